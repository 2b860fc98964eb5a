"""Masks of sparse attention: beside near tokens (`window`), a few that connect all of them.

prefix(n)           k.pos < n               causal | prefix(n) is a prefix LM (Raffel et al. 2020)
global_tokens(n)    q.pos < n or k.pos < n  the first n attend to all, and all to them (Longformer, Beltagy et al. 2020)
random_blocks(n)    n random blocks of earlier tokens, and of later ones (BigBird, Zaheer et al. 2020)

print((window(2) | global_tokens(1)).draw(6))

■ ■ ■ ■ ■ ■
■ ■ ■ · · ·
■ ■ ■ ■ · ·
■ · ■ ■ ■ ·
■ · · ■ ■ ■
■ · · · ■ ■
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UserError
from regard.nn import blocks
from regard.nn.blocks import Bounds, Span
from regard.nn.mask import Mask
from regard.nn.tokens import Token

MOST = 4096  # random blocks of a text whose pairs are looked at: 64 MiB


@cache
def prefix(count: int) -> Mask:
    """The first `count` tokens: `causal | prefix(n)` attends to the whole prefix, and to earlier tokens after it."""
    _check("prefix", count, 0)
    return Mask(f"prefix({count})", lambda q, k: k.pos < count, bounds=blocks.first_keys(count))


@cache
def global_tokens(count: int) -> Mask:
    """The first `count` tokens attend to all tokens, and all tokens to them."""
    _check("global_tokens", count, 0)

    def either(q: Token, k: Token) -> Tensor:
        return (q.pos < count) | (k.pos < count)

    return Mask(f"global_tokens({count})", either, bounds=blocks.first_tokens(count), reach=2 * count)


@cache
def random_blocks(count: int, size: int, seed: int = 0) -> Mask:
    """Blocks of `size` tokens attend to `count` random earlier blocks, and to those later ones that chose them.

    Which ones does not depend on the length, so that padding and a KV cache change nothing: a hash of the number of
    the block and the seed chooses them.
    """
    _check("random_blocks", count, 0)
    _check("block_size", size, 1)

    def chosen(block: Tensor, earlier: Tensor) -> Tensor:
        """Whether `block` chose `earlier`, elementwise."""
        found = torch.zeros_like(block + earlier, dtype=torch.bool)
        for draw in range(count):
            number = _hash(block * count + draw, seed).int()  # a GPU divides 32 bits several times as fast as 64
            found = found | (number % block.clamp_min(1).int() == earlier)
        return found & (earlier < block)

    def both(one: Tensor, other: Tensor) -> Tensor:
        return chosen(one, other) | chosen(other, one)

    def bounds(q: Span, k: Span) -> Bounds:
        number = -(-max(side.pos.shape[1] * side.pos.shape[2] for side in (q, k)) // size)  # of our blocks in a text
        if number > MOST:
            return blocks.unknown(q, k)
        (q_low, q_high), (k_low, k_high) = q.range(q.pos // size), k.range(k.pos // size)
        block = torch.arange(number, device=q.pos.device)
        sums = both(block[:, None], block).cumsum(0, dtype=torch.int32).cumsum(1, dtype=torch.int32)
        sums = F.pad(sums, (1, 0, 1, 0))  # [i, j]: how many pairs of the first i and j blocks are visible
        inside = (q_high < number) & (k_high < number)
        first, end, k_first, k_end = (one.clamp_max(number) for one in (q_low, q_high + 1, k_low, k_high + 1))
        count = sums[end, k_end] - sums[first, k_end] - sums[end, k_first] + sums[first, k_first]
        return (count > 0) | ~inside, (count == (end - first) * (k_end - k_first)) & inside

    return Mask(
        f"random_blocks({count} of {size}, seed {seed})",
        lambda q, k: both(q.pos // size, k.pos // size),
        bounds=bounds,
        reach=2 * count * size,
    )


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name} = {value}: must be {least} or more")


def _hash(number: Tensor, seed: int) -> Tensor:
    """A pseudo-random integer below 2³¹ for each number and seed below 2³¹; products stay below 2⁶³."""
    x = (number + seed) & 0x7FFFFFFF
    for factor in (0x45D9F3B, 0x119DE1F3):
        x = ((x ^ (x >> 16)) * factor) & 0x7FFFFFFF
    return x ^ (x >> 15)


def rows_and_columns(pos: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Row and column of each patch; grid: (patches per row, positions before them, such as [CLS])."""
    columns, first = grid
    patch = (pos - first).clamp_min(0)
    return patch // columns, patch % columns


@cache
def tiles(size: int, grid: tuple[int, int], shift: int = 0) -> Mask:
    """Only patches of the same window of `size` x `size`; the windows begin at row and column `shift`.

    Swin rolls the image by `shift`, partitions it, and masks what was rolled over the edge: the same windows, cut off
    at the edges. Positions before the patches, such as [CLS], are global: they attend to all patches, and all patches
    attend to them (as in Longformer).
    """

    def same_tile(q: Token, k: Token) -> Tensor:
        (q_row, q_column), (k_row, k_column) = rows_and_columns(q.pos, grid), rows_and_columns(k.pos, grid)
        offset = size - shift  # added rather than subtracted, so that no negative number is divided
        same_row = (q_row + offset) // size == (k_row + offset) // size
        same_column = (q_column + offset) // size == (k_column + offset) // size
        return (same_row & same_column) | (q.pos < grid[1]) | (k.pos < grid[1])

    def bounds(q: Span, k: Span) -> Bounds:
        some, every = blocks.first_tokens(grid[1])(q, k)
        parts = []
        for q_line, k_line in zip(rows_and_columns(q.pos, grid), rows_and_columns(k.pos, grid), strict=True):
            q_tile, k_tile = ((line + size - shift) // size for line in (q_line, k_line))
            parts.append(blocks.overlap(q.range(q_tile), k.range(k_tile)))
        (row_some, row_every), (column_some, column_every) = parts
        return some | (row_some & column_some), every | (row_every & column_every)

    return Mask(f"tiles({size}, shift {shift})", same_tile, bounds=bounds)
