"""Blocks: one long sequence of tokens as batches of one shape, for training and for evaluation.

    Blocks    every epoch the text is split at another offset into rows of `length` tokens, which come in random order:
              each token is read once per epoch, at another position of a row each time. The order of epoch e follows
              from (seed, e), so a resumed run needs only the epoch and how far it was
    windows   every token of a text exactly once, with as many tokens before it as fit into the context

A row of L + 1 tokens teaches L of them: `read` is all but the last, `labels` all but the first.

With `stride` < `context` the windows overlap, and only the last `stride` tokens of each (all of the first) count:

    context 4, stride 2       1 2 3 4                   a token has at least context - stride before it
                                  3 4 5 6               (Press et al. 2021, arXiv 2012.15832)
                                      5 6 7 8
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.data.batch import Tensors
from regard.data.streams import Stream, epoch_generator
from regard.errors import UserError

RESIDENT = {"cpu": 1 << 22, "cuda": 1 << 28}  # tokens (4 bytes each) kept as a whole: a step then copies nothing


@dataclass(frozen=True)
class BlockBatch(Tensors):
    """Rows of a text."""

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


class Blocks(Stream):
    """Batches of `rows` rows of `length` tokens, without end."""

    def __init__(self, ids: Tensor, rows: int, length: int, seed: int, device: torch.device | None = None) -> None:
        if len(ids) < length + 1:
            raise UserError(
                f"the training text has {len(ids):,} tokens, less than one row of train.pack = {length} and the token "
                "after it: give more text, or a smaller pack"
            )
        self.ids, self.rows, self.length, self.seed = ids, rows, length, seed
        self.device = device or torch.device("cpu")
        resident = len(ids) <= RESIDENT.get(self.device.type, RESIDENT["cpu"])
        self.flat = ids.int().to(self.device) if resident else None
        self.columns = torch.arange(length + 1, device=self.device)

    def starts(self, epoch: int) -> Tensor:
        """Where the rows of an epoch begin, in the order in which they are read; as many as make whole batches. [n]"""
        generator = epoch_generator(self.seed, epoch)
        room = len(self.ids) - self.length  # a row may begin at 0 … room - 1
        offset = int(torch.randint(min(self.length, room), (), generator=generator))
        count = (room - 1 - offset) // self.length + 1
        order = torch.randperm(count, generator=generator)
        if count < self.rows:  # a text shorter than a batch is read several times in it
            order = order.repeat(-(-self.rows // count))
        return offset + order[: len(order) // self.rows * self.rows] * self.length

    def open(self, epoch: int) -> tuple[int, Callable[[int], BlockBatch]]:
        starts = self.starts(epoch).view(-1, self.rows)
        starts = starts if self.flat is None else starts.to(self.device)
        return len(starts), lambda number: self.batch(starts[number])

    def batch(self, starts: Tensor) -> BlockBatch:
        if self.flat is None:
            return BlockBatch(torch.stack([self.ids[at : at + self.length + 1] for at in starts.tolist()]).long())
        return BlockBatch(self.flat[starts[:, None] + self.columns].long())


def windows(ids: Tensor, context: int, stride: int, rows: int) -> Iterator[tuple[BlockBatch, Tensor]]:
    """Batches over the whole text, and which of their labels count [R, context].

    The last window is padded with its first token, which does not count.
    """
    if not 1 <= stride <= context:
        raise UserError(f"stride = {stride}: must be from 1 to the context of {context} tokens")
    wanted = len(ids) - 1  # every token but the first
    flat = ids.numpy()
    starts = [0, *range(stride, max(wanted - context + stride, 0), stride)]
    for at in range(0, len(starts), rows):
        windows, counts = [], []
        for start in starts[at : at + rows]:
            row = flat[start : start + context + 1]
            count = np.zeros(context, bool)
            count[0 if start == 0 else context - stride : len(row) - 1] = True
            windows.append(np.concatenate((row, np.full(context + 1 - len(row), row[0]))))
            counts.append(count)
        batch = BlockBatch(torch.from_numpy(np.stack(windows).astype(np.int64)))
        yield batch, torch.from_numpy(np.stack(counts))
