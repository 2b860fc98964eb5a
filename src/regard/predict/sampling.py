"""Sampling: the next token is random, by its probability.

    p'(y) ∝ p(y)^(1 / temperature)      for y among the top_k most probable, and of those in the nucleus

The nucleus is the smallest set of most probable tokens whose probabilities sum to at least top_p (Holtzman et al.
2020, arXiv 1904.09751); top_k (Fan et al. 2018) is applied first. Tokens as probable as the last one kept are kept
too, so the result depends on probabilities alone; but top_k = 1 takes the most probable token, of equal ones the
first, as greedy search does.

One uniform number u per token decides: the token is the first, by id, whose cumulative p' exceeds u. The numbers of a
line come from (seed, index of the line, index of the sample), so a line gets the same samples whatever else is in the
batch, up to rounding in the last digits of p'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from regard.errors import UserError
from regard.predict.config import SearchConfig
from regard.predict.constraints import Constraints
from regard.predict.engine import Engine
from regard.predict.next_token import check_scores, next_scores
from regard.predict.outputs import Hypothesis

CHUNK = 64  # random numbers of a row, made together


@torch.inference_mode()
def sample(
    model: Engine,
    source: Tensor,
    is_real: Tensor | None,
    config: SearchConfig,
    bos: int,
    eos: int,
    lines: Sequence[int] | None = None,
    constraints: Constraints | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> list[list[Hypothesis]]:
    """`config.n_best` samples for each row of `source`, best score first; `lines` are the rows' indices (0, 1, …).

    `interrupt` is called before every step, and ends the search by raising an error.
    """
    count, device = config.n_best, source.device
    limits = [limit for limit in config.limits(source, is_real) for _ in range(count)]  # row: line, sample
    if not limits:
        return []
    uniform = Uniform(config.seed, range(source.shape[0]) if lines is None else lines, count)
    samples: list[Hypothesis | None] = [None] * len(limits)
    live = torch.arange(len(limits), device=device)  # the rows still open
    totals = torch.zeros(len(limits), dtype=torch.float64, device=device)
    written = torch.zeros(len(limits), 0, dtype=torch.long, device=device)
    most = torch.tensor(limits, device=device)
    constraints = constraints or Constraints([], [])
    prefixes, forbidden = constraints.prefix_table(device), constraints.forbidden
    if any(constraints.required):
        raise UserError("constraints: required phrases need beam search; set sample = false")
    state = model.start(source, is_real)
    tokens, parents = torch.full((source.shape[0], 1), bos, device=device), live // count
    while len(live):
        interrupt()
        logits = model.step(tokens, state)[:, -1]
        if written.shape[1] == 0 and count > 1:  # <s> is read once for all samples of a line
            logits = logits[parents]
            state.reorder(parents)
        known, allowed = next_scores(logits, written.shape[1] < config.min_length, written, config, eos, forbidden)
        check_scores(known[:, eos].tolist())
        if (column := written.shape[1] % CHUNK) == 0:
            uniforms = uniform.following(CHUNK).to(device)  # [lines · count, CHUNK]
        token = sample_token(allowed, config, uniforms[live, column])  # [rows]
        if prefixes is not None and written.shape[1] < prefixes.shape[1]:
            given = prefixes[live // count, written.shape[1]]
            token = torch.where(given >= 0, given, token)
        totals = totals + known.gather(1, token[:, None])[:, 0].double()
        written = torch.cat((written, token[:, None]), dim=1)
        ended = (token == eos) | (written.shape[1] == most[live])
        if bool(ended.any()):
            columns = (live[ended], totals[ended], written[ended])
            for row, total, ids in zip(*(column.tolist() for column in columns), strict=True):
                finished = ids[-1] == eos
                tokens, score = ids[:-1] if finished else ids, total / config.penalty(len(ids))
                samples[row] = Hypothesis(tokens, score, total, finished)
            rows = (~ended).nonzero()[:, 0]
            live, totals, written = live[rows], totals[rows], written[rows]
            state.reorder(rows)
        tokens = written[:, -1:]
    done = [sample for sample in samples if sample is not None]
    groups = (done[at : at + count] for at in range(0, len(done), count))
    return [sorted(group, key=lambda hypothesis: -hypothesis.score) for group in groups]


class Uniform:
    """Uniform random numbers in [0, 1), a stream of its own for each sample of each line."""

    def __init__(self, seed: int, lines: Sequence[int], count: int) -> None:
        self.streams = [np.random.default_rng([seed, line, sample]) for line in lines for sample in range(count)]

    def following(self, count: int) -> Tensor:
        """The next `count` numbers of every row, [rows, count]."""
        return torch.from_numpy(np.stack([stream.random(count) for stream in self.streams]))


def sample_token(scores: Tensor, config: SearchConfig, uniform: Tensor) -> Tensor:
    """The next token of each row [R], from log-probabilities (or logits) [R, V] and a number in [0, 1) for each."""
    if config.top_k == 1:
        return scores.argmax(dim=1)
    return pick(distribution(scores, config), uniform)


def distribution(scores: Tensor, config: SearchConfig) -> Tensor:
    """p' [R, vocab_size] in float64 from log-probabilities (or logits) [R, vocab_size]; 0 for tokens that were cut."""
    left = scores.shape[1]  # tokens that are not cut, in the row with most of them
    if 0 < config.top_k < scores.shape[1]:
        least = scores.topk(config.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
        if config.top_p < 1 and scores.is_cpu:  # on a GPU, sorting all is faster than reading a number back
            left = max(1, int((scores >= least).sum(dim=1).max()))  # none, if these are NaN
    scores = scores.double()
    if config.temperature != 1:
        scores = (scores - scores.amax(dim=1, keepdim=True)) / config.temperature  # so that none underflows
    probabilities = scores.softmax(dim=1)
    if config.top_p < 1:
        ordered = probabilities.topk(left, dim=1).values  # a few of a large vocabulary are sorted quickly
        before = ordered.cumsum(dim=1) - ordered  # the sum of the more probable ones; the first is always kept
        least = ordered.masked_fill(before >= config.top_p, 1.0).amin(dim=1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        probabilities = probabilities / probabilities.sum(dim=1, keepdim=True)
    return probabilities


def pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `uniform` [R]; never one of probability 0. [R]"""
    cumulative = probabilities.cumsum(dim=1)
    whole = cumulative[:, -1]
    target = torch.minimum(uniform * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    token = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return token.clamp_max(probabilities.shape[1] - 1)  # beyond the last only if these are NaN
