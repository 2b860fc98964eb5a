"""Augmentation: variants of the training images, made on the training device.

    crop    the image is shifted by up to n pixels and padded with black
    flip    left and right are exchanged
    erase   a rectangle of 2 to 33 % of the area becomes one grey        Zhong et al. 2017 (arXiv 1708.04896)
    mixup   λ x_a + (1 - λ) x_b, its label to λ that of a                 Zhang et al. 2018 (arXiv 1710.09412)
            λ ~ Beta(α, α), the larger of λ and 1 - λ                     x_b: another image of the batch

What is sampled follows from (seed, epoch, number of the batch) alone and is part of the batch as small tensors;
`augment` is a deterministic function of both. So a resumed run is exact, dropout has its random numbers to itself, and
every batch has the same shapes, as a CUDA graph needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batch import Tensors
from regard.data.images import Images
from regard.data.streams import ChunkedStream, batch_rows, epoch_generator
from regard.errors import UserError
from regard.settings import check_fields

AREA = (0.02, 0.33)  # of a rectangle that is erased, as a fraction of the image
SHAPE = 3.3  # its sides differ by at most this factor


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Random changes to training images."""

    crop: int = 0  # pixels by which an image may be shifted
    flip: float = 0.0  # probability that an image is mirrored
    erase: float = 0.0  # probability that a rectangle is erased
    mixup: float = 0.0  # α of the Beta(α, α) distribution from which mixing weights are sampled; 0: no mixing

    def __post_init__(self) -> None:
        check_fields(self, crop=0)
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} = {getattr(self, name)}: a probability, so it must be from 0 to 1")
        if not 0 <= self.mixup <= 100:
            raise UserError(f"mixup = {self.mixup}: must be from 0 (none) to 100; 0.2 is usual")


@dataclass(frozen=True)
class Augmentation(Tensors):
    """How each image of a batch is augmented; [B] and [B, n]."""

    shift: Tensor  # [B, 2] pixels down and to the right
    mirrored: Tensor  # [B] bool
    box: Tensor  # [B, 4] top, bottom, left, right of what is erased; nothing where they are 0
    grey: Tensor  # [B] what it becomes
    partner: Tensor  # [B] the image that is mixed in
    weight: Tensor  # [B] λ: weight of the image itself


def sample(config: AugmentConfig, count: int, side: int, *seed: int) -> Augmentation:
    """The augmentation of one batch of `count` images."""
    random = np.random.default_rng(seed)
    shift = random.integers(-config.crop, config.crop + 1, (count, 2))
    mirrored = random.random(count) < config.flip
    area = random.uniform(*AREA, count) * side * side
    ratio = np.exp(random.uniform(-math.log(SHAPE), math.log(SHAPE), count))
    sides = np.clip(np.rint(np.stack((np.sqrt(area * ratio), np.sqrt(area / ratio)))), 1, side)  # [2, B]
    corner = np.floor(random.random((2, count)) * (side - sides + 1))
    box = np.stack((corner[0], corner[0] + sides[0], corner[1], corner[1] + sides[1]), axis=1)
    box *= (random.random(count) < config.erase)[:, None]
    grey, partner = random.random(count), random.permutation(count)
    weight = random.beta(config.mixup, config.mixup, count) if config.mixup else np.ones(count)
    weight = np.maximum(weight, 1 - weight)
    sampled = (shift, mirrored, box.astype(np.int64), grey.astype(np.float32), partner, weight.astype(np.float32))
    return Augmentation(*map(torch.from_numpy, sampled))


def augment(pixels: Tensor, by: Augmentation, crop: int) -> Tensor:
    """[B, C, side, side] between 0 and 1, augmented; shifts are at most `crop`."""
    count, channels, side = pixels.shape[:3]
    position = torch.arange(side, device=pixels.device)
    # where each row and column comes from, [B, side]: an image is mirrored, then shifted
    down, across = position - by.shift[:, :1], position - by.shift[:, 1:]
    across = torch.where(by.mirrored[:, None], side - 1 - across, across)
    padded = F.pad(pixels, (crop, crop, crop, crop))
    row = torch.arange(count, device=pixels.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=pixels.device).view(1, -1, 1, 1)
    moved = padded[row, channel, down[:, None, :, None] + crop, across[:, None, None, :] + crop]
    top, bottom, left, right = by.box.T[..., None]
    rows, columns = (position >= top) & (position < bottom), (position >= left) & (position < right)
    inside = rows[:, None, :, None] & columns[:, None, None, :]
    erased = torch.where(inside, by.grey.view(-1, 1, 1, 1).to(moved.dtype), moved)
    weight = by.weight.view(-1, 1, 1, 1).to(moved.dtype)
    return weight * erased + (1 - weight) * erased[by.partner]


@dataclass(frozen=True)
class ImageBatch(Augmentation):
    """Images with their classes, and how each is augmented."""

    pixels: Tensor  # [B, channels, side, side] of bytes
    labels: Tensor  # [B]

    @property
    def tokens(self) -> Tensor:
        """The number of images."""
        return torch.full((), len(self.labels), device=self.labels.device)


class ImageStream(ChunkedStream):
    """Batches of `rows` labelled images, shuffled and augmented differently in every epoch.

    Images are small, so the whole data set is on the device if it fits, and a batch is a choice of rows there. The
    augmentation of an epoch is sampled in the epoch before and copied at once.
    """

    def __init__(
        self, images: Images, config: AugmentConfig, rows: int, side: int, seed: int, device: torch.device
    ) -> None:
        super().__init__(chunk=1 << 62)  # a whole epoch
        self.images = images.to(device) if device.type != "cpu" else images
        self.config, self.row_count, self.side, self.seed, self.device = config, rows, side, seed, device

    @property
    def size(self) -> dict[str, int]:
        return {"examples": len(self.images)}

    def prepare(self, epoch: int, chunk: int) -> tuple[int, tuple[Tensor, Augmentation]]:
        order = batch_rows(len(self.images), self.row_count, epoch_generator(self.seed, epoch))
        every = [sample(self.config, self.row_count, self.side, self.seed, epoch, at) for at in range(len(order))]
        joined = map(torch.cat, zip(*(vars(one).values() for one in every), strict=True))
        return len(order), (order, Augmentation(*joined))

    def finish(self, epoch: int, chunk: int, prepared: tuple[Tensor, Augmentation]) -> Callable[[int], ImageBatch]:
        order, every = prepared[0].to(self.images.labels.device), prepared[1].to(self.device)

        def batch(number: int) -> ImageBatch:
            at, part = order[number], every.rows(slice(number * self.row_count, (number + 1) * self.row_count))
            return ImageBatch(**vars(part), pixels=self.images[at], labels=self.images.labels[at]).to(self.device)

        return batch
