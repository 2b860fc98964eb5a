"""The feed-forward layer: attention mixes tokens, then this layer transforms each token by itself.

    relu, gelu, silu      W₂ act(W₁ x + b₁) + b₂                     Vaswani et al. 2017, eq. 2
    swiglu, geglu         W₂ (act(W_g x) ⊙ W_u x)                    Shazeer 2020

    x [B, N, dim] -> hidden [B, N, ff_dim] -> [B, N, dim]

A mixture of experts (Shazeer et al. 2017; Fedus et al. 2021) has several of these layers and sends each token
to the few that a router selects: more parameters at the same compute per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.config import StackConfig
from regard.nn.trace import Traceable


def gated(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return function(gate) * value


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "swiglu": lambda x: gated(x, F.silu),
    "geglu": lambda x: gated(x, ACTIVATIONS["gelu-tanh"]),
}


class FeedForward(Traceable):
    stages = ("up", "hidden", "output")

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.activation = config.activation
        is_gated = config.activation in ("swiglu", "geglu")
        width = 2 * config.ff_dim if is_gated else config.ff_dim  # gate and value in one matmul
        self.up = nn.Linear(config.dim, width, bias=config.bias)
        self.down = nn.Linear(config.ff_dim, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mark("hidden", ACTIVATIONS[self.activation](self.mark("up", self.up(x))))
        return self.mark("output", self.down(hidden))


class Experts(Traceable):
    """`experts` feed-forward layers, of which each token uses `experts_per_token`, weighted by the router."""

    stages = ("router", "output")

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.count, self.top = config.experts, config.experts_per_token
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.experts))
        self.balance: Tensor | None = None  # load-balancing loss of the last forward pass, for the trainer

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "balance": None}  # part of an autograd graph: it cannot be copied or saved

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)  # [T, dim]
        exact = torch.promote_types(x.dtype, torch.float32)
        probability = self.mark("router", self.router(tokens).softmax(dim=-1, dtype=exact))  # [T, experts]
        weight, chosen = probability.topk(self.top, dim=-1)  # [T, top]
        weight = (weight / weight.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, rank = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(tokens[token]) * weight[token, rank, None])
        # Fedus et al. 2021, eq. 4: fraction of tokens times mean probability, smallest (1) when uniform
        fraction = F.one_hot(chosen, self.count).to(exact).mean(dim=(0, 1))
        self.balance = self.count * (fraction * probability.mean(dim=0)).sum()
        return self.mark("output", out.view_as(x))
