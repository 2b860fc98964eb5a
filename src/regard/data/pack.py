"""Packing: several sentence pairs in one row, so that every batch has the same shape and almost no filler.

    source    a a a </s> b b </s> c c c c </s> · ·        document   1 1 1 1 2 2 2 3 3 3 3 3 0 0
    target    <s> A A <s> B B B <s> C C C · · ·            document   1 1 1 2 2 2 2 3 3 3 3 0 0 0

Pair number d of a row has document d on both sides; attention, within a side and across, is kept to equal
documents (`regard.nn.mask.same_document`), and positions restart with each, so the numbers are those of the
sentences alone. Filler is document 0: it sees only itself and nothing is learned from it. Fixed shapes are
what compiled code and CUDA graphs want; a row is filled to 95 % and more where a bucket of padded sentences
wastes a tenth to a third (Krell et al. 2021, "Efficient sequence packing without cross-contamination").

A whole epoch is laid out at once by array operations and cut into steps by slicing: no work per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from regard.data.batch import PairBatch, Pairs, Ragged, Stream
from regard.errors import UserError


@dataclass(frozen=True)
class PackedBatch:
    """Rows of packed pairs; all [R, L]."""

    source: Tensor
    source_document: Tensor
    target: Tensor
    target_document: Tensor
    expected: Tensor  # IGNORE on filler

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))

    def clone(self) -> PackedBatch:
        return PackedBatch(*(getattr(self, field.name).clone() for field in fields(self)))

    def copy_(self, other: PackedBatch) -> None:
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name), non_blocking=True)

    @property
    def tokens(self) -> Tensor:
        """How many target tokens are to be learned."""
        return (self.expected != PairBatch.IGNORE).sum()

    def rows(self, chosen: slice) -> PackedBatch:
        return PackedBatch(*(getattr(self, field.name)[chosen] for field in fields(self)))


def assign(sources: list[int], targets: list[int], length: int, window: int = 64) -> list[int]:
    """The row of each pair: first fit among the newest `window` open rows, both sides within `length`."""
    rows: list[int] = []
    open_rows: list[list[int]] = []  # [row, source tokens left, target tokens left]
    count = 0
    for source, target in zip(sources, targets, strict=True):
        for entry in open_rows:
            if entry[1] >= source and entry[2] >= target:
                break
        else:
            entry = [count, length, length]
            count += 1
            open_rows.append(entry)
            if len(open_rows) > window:
                open_rows.pop(0)
        entry[1] -= source
        entry[2] -= target
        rows.append(entry[0])
    return rows


class _Plan(NamedTuple):
    """Which pair goes where, ordered by row."""

    order: Tensor  # [pairs] number of the pair in the data
    row: Tensor  # [pairs] the row it goes to
    first: Tensor  # [pairs] whether it is the first one there
    document: Tensor  # [pairs] its number within the row, from 1
    rows: int  # of the whole epoch


class Packs(Stream):
    """Packed batches of `rows` rows of `length` tokens."""

    def __init__(self, data: Pairs, rows: int, length: int, seed: int, device: torch.device | None = None) -> None:
        longest = max(int(data.sources.lengths.max()), int(data.targets.lengths.max()) - 1)
        if longest > length:
            raise UserError(
                f"train.pack = {length} is too short for a sequence of {longest} tokens: raise it, "
                f"or leave longer ones out with data.max_length = {length}"
            )
        self.data, self.rows, self.length, self.seed = data, rows, length, seed
        self.device = device or torch.device("cpu")

    def layout(self, epoch: int) -> PackedBatch:
        """All rows of an epoch, in random order, those of the last incomplete step filled up with filler."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.data), generator=generator)
        sources, targets = self.data.sources.lengths[order], self.data.targets.lengths[order] - 1  # <s> … read
        row = torch.tensor(assign(sources.tolist(), targets.tolist(), self.length))
        count = -(-(int(row.max()) + 1) // self.rows) * self.rows
        row = torch.randperm(count, generator=generator)[row]
        by_row = row.argsort(stable=True)
        order, row, sources, targets = order[by_row], row[by_row], sources[by_row], targets[by_row]
        first = torch.ones_like(row, dtype=torch.bool)
        first[1:] = row[1:] != row[:-1]
        plan = _Plan(order, row, first, _within(torch.ones_like(row), first) + 1, count)
        source, source_document = self._lay(self.data.sources, plan, sources)
        target, target_document = self._lay(self.data.targets, plan, targets)
        expected, _ = self._lay(self.data.targets, plan, targets, shift=1)
        expected = torch.where(target_document > 0, expected, PairBatch.IGNORE)
        return PackedBatch(source, source_document, target, target_document, expected)

    def _lay(self, data: Ragged, plan: _Plan, lengths: Tensor, shift: int = 0) -> tuple[Tensor, Tensor]:
        """ids and documents [count, length]; the first `shift` tokens of each sequence are passed over."""
        start = plan.row * self.length + _within(lengths, plan.first)  # where each begins in the flat rows
        step = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        to = start.repeat_interleave(lengths) + step
        ids, documents = torch.zeros(2, plan.rows * self.length, dtype=torch.long)
        ids[to] = data.flat[data.starts[plan.order].repeat_interleave(lengths) + step + shift].long()
        documents[to] = plan.document.repeat_interleave(lengths)
        return ids.view(plan.rows, self.length), documents.view(plan.rows, self.length)

    def __iter__(self) -> Iterator[PackedBatch]:
        while True:
            epoch = self.layout(self.epoch).to(self.device)
            while self.index * self.rows < len(epoch.source):
                at = self.index * self.rows
                self.index += 1
                yield epoch.rows(slice(at, at + self.rows))
            self.epoch, self.index = self.epoch + 1, 0


def _within(sizes: Tensor, first: Tensor) -> Tensor:
    """Running sum of `sizes` before each entry, starting anew where `first`."""
    before = sizes.cumsum(0) - sizes
    return before - torch.where(first, before, 0).cummax(0).values
