"""Batches: sequences of different length side by side, with as little filler as possible.

A batch is chosen by a budget of tokens, not of sentences (Vaswani et al. 2017, section 5.1): sequences of
similar length go together, so that the padded rectangle  rows x longest  stays near its real content.

    Ragged    all sequences end to end in one tensor; `pad(rows)` cuts a rectangle out of it in one step
    Batches   which rows make the next batch: deterministic by seed, and able to go on from any point

Order within an epoch: shuffle, sort by length (ties stay shuffled), cut by budget, shuffle the cuts. The
whole order of epoch e follows from (seed, e), so a resumed run needs only the epoch and how far it was.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from regard.errors import UserError


class Ragged:
    """Sequences of ids end to end: flat [total], starts [rows], lengths [rows].

    `flat` is in memory or mapped from a file (`regard.data.columns`), where only the rows of a batch are read.
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

    def joined(self) -> Tensor:
        """All ids end to end, also where these are some of the sequences only. [Σ lengths]"""
        return self.flat[self.starts.repeat_interleave(self.lengths) + steps(self.lengths)]

    def choose(self, rows: Tensor) -> Ragged:
        """These sequences only; the ids stay where they are."""
        chosen = copy.copy(self)
        chosen.lengths, chosen.starts = self.lengths[rows], self.starts[rows]
        return chosen

    def pad(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, longest], filled up with 0 on the right, and which of them are real (the rest is never seen)."""
        lengths = self.lengths[rows]
        column = torch.arange(int(lengths.max()) if len(rows) else 0)
        is_real = column < lengths[:, None]
        at = (self.starts[rows][:, None] + column).clamp_max(max(len(self.flat) - 1, 0))
        ids = torch.from_numpy(self.flat.numpy()[at.numpy()])  # flat[at] would wake all threads for a few numbers
        return torch.where(is_real, ids.long(), 0), is_real


def steps(lengths: Tensor) -> Tensor:
    """0, 1, 2, … for each of sequences that lie end to end. [Σ lengths]"""
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


class Tensors:
    """What a batch can do that is a dataclass of tensors, each with the rows of the batch as first axis, or None."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same batch with every tensor changed."""
        parts = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return type(self)(*(None if part is None else change(part) for part in parts))

    def to(self, device: torch.device) -> Self:
        return self.each(lambda part: part.to(device, non_blocking=True))

    def clone(self) -> Self:
        return self.each(Tensor.clone)

    def rows(self, chosen: slice) -> Self:
        return self.each(lambda part: part[chosen])

    def copy_(self, other: Self) -> None:
        """Take over the content of `other`, in place."""
        for field in fields(self):  # type: ignore[arg-type]
            if (own := getattr(self, field.name)) is not None:
                own.copy_(getattr(other, field.name), non_blocking=True)


@dataclass(frozen=True)
class PairBatch(Tensors):
    """Source and shifted target: `target[:, i]` is read, `labels[:, i]` is what should follow."""

    source: Tensor  # [B, S]
    source_is_real: Tensor | None  # [B, S]; None: no filler
    target: Tensor  # [B, T]
    labels: Tensor  # [B, T], IGNORE where there is nothing to learn

    IGNORE = -100

    @property
    def tokens(self) -> Tensor:
        """How many target tokens are to be learned."""
        return (self.labels != self.IGNORE).sum()


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

    def at(self, epoch: int) -> Pairs:
        """The pairs that this epoch reads: always the same."""
        return self

    @property
    def longest(self) -> int:
        """The most tokens a model reads at once: a source, or a target without its end."""
        return max(int(self.sources.lengths.max()), int(self.targets.lengths.max()) - 1)

    @property
    def longest_row(self) -> int:
        """The largest of `sizes`."""
        return int(self.sizes.max())

    @property
    def sizes(self) -> Tensor:
        """What a row costs: its longer side."""
        return torch.maximum(self.sources.lengths, self.targets.lengths)

    def batch(self, rows: Tensor) -> PairBatch:
        source, source_is_real = self.sources.pad(rows)
        target, is_real = self.targets.pad(rows)
        labels = torch.where(is_real[:, 1:], target[:, 1:], PairBatch.IGNORE)
        return PairBatch(source, None if bool(source_is_real.all()) else source_is_real, target[:, :-1], labels)


class Stream(ABC):
    """What is endless and repeatable, and can go on from any point: `position` is where it stands.

    Several processes share one stream: of every `world` batches in a row, process `rank` takes its own, and all of
    them stand at the same position. So two processes learn in a step from what one would in two batches.
    """

    epoch = 0
    index = 0  # batches taken from this epoch, by all processes together
    rank, world = 0, 1

    @property
    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def seek(self, position: dict[str, int]) -> None:
        self.epoch, self.index = position["epoch"], position["index"]

    def share(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    @abstractmethod
    def open(self, epoch: int) -> tuple[int, Callable[[int], Any]]:
        """How many batches an epoch has, at least one, and a function that makes the one of a given number."""

    def __iter__(self) -> Generator[Any]:
        """Batches from here on, without end."""
        opened, count, make = -1, 0, None
        while True:
            for turn in range(self.world):
                while opened != self.epoch or self.index >= count:
                    if opened == self.epoch:
                        self.epoch, self.index = self.epoch + 1, 0
                    opened, (count, make) = self.epoch, self.open(self.epoch)
                if turn == self.rank:
                    own, number = make, self.index
                self.index += 1
            assert own is not None
            yield own(number)


class Paddable(Protocol):
    """What `Batches` takes: rows of known size, perhaps others in every epoch, and how some of them become a batch."""

    def __len__(self) -> int: ...

    @property
    def longest_row(self) -> int: ...

    @property
    def sizes(self) -> Tensor: ...

    def at(self, epoch: int) -> Paddable: ...

    def batch(self, rows: Tensor) -> Any: ...


class Batches(Stream):
    """Padded batches of similar length, up to `budget` tokens each."""

    def __init__(self, data: Paddable, budget: int, seed: int) -> None:
        if data.longest_row > budget:
            raise UserError(
                f"train.batch_tokens = {budget} is too small for a sequence of {data.longest_row} tokens: raise it, "
                "or lower data.max_length"
            )
        self.data, self.budget, self.seed = data, budget, seed

    def plan(self, epoch: int) -> list[Tensor]:
        """The rows of each batch of an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        shuffled = torch.randperm(len(self.data), generator=generator)
        sizes = self.data.at(epoch).sizes[shuffled]
        order = sizes.argsort(stable=True)
        cuts, rows = [], 0
        for at, size in enumerate(sizes[order].tolist()):  # ascending, so `size` is the batch's longest
            if (rows + 1) * size > self.budget:
                cuts.append(at)
                rows = 0
            rows += 1
        batches = shuffled[order].tensor_split(cuts)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def open(self, epoch: int) -> tuple[int, Callable[[int], Any]]:
        plan, data = self.plan(epoch), self.data.at(epoch)
        return len(plan), lambda number: data.batch(plan[number])
