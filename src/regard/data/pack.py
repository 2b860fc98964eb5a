"""Packing: several sentence pairs in one row, so that every batch has the same shape and almost no filler.

    source    a a a </s> b b </s> c c c c </s> · ·        document   1 1 1 1 2 2 2 3 3 3 3 3 0 0
    target    <s> A A <s> B B B <s> C C C · · ·            document   1 1 1 2 2 2 2 3 3 3 3 0 0 0

Pair number d of a row has document d on both sides; attention, within a side and across, is kept to equal
documents (`regard.nn.mask.same_document`), and positions restart with each, so the numbers are those of the
sentences alone. Padding is document 0: it sees only itself and nothing is learned from it. Fixed shapes are
what compiled code and CUDA graphs want; a row is filled to 95 % and more where a bucket of padded sentences
wastes a tenth to a third (Krell et al. 2021, "Efficient sequence packing without cross-contamination").

A whole epoch is laid out at once by array operations and cut into steps by slicing: no work per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.data.batch import PairBatch, Pairs, Ragged, Stream, Tensors, steps
from regard.errors import UserError


@dataclass(frozen=True)
class PackedBatch(Tensors):
    """Rows of packed pairs; all [R, L]."""

    source: Tensor
    source_document: Tensor
    target: Tensor
    target_document: Tensor
    labels: Tensor  # IGNORE on filler

    @property
    def tokens(self) -> Tensor:
        """How many target tokens are to be learned."""
        return (self.labels != PairBatch.IGNORE).sum()


def assign(sources: list[int], targets: list[int], length: int) -> list[int]:
    """The row of each pair: best fit, the fullest row whose two sides both have room for the pair's longer side."""
    rows: list[int] = []
    left: list[list[int]] = []  # room of each row: [source, target]
    ready: list[list[int]] = [[] for _ in range(length + 1)]  # rows by the smaller of the two
    some = 0  # bit r: ready[r] is not empty, so that the best fit is the lowest bit from `need` on
    for source, target in zip(sources, targets, strict=True):
        need = max(source, target)
        if fits := some >> need:
            room = need + (fits & -fits).bit_length() - 1
            row = ready[room].pop()
            some ^= (not ready[room]) << room
        else:
            row = len(left)
            left.append([length, length])
        sides = left[row]
        sides[0] -= source
        sides[1] -= target
        room = min(sides)
        ready[room].append(row)
        some |= 1 << room
        rows.append(row)
    return rows


class Plan(NamedTuple):
    """Which pair (or text) goes where, ordered by row."""

    order: Tensor  # [pairs] number of the pair in the data
    row: Tensor  # [pairs] the row it goes to
    first: Tensor  # [pairs] whether it is the first one there
    document: Tensor  # [pairs] its number within the row, from 1
    rows: int  # of the whole epoch

    def part(self, begin: int, end: int) -> Plan:
        """The same for the rows from `begin` to before `end`, which become row 0 and on."""
        a, b = torch.searchsorted(self.row, torch.tensor([begin, end])).tolist()
        return Plan(self.order[a:b], self.row[a:b] - begin, self.first[a:b], self.document[a:b], end - begin)


def plan_rows(sources: Tensor, targets: Tensor, length: int, rows: int, generator: torch.Generator) -> Plan:
    """An epoch of pairs with these lengths, in random order, in rows of `length`; as many as make whole batches."""
    order = torch.randperm(len(sources), generator=generator)
    row = torch.tensor(assign(sources[order].tolist(), targets[order].tolist(), length))
    count = -(-(int(row.max()) + 1) // rows) * rows
    row = torch.randperm(count, generator=generator)[row]
    by_row = row.argsort(stable=True)
    order, row = order[by_row], row[by_row]
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = row[1:] != row[:-1]
    return Plan(order, row, first, _within(torch.ones_like(row), first) + 1, count)


def lay(data: Ragged, plan: Plan, lengths: Tensor, width: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """ids and documents [rows, width]; `lengths` are in the plan's order, the first `shift` tokens are passed over."""
    start = plan.row * width + _within(lengths, plan.first)  # where each begins in the flat rows
    step = steps(lengths)
    to = start.repeat_interleave(lengths) + step
    ids, documents = torch.zeros(2, plan.rows * width, dtype=torch.long)
    ids[to] = data.flat[data.starts[plan.order].repeat_interleave(lengths) + step + shift].long()
    documents[to] = plan.document.repeat_interleave(lengths)
    return ids.view(plan.rows, width), documents.view(plan.rows, width)


class Packable(Protocol):
    """What `Packs` takes: pairs, perhaps others in every epoch, and how long the longest of them is."""

    @property
    def longest(self) -> int: ...

    def at(self, epoch: int) -> Pairs: ...


class Packs(Stream):
    """Packed batches of `rows` rows of `length` tokens."""

    def __init__(self, data: Packable, rows: int, length: int, seed: int, device: torch.device | None = None) -> None:
        if data.longest > length:
            raise UserError(
                f"train.pack = {length} is too short for a sequence of {data.longest} tokens: raise it, "
                f"or leave longer ones out with data.max_length = {length}"
            )
        self.data, self.rows, self.length, self.seed = data, rows, length, seed
        self.device = device or torch.device("cpu")

    def layout(self, epoch: int) -> PackedBatch:
        """All rows of an epoch, in random order, those of the last incomplete step filled up with filler."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        data = self.data.at(epoch)
        sources, targets, width = data.sources.lengths, data.targets.lengths - 1, self.length  # <s> … is read
        plan = plan_rows(sources, targets, width, self.rows, generator)
        source, source_document = lay(data.sources, plan, sources[plan.order], width)
        target, target_document = lay(data.targets, plan, targets[plan.order], width)
        labels, _ = lay(data.targets, plan, targets[plan.order], width, shift=1)
        labels = torch.where(target_document > 0, labels, PairBatch.IGNORE)
        return PackedBatch(source, source_document, target, target_document, labels)

    def open(self, epoch: int) -> tuple[int, Callable[[int], PackedBatch]]:
        laid, step = self.layout(epoch).to(self.device), self.rows
        return len(laid.source) // step, lambda number: laid.rows(slice(number * step, (number + 1) * step))


def _within(sizes: Tensor, first: Tensor) -> Tensor:
    """Running sum of `sizes` before each entry, starting anew where `first`."""
    before = sizes.cumsum(0) - sizes
    return before - torch.where(first, before, 0).cummax(0).values
