"""Packing single texts: several of them in one row, so that every batch has the same shape and almost no filler.

    ids        <s> a a a </s> <s> b b </s> <s> c </s> · ·
    document    1  1 1 1  1    2  2 2  2    3  3  3   0 0

As for pairs (`regard.data.pack`): attention is kept to equal documents, positions restart with each, and filler is
document 0. What is learned from a row differs (the class of each text, its masked tokens), so `finish` is left to the
subclasses. Rows are laid out a slab at a time, some million tokens, by a thread while the model learns from the slab
before; then they go to the device, are finished there, and are cut into steps by slicing: no work per step, and an
epoch may be larger than memory. What `finish` draws at random follows from (seed, epoch, slab) and the kind of device.

The thread never touches a GPU: while a step is being recorded as a graph, nobody else may.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from regard.data.batch import Ragged, Stream, Tensors
from regard.data.pack import Plan, lay, plan_rows
from regard.errors import UserError

SLAB = 1 << 22  # tokens that are laid out at once


class Slab(NamedTuple):
    """Rows [n, length] of an epoch of so many batches, and which text of the plan went where."""

    batches: int
    ids: Tensor
    document: Tensor
    plan: Plan


class TextPacks(Stream):
    """Batches of `rows` rows of `length` tokens."""

    def __init__(self, texts: Ragged, rows: int, length: int, seed: int, device: torch.device | None = None) -> None:
        longest = int(texts.lengths.max())
        if longest > length:
            raise UserError(
                f"train.pack = {length} is too short for a text of {longest} tokens: raise it, "
                f"or cut longer ones with data.max_length = {length}"
            )
        self.texts, self.row_count, self.length, self.seed = texts, rows, length, seed
        self.device = device or torch.device("cpu")
        self.each = max(1, SLAB // (rows * length))  # batches of a slab
        self.planned: tuple[int, Plan] | None = None  # the epoch that the thread is in
        self.asked: dict[tuple[int, int], Future[Slab]] = {}
        self.thread = ThreadPoolExecutor(1, "slabs")

    def plan(self, epoch: int) -> Plan:
        """Where each text goes in an epoch."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return plan_rows(self.texts.lengths, self.texts.lengths, self.length, self.row_count, generator)

    def open(self, epoch: int) -> tuple[int, Callable[[int], Tensors]]:
        step, each = self.row_count, self.each
        batches = self._ask(epoch, self.index // each).result().batches
        laid: dict[int, Tensors] = {}

        def make(number: int) -> Tensors:
            slab, place = divmod(number, each)
            if slab not in laid:
                laid.clear()  # before the next one takes its place
                laid[slab] = self._finished(epoch, slab)
                self.asked = {}
                self._ask(*((epoch, slab + 1) if (slab + 1) * each < batches else (epoch + 1, 0)))
            return laid[slab].rows(slice(place * step, (place + 1) * step))

        return batches, make

    def _ask(self, epoch: int, slab: int) -> Future[Slab]:
        """One slab, laid out by a thread while the model learns from another."""
        if (epoch, slab) not in self.asked:
            self.asked[epoch, slab] = self.thread.submit(self._lay, epoch, slab)
        return self.asked[epoch, slab]

    def _lay(self, epoch: int, slab: int) -> Slab:
        if self.planned is None or self.planned[0] != epoch:
            self.planned = (epoch, self.plan(epoch))
        texts, plan = self.texts, self.planned[1]
        rows = self.each * self.row_count
        part = plan.part(slab * rows, min((slab + 1) * rows, plan.rows))
        return Slab(plan.rows // self.row_count, *lay(texts, part, texts.lengths[part.order], self.length), part)

    def _finished(self, epoch: int, slab: int) -> Tensors:
        _, ids, document, plan = self._ask(epoch, slab).result()
        generator = torch.Generator(self.device).manual_seed((self.seed * 1_000_003 + epoch) * 65_537 + slab)
        return self.finish(ids.to(self.device), document.to(self.device), plan, generator)

    @abstractmethod
    def finish(self, ids: Tensor, document: Tensor, plan: Plan, generator: torch.Generator) -> Tensors:
        """The batch of rows [n, length], with what is to be learned from them; all on the device but for the plan."""
