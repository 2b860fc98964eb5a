"""Greedy and beam search for one sentence: the rules of `regard.predict.beam` with lists instead of tables.

Tables in fixed shapes serve a batch: one operation moves the hypotheses of 64 sentences. A sentence alone has 2 · beam
extensions per step, and 50 operations on tables of 10 numbers take longer than the rules themselves. Here the scores
are ranked as a tensor, and the rest is plain Python:

    totals [rows, 1] + log p [rows, vocab_size]  ->  the 2 · beam largest, by (row, token)  ->  ended or live
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.predict.config import SearchConfig
from regard.predict.engine import Engine
from regard.predict.next_token import INFINITY, check_scores, largest_of, next_scores
from regard.predict.outputs import Hypothesis

SENTENCE = torch.zeros(1, dtype=torch.long)  # all rows are of the only one
NOTHING = torch.zeros(1, 0, dtype=torch.long)


class Live(NamedTuple):
    """A hypothesis that continues: log P, the row that it extends, and its tokens."""

    total: float
    row: int
    tokens: list[int]


def search_one(
    engine: Engine,
    source: Tensor,
    is_real: Tensor | None,
    config: SearchConfig,
    limit: int,
    bos: int,
    eos: int,
    interrupt: Callable[[], None],
) -> list[Hypothesis]:
    """The `config.n_best` best hypotheses of `source` [1, N] on a CPU, of `limit` tokens at most, best first."""
    size, state, tokens = config.beam, engine.start(source, is_real), torch.tensor([[bos]])
    live, found, totals = [Live(0.0, 0, [])], list[Hypothesis](), torch.zeros(1, 1)
    for length in range(1, limit + 1):
        interrupt()
        logits = engine.step(tokens, state)[:, -1]  # [rows, vocab_size]
        written = torch.tensor([one.tokens for one in live]) if config.no_repeat_ngram and length > 1 else NOTHING
        scores = next_scores(logits, length <= config.min_length, written, config, eos)[1]
        if size == 1:  # the most probable token needs no rank; NumPy finds it in a fifth of the time
            numbers = scores[0].numpy()
            columns = [int(numbers.argmax())]
            best = [float(totals.item() + numbers[columns[0]])]
        else:
            best, columns = largest_of(scores.add_(totals).flatten(), 2 * size)
        check_scores(best)
        before, live, penalty = live, [], config.penalty(length)
        for rank, (total, column) in enumerate(zip(best, columns, strict=True)):
            if total == -INFINITY:
                break
            row, token = divmod(column, scores.shape[1])
            ends, prefix = token == eos, before[row].tokens
            extended = prefix if ends else [*prefix, token]
            if rank < size and (ends or length == limit):
                found.append(Hypothesis(extended, total / penalty, total, ends))
            if not ends and len(live) < size:
                live.append(Live(total, row, extended))
        found.sort(key=lambda one: -one.score)  # of equal ones the earlier stays in front
        del found[size:]
        if not live or is_settled(found, live[0].total, config, limit if config.length_penalty >= 0 else length + 1):
            break
        rows = [one.row for one in live]
        if rows != list(range(len(before))):
            state.reorder(torch.tensor(rows), SENTENCE)
        tokens = torch.tensor([one.tokens[-1:] for one in live])
        totals = torch.tensor([[one.total] for one in live], dtype=scores.dtype)
    return found[: config.n_best]


def is_settled(found: list[Hypothesis], best: float, config: SearchConfig, longest: int) -> bool:
    """Whether no live hypothesis, the best of which has log P `best`, can pass those that are given out."""
    count = config.beam if config.early_stopping else config.n_best
    if len(found) < count:
        return False
    return config.early_stopping or config.beam == 1 or best / config.penalty(longest) <= found[count - 1].score
