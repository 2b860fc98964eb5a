"""Attention scores: alternatives to the dot product of query and key.

    dot             q · k                              Luong et al. 2015; scaled: Vaswani et al. 2017
    multiplicative  q · W k                            Luong et al. 2015 ("general")
    additive        vᵀ tanh(W k + U q)                 Bahdanau et al. 2015
    concat          vᵀ tanh(W [q; k])                  Luong et al. 2015

The last two are one formula: W [q; k] = U q + W' k with W = [U W']. Additive scores need a tensor
[B, H, Nq, Nk, D], the dot product does not: that is why it replaced them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.nn.config import Score


def multiplicative(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """q [B, H, Nq, D], k [B, H, Nk, E], w [H, D, E] -> [B, H, Nq, Nk]."""
    return q @ w @ k.transpose(-2, -1)


def additive(q: Tensor, k: Tensor, u: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """q [B, H, Nq, D], k [B, H, Nk, E], u [H, D, A], w [H, E, A], v [H, A] -> [B, H, Nq, Nk]."""
    return additive_projected(q @ u, k @ w, v)


def additive_projected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same for projected queries and keys: a decoder that loops over time projects its keys once."""
    hidden = torch.tanh(q[:, :, :, None] + k[:, :, None])  # [B, H, Nq, Nk, A]
    return torch.einsum("bhqka,ha->bhqk", hidden, v)


def concat(q: Tensor, k: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """w [H, D + E, A] multiplies [q; k], for each pair."""
    nq, nk = q.shape[2], k.shape[2]
    pairs = torch.cat((q[:, :, :, None].expand(-1, -1, -1, nk, -1), k[:, :, None].expand(-1, -1, nq, -1, -1)), -1)
    return torch.einsum("bhqka,ha->bhqk", torch.tanh(torch.einsum("bhqkd,hda->bhqka", pairs, w)), v)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"multiplicative": multiplicative, "additive": additive, "concat": concat}


class LearnedScore(nn.Module):
    """A score with parameters, for `heads` heads of size `dim`."""

    def __init__(self, kind: Score, heads: int, dim: int) -> None:
        super().__init__()
        self.kind = kind
        shapes: dict[str, list[tuple[int, ...]]] = {
            "multiplicative": [(dim, dim)],
            "additive": [(dim, dim), (dim, dim), (dim,)],
            "concat": [(2 * dim, dim), (dim,)],
        }
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(heads, *shape) * dim**-0.5) for shape in shapes[kind])

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return FUNCTIONS[self.kind](q, k, *self.weights)
