"""From logits to the best next tokens: log-probabilities, which tokens are forbidden, and ranks.

log p(y) = logit_y - log Σ exp(logit)         [rows, vocab_size]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import UserError
from regard.predict.config import SearchConfig
from regard.predict.constraints import Pattern, completed

GROUPS = 96  # of columns, for each number that is sought, see `largest`
INFINITY = float("inf")


def largest(scores: Tensor, count: int, recorded: bool = False) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row (or all there are), in order, and their columns; equal ones by column.

    A long row is ranked in two rounds. Every column belongs to one of some groups; the largest numbers are in the
    groups with the largest maxima, and a maximum is computed many times as fast as a rank.

    `topk` leaves open which of equal numbers it takes and in what order. Sorting what it took fixes the order; which
    ones it took matters only where the next one is equal too, and then the whole row is sorted; but not if `recorded`,
    where nothing can be read back.
    """
    rows, size = scores.shape
    most = min(count if recorded else count + 1, size)
    deep = size // (GROUPS * most)
    if deep < 2:
        values, columns = scores.topk(most, dim=1)
    else:
        groups, rest = divmod(size, deep)
        layers = scores[:, : size - rest].unflatten(1, (deep, groups))
        chosen = layers.amax(dim=1).topk(most, dim=1, sorted=False).indices  # [rows, most]
        columns = (chosen[:, :, None] + torch.arange(0, size - rest, groups, device=scores.device)).flatten(1)
        if rest:  # columns beyond the last full layer
            last = torch.arange(size - rest, size, device=scores.device)
            columns = torch.cat((columns, last.expand(rows, -1)), dim=1)
        values, index = scores.gather(1, columns).topk(most, dim=1)
        columns = columns.gather(1, index)
    if not recorded:
        if scores.device.type == "cpu" and not bool((values[:, 1:] == values[:, :-1]).any()):
            return values[:, :count].contiguous(), columns[:, :count].contiguous()
        if most > count:
            tied = (values[:, -2] == values[:, -1]) & (values[:, -1] > -INFINITY)
            values, columns = values[:, :count], columns[:, :count]
            if bool(tied.any()):
                whole, order = scores[tied].sort(dim=1, descending=True, stable=True)
                values[tied], columns[tied] = whole[:, :count], order[:, :count]
    columns, order = columns.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, columns.gather(1, order)


def largest_of(scores: Tensor, count: int) -> tuple[list[float], list[int]]:
    """As `largest`, of all `scores` [n] on a CPU, as lists: in a long row, fewer operations where no two are equal."""
    size = len(scores)
    most = min(count + 1, size)
    deep = size // (GROUPS * most)
    if deep >= 2:
        groups = size // deep
        layers, rest = scores[: deep * groups].view(deep, groups), scores[deep * groups :]
        chosen = layers.amax(dim=0).topk(most, sorted=False).indices
        best, index = torch.cat((layers.index_select(1, chosen).flatten(), rest)).topk(most)
        values, names, columns = best.tolist(), chosen.tolist(), list[int]()
        if len(set(values)) == most:
            for at in index[:count].tolist():
                layer, group = divmod(at, most)
                columns.append(layer * groups + names[group] if layer < deep else deep * (groups - most) + at)
            return values[:count], columns
    ranked, places = largest(scores[None], count)
    return ranked[0].tolist(), places[0].tolist()


def next_scores(
    logits: Tensor,
    early: bool | Tensor,
    written: Tensor,
    config: SearchConfig,
    eos: int | None,
    forbidden: Sequence[Pattern] = (),
) -> tuple[Tensor, Tensor]:
    """log p [R, vocab_size] of every next token, and the same with -inf where a token is forbidden.

    Forbidden are </s> where it is `early`, what would repeat an n-gram of `written` [R, t], and what would complete one
    of the patterns. Where that would leave nothing, </s> is allowed after all: an output ends rather than breaks a
    rule. In float32 at least: sums over many tokens must keep small differences.
    """
    scores = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    length, ngram = written.shape[1], config.no_repeat_ngram
    repeats = 0 < ngram <= length
    if eos is None or (early is False and not repeats and not forbidden):
        return scores, scores
    allowed = scores.clone()
    if isinstance(early, Tensor):  # not known to the CPU while a step is recorded
        allowed[:, eos].masked_fill_(early, -INFINITY)
    elif early:
        allowed[:, eos] = -INFINITY
    if repeats:
        grams = written.unfold(1, ngram, 1)  # [R, t - ngram + 1, ngram]
        tail = written[:, length - ngram + 1 :]  # [R, ngram - 1]: what a forbidden token would complete
        row, at = (grams[:, :, :-1] == tail[:, None]).all(dim=2).nonzero(as_tuple=True)
        allowed[row, grams[row, at, -1]] = -INFINITY
    for token, completes in completed(forbidden, written):
        allowed[:, token].masked_fill_(completes, -INFINITY)
    if repeats or forbidden:
        stuck = (allowed == -INFINITY).all(dim=1)
        allowed[:, eos] = torch.where(stuck, scores[:, eos], allowed[:, eos])
    return scores, allowed


def check_scores(scores: list[float]) -> None:
    if any(score != score for score in scores):
        raise UserError(
            "the model's scores are not numbers (NaN): its weights are damaged, training has diverged, "
            "or the precision is too low for it; try an earlier checkpoint, or float32"
        )
