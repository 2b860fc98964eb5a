"""Augmentation: other pictures of the same things, made on the training device.

    crop    the picture moves by up to n pixels; what comes in is black
    flip    left and right change places
    erase   a rectangle of 2 to 33 % of the area becomes one grey        Zhong et al. 2017 (arXiv 1708.04896)
    mixup   λ x_a + (1 - λ) x_b, its label to λ that of a                 Zhang et al. 2018 (arXiv 1710.09412)
            λ ~ Beta(α, α), the larger of λ and 1 - λ                     x_b: another picture of the batch

What is drawn at random follows from (seed, epoch, number of the batch) alone and travels with the batch as small
tensors; `augment` is a function of pictures and draws. So a resumed run sees exactly what it would have seen, dropout
has its random numbers to itself, and every batch has the same shapes, as a CUDA graph wants them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batch import Tensors
from regard.errors import UserError
from regard.settings import check_types

AREA = (0.02, 0.33)  # of a rectangle that is erased, as a share of the picture
SHAPE = 3.3  # its sides differ by at most this factor


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    crop: int = 0  # pixels by which a picture may move
    flip: float = 0.0  # how many of them are mirrored
    erase: float = 0.0  # how many lose a rectangle
    mixup: float = 0.0  # α; 0: none

    def __post_init__(self) -> None:
        check_types(self)
        if self.crop < 0:
            raise UserError(f"crop = {self.crop}: must be 0 or more pixels")
        for name in ("flip", "erase"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name} = {getattr(self, name)}: a probability, so it must be from 0 to 1")
        if not 0 <= self.mixup <= 100:
            raise UserError(f"mixup = {self.mixup}: must be from 0 (none) to 100; 0.2 is usual")


@dataclass(frozen=True)
class Draws(Tensors):
    """What chance has decided for each picture of a batch; [B] and [B, n]."""

    shift: Tensor  # [B, 2] pixels down and to the right
    mirrored: Tensor  # [B] bool
    box: Tensor  # [B, 4] top, bottom, left, right of what is erased; nothing where they are 0
    grey: Tensor  # [B] what it becomes
    partner: Tensor  # [B] the picture that is mixed in
    share: Tensor  # [B] λ: how much of the picture itself stays


def draw(config: AugmentConfig, count: int, side: int, *seed: int) -> Draws:
    """The draws of one batch of `count` pictures."""
    chance = np.random.default_rng(seed)
    shift = chance.integers(-config.crop, config.crop + 1, (count, 2))
    mirrored = chance.random(count) < config.flip
    area = chance.uniform(*AREA, count) * side * side
    ratio = np.exp(chance.uniform(-math.log(SHAPE), math.log(SHAPE), count))
    sides = np.clip(np.rint(np.stack((np.sqrt(area * ratio), np.sqrt(area / ratio)))), 1, side)  # [2, B]
    corner = np.floor(chance.random((2, count)) * (side - sides + 1))
    box = np.stack((corner[0], corner[0] + sides[0], corner[1], corner[1] + sides[1]), axis=1)
    box *= (chance.random(count) < config.erase)[:, None]
    grey, partner = chance.random(count), chance.permutation(count)
    share = chance.beta(config.mixup, config.mixup, count) if config.mixup else np.ones(count)
    share = np.maximum(share, 1 - share)
    return Draws(
        torch.from_numpy(shift),
        torch.from_numpy(mirrored),
        torch.from_numpy(box.astype(np.int64)),
        torch.from_numpy(grey.astype(np.float32)),
        torch.from_numpy(partner),
        torch.from_numpy(share.astype(np.float32)),
    )


def augment(pixels: Tensor, draws: Draws, crop: int) -> Tensor:
    """[B, C, side, side] between 0 and 1, changed as `draws` say; shifts go up to `crop`."""
    count, channels, side = pixels.shape[:3]
    place = torch.arange(side, device=pixels.device)
    # where each row and column comes from, [B, side]: a picture is mirrored, then moved
    down, across = place - draws.shift[:, :1], place - draws.shift[:, 1:]
    across = torch.where(draws.mirrored[:, None], side - 1 - across, across)
    room = F.pad(pixels, (crop, crop, crop, crop))
    row = torch.arange(count, device=pixels.device).view(-1, 1, 1, 1)
    channel = torch.arange(channels, device=pixels.device).view(1, -1, 1, 1)
    moved = room[row, channel, down[:, None, :, None] + crop, across[:, None, None, :] + crop]
    top, bottom, left, right = draws.box.T[..., None]
    inside = ((place >= top) & (place < bottom))[:, :, None] & ((place >= left) & (place < right))[:, None, :]
    erased = torch.where(inside[:, None], draws.grey.view(-1, 1, 1, 1).to(moved.dtype), moved)
    share = draws.share.view(-1, 1, 1, 1).to(moved.dtype)
    return share * erased + (1 - share) * erased[draws.partner]
