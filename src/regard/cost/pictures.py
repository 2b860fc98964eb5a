"""Pictures: what it takes to make vectors of pixels, and which patches see each other.

    linear   side² patches, each a product [channels · patch²] x [dim]
    conv     3 x 3 convolutions with stride 2 until a patch is one place: [9 · before] x [after] at each of their
             positions, a norm and a relu behind each; then [dim] x [dim]

A shifted window cuts each axis into pieces of s_i positions; a patch sees those of its square, so a layer has
(Σ s_i²)² visible pairs instead of side⁴ (Liu et al. 2021).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from regard.models.config import ModelConfig


class Map(NamedTuple):
    """One product: `positions` times [inputs] x [outputs]."""

    inputs: int
    outputs: int
    positions: int


def stem_maps(config: ModelConfig) -> list[Map]:
    """The convolutions before the patches are mapped."""
    side, maps = config.image_size, []
    for before, after in itertools.pairwise((config.channels, *config.stem_widths)):
        side //= 2
        maps.append(Map(9 * before, after, side * side))
    return maps


def patch_maps(config: ModelConfig) -> list[Map]:
    """All products over a picture, in their order."""
    inputs = config.dim if config.stem_widths else config.channels * config.patch_size**2
    return [*stem_maps(config), Map(inputs, config.dim, (config.image_size // config.patch_size) ** 2)]


def tile_pairs(config: ModelConfig, layers: int) -> int:
    """Pairs (query, key) that `layers` layers with a shifted window see, [CLS] included."""
    assert config.shifted_window is not None
    size, side, first = config.shifted_window, config.image_size // config.patch_size, int(config.has_cls)
    total = 0
    for shift, count in ((0, -(-layers // 2)), (size // 2, layers // 2)):
        edges = sorted({0, *range(shift, side, size), side})
        pieces = sum((end - begin) ** 2 for begin, end in itertools.pairwise(edges))
        total += count * (pieces**2 + 2 * first * side**2 + first)
    return total


def stem_bytes(config: ModelConfig, batch: int, size: int) -> int:
    """What the backward pass keeps of a stem, beside the pixels."""
    wide, kept = max(4, size), 0
    for one in stem_maps(config):
        numbers = batch * one.outputs * one.positions
        # what enters the norm; its mean and deviation; relu's output, which is what enters the next product
        kept += numbers * size + 2 * batch * wide + numbers * size
        kept += numbers * (wide + size) if size < wide else 0  # autocast: the norm in 32 bits, then 16 again
    return kept
