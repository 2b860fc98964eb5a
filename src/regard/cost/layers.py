"""Why self-attention: one layer of each kind, compared as in Table 1 of the paper (Vaswani et al. 2017, section 4).

A layer maps n vectors of width d to n vectors of width d. Three questions: how many operations does it take, how many
of them have to wait for each other, and through how many layers or steps does a signal pass between two positions that
are far apart? Long paths make long dependencies hard to learn.

    layer                  complexity   sequential   maximum path     FLOPs of our layer, forward
    self-attention         n²·d         1            1                8·n·d² + 4·n²·d
    restricted attention   r·n·d        1            n/r              8·n·d² + 4·n·(2·r - 1)·d
    LSTM                   n·d²         n            n                16·n·d²
    GRU                    n·d²         n            n                12·n·d²
    convolution            k·n·d²       1            n/k              2·k·n·d²
    dilated convolution    k·n·d²       1            log_k(n)         2·k·n·d²

The paper's columns are orders of growth. They leave out the projections of attention, 8·n·d² FLOPs, which are more
than half of the layer until n = 2·d, and constants: an LSTM has eight matrices [d, d], a GRU six, a convolution k.

Restricted attention sees a neighbourhood of r positions, centred (r is odd). It is computed in blocks of r queries,
each with the 2·r - 1 keys that one of them sees, so about half of the scores are masked.

Path lengths are exact, from the first input to the last output. A layer of restricted attention reaches (r - 1)/2
positions back. Convolutions are causal: a layer reaches k - 1 positions back, and L dilated ones, with dilation k^l in
layer l, together k^L - 1.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from regard.errors import UserError

ATTENTION, RESTRICTED, LSTM, GRU = "self-attention", "restricted attention", "LSTM", "GRU"
CONVOLUTION, DILATED = "convolution", "dilated convolution"
FARTHEST = 2**40  # a crossing beyond this length is none


class Growth(NamedTuple):
    """A row of Table 1: complexity per layer, sequential operations, maximum path length."""

    complexity: str
    sequential: str
    path: str


TABLE = {
    ATTENTION: Growth("n²·d", "1", "1"),
    RESTRICTED: Growth("r·n·d", "1", "n/r"),
    LSTM: Growth("n·d²", "n", "n"),
    GRU: Growth("n·d²", "n", "n"),
    CONVOLUTION: Growth("k·n·d²", "1", "n/k"),
    DILATED: Growth("k·n·d²", "1", "log_k(n)"),
}


@dataclass(frozen=True)
class LayerSizes:
    """The sizes that all layers of a comparison have in common."""

    dim: int = 512  # d
    heads: int = 8
    kernel: int = 3  # k
    window: int = 65  # r, the neighbourhood of restricted attention

    def __post_init__(self) -> None:
        if self.dim < 1 or self.heads < 1 or self.dim % self.heads:
            raise UserError(f"dim = {self.dim}: must be a multiple of heads = {self.heads}")
        if self.kernel < 2:
            raise UserError(f"kernel = {self.kernel}: a convolution over fewer than 2 positions connects none; use 3")
        if self.window < 3 or self.window % 2 == 0:
            near = max(3, self.window + 1)
            raise UserError(
                f"window = {self.window}: a neighbourhood with equal sides has an odd number of positions, at least 3; "
                f"use {near}"
            )


def complexity(kind: str, sizes: LayerSizes, n: int) -> int:
    """The term of the paper's table."""
    d = sizes.dim
    match kind:
        case "self-attention":
            return n * n * d
        case "restricted attention":
            return sizes.window * n * d
        case "LSTM" | "GRU":
            return n * d * d
        case _:
            return sizes.kernel * n * d * d


def operations(kind: str, sizes: LayerSizes, n: int) -> int:
    """FLOPs of a forward pass over one row, those of masked pairs included."""
    d = sizes.dim
    match kind:
        case "self-attention":
            return 8 * n * d * d + 4 * n * n * d
        case "restricted attention":
            queries = min(n, sizes.window)  # of a block; the last block may be padded
            keys = queries + 2 * reach(sizes.window, n)
            return 8 * n * d * d + 4 * -(-n // queries) * queries * keys * d
        case "LSTM":
            return 16 * n * d * d
        case "GRU":
            return 12 * n * d * d
        case _:
            return 2 * sizes.kernel * n * d * d


def reach(width: int, n: int) -> int:
    """How far a neighbourhood of `width` positions extends to each side, in a sequence of n."""
    return min((width - 1) // 2, n - 1)


def sequential_operations(kind: str, n: int) -> int:
    """Operations that have to wait for each other."""
    return n if kind in (LSTM, GRU) else 1


def path_length(kind: str, sizes: LayerSizes, n: int) -> int:
    """Layers, or steps of a recurrent one, between the first input and the last output."""
    match kind:
        case "self-attention":
            return 1
        case "LSTM" | "GRU":
            return n
        case "restricted attention":
            return max(1, -(-2 * (n - 1) // (sizes.window - 1)))
        case "convolution":
            return max(1, -(-(n - 1) // (sizes.kernel - 1)))
    layers, width = 1, sizes.kernel
    while width < n:
        layers, width = layers + 1, width * sizes.kernel
    return layers


def first_above(cost: Callable[[int], float], other: Callable[[int], float]) -> int | None:
    """The length from which on `cost` exceeds `other`, by formula: 1 if always, None if never."""
    n = 1 + bisect.bisect_left(range(1, FARTHEST), True, key=lambda n: cost(n) > other(n))
    return None if n >= FARTHEST else n


def crossing(lengths: Sequence[int], values: Sequence[float], others: Sequence[float]) -> float | None:
    """The length from which on measured `values` exceed `others`: interpolated between two lengths, as a straight line
    on logarithmic axes; the first length if they always do, None if they do not at the last one."""
    gaps = [math.log(value / other) for value, other in zip(values, others, strict=True)]
    if not gaps or gaps[-1] <= 0:
        return None
    at = max((i for i, gap in enumerate(gaps) if gap <= 0), default=None)
    if at is None:
        return float(lengths[0])
    part = gaps[at] / (gaps[at] - gaps[at + 1])
    return float(lengths[at] * (lengths[at + 1] / lengths[at]) ** part)


def fitted(values: Sequence[float], formula: Sequence[float]) -> float:
    """The constant c of values ≈ c · formula, from the larger half of the points: at small sizes a measurement is
    mostly the cost of starting operations, which is in no formula."""
    ratios = [math.log(value / term) for value, term in zip(values, formula, strict=True)]
    upper = ratios[len(ratios) // 2 :]
    return math.exp(sum(upper) / len(upper))
