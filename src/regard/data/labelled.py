"""Batches of labelled texts, padded or packed.

A text is  <s> … </s>,  truncated to `data.max_length` tokens; the first token is what BERT calls [CLS].

    padded   text [B, N], is_real [B, N],  labels [B, 1]      texts of similar length side by side
    packed   text [R, L], document [R, L], labels [R, D]      at most D texts per row, IGNORE where there are fewer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.data.batch import PairBatch, Ragged, Tensors
from regard.data.columns import Store
from regard.data.pack import Plan, TextPacks, TextRows


@dataclass(frozen=True)
class ClassBatch(Tensors):
    """Texts, one per row or packed, and their classes."""

    text: Tensor  # [R, N]
    labels: Tensor  # [R, D], IGNORE where a packed row has fewer texts
    is_real: Tensor | None = None  # [R, N] of padded texts; None: no padding
    document: Tensor | None = None  # [R, N] of packed ones, from 1; 0: padding

    @property
    def tokens(self) -> Tensor:
        """The number of texts."""
        return (self.labels != PairBatch.IGNORE).sum()


class Labelled:
    """Texts with the numbers of their classes [N]."""

    def __init__(self, texts: Ragged, labels: Tensor) -> None:
        self.texts, self.labels = texts, labels

    @classmethod
    def of(cls, store: Store) -> Labelled:
        return cls(store.ragged("text"), store.tensor("label").long())

    def __len__(self) -> int:
        return len(self.labels)

    def choose(self, rows: Tensor) -> Labelled:
        return Labelled(self.texts.choose(rows), self.labels[rows])

    def at(self, epoch: int) -> Labelled:
        return self

    @property
    def longest_row(self) -> int:
        return int(self.texts.lengths.max())

    @property
    def sizes(self) -> Tensor:
        return self.texts.lengths

    def batch(self, rows: Tensor) -> ClassBatch:
        text, is_real = self.texts.pad(rows)
        return ClassBatch(text, self.labels[rows][:, None], None if bool(is_real.all()) else is_real)


class ClassPacks(TextPacks):
    """Packed batches of labelled texts."""

    def __init__(self, data: Labelled, rows: int, length: int, seed: int, device: torch.device | None = None) -> None:
        super().__init__(data.texts, rows, length, seed, device)
        self.labels = data.labels
        self.most = length // int(data.texts.lengths.min())  # texts that a row can hold

    def label(self, rows: TextRows, plan: Plan, generator: torch.Generator) -> ClassBatch:
        labels = torch.full((len(rows.ids), self.most), PairBatch.IGNORE)
        labels[plan.row, plan.document - 1] = self.labels[plan.order]
        return ClassBatch(rows.ids, labels.to(rows.ids.device), document=rows.document)


def sample_rows(labels: Tensor, fraction: float, seed: int, *, keep: bool) -> Tensor:
    """Which rows [N] are sampled: the same fraction of every class, at least one of each; a smaller fraction with the
    same seed is a subset of a larger one. With `keep`, at least one of a class is left instead.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    sampled = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        count = round(fraction * len(members))
        sampled[members[: min(count, len(members) - 1) if keep else max(count, 1)]] = True
    return sampled


def balanced_weights(counts: Sequence[int]) -> list[float]:
    """w_c = N / (C n_c): every class counts as much as the others, and the mean over the examples is 1."""
    return [sum(counts) / (len(counts) * count) for count in counts]
