"""Attention: every query takes the mean of the values, weighted by how well its key fits.

    Attention(Q, K, V) = softmax(Q Kᵀ / sqrt(d_k)) V                      Vaswani et al. 2017, eq. 1

    q  [B, H, Nq, D]     k  [B, Hkv, Nk, D]     v  [B, Hkv, Nk, Dv]     output  [B, H, Nq, Dv]

`reference` writes the formula out and hands back every stage. `attend` computes the same numbers by the
path asked for: "reference", "fused" (scaled_dot_product_attention: flash, memory-efficient or cuDNN) or
"flex" (FlexAttention, which skips hidden blocks). With Hkv < H, each key head serves H / Hkv query heads
(Ainslie et al. 2023). A query that sees nothing gets zeros.
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
from regard.nn.config import Path
from regard.nn.mask import AttentionMask
from regard.nn.position import Bias

Mark = Callable[[str, Tensor], Tensor]  # (stage, value) -> value: a trace may look, or put another in its place


@dataclass(frozen=True)
class Stages:
    """Everything that happens between queries and output, [B, H, Nq, Nk] each but the last."""

    scores: Tensor  # q · k
    scaled: Tensor  # times 1 / sqrt(d), plus the position's bias
    masked: Tensor  # hidden pairs at -inf
    weights: Tensor  # softmax over the keys: each row sums to 1, or is all zero
    output: Tensor  # [B, H, Nq, Dv] weighted sum of the values


def dot(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    score: Callable[[Tensor, Tensor], Tensor] = dot,
    mark: Mark = lambda stage, value: value,
) -> Stages:
    """The formula, stage by stage. `visible` is boolean (True = may look), `bias` is added to the scores."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = mark("scores", score(q, k))
    scaled = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scaled = mark("scaled", scaled if bias is None else scaled + bias)
    masked = mark("masked", scaled if visible is None else scaled.masked_fill(~visible, float("-inf")))
    weights = mark("weights", softmax(masked))
    output = mark("heads", F.dropout(weights, dropout) @ v)
    return Stages(scores, scaled, masked, weights, output)


def softmax(masked: Tensor) -> Tensor:
    """exp(x) / Σ exp(x) over the last axis; a row of -inf gives zeros instead of 0/0."""
    blind = (masked == float("-inf")).all(dim=-1, keepdim=True)
    return masked.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)


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
    """softmax(q kᵀ · scale + bias, over what is visible) v, by the path asked for.

    Another `score` than the dot product, and a `mark` that looks at the stages, need path = "reference".
    """
    grouped = q.shape[1] != k.shape[1]
    match path:
        case "reference":
            table = None if bias is None else bias.dense(q)
            visible = attention_mask.dense()
            return reference(q, k, v, visible, scale=scale, bias=table, dropout=dropout, score=score, mark=mark).output
        case "fused":
            mask, is_causal = attention_mask.fused()
            if bias is not None:
                mask, is_causal = _additive(bias.dense(q), attention_mask), False
            elif mask is not None and q.is_cuda:
                mask = attention_mask.additive(q.dtype)  # cuDNN takes an all-False boolean row for an all-True one
            return F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=grouped
            )
        case "flex":
            _check_flex(q, k, v, dropout)
            score_mod = None if bias is None else bias.score_mod(q)
            run: Callable[..., Tensor] = flex_attention
            if q.is_cuda and not torch.compiler.is_compiling():
                run = _compiled_flex()
            return run(q, k, v, score_mod, attention_mask.blocks(q.shape[0]), scale=scale, enable_gqa=grouped)


def _additive(bias: Tensor, attention_mask: AttentionMask) -> Tensor:
    if attention_mask.kind == "everything":
        return bias
    return bias.masked_fill(~attention_mask.dense(), float("-inf"))


def _check_flex(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    if dropout:
        raise UserError(f"dropout = {dropout}: attention = 'flex' cannot drop weights; use 'fused' or 'reference'")
    if q.device.type == "cpu" and any(x.requires_grad for x in (q, k, v)):
        raise UserError("attention = 'flex' has no gradients on a CPU: train with 'fused', or use torch.no_grad()")


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
