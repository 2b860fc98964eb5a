"""Position encodings: attention is permutation-invariant, so the order of the tokens has to be encoded.

Position information enters in one of three ways, always from explicit positions:

    embed(pos)           [B|1, N, dim]     added to the embeddings     sinusoidal, learned
    rotation(pos)        cos, sin          rotates queries and keys    rope
    bias(q_pos, k_pos)   [B|1, H, Nq, Nk]  added to the scaled scores  relative, t5, alibi

    sinusoidal  PE(pos, 2i) = sin(pos / 10000^(2i/dim)), PE(pos, 2i+1) = cos(…)    Vaswani et al. 2017
    learned     one embedding per position                                          Gehring et al. 2017
    relative    scores += q · a[clip(j - i)] / sqrt(d)                              Shaw et al. 2018
    t5          scores += b[bucket(j - i), head]                                    Raffel et al. 2020
    rope        q, k rotated by the angle pos · base^(-2i/d) in each pair           Su et al. 2021
    alibi       scores += -slope[head] · |i - j|                                    Press et al. 2022

With `position_axes` = 2, image patches use the row in the first half of the pairs and the column in the second
(Dosovitskiy et al. 2021, appendix D.4; rope: Heo et al. 2024). [CLS] has row 0 and column 0.

A bias is written once, as a function of the indices (row, head, query, key). Broadcast index tensors give the dense
bias; FlexAttention calls it as its `score_mod`. Shaw's second embedding, added to the values, is left out: Table 4 of
the paper reports the same BLEU without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.config import StackConfig
from regard.nn.mask import Positions
from regard.nn.patterns import rows_and_columns

At = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, query, key) -> bias, elementwise
Rotation = tuple[Tensor, Tensor]  # cos, and sin with the sign of its term in `rotate`, [B|1, 1, N, head_dim]


class Bias:
    """A score bias for these positions; `content`: it also depends on the query vectors.

    `relative`: it depends on the difference of the positions (and the head) alone, so that it may be computed once for
    many blocks of tokens.
    """

    def __init__(
        self,
        at: Callable[[Tensor], At],
        heads: int,
        q_pos: Tensor,
        k_pos: Tensor,
        content: bool,
        relative: bool = False,
    ) -> None:
        self.at, self.heads, self.q_pos, self.k_pos, self.content = at, heads, q_pos, k_pos, content
        self.relative = relative
        self._dense: Tensor | None = None

    def dense(self, q: Tensor) -> Tensor:
        """[B|1, H, Nq, Nk]; computed once for all layers unless it depends on the queries."""
        if self._dense is not None and not self.content:
            return self._dense.to(q.dtype)
        rows = q.shape[0] if self.content else max(self.q_pos.shape[0], self.k_pos.shape[0])
        sizes = (rows, self.heads, self.q_pos.shape[1], self.k_pos.shape[1])
        index = (torch.arange(size, device=q.device) for size in sizes)
        b, h, i, j = (x.view([-1 if axis == own else 1 for axis in range(4)]) for own, x in enumerate(index))
        self._dense = self.at(q)(b, h, i, j)
        return self._dense.to(q.dtype)

    def score_mod(self, q: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
        at = self.at(q)
        return lambda score, b, h, i, j: score + at(b, h, i, j)


class Position(nn.Module):
    """No position encoding, and the interface of all others; `causal`: of a stack that is."""

    def __init__(self, config: StackConfig, causal: bool = False) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        # of rows and columns that are encoded: only the encoder of an image model has two axes
        self.grid = config.grid if config.position_axes == 2 and not causal else None

    def embed(self, pos: Tensor) -> Tensor | None:
        return None

    def rotation(self, pos: Tensor) -> Rotation | None:
        return None

    def bias(self, q_pos: Tensor, k_pos: Tensor) -> Bias | None:
        return None


def join_pairs(first: Tensor, second: Tensor, pairs: str) -> Tensor:
    """[…, n] twice -> […, 2n]: interleaved (f0 s0 f1 s1 …) or halves (f0 f1 … s0 s1 …)."""
    return torch.stack((first, second), -1).flatten(-2) if pairs == "interleaved" else torch.cat((first, second), -1)


def angles(pos: Tensor, size: int, base: float, grid: tuple[int, int] | None) -> Tensor:
    """[B|1, N] -> [B|1, N, size / 2], the angle pos · base^(-2i/size) of each pair i.

    With a grid, half of the pairs use the row of a patch and half its column. Float64 (where the device has it) keeps
    large positions exact.
    """
    axes = [pos]
    if grid is not None:
        first = grid[1]  # [CLS] is at row 0, column 0; after it rows and columns count from 1
        axes = [torch.where(pos < first, 0, axis + first) for axis in rows_and_columns(pos, grid)]
    size //= len(axes)
    dtype = torch.float32 if pos.device.type == "mps" else torch.float64
    frequencies = base ** (-torch.arange(0, size, 2, device=pos.device, dtype=dtype) / size)
    parts = [axis[..., None] * frequencies for axis in axes]
    return parts[0] if grid is None else torch.cat(parts, dim=-1)


class Sinusoidal(Position):
    def embed(self, pos: Tensor) -> Tensor:
        angle = angles(pos, self.config.dim, 10000.0, self.grid)
        return join_pairs(angle.sin(), angle.cos(), self.config.pairs)


class Learned(Position):
    def __init__(self, config: StackConfig, causal: bool = False) -> None:
        super().__init__(config, causal)
        self.embedding = nn.Embedding(config.max_length, config.dim)
        self.checks_length = True  # False while no tensor may be read, as in the recording of a CUDA graph

    def embed(self, pos: Tensor) -> Tensor:
        last = self.embedding.num_embeddings - 1  # only padding may be beyond it, see `check_length`
        return self.embedding(pos.clamp_max(last))  # type: ignore[no-any-return]

    def check_length(self, positions: Positions, cached: int = 0) -> None:
        """Raise an error for positions that have no embedding, after `cached` earlier tokens."""
        longest, length = self.embedding.num_embeddings, positions.length + cached
        if length <= longest or not self.checks_length:
            return
        if positions.start is None and positions.length:  # padding and packed texts: rows are longer than their texts
            pos = positions.pos if positions.is_real is None else torch.where(positions.is_real, positions.pos, -1)
            length = int(pos.max()) + 1
        if length > longest:
            raise UserError(
                f"sequence of {length} tokens is longer than max_length = {longest} of the learned positions: "
                "shorten it, raise max_length, or use position = 'rope' or 'sinusoidal', which have no limit"
            )


class Rotary(Position):
    def rotation(self, pos: Tensor) -> Rotation:
        angle, pairs = angles(pos, self.config.key_dim, self.config.rope_base, self.grid)[:, None], self.config.pairs
        return join_pairs(angle.cos(), angle.cos(), pairs), join_pairs(-angle.sin(), angle.sin(), pairs)


def rotate(x: Tensor, rotation: Rotation, pairs: str) -> Tensor:
    """Rotate each pair (a, b) of x [B, H, N, D] to (a cos - b sin, b cos + a sin)."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    count = x.shape[-1] // 2
    sizes, axis = ((count, 2), -1) if pairs == "interleaved" else ((2, count), -2)
    swapped = x.view(*x.shape[:-1], *sizes).flip(axis).flatten(-2)  # (b, a); the sign of its term is in `sin`
    return torch.addcmul(x * cos, swapped, sin)


class Relative(Position):
    """Shaw et al. 2018; one embedding shared by heads and layers."""

    def __init__(self, config: StackConfig, causal: bool = False) -> None:
        super().__init__(config, causal)
        self.embedding = nn.Embedding(2 * config.position_distance + 1, config.key_dim)

    def bias(self, q_pos: Tensor, k_pos: Tensor) -> Bias:
        farthest = self.config.position_distance

        def at(q: Tensor) -> At:
            content = q @ self.embedding.weight.T * self.config.scale  # [B, H, Nq, 2 farthest + 1]

            def value(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                distance = _at(k_pos, b, j) - _at(q_pos, b, i)
                return content[b, h, i, distance.clamp(-farthest, farthest) + farthest]

            return value

        return Bias(at, self.config.heads, q_pos, k_pos, content=True)


class T5(Position):
    def __init__(self, config: StackConfig, causal: bool = False) -> None:
        super().__init__(config, causal)
        self.embedding = nn.Embedding(config.position_buckets, config.heads)

    def bucket(self, distance: Tensor) -> Tensor:
        """Small distances have a bucket each, large ones logarithmic buckets; bidirectional stacks split by sign."""
        buckets = self.config.position_buckets
        offset = torch.zeros_like(distance)
        if self.causal:
            distance = (-distance).clamp_min(0)
        else:
            buckets //= 2
            offset, distance = (distance > 0).long() * buckets, distance.abs()
        exact = buckets // 2
        ratio = (distance.clamp_min(1).float() / exact).log() / math.log(self.config.position_distance / exact)
        logarithmic = (exact + (ratio * (buckets - exact)).long()).clamp_max(buckets - 1)
        return offset + torch.where(distance < exact, distance, logarithmic)

    def bias(self, q_pos: Tensor, k_pos: Tensor) -> Bias:
        def value(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return self.embedding.weight[self.bucket(_at(k_pos, b, j) - _at(q_pos, b, i)), h]

        return Bias(lambda q: value, self.config.heads, q_pos, k_pos, content=False, relative=True)


class ALiBi(Position):
    def bias(self, q_pos: Tensor, k_pos: Tensor) -> Bias:
        # not a buffer: a model on the meta device would lose it, and one in half precision would round it
        slopes = alibi_slopes(self.config.heads, q_pos.device).float()

        def value(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return -slopes[h] * (_at(k_pos, b, j) - _at(q_pos, b, i)).abs()

        return Bias(lambda q: value, self.config.heads, q_pos, k_pos, content=False, relative=True)


def alibi_slopes(heads: int, device: torch.device | None = None) -> Tensor:
    """2^(-8/n), 2^(-16/n), … for n heads; other counts take every second slope of the next power of two.

    Computed on the device: the recording of a CUDA graph allows no copy from the CPU.
    """
    power = 2 ** math.floor(math.log2(heads))
    dtype = torch.float32 if device is not None and device.type == "mps" else torch.float64
    head = torch.arange(heads, device=device, dtype=dtype)
    return torch.exp2(torch.where(head < power, -8 * (head + 1), -4 * (2 * (head - power) + 1)) / power)


def _at(pos: Tensor, b: Tensor, i: Tensor) -> Tensor:
    return pos[0, i] if pos.shape[0] == 1 else pos[b, i]


KINDS: dict[str, type[Position]] = {
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "relative": Relative,
    "t5": T5,
    "rope": Rotary,
    "alibi": ALiBi,
    "none": Position,
}
