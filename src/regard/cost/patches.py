"""Image patches: the matmuls that embed them, and which patches attend to each other.

    linear   side² patches, each a matmul [channels · patch²] x [dim]
    conv     3 x 3 convolutions with stride 2 until a patch is one position: [9 · channels in] x [channels out] at each
             output position, each followed by a norm and a relu; then [dim] x [dim]

A shifted window cuts each axis into pieces of s_i positions, and a patch attends to those of its window, so a layer
has (Σ s_i²)² pairs instead of side⁴ (Liu et al. 2021).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from regard.models.config import ModelConfig


class Matmul(NamedTuple):
    """[inputs] x [outputs] at each of `positions`."""

    inputs: int
    outputs: int
    positions: int


def stem_matmuls(config: ModelConfig) -> list[Matmul]:
    """The convolutions of the stem."""
    side, matmuls = config.image_size, []
    for before, after in itertools.pairwise((config.channels, *config.stem_widths)):
        side //= 2
        matmuls.append(Matmul(9 * before, after, side * side))
    return matmuls


def patch_matmuls(config: ModelConfig) -> list[Matmul]:
    """All matmuls that embed an image, in order."""
    inputs = config.dim if config.stem_widths else config.channels * config.patch_size**2
    return [*stem_matmuls(config), Matmul(inputs, config.dim, (config.image_size // config.patch_size) ** 2)]


def tile_pairs(config: ModelConfig, layers: int) -> int:
    """Query-key pairs of `layers` layers with a shifted window, [CLS] included."""
    assert config.shifted_window is not None
    size, side, first = config.shifted_window, config.image_size // config.patch_size, int(config.has_cls)
    total = 0
    for shift, count in ((0, -(-layers // 2)), (size // 2, layers // 2)):
        edges = sorted({0, *range(shift, side, size), side})
        pieces = sum((end - begin) ** 2 for begin, end in itertools.pairwise(edges))
        total += count * (pieces**2 + 2 * first * side**2 + first)
    return total


def stem_bytes(config: ModelConfig, batch: int, size: int) -> int:
    """What is stored of a stem for the backward pass, besides the pixels."""
    wide, kept = max(4, size), 0
    for matmul in stem_matmuls(config):
        elements = batch * matmul.outputs * matmul.positions
        # the input of the norm; its mean and standard deviation; the output of relu, which the next matmul reads
        kept += elements * size + 2 * batch * wide + elements * size
        kept += elements * (wide + size) if size < wide else 0  # autocast: the norm in 32 bits, then 16 again
    return kept
