"""Batches of labelled pictures, with what chance will do to each of them.

A picture is 784 bytes or a few thousand: a whole data set fits on the device, and a batch is a choice of rows there.
What chance decides for an epoch (`regard.data.augment.draw`) is drawn by a thread during the epoch before and copied
at once, so a step has nothing to wait for. Draws follow from (seed, epoch, number of the batch), the order of the rows
from (seed, epoch): a resumed run sees what it would have seen. The thread never touches a GPU: while a step is being
recorded as a graph, nobody else may.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.data.augment import AugmentConfig, Draws, draw
from regard.data.batch import Stream, Tensors
from regard.data.images import Images
from regard.data.rows import order_of


@dataclass(frozen=True)
class PictureBatch(Tensors):
    """Pictures with their classes, and what chance has decided to do with each."""

    pixels: Tensor  # [B, channels, side, side] of bytes
    labels: Tensor  # [B]
    shift: Tensor  # the fields of `Draws`
    mirrored: Tensor
    box: Tensor
    grey: Tensor
    partner: Tensor
    share: Tensor

    @property
    def tokens(self) -> Tensor:
        """How many pictures are to be learned."""
        return torch.full((), len(self.labels), device=self.labels.device)

    @property
    def draws(self) -> Draws:
        return Draws(self.shift, self.mirrored, self.box, self.grey, self.partner, self.share)


class PictureStream(Stream):
    """Batches of `rows` pictures, in another order and with other draws every epoch."""

    def __init__(
        self, pictures: Images, config: AugmentConfig, rows: int, side: int, seed: int, device: torch.device
    ) -> None:
        self.pixels, self.labels = pictures.pixels.to(device), pictures.labels.to(device)
        self.config, self.row_count, self.side, self.seed, self.device = config, rows, side, seed, device
        self.asked: dict[int, Future[tuple[Tensor, Draws]]] = {}
        self.thread = ThreadPoolExecutor(1, "draws")

    def open(self, epoch: int) -> tuple[int, Callable[[int], PictureBatch]]:
        order, drawn = self._ask(epoch).result()
        self.asked = {}
        self._ask(epoch + 1)
        draws, at, rows = drawn.to(self.device), order.to(self.device), self.row_count
        chosen = at if self.pixels.bytes.device == at.device else order  # where the pictures are

        def make(number: int) -> PictureBatch:
            part = draws.rows(slice(number * rows, (number + 1) * rows))
            pixels = self.pixels[chosen[number]].to(self.device, non_blocking=True)
            return PictureBatch(pixels, self.labels[at[number]], *vars(part).values())

        return len(order), make

    def _ask(self, epoch: int) -> Future[tuple[Tensor, Draws]]:
        """Order [batches, rows] and draws [batches · rows] of an epoch."""
        if epoch not in self.asked:
            self.asked[epoch] = self.thread.submit(self._draw, epoch)
        return self.asked[epoch]

    def _draw(self, epoch: int) -> tuple[Tensor, Draws]:
        order = order_of(len(self.labels), self.row_count, self.seed, epoch)
        every = [draw(self.config, self.row_count, self.side, self.seed, epoch, at) for at in range(len(order))]
        return order, Draws(*map(torch.cat, zip(*(vars(one).values() for one in every), strict=True)))
