"""Scaled dot-product attention: each query takes an average of the values, weighted by how well its key matches.

    Attention(Q, K, V) = softmax(Q Kᵀ / sqrt(d_k)) V                      Vaswani et al. 2017, eq. 1

    q  [B, H, Nq, D]     k  [B, Hkv, Nk, D]     v  [B, Hkv, Nk, Dv]     output  [B, H, Nq, Dv]

`attention_stages` writes the formula out and returns every stage. `attend` computes the same output by one of three
implementations: "reference" (the formula), "fused" (scaled_dot_product_attention: flash, memory-efficient or cuDNN)
or "flex" (FlexAttention, which skips masked blocks). Where a mask leaves few of the pairs of a long sequence, "fused"
also skips masked blocks: by `regard.nn.banded`, or on a GPU by `regard.nn.flash` or FlexAttention. With Hkv < H, each
key/value head serves H / Hkv query heads (grouped-query attention, Ainslie et al. 2023). A query whose keys are all
masked gets zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from regard.errors import UserError
from regard.nn.banded import attend_banded, kernels_for, prepare
from regard.nn.compiled import compiled
from regard.nn.config import Path
from regard.nn.flash import attend_flash
from regard.nn.mask import AttentionMask
from regard.nn.position import Bias
from regard.nn.sdpa import fused_attention

Mark = Callable[[str, Tensor], Tensor]  # (stage, value) -> value: a trace may record it, or replace it


@dataclass(frozen=True)
class Stages:
    """Every step from queries to output, [B, H, Nq, Nk] each except the last."""

    scores: Tensor  # q · k
    scaled: Tensor  # times 1 / sqrt(d), plus the position bias
    masked: Tensor  # -inf where the mask is False
    weights: Tensor  # softmax over the keys: each row sums to 1, or is all zero
    output: Tensor  # [B, H, Nq, Dv] weighted sum of the values


def dot(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


def attention_stages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    score: Callable[[Tensor, Tensor], Tensor] = dot,
    mark: Mark = lambda stage, value: value,
) -> Stages:
    """The formula, stage by stage. `mask` is boolean (True = attend), `bias` is added to the scaled scores."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = mark("scores", score(q, k))
    scaled = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scaled = mark("scaled", scaled if bias is None else scaled + bias)
    masked = mark("masked", scaled if mask is None else scaled.masked_fill(~mask, float("-inf")))
    weights = mark("weights", softmax(masked))
    output = mark("heads", F.dropout(weights, dropout) @ v)
    return Stages(scores, scaled, masked, weights, output)


def softmax(masked: Tensor) -> Tensor:
    """exp(x) / Σ exp(x) over the last axis; a row of -inf gives zeros instead of 0/0."""
    empty = (masked == float("-inf")).all(dim=-1, keepdim=True)
    return masked.masked_fill(empty, 0.0).softmax(dim=-1).masked_fill(empty, 0.0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: AttentionMask,
    *,
    bias: Bias | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    path: Path = "fused",
    score: Callable[[Tensor, Tensor], Tensor] = dot,
    mark: Mark = lambda stage, value: value,
) -> Tensor:
    """softmax(q kᵀ · scale + bias, masked) v by the implementation `path`.

    A `score` other than the dot product, and a `mark` that reads the stages, need path = "reference".
    """
    if not isinstance(attention_mask, AttentionMask):
        raise UserError(
            f"attention_mask is a {type(attention_mask).__name__}: pass an AttentionMask; "
            "AttentionMask(from_tensor(mask), queries, keys) makes one of a boolean tensor"
        )
    grouped, route = q.shape[1] != k.shape[1], str(path)
    if path == "fused":
        kernels = kernels_for(q.dtype, q.shape[-1], v.shape[-1], is_plain=bias is None and not grouped)
        route = prepare(attention_mask, q.device, dropout, kernels)
    match route:
        case "reference":
            added, visible = None if bias is None else bias.dense(q), attention_mask.dense()
            stages = attention_stages(
                q, k, v, visible, scale=scale, bias=added, dropout=dropout, score=score, mark=mark
            )
            return stages.output
        case "banded":
            return attend_banded(q, k, v, attention_mask.plan, bias=bias, scale=scale, dropout=dropout)
        case "flash":
            return attend_flash(q, k, v, attention_mask.bands, scale)
        case "dense":
            mask, is_causal = attention_mask.fused()
            if bias is not None:
                mask, is_causal = bias.dense(q), False
                if attention_mask.kind != "everything":
                    mask = mask.masked_fill(~attention_mask.dense(), float("-inf"))
            elif mask is not None and q.is_cuda:
                mask = attention_mask.additive(q.dtype)  # cuDNN takes an all-False boolean row for an all-True one
            return fused_attention(q, k, v, mask, dropout, is_causal=is_causal, scale=scale, enable_gqa=grouped)
        case _:
            _check_flex(q, k, v, dropout)
            score_mod = None if bias is None else bias.score_mod(q)
            block_mask = attention_mask.blocks(q.shape[0], q.shape[2])
            run: Callable[..., Tensor] = flex_attention
            if q.is_cuda and not torch.compiler.is_compiling():
                run = _compiled_flex()
            return run(q, k, v, score_mod, block_mask, scale=scale, enable_gqa=grouped)


def _check_flex(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    if dropout:
        raise UserError(f"dropout = {dropout}: attention = 'flex' has no attention dropout; use 'fused' or 'reference'")
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise UserError("attention = 'flex' has no gradients on a CPU: train with 'fused', or use torch.no_grad()")


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return compiled(flex_attention)
