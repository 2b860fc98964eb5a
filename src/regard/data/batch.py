"""What batches are made of: sequences of different length, concatenated or padded to a rectangle.

Ragged      all sequences concatenated in one tensor; `pad(rows)` gathers a padded rectangle in one step
Sequences   what `Batches` splits into batches: `Pairs` of an encoder-decoder, `Labelled` texts of a classifier
Tensors     base of all batches: a dataclass of tensors
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from regard.errors import UserError


class Ragged:
    """Sequences of ids, concatenated: flat [total], starts [rows], lengths [rows].

    `flat` is in memory or mapped from a file (`regard.data.columns`), where only the rows of a batch are read.
    """

    def __init__(self, flat: Tensor, lengths: Tensor) -> None:
        self.flat, self.lengths = flat, lengths
        self.starts = lengths.cumsum(0) - lengths

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]] | Ragged) -> Ragged:
        """From lists of ids, in memory; `Ragged` is returned as it is."""
        if isinstance(sequences, Ragged):
            return sequences
        lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long)
        return cls(torch.tensor([*chain.from_iterable(sequences)], dtype=torch.int32), lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def joined(self) -> Tensor:
        """All ids, concatenated, also of a selection of sequences. [Σ lengths]"""
        return self.flat[self.starts.repeat_interleave(self.lengths) + steps(self.lengths)]

    def choose(self, rows: Tensor) -> Ragged:
        """These sequences only; the ids are not copied."""
        chosen = copy.copy(self)
        chosen.lengths, chosen.starts = self.lengths[rows], self.starts[rows]
        return chosen

    def pad(self, rows: Tensor, width: Callable[[int], int] = int) -> tuple[Tensor, Tensor]:
        """ids [B, width(longest)], padded with 0 on the right, and which of them are real."""
        lengths = self.lengths[rows]
        column = torch.arange(width(int(lengths.max())) if len(rows) else 0)
        is_real = column < lengths[:, None]
        at = (self.starts[rows][:, None] + column).clamp_max(max(len(self.flat) - 1, 0))
        ids = torch.from_numpy(self.flat.numpy()[at.numpy()])  # flat[at] would use all threads for a few numbers
        return torch.where(is_real, ids.long(), 0), is_real


def steps(lengths: Tensor) -> Tensor:
    """0, 1, 2, … for each of the concatenated sequences. [Σ lengths]"""
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def pad_rows(sequences: Sequence[Tensor], longest: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences [length, …] as rows [B, longest, …], padded with 0, and which of it is real, [B, longest]."""
    lengths = torch.tensor([len(one) for one in sequences])
    rows = sequences[0].new_zeros(len(sequences), longest or int(lengths.max()), *sequences[0].shape[1:])
    for row, one in zip(rows, sequences, strict=True):
        row[: len(one)] = one
    return rows, torch.arange(rows.shape[1]) < lengths[:, None]


class Tensors:
    """Base of batches: dataclasses of tensors (or None), each with the rows of the batch as first axis."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same batch with every tensor changed."""
        parts = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return type(self)(*(None if part is None else change(part) for part in parts))

    def to(self, device: torch.device) -> Self:
        return self.each(lambda part: part.to(device, non_blocking=True))

    def clone(self) -> Self:
        return self.each(Tensor.clone)

    def rows(self, chosen: slice | Tensor) -> Self:
        return self.each(lambda part: part[chosen])

    def copy_(self, other: Self) -> None:
        """Copy the content of `other`, in place."""
        for field in fields(self):  # type: ignore[arg-type]
            if (own := getattr(self, field.name)) is not None:
                own.copy_(getattr(other, field.name), non_blocking=True)


class Labels(Tensors):
    """A batch with `labels`: IGNORE where there is nothing to predict."""

    IGNORE = -100
    labels: Tensor

    @property
    def tokens(self) -> Tensor:
        """The number of labels that count: what the loss is averaged over."""
        return (self.labels != self.IGNORE).sum()


@dataclass(frozen=True)
class PairBatch(Labels):
    """Source and shifted target: `target[:, i]` is read, `labels[:, i]` is the token that follows."""

    source: Tensor  # [B, S]
    source_is_real: Tensor | None  # [B, S]; None: no padding
    target: Tensor  # [B, T]
    labels: Tensor  # [B, T], IGNORE on padding


class Sequences(ABC):
    """Rows of known size, perhaps others in every epoch, and how some of them become a padded batch."""

    weights: Tensor | None = None  # how often each row occurs in an epoch of training [rows]; None: once

    @property
    @abstractmethod
    def sizes(self) -> Tensor:
        """The length of each row. [rows]"""

    @abstractmethod
    def batch(self, rows: Tensor, width: Callable[[int], int] = int) -> Any:
        """These rows, padded to `width(n)` tokens, where the longest has n."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def longest_row(self) -> int:
        return int(self.sizes.max())

    @property
    def tokens(self) -> int:
        """The tokens of all rows."""
        return int(self.sizes.sum())

    def at(self, epoch: int) -> Self:
        """The rows that this epoch reads: always the same, unless a subclass samples them."""
        return self


class Pairs(Sequences):
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

    @property
    def longest(self) -> int:
        """The most tokens a model reads at once: a source, or a target without its end."""
        return max(int(self.sources.lengths.max()), int(self.targets.lengths.max()) - 1)

    @property
    def sizes(self) -> Tensor:
        """The length of a row: its longer side."""
        return torch.maximum(self.sources.lengths, self.targets.lengths)

    @property
    def tokens(self) -> int:
        """The tokens of both sides."""
        return int(self.sources.lengths.sum() + self.targets.lengths.sum())

    def batch(self, rows: Tensor, width: Callable[[int], int] = int) -> PairBatch:
        source, source_is_real = self.sources.pad(rows, width)
        target, is_real = self.targets.pad(rows, width)
        labels = torch.where(is_real[:, 1:], target[:, 1:], PairBatch.IGNORE)
        return PairBatch(source, None if bool(source_is_real.all()) else source_is_real, target[:, :-1], labels)
