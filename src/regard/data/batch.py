"""Batches: sequences of different length side by side, with as little filler as possible.

A batch is chosen by a budget of tokens, not of sentences (Vaswani et al. 2017, section 5.1): sequences of
similar length go together, so that the padded rectangle  rows x longest  stays near its real content.

    Ragged    all sequences end to end in one tensor; `pad(rows)` cuts a rectangle out of it in one step
    Batches   which rows make the next batch: deterministic by seed, and able to go on from any point

Order within an epoch: shuffle, sort by length (ties stay shuffled), cut by budget, shuffle the cuts. The
whole order of epoch e follows from (seed, e), so a resumed run needs only the epoch and how far it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from regard.errors import UserError


class Ragged:
    """Sequences of ids end to end: flat [total], starts [rows], lengths [rows].

    `flat` is in memory or mapped from a file (`regard.data.store`), where only the rows of a batch are read.
    """

    def __init__(self, flat: Tensor, lengths: Tensor) -> None:
        self.flat, self.lengths = flat, lengths
        self.starts = lengths.cumsum(0) - lengths

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]] | Ragged) -> Ragged:
        """From lists of ids, in memory; what is ragged already stays as it is."""
        if isinstance(sequences, Ragged):
            return sequences
        lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long)
        return cls(torch.tensor([*chain.from_iterable(sequences)], dtype=torch.int32), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def pad(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, longest], filled up with 0 on the right, and which of them are real (the rest is never seen)."""
        lengths = self.lengths[rows]
        column = torch.arange(int(lengths.max()) if len(rows) else 0)
        valid = column < lengths[:, None]
        at = (self.starts[rows][:, None] + column).clamp_max(max(len(self.flat) - 1, 0))
        return torch.where(valid, self.flat[at].long(), 0), valid


@dataclass(frozen=True)
class PairBatch:
    """Source and shifted target: `target[:, i]` is read, `expected[:, i]` is what should follow."""

    source: Tensor  # [B, S]
    source_valid: Tensor | None  # [B, S]; None: no filler
    target: Tensor  # [B, T]
    expected: Tensor  # [B, T], IGNORE where there is nothing to learn

    IGNORE = -100

    @property
    def tokens(self) -> Tensor:
        """How many target tokens are to be learned."""
        return (self.expected != self.IGNORE).sum()

    def to(self, device: torch.device) -> PairBatch:
        valid = None if self.source_valid is None else self.source_valid.to(device, non_blocking=True)
        source, target, expected = (x.to(device, non_blocking=True) for x in (self.source, self.target, self.expected))
        return PairBatch(source, valid, target, expected)


class Pairs:
    """Source and target sequences as a model reads them: sources end with </s>, targets are <s> … </s>."""

    def __init__(self, sources: Sequence[Sequence[int]] | Ragged, targets: Sequence[Sequence[int]] | Ragged) -> None:
        if len(sources) != len(targets):
            raise UserError(f"{len(sources)} sources but {len(targets)} targets: each source needs one target")
        if not sources:
            raise UserError("no sentence pairs: the data is empty")
        self.sources, self.targets = Ragged.of(sources), Ragged.of(targets)
        for name, side, least in (("source", self.sources, 1), ("target", self.targets, 2)):
            if (shortest := int(side.lengths.min())) < least:
                row = int(side.lengths.argmin())
                raise UserError(f"{name} {row} has {shortest} ids: sources end with </s>, targets are <s> … </s>")

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def sizes(self) -> Tensor:
        """What a row costs: its longer side."""
        return torch.maximum(self.sources.lengths, self.targets.lengths)

    def batch(self, rows: Tensor) -> PairBatch:
        source, source_valid = self.sources.pad(rows)
        target, valid = self.targets.pad(rows)
        expected = torch.where(valid[:, 1:], target[:, 1:], PairBatch.IGNORE)
        return PairBatch(source, None if bool(source_valid.all()) else source_valid, target[:, :-1], expected)


class Stream:
    """What is endless and repeatable, and can go on from any point: `position` is where it stands."""

    epoch = 0
    index = 0  # batches taken from this epoch

    @property
    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def seek(self, position: dict[str, int]) -> None:
        self.epoch, self.index = position["epoch"], position["index"]


class Batches(Stream):
    """Padded batches of similar length, up to `budget` tokens each."""

    def __init__(self, data: Pairs, budget: int, seed: int) -> None:
        longest = int(data.sizes.max())
        if longest > budget:
            raise UserError(
                f"train.batch_tokens = {budget} is too small for a sequence of {longest} tokens: raise it, "
                "or leave such pairs out with a lower data.max_length"
            )
        self.data, self.budget, self.seed = data, budget, seed

    def plan(self, epoch: int) -> list[Tensor]:
        """The rows of each batch of an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        shuffled = torch.randperm(len(self.data), generator=generator)
        sizes = self.data.sizes[shuffled]
        order = sizes.argsort(stable=True)
        cuts, rows = [], 0
        for at, size in enumerate(sizes[order].tolist()):  # ascending, so `size` is the batch's longest
            if (rows + 1) * size > self.budget:
                cuts.append(at)
                rows = 0
            rows += 1
        batches = shuffled[order].tensor_split(cuts)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def __iter__(self) -> Iterator[PairBatch]:
        while True:
            plan = self.plan(self.epoch)
            while self.index < len(plan):
                rows = plan[self.index]
                self.index += 1
                yield self.data.batch(rows)
            self.epoch, self.index = self.epoch + 1, 0
