"""Multi-head attention: several small attentions side by side, each free to look elsewhere.

    head_i = Attention(x W_q,i , y W_k,i , y W_v,i)        MultiHead(x, y) = [head_1; …; head_h] W_o

x is where the queries come from, y where keys and values do: the same sequence (self attention) or
another one (cross attention over a memory). One matrix product makes the projections of all heads; for
self attention it makes q, k and v at once (GPT-2's `c_attn`). `HeadList` is the same thing spelled out,
one small module a head, for reading and for checking.

    x  [B, Nq, dim]   y  [B, Nk, dim]   ->   [B, Nq, dim]                 Vaswani et al. 2017, section 3.2.2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.attention import attend, dot, reference
from regard.nn.cache import Cache
from regard.nn.config import Path, StackConfig
from regard.nn.mask import AttentionMask
from regard.nn.norm import RMSNorm
from regard.nn.position import Bias, Rotation, rotate
from regard.nn.score import LearnedScore
from regard.nn.trace import Traceable


@dataclass(frozen=True)
class Context:
    """What travels through a stack unchanged, so that signatures stay short."""

    attention_mask: AttentionMask  # of the sequence for itself
    rotation: Rotation | None = None
    bias: Bias | None = None
    cache: Cache | None = None
    memory: Tensor | None = None  # [B, M, dim], for cross attention
    memory_mask: AttentionMask | None = None

    def prepare(self, path: Path, x: Tensor) -> None:
        """Make the masks that every layer will ask for before the first one does: compiled layers only read them."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        for attention_mask in (self.attention_mask, self.memory_mask):
            if attention_mask is not None and path == "fused" and attention_mask.fused()[0] is not None and x.is_cuda:
                attention_mask.additive(dtype)


class MultiHead(Traceable):
    """Self attention, or cross attention over a memory when `cross`."""

    stages = ("q", "k", "v", "mask", "scores", "scaled", "masked", "weights", "heads", "output")

    def __init__(
        self, config: StackConfig, *, layer: int = 0, cross: bool = False, kept: tuple[int, ...] | None = None
    ) -> None:
        """`kept`: the heads that pruning has left; None: all of the config's."""
        super().__init__()
        self.config, self.layer, self.cross = config, layer, cross
        self.kept = tuple(range(config.heads)) if kept is None else kept
        serving = [head // (config.heads // config.key_heads) for head in self.kept]  # the key head of each head
        self.heads, self.key_heads = len(serving), len(set(serving))
        self.key_of = tuple(sorted(set(serving)).index(head) for head in serving)
        group = self.heads // self.key_heads
        self.uneven = self.key_of != tuple(index // group for index in range(self.heads))
        q_size, k_size = self.heads * config.key_dim, self.key_heads * config.key_dim
        self.sizes = (q_size, k_size, self.key_heads * config.val_dim)
        if cross:
            self.q = nn.Linear(config.dim, q_size, bias=config.bias)
            self.kv = nn.Linear(config.dim, sum(self.sizes[1:]), bias=config.bias)
        else:
            self.qkv = nn.Linear(config.dim, sum(self.sizes), bias=config.bias)
        self.out = nn.Linear(self.heads * config.val_dim, config.dim, bias=config.bias)
        self.score = (
            None
            if config.attention_score == "dot"
            else LearnedScore(config.attention_score, self.heads, config.key_dim)
        )
        # one gain for all heads, as in Gemma 3 and Qwen3
        self.q_norm = RMSNorm(config.key_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.key_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self._across(x, context) if self.cross else self._within(x, context)
        if len(k) < len(q):  # rows that share a source, such as the beams of a sentence, ask it together
            q = q.view(len(k), -1, *q.shape[1:]).transpose(1, 2).flatten(2, 3)  # [sources, H, group · Nq, D]
        attention_mask = context.memory_mask if self.cross else context.attention_mask
        assert attention_mask is not None
        path = self.config.attention
        if self.tap is not None:  # every stage has to be there to be looked at
            path = "reference"
            q, k, v = self.mark("q", q), self.mark("k", k), self.mark("v", v)
            attention_mask = attention_mask.with_mask(self.tap("mask", attention_mask.mask))
        bias = None if self.cross else context.bias
        if bias is not None and self.heads < self.config.heads:
            bias = bias.only(self.kept)
        if self.uneven:  # pruning has left groups of different size: each head gets its keys by name
            k, v = k[:, self.key_of], v[:, self.key_of]
        heads = attend(
            q,
            k,
            v,
            attention_mask,
            bias=bias,
            scale=self.config.scale,
            dropout=self.config.attention_dropout if self.training else 0.0,
            path=path,
            score=dot if self.score is None else self.score,
            mark=self.mark,
        )
        return self.mark("output", self.out(heads.transpose(1, 2).flatten(2)).view(x.shape))

    def _within(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q, k, v = self._split(q, self.heads, self.q_norm), self._split(k, norm=self.k_norm), self._split(v)
        if context.rotation is not None:
            q, k = (rotate(part, context.rotation, self.config.pairs) for part in (q, k))
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        return q, k, v

    def _across(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q = self._split(self.q(x), self.heads, self.q_norm)
        cache = context.cache
        if cache is not None and self.layer in cache.memory:
            return q, *cache.memory[self.layer]
        assert context.memory is not None
        k, v = self.remember(context.memory)
        if cache is not None:
            cache.memory[self.layer] = (k, v)
        return q, k, v

    def remember(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory [B, M, dim], for cross attention."""
        k, v = self.kv(memory).split(self.sizes[1:], dim=-1)
        return self._split(k, norm=self.k_norm), self._split(v)

    def _split(self, x: Tensor, heads: int | None = None, norm: nn.Module | None = None) -> Tensor:
        """[B, N, H · D] -> [B, H, N, D]"""
        heads = heads or self.key_heads
        parts = x.view(*x.shape[:2], heads, x.shape[2] // heads)
        return (parts if norm is None else norm(parts)).transpose(1, 2)


class HeadList(nn.Module):
    """The same self attention as a list of single heads, concatenated: same weights, same output."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        single = replace(config, heads=1, kv_heads=1, head_dim=config.key_dim, value_dim=config.val_dim)
        self.config = config
        self.heads = nn.ModuleList(
            nn.Linear(config.dim, sum(MultiHead(single).sizes), bias=config.bias) for _ in range(config.heads)
        )
        self.out = nn.Linear(config.heads * config.val_dim, config.dim, bias=config.bias)

    @classmethod
    def of(cls, fused: MultiHead) -> HeadList:
        """Cut the fused projections into one projection a head."""
        if fused.cross or fused.score is not None or fused.heads < fused.config.heads or fused.config.qk_norm:
            raise UserError(
                "HeadList is self attention with dot-product scores and all heads: "
                "this has cross = true, score = learned, pruned heads or qk_norm = true"
            )
        config, heads = fused.config, cls(fused.config).to(fused.qkv.weight)
        group = config.heads // config.key_heads
        for own, given in zip(
            fused.qkv.parameters(),
            zip(*(head.parameters() for head in heads.heads), strict=True),
            strict=True,
        ):
            q, k, v = torch.split(own.detach(), list(fused.sizes))
            for index, parameter in enumerate(given):
                rows = (
                    q.chunk(config.heads)[index],
                    k.chunk(config.key_heads)[index // group],
                    v.chunk(config.key_heads)[index // group],
                )
                parameter.data.copy_(torch.cat(rows))
        heads.out.load_state_dict(fused.out.state_dict())
        return heads

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        outputs = []
        for project in self.heads:
            q, k, v = project(x).split((self.config.key_dim, self.config.key_dim, self.config.val_dim), dim=-1)
            single = reference(q[:, None], k[:, None], v[:, None], visible, scale=self.config.scale)
            outputs.append(single.output[:, 0])  # [B, N, Dv]
        joined: Tensor = self.out(torch.cat(outputs, dim=-1))
        return joined
