"""Streams: endless, repeatable sequences of batches, each able to continue from any point.

    Batches     padded sequences of similar length, by a budget of tokens        variable shapes
    Packs       several sequences per row (`regard.data.pack`)                   fixed shapes
    Blocks      rows of one long token sequence (`regard.data.blocks`)           fixed shapes
    Examples    examples of one shape, stored or generated: images, scenes, windows of a series

The order of epoch e follows from (seed, e) alone, so a resumed run needs only the epoch and the number of the batch.
A stream takes random numbers only from generators of its own; the global one belongs to the training step.

`Ahead` prepares the next batches in a thread while the model trains on these; `prefetch` does the same for any stream.
The threads never use a GPU: while a step is captured as a CUDA graph, no other thread may.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from regard.errors import UserError

AHEAD = 4  # batches that `prefetch` keeps ready


def epoch_seed(seed: int, epoch: int) -> int:
    return seed * 1_000_003 + epoch


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """The random numbers of one epoch."""
    return torch.Generator().manual_seed(epoch_seed(seed, epoch))


class Stream(ABC):
    """Endless and repeatable; `position` is where it is.

    Several processes share one stream: of every `world` batches in a row, process `rank` takes its own, and all have
    the same position. So two processes learn in one step from what one process would in two batches.
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
        """The number of batches of an epoch, at least one, and a function that makes the one of a given number."""

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
    """Padded batches of similar length, up to `budget` tokens each (Vaswani et al. 2017, section 5.1).

    Order within an epoch: shuffle, sort by length (ties stay shuffled), split by budget, shuffle the batches. So the
    padded rectangle  rows x longest  is nearly full.
    """

    def __init__(self, data: Paddable, budget: int, seed: int) -> None:
        if data.longest_row > budget:
            raise UserError(
                f"train.batch_tokens = {budget} is too small for a sequence of {data.longest_row} tokens: raise it, "
                "or lower data.max_length"
            )
        self.data, self.budget, self.seed = data, budget, seed

    def plan(self, epoch: int) -> list[Tensor]:
        """The rows of each batch of an epoch."""
        generator = epoch_generator(self.seed, epoch)
        shuffled = torch.randperm(len(self.data), generator=generator)
        sizes = self.data.at(epoch).sizes[shuffled]
        order = sizes.argsort(stable=True)
        splits, rows = [], 0
        for at, size in enumerate(sizes[order].tolist()):  # ascending, so `size` is the batch's longest
            if (rows + 1) * size > self.budget:
                splits.append(at)
                rows = 0
            rows += 1
        batches = shuffled[order].tensor_split(splits)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def open(self, epoch: int) -> tuple[int, Callable[[int], Any]]:
        plan, data = self.plan(epoch), self.data.at(epoch)
        return len(plan), lambda number: data.batch(plan[number])


def batch_rows(count: int, rows: int, seed: int, epoch: int) -> Tensor:
    """The rows of each batch of an epoch, shuffled, [batches, rows]; an incomplete batch at the end is left out.

    Fewer rows than a batch are repeated in it.
    """
    order = torch.randperm(count, generator=epoch_generator(seed, epoch))
    if count < rows:
        order = order.repeat(-(-rows // count))
    return order[: len(order) // rows * rows].view(-1, rows)


class Examples(Stream):
    """Batches of `rows` out of `count` examples of one shape, made by `make(row numbers)`."""

    def __init__(self, count: int, rows: int, seed: int, make: Callable[[Tensor], Any]) -> None:
        self.count, self.rows, self.seed, self.make = count, rows, seed, make

    def open(self, epoch: int) -> tuple[int, Callable[[int], Any]]:
        order = batch_rows(self.count, self.rows, self.seed, epoch)
        return len(order), lambda number: self.make(order[number])


class Ahead(Stream):
    """A stream whose batches a thread prepares, `chunk` of them at a time."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.thread = ThreadPoolExecutor(1, type(self).__name__)
        self.requested: dict[tuple[int, int], Future[tuple[int, Any]]] = {}

    @abstractmethod
    def prepare(self, epoch: int, chunk: int) -> tuple[int, Any]:
        """The number of batches of the epoch, and what the chunk is made of, on the CPU; called in the thread."""

    @abstractmethod
    def finish(self, epoch: int, chunk: int, prepared: Any) -> Any:
        """The chunk on the device."""

    @abstractmethod
    def batch(self, finished: Any, number: int) -> Any:
        """Batch `number` of a chunk."""

    def open(self, epoch: int) -> tuple[int, Callable[[int], Any]]:
        batches, _ = self._request(epoch, self.index // self.chunk).result()
        current: dict[int, Any] = {}

        def make(number: int) -> Any:
            chunk, within = divmod(number, self.chunk)
            if chunk not in current:
                current.clear()  # frees its memory before the next takes more
                current[chunk] = self.finish(epoch, chunk, self._request(epoch, chunk).result()[1])
                self.requested = {}
                self._request(*((epoch, chunk + 1) if (chunk + 1) * self.chunk < batches else (epoch + 1, 0)))
            return self.batch(current[chunk], within)

        return batches, make

    def _request(self, epoch: int, chunk: int) -> Future[tuple[int, Any]]:
        if (epoch, chunk) not in self.requested:
            self.requested[epoch, chunk] = self.thread.submit(self.prepare, epoch, chunk)
        return self.requested[epoch, chunk]


def prefetch(stream: Stream, pin: bool = False) -> Generator[Any]:
    """The batches of `stream` from its position on, made by a thread ahead of training. Closing it ends the thread.

    The thread iterates over a copy of the stream, so `stream.position` is that of the batches taken. With `pin`,
    batches are in pinned memory, from where they are copied to a GPU asynchronously.
    """
    ahead = copy.copy(stream)
    batches = iter(ahead)

    def make() -> tuple[Any, dict[str, int]]:
        batch = next(batches)
        return _pinned(batch) if pin else batch, ahead.position

    with ThreadPoolExecutor(1, "batches") as thread:
        try:
            waiting = deque(thread.submit(make) for _ in range(AHEAD))
            while True:
                batch, position = waiting.popleft().result()  # or the error of the thread
                waiting.append(thread.submit(make))
                stream.seek(position)
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)


def _pinned(batch: Any) -> Any:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: x.pin_memory() for name, x in tensors.items() if isinstance(x, Tensor)})
