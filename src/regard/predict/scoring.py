"""Scoring: the log-probability of a given output, token by token, instead of a search for the best one.

    pairs    log P(Y | X) = Σ_t log p(y_t | y_<t, X)         Y ends with </s>; all t at once, by teacher forcing
    text     log P(x_2 … x_N | x_1) = Σ_t log p(x_t | x_<t)  nothing predicts the first token, unless the text begins a
                                                             document: then the </s> of the one before does
    masked   PLL(x) = Σ_t log p(x_t | x_\\t)                  pseudo-log-likelihood: each token is masked in turn
                                                             (Salazar et al. 2020, arXiv 1910.14659)

Perplexity is exp(-mean). A text that is longer than the context of a language model is read in windows that overlap by
half, so that each token but the first ones has at least context / 2 tokens before it.

For a hypothesis of a search the result is its `log_probability`, as long as its text is tokenised as the search has
generated it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import Labels, PairBatch, Pairs
from regard.data.streams import Batches
from regard.errors import UserError
from regard.predict.bundle import Prediction
from regard.predict.next_token import check_scores
from regard.text.tokenizer import Tokenizer

TOKENS = 2**13  # of a batch, padding included
LOGITS = 2**24  # computed at once, 4 bytes each


@dataclass(frozen=True)
class TokenScore:
    """A token of an output and its log-probability."""

    id: int
    token: str
    log_probability: float


@dataclass(frozen=True)
class SequenceScore(Prediction):
    """The tokens of an output that were predicted; `per_token` and `perplexity` are None where there are none."""

    tokens: tuple[TokenScore, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: Iterable[int], values: Sequence[float]) -> SequenceScore:
        check_scores(list(values))
        names = ((id, tokenizer.token(id)) for id in ids)
        return cls(tuple(TokenScore(*name, value) for name, value in zip(names, values, strict=True)))

    @property
    def log_probability(self) -> float:
        return math.fsum(one.log_probability for one in self.tokens)

    @property
    def per_token(self) -> float | None:
        return self.log_probability / len(self.tokens) if self.tokens else None

    @property
    def perplexity(self) -> float | None:
        return None if self.per_token is None else math.exp(min(-self.per_token, 700.0))


@torch.inference_mode()
def label_scores(model: Any, states: Tensor, labels: Tensor) -> list[list[float]]:
    """log p of the labels [B, T] of each row that are not IGNORE, by the output head over states [B, T, dim].

    In float32 at least, and some at a time: logits of a whole batch may be larger than the model.
    """
    counted, rows, values = labels != Labels.IGNORE, max(1, LOGITS // model.config.target_size), [states.new_empty(0)]
    for part, label in zip(states[counted].split(rows), labels[counted][:, None].split(rows), strict=True):
        logits = model.output_head(part)
        log_p = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        values.append(log_p.gather(1, label)[:, 0])
    return [part.tolist() for part in torch.cat(values).split(counted.sum(dim=1).tolist())]


@torch.inference_mode()
def pair_scores(
    models: Sequence[Any], source: Tensor, is_real: Tensor | None, target: Tensor, labels: Tensor
) -> list[list[float]]:
    """log p of the labels [B, T] of each row by teacher forcing; of an ensemble, by the mean of the probabilities."""
    if any(not model.config.causal for model in models):
        raise UserError("model.causal = false: such a model has seen the tokens, so their probability means nothing")
    each = [label_scores(model, model.states(target, model.encode(source, is_real)), labels) for model in models]
    if len(each) == 1:
        return each[0]
    rows = (torch.tensor(row, dtype=torch.float64) for row in zip(*each, strict=True))  # [models, tokens]
    return [(row.logsumexp(dim=0) - math.log(len(each))).tolist() for row in rows]


def pair_batches(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], PairBatch]]:
    """Rows of similar length, and their batch: sources end with </s>, targets are <s> … </s>."""
    if not sources:
        return
    pairs = Pairs(sources, targets)
    for rows in Batches(pairs, max(TOKENS, pairs.longest_row), seed=0).plan(0):
        yield rows.tolist(), pairs.batch(rows)


def windows(ids: Sequence[int], context: int) -> Iterator[tuple[list[int], int]]:
    """Parts of `context` tokens and one more that overlap by half, and how many labels of each the last one had."""
    stride, start = max(1, context // 2), 0
    while start == 0 or start + context - stride + 1 < len(ids):
        yield list(ids[start : start + context + 1]), 0 if start == 0 else context - stride
        start += stride
