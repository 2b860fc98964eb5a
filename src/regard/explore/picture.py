"""Pictures: pixels for a model, and how the places of its attention lie in them.

A picture of `image_size` pixels a side is cut into squares of `patch_size`: place n (after [CLS], where the
model has it) is the square in row n // across, column n % across (Dosovitskiy et al. 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import MissingExtra, UserError
from regard.models.config import ModelConfig


@dataclass(frozen=True)
class Grid:
    """Squares of a picture: `down` rows of `across`; `first` places before them belong to no square ([CLS])."""

    down: int
    across: int
    first: int

    @property
    def labels(self) -> tuple[str, ...]:
        squares = tuple(f"{row},{column}" for row in range(self.down) for column in range(self.across))
        return ("[CLS]",) * self.first + squares


def grid_of(config: ModelConfig) -> Grid:
    side = config.image_size // config.patch_size
    return Grid(side, side, config.source_length - side * side)


def read_picture(picture: Any, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """(pixels as the model reads them, pixels as they are shown), [channels, side, side] each.

    `picture` is a file, or numbers [channels, height, width] that the model reads as they are.
    """
    want = (config.channels, config.image_size, config.image_size)
    if isinstance(picture, str | Path):
        pixels = open_picture(Path(picture), config)
        return pixels, pixels
    pixels = torch.as_tensor(np.asarray(picture) if not isinstance(picture, Tensor) else picture, dtype=torch.float32)
    if tuple(pixels.shape) != want:
        raise UserError(f"the picture has shape {tuple(pixels.shape)}: give {want}, or the name of a file")
    low, high = float(pixels.min()), float(pixels.max())
    return pixels, ((pixels - low) / (high - low) if high > low else pixels.clamp(0, 1)).clamp(0, 1)


def open_picture(path: Path, config: ModelConfig) -> Tensor:
    """A file as [channels, side, side] between 0 and 1, resized where it has another size."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingExtra("figure", "pillow", f"{path}: reading a picture") from None
    kinds = {1: "L", 3: "RGB", 4: "RGBA"}
    if config.channels not in kinds:
        raise UserError(f"channels = {config.channels}: a picture file has 1, 3 or 4; give the numbers instead")
    side = config.image_size
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert(kinds[config.channels]).resize((side, side)), dtype=np.float32) / 255
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: cannot be read as a picture: {error}") from None
    return torch.from_numpy(pixels.reshape(side, side, config.channels)).permute(2, 0, 1).contiguous()


def read_features(given: Any) -> Tensor:
    """Vectors [regions, size] that another model made: numbers, or the name of an .npy file."""
    if not isinstance(given, str | Path):
        return torch.as_tensor(given, dtype=torch.float32)
    try:
        return torch.from_numpy(np.asarray(np.load(given, allow_pickle=False), dtype=np.float32))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{given}: cannot be read as features: {error}; give an .npy file of [regions, size]") from None
