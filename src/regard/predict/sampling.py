"""Sampling: draw the next token instead of choosing it.

    p'(y) ∝ p(y)^(1 / temperature)      for y among the top_k likeliest, and of those in the nucleus

The nucleus is the smallest set of likeliest tokens that holds at least top_p of the probability (Holtzman et
al. 2020, arXiv 1904.09751); top_k (Fan et al. 2018) is cut first. Tokens as likely as the last one kept are
kept too, so the cut depends on probabilities alone; but top_k = 1 takes the likeliest, of equal ones the first, as
greedy search does.

One uniform number u a token decides: the token is the first, by id, whose cumulative p' exceeds u. The
numbers of a line come from (seed, number of the line, number of the draw), so a line gets the same answer
whatever stands beside it in the batch, up to rounding in the last digits of p'.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard.predict.config import SearchConfig
from regard.predict.engine import Engine
from regard.predict.search import Hypothesis, check_scores, forbid, length_limits, log_probabilities


@torch.inference_mode()
def sample(
    model: Engine,
    source: Tensor,
    is_real: Tensor | None,
    config: SearchConfig,
    bos: int,
    eos: int,
    lines: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """`config.n_best` draws for each row of `source`, best score first; `lines` are the rows' numbers (0, 1, …)."""
    draws, device = config.n_best, source.device
    limits = [limit for limit in length_limits(source, is_real, config) for _ in range(draws)]  # row: line, draw
    if not limits:
        return []
    numbers = range(source.shape[0]) if lines is None else lines
    chance = Chance(config.seed, numbers, draws)
    answers: list[Hypothesis | None] = [None] * len(limits)
    live = torch.arange(len(limits), device=device)  # the rows still open
    totals = torch.zeros(len(limits), dtype=torch.float64, device=device)
    written = torch.zeros(len(limits), 0, dtype=torch.long, device=device)
    most = torch.tensor(limits, device=device)
    state = model.start(source, is_real)
    tokens, parents = torch.full((source.shape[0], 1), bos, device=device), live // draws
    while len(live):
        logits = model.step(tokens, state)[:, -1]
        if written.shape[1] == 0 and draws > 1:  # <s> is read once for all draws of a line
            logits = logits[parents]
            state.reorder(parents)
        known = log_probabilities(logits)
        check_scores(known[:, eos].tolist())
        early = written.shape[1] < config.min_length
        allowed = forbid(known, early, written, config.no_repeat_ngram, eos)
        token = draw(allowed, config, chance.at(written.shape[1], live))  # [rows]
        totals = totals + known.gather(1, token[:, None])[:, 0].double()
        written = torch.cat((written, token[:, None]), dim=1)
        ended = (token == eos) | (written.shape[1] == most[live])
        if bool(ended.any()):
            columns = (live[ended], totals[ended], written[ended])
            for row, total, ids in zip(*(column.tolist() for column in columns), strict=True):
                answers[row] = answer(ids, total, config, eos)
            rows = (~ended).nonzero()[:, 0]
            live, totals, written = live[rows], totals[rows], written[rows]
            state.reorder(rows)
        tokens = written[:, -1:]
    drawn = [found for found in answers if found is not None]
    groups = (drawn[at : at + draws] for at in range(0, len(drawn), draws))
    return [sorted(group, key=lambda hypothesis: -hypothesis.score) for group in groups]


def answer(ids: list[int], total: float, config: SearchConfig, eos: int) -> Hypothesis:
    finished = ids[-1] == eos
    return Hypothesis(ids[:-1] if finished else ids, total / config.penalty(len(ids)), total, finished)


class Chance:
    """Numbers in [0, 1), a stream of its own for each draw of each line, made in blocks as the answers grow."""

    BLOCK = 64

    def __init__(self, seed: int, lines: Sequence[int], draws: int) -> None:
        self._streams = [np.random.default_rng([seed, line, draw]) for line in lines for draw in range(draws)]
        self._block = torch.zeros(len(self._streams), self.BLOCK, dtype=torch.float64)

    def at(self, length: int, live: Tensor) -> Tensor:
        """The number that decides token `length` of each row in `live`; lengths come one after the other. [rows]"""
        column, rows = length % self.BLOCK, live.cpu()
        if column == 0:
            fresh = [self._streams[row].random(self.BLOCK) for row in rows.tolist()]
            self._block[rows] = torch.from_numpy(np.stack(fresh))
        return self._block[rows, column].to(live.device)

    def following(self, count: int) -> Tensor:
        """The next `count` numbers of every row, [rows, count]: what `at` would give one length after the other."""
        return torch.from_numpy(np.stack([stream.random(count) for stream in self._streams]))


def draw(scores: Tensor, config: SearchConfig, chance: Tensor) -> Tensor:
    """The next token of each row [R], from log-probabilities (or logits) [R, V] and a number in [0, 1) each."""
    if config.top_k == 1:
        return scores.argmax(dim=1)
    return pick(distribution(scores, config), chance)


def distribution(scores: Tensor, config: SearchConfig) -> Tensor:
    """p' [R, vocab_size] in float64 from log-probabilities (or logits) [R, vocab_size]; what was cut is 0."""
    left = scores.shape[1]  # tokens that are not cut, in the row that has most of them
    if 0 < config.top_k < scores.shape[1]:
        least = scores.topk(config.top_k, dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
        if config.top_p < 1 and scores.is_cpu:  # a GPU sorts all of them sooner than it is asked
            left = max(1, int((scores >= least).sum(dim=1).max()))  # none, if these are no numbers
    scores = scores.double()
    if config.temperature != 1:
        scores = (scores - scores.amax(dim=1, keepdim=True)) / config.temperature  # so that none is too low
    probabilities = scores.softmax(dim=1)
    if config.top_p < 1:
        ordered = probabilities.topk(left, dim=1).values  # a few of a large vocabulary are soon sorted
        before = ordered.cumsum(dim=1) - ordered  # what the likelier ones hold; the first is always kept
        least = ordered.masked_fill(before >= config.top_p, 1.0).amin(dim=1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        probabilities = probabilities / probabilities.sum(dim=1, keepdim=True)
    return probabilities


def pick(probabilities: Tensor, chance: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `chance` [R]; never one of probability 0. [R]"""
    cumulative = probabilities.cumsum(dim=1)
    whole = cumulative[:, -1]
    target = torch.minimum(chance * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return found.clamp_max(probabilities.shape[1] - 1)  # behind the last only where these are no numbers
