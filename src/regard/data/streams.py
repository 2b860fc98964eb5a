"""Streams: endless, repeatable sequences of batches, each able to continue from any point.

    Batches     padded sequences of similar length, by a budget of tokens        variable shapes
    Packs       several sequences per row (`regard.data.pack`)                   fixed shapes
    Blocks      rows of one long token sequence                                  fixed shapes
    Examples    examples of one shape, stored or generated: images, scenes, windows of a series

The order of epoch e follows from (seed, e) alone, so a resumed run needs only the epoch and the number of the batch.
Rows may have weights: one of weight w occurs w times in an epoch, on average where w is not a whole number.

A stream takes random numbers only from generators of its own; the global one belongs to the training step.

`ChunkedStream` prepares batches in a thread while the model trains on these; `prefetch` does so for any stream.
The threads never use a GPU: while a step is captured as a CUDA graph, no other thread may.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import Sequences, Tensors
from regard.errors import UserError

LONG = 512  # tokens of a sequence, from which on widths are rounded more
SHORTEST = 8  # tokens of a passage that is repeated
PREFETCHED = 4  # batches that `prefetch` keeps ready
RESIDENT = {"cpu": 1 << 22, "cuda": 1 << 28}  # tokens (4 bytes each) kept as a whole: a step then copies nothing


def epoch_seed(seed: int, epoch: int) -> int:
    return seed * 1_000_003 + epoch


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """The random numbers of one epoch."""
    return torch.Generator().manual_seed(epoch_seed(seed, epoch))


def weighted_rows(weights: Tensor, generator: torch.Generator) -> Tensor:
    """The rows of an epoch, each as often as its weight says: ⌊w⌋ times, and once more with probability w - ⌊w⌋.

    Systematic sampling: of the rows of one weight, the same number in every epoch, give or take one. Weights that are
    all below 1 are divided by the largest, so that no epoch is empty.
    """
    weights = weights.double() / weights.max().clamp_max(1.0)
    whole = weights.floor()
    order = torch.randperm(len(weights), generator=generator)
    order = order[weights[order].argsort(stable=True)]  # rows of one weight side by side, in random order
    offset = torch.rand((), generator=generator, dtype=torch.float64)
    reached = (offset + (weights - whole)[order].cumsum(0)).floor().long()
    times = whole.long()
    times[order] += reached.diff(prepend=torch.zeros(1, dtype=torch.long))
    return torch.arange(len(weights)).repeat_interleave(times)


def shuffled_rows(count: int, weights: Tensor | None, generator: torch.Generator) -> Tensor:
    """The rows of an epoch in random order, as often as their `weights` [count] say; None: once."""
    if weights is None:
        return torch.randperm(count, generator=generator)
    rows = weighted_rows(weights, generator)
    return rows[torch.randperm(len(rows), generator=generator)]


class Stream(ABC):
    """Endless and repeatable; `position` is where it is.

    Several processes share one stream: of every `world` batches in a row, process `rank` takes its own, and all have
    the same position. So two processes learn in one step from what one process would in two batches.
    """

    epoch = 0
    index = 0  # batches taken from this epoch, by all processes together
    rank, world = 0, 1
    per_epoch = 0  # batches of the epoch, once one is taken

    @property
    def size(self) -> dict[str, int]:
        """The training data, as far as it is known: "examples" and "tokens"."""
        return {}

    @property
    def position(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def seek(self, position: dict[str, int]) -> None:
        self.epoch, self.index = position["epoch"], position["index"]

    def shard(self, rank: int, world: int) -> None:
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
                    self.per_epoch = count
                if turn == self.rank:
                    own, number = make, self.index
                self.index += 1
            assert own is not None
            yield own(number)


class Batches(Stream):
    """Padded batches of similar length, up to `budget` tokens each (Vaswani et al. 2017, section 5.1).

    Order within an epoch: shuffle, sort by length (ties stay shuffled), split by budget, shuffle the batches. So the
    padded rectangle  rows x longest  is nearly full. On a GPU, lengths are rounded up to a multiple of 8 (of 64, if
    there are long ones): cuDNN, the compiler and the allocator prepare something for every new shape.
    """

    def __init__(self, data: Sequences, budget: int, seed: int, device: torch.device | None = None) -> None:
        self.data, self.budget, self.seed, self.longest = data, budget, seed, data.longest_row
        if self.longest > budget:
            raise UserError(
                f"train.batch_tokens = {budget} is too small for a sequence of {self.longest} tokens: raise it, "
                "or lower data.max_length"
            )
        self.multiple = 1 if device is None or device.type == "cpu" else 8 if self.longest <= LONG else 64

    @property
    def size(self) -> dict[str, int]:
        return {"examples": len(self.data), "tokens": self.data.tokens}

    def width(self, longest: int) -> int:
        """The padded length of rows of which the longest has so many tokens."""
        return min(-(-longest // self.multiple) * self.multiple, max(longest, self.longest))

    def plan(self, epoch: int) -> list[Tensor]:
        """The rows of each batch of an epoch."""
        generator = epoch_generator(self.seed, epoch)
        shuffled = shuffled_rows(len(self.data), self.data.weights, generator)
        sizes = self.data.at(epoch).sizes[shuffled]
        order = sizes.argsort(stable=True)
        splits, rows = [], 0
        for at, longest in enumerate(sizes[order].tolist()):  # ascending, so it is the longest of the batch
            size = self.width(longest)
            if (rows + 1) * size > self.budget:
                splits.append(at)
                rows = 0
            rows += 1
        batches = shuffled[order].tensor_split(splits)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def open(self, epoch: int) -> tuple[int, Callable[[int], Any]]:
        plan, data = self.plan(epoch), self.data.at(epoch)
        return len(plan), lambda number: data.batch(plan[number], self.width)


def batch_rows(count: int, rows: int, generator: torch.Generator, weights: Tensor | None = None) -> Tensor:
    """The rows of each batch of an epoch, shuffled, [batches, rows]; an incomplete batch at the end is left out.

    Fewer rows than a batch are repeated in it.
    """
    order = shuffled_rows(count, weights, generator)
    if len(order) < rows:
        order = order.repeat(-(-rows // len(order)))
    return order[: len(order) // rows * rows].view(-1, rows)


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


class Examples(Stream):
    """Batches of `rows` out of `count` examples of one shape, made by `make(row numbers)`."""

    def __init__(self, count: int, rows: int, seed: int, make: Callable[[Tensor], Any]) -> None:
        self.count, self.rows, self.seed, self.make = count, rows, seed, make

    @property
    def size(self) -> dict[str, int]:
        return {"examples": self.count}

    def open(self, epoch: int) -> tuple[int, Callable[[int], Any]]:
        order = batch_rows(self.count, self.rows, epoch_generator(self.seed, epoch))
        return len(order), lambda number: self.make(order[number])


@dataclass(frozen=True)
class BlockBatch(Tensors):
    """Rows of a text. A row of L + 1 tokens teaches L: `read` is all but the last, `labels` all but the first."""

    ids: Tensor  # [R, L + 1]

    @property
    def read(self) -> Tensor:
        return self.ids[:, :-1]

    @property
    def labels(self) -> Tensor:
        return self.ids[:, 1:]

    @property
    def tokens(self) -> Tensor:
        """The number of labels."""
        return torch.full((), self.labels.numel(), device=self.ids.device)

    def part(self, take: Callable[[Tensor], Tensor]) -> BlockPart:
        """What `take` leaves of the tokens [R, L] and of their labels."""
        return BlockPart(take(self.read), take(self.labels))


@dataclass(frozen=True)
class BlockPart(Tensors):
    """Some tokens of each row, and the token after each."""

    read: Tensor  # [R, n]
    labels: Tensor  # [R, n]

    @property
    def tokens(self) -> Tensor:
        return torch.full((), self.labels.numel(), device=self.labels.device)


class Blocks(Stream):
    """Batches of `rows` rows of `length` tokens, and the token after each.

    Every epoch the text is split at another offset into rows, which come in random order: each token is read once per
    epoch, at another position of a row each time. `groups` are parts of the text, (tokens, weight) each; a row has the
    weight of the part that it begins in.

    Of the rows of a batch, the fraction `repeat` has one passage again and again, of a random length from 8 tokens to
    half a row: what follows can then be copied from the context, and is quickly learned (Olsson et al. 2022).
    """

    def __init__(
        self, ids: Tensor, rows: int, length: int, seed: int, device: torch.device | None = None,
        groups: Sequence[tuple[int, float]] = (), repeat: float = 0.0,
    ) -> None:  # fmt: skip
        if repeat and length < 2 * SHORTEST:
            raise UserError(f"data.repeat = {repeat}: needs rows of train.pack >= {2 * SHORTEST} tokens, not {length}")
        if len(ids) < length + 1:
            raise UserError(
                f"the training text has {len(ids):,} tokens, less than one row of train.pack = {length} and the token "
                "after it: give more text, or a smaller pack"
            )
        self.rows, self.length, self.seed = rows, length, seed
        self.repeated = round(repeat * rows)  # rows of a batch
        self.ends = torch.tensor([size for size, _ in groups]).cumsum(0)
        self.weights = torch.tensor([weight for _, weight in groups]) if len(groups) > 1 else None
        device = device or torch.device("cpu")
        resident = len(ids) <= RESIDENT.get(device.type, RESIDENT["cpu"])
        self.ids = ids.int().to(device) if resident else ids
        self.columns = torch.arange(length + 1, device=self.ids.device)

    @property
    def size(self) -> dict[str, int]:
        return {"tokens": len(self.ids)}

    def starts(self, epoch: int) -> Tensor:
        """Where the rows of an epoch begin, by batch. [batches, rows]"""
        generator = epoch_generator(self.seed, epoch)
        positions = len(self.ids) - self.length  # a row may begin at 0 … positions - 1
        offset = int(torch.randint(min(self.length, positions), (), generator=generator))
        count = (positions - 1 - offset) // self.length + 1
        weights = self.weights
        if weights is not None:
            starts = offset + torch.arange(count) * self.length
            weights = weights[torch.bucketize(starts, self.ends, right=True)]
        return offset + batch_rows(count, self.rows, generator, weights) * self.length

    def open(self, epoch: int) -> tuple[int, Callable[[int], BlockBatch]]:
        starts = self.starts(epoch).to(self.ids.device)
        if not self.repeated:
            return len(starts), lambda number: BlockBatch(self.ids[starts[number, :, None] + self.columns].long())
        periods = torch.full(starts.shape, self.length + 1, device=self.ids.device)  # of each row, [batches, rows]
        generator = epoch_generator(self.seed, epoch)
        sizes = torch.randint(SHORTEST, self.length // 2 + 1, (len(starts), self.repeated), generator=generator)
        periods[:, : self.repeated] = sizes.to(periods)
        return len(starts), lambda number: BlockBatch(
            self.ids[starts[number, :, None] + self.columns % periods[number, :, None]].long()
        )


def windows(ids: Tensor, context: int, stride: int, rows: int) -> Iterator[tuple[BlockBatch, Tensor]]:
    """Batches with every token of a text exactly once, and which of their labels count [R, context].

    With `stride` < `context` the windows overlap, and only the last `stride` tokens of each (all of the first) count:

        context 4, stride 2       1 2 3 4                   a token has at least context - stride before it
                                      3 4 5 6               (Press et al. 2021, arXiv 2012.15832)
                                          5 6 7 8

    The last window is padded with its first token, which does not count.
    """
    if not 1 <= stride <= context:
        raise UserError(f"stride = {stride}: must be from 1 to the context of {context} tokens")
    column = torch.arange(context + 1)
    starts = torch.tensor([0, *range(stride, max(len(ids) - 1 - context + stride, 0), stride)])
    for start in starts[:, None].split(rows):
        at = start + column
        counts = ((start == 0) | (column[1:] > context - stride)) & (at[:, 1:] < len(ids))
        yield BlockBatch(ids[torch.where(at < len(ids), at, start)].long()), counts


class ChunkedStream(Stream):
    """A stream whose batches a thread prepares, `chunk` of them at a time."""

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk
        self.thread = ThreadPoolExecutor(1, type(self).__name__)
        self.requested: dict[tuple[int, int], Future[tuple[int, Any]]] = {}

    @abstractmethod
    def prepare(self, epoch: int, chunk: int) -> tuple[int, Any]:
        """The number of batches of the epoch, and what the chunk is made of, on the CPU; called in the thread."""

    @abstractmethod
    def finish(self, epoch: int, chunk: int, prepared: Any) -> Callable[[int], Any]:
        """The chunk on the device: the batches by their number in it."""

    def open(self, epoch: int) -> tuple[int, Callable[[int], Any]]:
        batches, _ = self._request(epoch, self.index // self.chunk).result()
        current: dict[int, Callable[[int], Any]] = {}

        def make(number: int) -> Any:
            chunk, within = divmod(number, self.chunk)
            if chunk not in current:
                current.clear()  # frees its memory before the next takes more
                current[chunk] = self.finish(epoch, chunk, self._request(epoch, chunk).result()[1])
                self.requested = {}
                self._request(*((epoch, chunk + 1) if (chunk + 1) * self.chunk < batches else (epoch + 1, 0)))
            return current[chunk](within)

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
        return batch.each(Tensor.pin_memory) if pin else batch, ahead.position

    with ThreadPoolExecutor(1, "batches") as thread:
        try:
            waiting = deque(thread.submit(make) for _ in range(PREFETCHED))
            while True:
                batch, position = waiting.popleft().result()  # or the error of the thread
                waiting.append(thread.submit(make))
                stream.seek(position)
                stream.per_epoch = ahead.per_epoch
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)
