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

from regard.data.features import open_features
from regard.data.pixels import open_pixels
from regard.errors import UserError
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
    return open_pixels(path, config.channels, config.image_size)[0].float() / 255


def read_features(given: Any) -> Tensor:
    """Vectors [regions, size] that another model made: numbers, or the name of a file."""
    return open_features(given) if isinstance(given, str | Path) else torch.as_tensor(given, dtype=torch.float32)
