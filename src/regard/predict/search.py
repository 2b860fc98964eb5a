"""Search: from next-token scores to a sequence.

    greedy   y_t = argmax_y p(y | y_<t, x)

A model that reads a source and then writes (encoder-decoder, recurrent) can be searched: `start` reads the
source, `step` reads one more token of each row and gives the scores of what may follow. What it remembers in
between is its own affair, as long as the rows can be reordered. A decoder-only model has no source:
`regard.predict.generator` goes on with its text. Beam search and sampling stand beside this file; what they
share stands here: the limits of a length, the tokens that are forbidden, and the answer.

Greedy search is the shortest of them and the one the others are checked with. The cache makes a step cost
one token, whatever came before it; rows that have ended are carried along but no longer matter.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from regard.errors import UserError
from regard.predict.config import SearchConfig

# Held while work that may be recorded as a graph is handed to a GPU: a recording fails if another thread works then.
TURN = threading.RLock()
Key = TypeVar("Key")
Recorded = TypeVar("Recorded")


def keep_ready(ready: OrderedDict[Key, Recorded], key: Key, one: Recorded, most: int) -> None:
    """What was recorded stays for the next of its shape; of more than `most` the one goes that was used longest ago."""
    ready[key] = one
    if len(ready) > most:
        ready.popitem(last=False)


class Kept(Protocol):
    """What a model remembers of a generation under way, a row for a row."""

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order; a row may be taken more than once, or not at all.

        `sources` tells more: the rows are groups of equal size, one for each of these sources, numbered as they
        stood before, in their order, none twice. So what was read from a source may be kept once for its group.
        """


class Steps(Protocol):
    """A model that generates."""

    def start(self, source: Tensor, is_real: Tensor | None = None) -> Any:
        """Read the source [B, …]; gives a `Kept` of B rows."""

    def step(self, tokens: Tensor, state: Any) -> Tensor:
        """Read `tokens` [B, n]; logits [B, n, vocab_size] of what follows each."""


@dataclass(frozen=True)
class Hypothesis:
    """One answer: its tokens without <s> and </s>, how it ranks, and log P(tokens | source)."""

    tokens: list[int]
    score: float
    log_probability: float
    finished: bool = True  # False: it reached its limit before </s>


@torch.inference_mode()
def greedy(model: Steps, source: Tensor, is_real: Tensor | None, *, bos: int, eos: int, limit: int) -> list[list[int]]:
    """The most probable token at each step, until </s> or `limit` tokens; without <s> and </s>."""
    state = model.start(source, is_real)
    rows = source.shape[0]
    token = torch.full((rows, 1), bos, device=source.device)
    ended = torch.zeros(rows, dtype=torch.bool, device=source.device)
    written = []
    for _ in range(limit):
        token = model.step(token, state)[:, -1].argmax(dim=-1, keepdim=True)  # [B, 1]
        written.append(token)
        ended |= token[:, 0] == eos
        if bool(ended.all()):
            break
    sequences = torch.cat(written, dim=1).tolist() if written else [[] for _ in range(rows)]
    return [sequence[: sequence.index(eos)] if eos in sequence else sequence for sequence in sequences]


def length_limits(source: Tensor, is_real: Tensor | None, config: SearchConfig) -> list[int]:
    """The most tokens each row may get. It follows from the row alone, not from the padding beside it."""
    if is_real is not None:
        lengths = is_real.sum(dim=1).tolist()
    else:  # an image [B, C, H, W] has no length to be a multiple of
        lengths = [source.shape[1] if source.dim() < 4 else 0] * source.shape[0]
    return [config.limit(length) for length in lengths]


def forbid(scores: Tensor, written: Tensor, config: SearchConfig, eos: int) -> Tensor:
    """scores [R, vocab_size] with -inf for what must not follow `written` [R, t]: an early </s>, a repeated n-gram.

    Where that would leave nothing, </s> is allowed after all: an answer ends rather than breaks a rule.
    """
    size, length = config.no_repeat_ngram, written.shape[1]
    early = length < config.min_length
    repeats = 0 < size <= length
    if not (early or repeats):
        return scores
    allowed = scores.clone()
    if early:
        allowed[:, eos] = float("-inf")
    if repeats:
        grams = written.unfold(1, size, 1)  # [R, t - size + 1, size]
        tail = written[:, length - size + 1 :]  # [R, size - 1]: what a forbidden token would complete
        row, at = (grams[:, :, :-1] == tail[:, None]).all(dim=2).nonzero(as_tuple=True)
        allowed[row, grams[row, at, -1]] = float("-inf")
    stuck = (allowed == float("-inf")).all(dim=1)
    allowed[:, eos] = torch.where(stuck, scores[:, eos], allowed[:, eos])
    return allowed


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax over the last axis, in float32 at least: sums of many tokens must not lose the small differences."""
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def check_scores(numbers: list[float]) -> None:
    if any(number != number for number in numbers):
        raise UserError(
            "the model's scores are not numbers (NaN): its weights are damaged, training has diverged, "
            "or the precision is too low for it; try an earlier checkpoint, or float32"
        )
