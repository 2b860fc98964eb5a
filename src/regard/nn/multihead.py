"""Multi-head attention: several attentions in parallel, each with its own projections.

    head_i = Attention(x W_q,i , y W_k,i , y W_v,i)        MultiHead(x, y) = [head_1; …; head_h] W_o

Queries come from x, keys and values from y: the same sequence (self-attention) or a memory, such as the output of an
encoder (cross-attention). One matmul computes the projections of all heads; in self-attention that is q, k and v at
once (`c_attn` of GPT-2). `HeadList` is the same computation with one small module per head, for reading and testing.

    x  [B, Nq, dim]   y  [B, Nk, dim]   ->   [B, Nq, dim]                 Vaswani et al. 2017, section 3.2.2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.attention import Mark, attend, attention_stages, dot
from regard.nn.cache import Cache
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask
from regard.nn.norm import RMSNorm
from regard.nn.parts import Part
from regard.nn.position import Bias, Rotation, rotate
from regard.nn.score import LearnedScore
from regard.nn.trace import Traceable


@dataclass(frozen=True)
class Context:
    """What all layers of a forward pass share."""

    attention_mask: AttentionMask  # of self-attention
    rotation: Rotation | None = None
    bias: Bias | None = None
    cache: Cache | None = None
    memory: Tensor | None = None  # [B, M, dim], for cross-attention
    memory_mask: AttentionMask | None = None
    part: Part | None = None  # the tokens of this process, where several have one sequence


class MultiHead(Traceable):
    """Self-attention, or cross-attention over a memory if `cross`."""

    stages = ("q", "k", "v", "mask", "scores", "scaled", "masked", "weights", "heads", "output")
    uneven = False  # whether key/value heads serve different numbers of heads: only after pruning

    def __init__(self, config: StackConfig, *, layer: int = 0, cross: bool = False) -> None:
        super().__init__()
        self.config, self.layer, self.cross = config, layer, cross
        self.heads, self.key_heads = config.heads, config.key_heads
        self.numbers = tuple(range(self.heads))  # of the heads; pruned layers keep the original ones
        self.key_of = tuple(head // (self.heads // self.key_heads) for head in self.numbers)  # key/value head of each
        q_size, k_size = self.heads * config.key_dim, self.key_heads * config.key_dim
        self.sizes = (q_size, k_size, self.key_heads * config.val_dim)
        if cross:
            self.q = nn.Linear(config.dim, q_size, bias=config.bias)
            self.kv = nn.Linear(config.dim, sum(self.sizes[1:]), bias=config.bias)
        else:
            self.qkv = nn.Linear(config.dim, sum(self.sizes), bias=config.bias)
        self.out = nn.Linear(self.heads * config.val_dim, config.dim, bias=config.bias)
        score = config.attention_score
        self.score = None if score == "dot" else LearnedScore(score, self.heads, config.key_dim)
        # one gain for all heads, as in Gemma 3 and Qwen3
        self.q_norm = RMSNorm(config.key_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.key_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        attention_mask = context.attention_mask
        if self.cross:
            assert context.memory_mask is not None
            q, k, v = self._project_cross(x, context)
            attention_mask = context.memory_mask
        else:
            q, k, v = self._project(self.qkv, x, context)
            if context.cache is not None:
                k, v = context.cache.extend(self.layer, k, v)
            if context.part is not None:
                k, v = context.part.gather_pair(k, v)
        if self.tap is not None:
            q, k, v = self.mark("q", q), self.mark("k", k), self.mark("v", v)
            attention_mask = attention_mask.with_mask(self.tap.see(self.path + "mask", attention_mask.mask))
        if self.uneven:
            k, v = k[:, self.key_of], v[:, self.key_of]
        heads = self._heads(x, (q, k, v), attention_mask, context)
        return self.mark("output", self.out(heads.transpose(1, 2).flatten(2)).view(x.shape))

    def _heads(
        self,
        x: Tensor,
        parts: tuple[Tensor, Tensor, Tensor],
        attention_mask: AttentionMask,
        context: Context,
        mark: Mark | None = None,
    ) -> Tensor:
        """The output of each head [B, H, Nq, Dv]; `parts` are q, k and v."""
        path = self.config.attention if self.tap is None else "reference"  # a trace needs every stage
        return attend(
            *parts,
            attention_mask,
            bias=None if self.cross else context.bias,
            scale=self.config.scale,
            dropout=self.config.attention_dropout if self.training else 0.0,
            path=path,
            score=dot if self.score is None else self.score,
            mark=mark or self.mark,
        )

    def _project(self, qkv: nn.Linear, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x: [B, H, N, D]."""
        q, k, v = qkv(x).split(self.sizes, dim=-1)
        q, k = self._split(q, self.heads, self.q_norm), self._split(k, self.key_heads, self.k_norm)
        if context.rotation is not None:
            q, k = (rotate(part, context.rotation, self.config.pairs) for part in (q, k))
        return q, k, self._split(v, self.key_heads)

    def _project_cross(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        q, cache = self._split(self.q(x), self.heads, self.q_norm), context.cache
        if cache is None or self.layer not in cache.memory:
            assert context.memory is not None
            k, v = self.project_memory(context.memory)
            if cache is None:
                return q, k, v
            cache.memory[self.layer] = (k, v)
        return cache.attend_memory(self.layer, q)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory [B, M, dim], for cross-attention."""
        k, v = self.kv(memory).split(self.sizes[1:], dim=-1)
        return self._split(k, self.key_heads, self.k_norm), self._split(v, self.key_heads)

    def _split(self, x: Tensor, heads: int, norm: nn.Module | None = None) -> Tensor:
        """[B, N, H · D] -> [B, H, N, D]"""
        parts = x.view(*x.shape[:2], heads, x.shape[2] // heads)
        return (parts if norm is None else norm(parts)).transpose(1, 2)


class HeadList(nn.Module):
    """The same self-attention as a list of single heads, concatenated: same weights, same output."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config, size = config, 2 * config.key_dim + config.val_dim  # of q, k and v
        self.heads = nn.ModuleList(nn.Linear(config.dim, size, bias=config.bias) for _ in range(config.heads))
        self.out = nn.Linear(config.heads * config.val_dim, config.dim, bias=config.bias)

    @classmethod
    def of(cls, fused: MultiHead) -> HeadList:
        """Split the joint projection into one projection per head."""
        if fused.cross or fused.score is not None or type(fused) is not MultiHead or fused.config.qk_norm:
            raise UserError(
                "HeadList is self-attention with dot-product scores and all heads: this layer has cross = true, "
                "a learned attention_score, pruned heads or qk_norm = true"
            )
        config, heads = fused.config, cls(fused.config).to(fused.qkv.weight)
        group = config.heads // config.key_heads
        single = zip(*(head.parameters() for head in heads.heads), strict=True)  # weights of all heads, then biases
        for joint, parameters in zip(fused.qkv.parameters(), single, strict=True):
            q, k, v = torch.split(joint.detach(), list(fused.sizes))
            keys, values = k.chunk(config.key_heads), v.chunk(config.key_heads)
            for index, (query, parameter) in enumerate(zip(q.chunk(config.heads), parameters, strict=True)):
                parameter.data.copy_(torch.cat((query, keys[index // group], values[index // group])))
        heads.out.load_state_dict(fused.out.state_dict())
        return heads

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        outputs = []
        for project in self.heads:
            q, k, v = project(x).split((self.config.key_dim, self.config.key_dim, self.config.val_dim), dim=-1)
            stages = attention_stages(q[:, None], k[:, None], v[:, None], mask, scale=self.config.scale)
            outputs.append(stages.output[:, 0])  # [B, N, Dv]
        return self.out(torch.cat(outputs, dim=-1))  # type: ignore[no-any-return]
