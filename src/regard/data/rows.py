"""Rows: examples of one shape, all in memory, in another order every epoch.

Pictures of one size, windows of a series, padded sequences: where every example has the same shape, a batch is a
choice of row numbers. The order of epoch e follows from (seed, e), so a resumed run needs only the epoch and how far
it was. Rows that make no whole batch at the end of an epoch wait for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import Stream

Make = Callable[[Tensor, int, int], Any]  # (row numbers [rows], epoch, number of the batch in it) -> batch


def order_of(count: int, rows: int, seed: int, epoch: int) -> Tensor:
    """The rows of each batch of an epoch, [batches, rows]; fewer rows than a batch are read several times in it."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator)
    if count < rows:
        order = order.repeat(-(-rows // count))
    return order[: len(order) // rows * rows].view(-1, rows)


class Rows(Stream):
    """Batches of `rows` rows out of `count`, made by `make`."""

    def __init__(self, count: int, rows: int, seed: int, make: Make) -> None:
        self.count, self.rows, self.seed, self.make = count, rows, seed, make

    def open(self, epoch: int) -> tuple[int, Callable[[int], Any]]:
        order = order_of(self.count, self.rows, self.seed, epoch)
        return len(order), lambda number: self.make(order[number], epoch, number)
