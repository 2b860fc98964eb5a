"""Block and stack: attention and feed-forward, each with a way around it, repeated.

    post-LN (2017)   x ← Norm(x + f(x))        pre-LN (GPT-2)   x ← x + f(Norm(x))

One block serves encoder and decoder: a decoder's block also looks at a memory (cross attention), and its
self attention is causal. One stack, told apart by two flags:

    encoder              causal=False, memory=False
    decoder-only (GPT)   causal=True,  memory=False
    decoder              causal=True,  memory=True

    x [B, N, dim] -> [B, N, dim]            Vaswani et al. 2017, figure 1; pre-LN: Xiong et al. 2020
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.nn.cache import Cache
from regard.nn.config import StackConfig
from regard.nn.feedforward import make_feedforward
from regard.nn.mask import Mask, Places, Visibility, causal, everything, window
from regard.nn.multihead import Context, MultiHead
from regard.nn.position import check_length, make_position
from regard.nn.trace import Traceable


def make_norm(config: StackConfig) -> nn.Module:
    """layer: (x - mean) / std · g + b (Ba et al. 2016); rms: x / rms · g (Zhang & Sennrich 2019)."""
    match config.norm:
        case "layer":
            return nn.LayerNorm(config.dim, eps=config.norm_eps)
        case "rms":
            return nn.RMSNorm(config.dim, eps=config.norm_eps)
        case "none":
            return nn.Identity()


class Residual(nn.Module):
    """One sub-layer's surroundings: norm, dropout and the way around, in the order asked for."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.pre, self.residual, self.dropout = config.norm_order == "pre", config.residual, config.dropout

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        out = layer(self.norm(x) if self.pre else x)
        if self.training and self.dropout:
            out = F.dropout(out, self.dropout)
        if self.residual:
            out = x + out
        return out if self.pre else self.norm(out)


class Block(Traceable):
    stages = ("output",)

    def __init__(self, config: StackConfig, *, layer: int = 0, memory: bool = False) -> None:
        super().__init__()
        self.attention = MultiHead(config, layer=layer)
        self.around_attention = Residual(config)
        self.cross = MultiHead(config, layer=layer, cross=True) if memory else None
        self.around_cross = Residual(config) if memory else None
        self.feedforward = make_feedforward(config)
        self.around_feedforward = Residual(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.around_attention(x, lambda h: self.attention(h, context))
        if self.cross is not None and self.around_cross is not None:
            cross = self.cross
            x = self.around_cross(x, lambda h: cross(h, context))
        return self.mark("output", self.around_feedforward(x, self.feedforward))


@dataclass(frozen=True)
class Memory:
    """What an encoder hands to a decoder: states [B, M, dim] and where they stand."""

    states: Tensor
    places: Places


class Stack(Traceable):
    stages = ("embedded", "output")

    def __init__(self, config: StackConfig, *, causal: bool, memory: bool = False) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.checkpoint = False  # recompute activations in the backward pass instead of keeping them
        self.position = make_position(config, causal=causal)
        self.embed_norm = make_norm(config) if config.embed_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, layer=layer, memory=memory) for layer in range(config.layers))
        self.norm = make_norm(config) if config.ends_with_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        places: Places,
        *,
        memory: Memory | None = None,
        cache: Cache | None = None,
        mask: Mask = everything,
    ) -> Tensor:
        """x: embeddings [B, N, dim]; `mask` further restricts self attention."""
        check_length(self.config, places, 0 if cache is None else len(cache))
        context = self._context(places, memory, cache, mask)
        embedded = self.position.embed(places.pos)
        if embedded is not None:
            x = x + embedded.to(x.dtype)
        x = self.embed_norm(x)
        if self.training and self.config.embed_dropout:
            x = F.dropout(x, self.config.embed_dropout)
        x = self.mark("embedded", x)
        # a trace sees every activation once, so nothing is computed twice under it
        recompute = self.checkpoint and self.tap is None and torch.is_grad_enabled()
        if recompute and context.bias is not None and self.config.attention != "flex":
            context.bias.share(x)
        for block in self.blocks:
            x = checkpoint(block, x, context, use_reentrant=False) if recompute else block(x, context)
        return self.mark("output", self.norm(x))

    def _context(self, places: Places, memory: Memory | None, cache: Cache | None, mask: Mask) -> Context:
        if self.config.window is not None:
            mask = window(self.config.window) & mask
        if self.causal:
            mask = causal & mask
        keys = places if cache is None else cache.add(places)
        return Context(
            visibility=Visibility(mask, places, keys, first=keys.length - places.length),
            rotation=self.position.rotation(places.pos),
            bias=self.position.bias(places.pos, keys.pos),
            cache=cache,
            memory=None if memory is None else memory.states,
            memory_visibility=None if memory is None else Visibility(everything, places, memory.places),
        )
