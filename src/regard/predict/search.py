"""Search: from next-token distributions to a sequence. What greedy search, beam search and sampling share.

The limits of a length, the tokens that are forbidden, log-probabilities, and the hypothesis that comes out. A model
that reads a source and then generates (encoder-decoder, recurrent) is searched through an engine
(`regard.predict.engine`); a decoder-only model has no source, and `regard.predict.generator` continues its text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import UserError
from regard.predict.config import SearchConfig


@dataclass(frozen=True)
class Hypothesis:
    """One output: its tokens without <s> and </s>, its score, and log P(tokens | source)."""

    tokens: list[int]
    score: float
    log_probability: float
    finished: bool = True  # False: it reached its limit before </s>


def length_limits(source: Tensor, is_real: Tensor | None, config: SearchConfig) -> list[int]:
    """The most tokens of each row's output. It follows from the row alone, not from the padding beside it."""
    if is_real is not None:
        lengths = is_real.sum(dim=1).tolist()
    else:  # an image [B, C, H, W] has no length to be a multiple of
        lengths = [source.shape[1] if source.dim() < 4 else 0] * source.shape[0]
    return [config.limit(length) for length in lengths]


def forbid(scores: Tensor, early: bool | Tensor, written: Tensor, ngram: int, eos: int) -> Tensor:
    """scores [R, vocab_size] with -inf for an `early` </s>, and for what would repeat an n-gram of `written` [R, t].

    Where that would leave nothing, </s> is allowed after all: an output ends rather than breaks a rule.
    """
    length = written.shape[1]
    repeats = 0 < ngram <= length
    if early is False and not repeats:
        return scores
    allowed = scores.clone()
    if isinstance(early, Tensor):  # not known to the CPU while a step is recorded
        allowed[:, eos].masked_fill_(early, float("-inf"))
    elif early:
        allowed[:, eos] = float("-inf")
    if repeats:
        grams = written.unfold(1, ngram, 1)  # [R, t - ngram + 1, ngram]
        tail = written[:, length - ngram + 1 :]  # [R, ngram - 1]: what a forbidden token would complete
        row, at = (grams[:, :, :-1] == tail[:, None]).all(dim=2).nonzero(as_tuple=True)
        allowed[row, grams[row, at, -1]] = float("-inf")
    stuck = (allowed == float("-inf")).all(dim=1)
    allowed[:, eos] = torch.where(stuck, scores[:, eos], allowed[:, eos])
    return allowed


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax over the last axis, in float32 at least: sums over many tokens must keep small differences."""
    return logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def check_scores(scores: list[float]) -> None:
    if any(score != score for score in scores):
        raise UserError(
            "the model's scores are not numbers (NaN): its weights are damaged, training has diverged, "
            "or the precision is too low for it; try an earlier checkpoint, or float32"
        )
