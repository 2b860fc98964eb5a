"""Banded attention: scaled_dot_product_attention over the visible blocks alone.

A window of w tokens leaves a band of the attention matrix; computing all of it and masking most of it costs N² all the
same. Here the queries are cut into blocks, and each block is given only the key blocks that it can see:

    keys     [ 0 | 1 | 2 | 3 | 4 | 5 ]
    query 0    ■                          a block of c queries and its keys are one call of
    query 1    ■   ■                      scaled_dot_product_attention, c · m · c scores for m blocks of keys:
    query 2    ■   ■   ■                  O(N · w) in time and memory
    query 3        ■   ■   ■
    query 4            ■   ■   ■

Which calls there are is in the plan (`regard.nn.plan`). On a CPU, keys are read where they are, unless the visible
blocks are far apart, as with global tokens and random blocks; so a window that is nearly as wide as the text takes no
longer than none. Values and gradients are those of dense attention, with biases and attention dropout, on any device
(Beltagy et al. 2020, section 3.1: "chunks").
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.config import LONG
from regard.nn.flash import find_bands, flash_can
from regard.nn.mask import AttentionMask, causal
from regard.nn.plan import Plan, Range, cheapest, indices, make_plan, plan_texts
from regard.nn.position import Bias
from regard.nn.sdpa import fused_attention


def prepare(attention_mask: AttentionMask, device: torch.device, dropout: float, kernels: Collection[str]) -> str:
    """How "fused" computes attention: "dense", "banded", or on a GPU "flash" or "flex", if they are among `kernels`.

    It also makes the plan of banded attention, once: that reads tensors, so a compiled or captured layer needs a plan
    that was made before it.
    """
    if attention_mask.plan is not None:
        return "banded"
    mask, is_cpu, kind = attention_mask.mask, device.type == "cpu", attention_mask.kind
    is_causal, compiling = mask.implies(causal), torch.compiler.is_compiling()
    if kind == "causal" and attention_mask.q.start is None:  # the queries are a part of the sequence
        kind = "part"
    if kind in ("everything", "causal") or torch.compiler.is_exporting() or (compiling and is_cpu):
        return "dense"
    queries, keys = attention_mask.q.length, attention_mask.k.length
    is_gpu = device.type == "cuda" and not dropout
    if is_gpu and "flash" in kernels and keys >= LONG and find_bands(attention_mask) is not None:
        return "flash"
    if is_cpu and keys >= LONG and attention_mask.plans_texts:
        attention_mask.plan = plan_texts(attention_mask)
        attention_mask.plans_texts = attention_mask.plan is not None  # so that no other layer plans again
        if attention_mask.plans_texts:
            return "banded"
    if mask.reach is None and not (is_causal and (is_cpu or kind == "part")):
        return "dense"
    if min(queries, keys) < (LONG if mask.reach is not None else 4 * LONG):
        return "dense"
    if is_cpu:
        attention_mask.plan = cheapest(attention_mask)
        return "banded"
    reach = (2 * keys if mask.reach is None else mask.reach) // (2 if is_causal else 1)
    size = 1 << min(9, max(6, (reach // 2).bit_length() - 1))  # 64 to 512
    if not is_causal and reach + size > 0.75 * keys:
        return "dense"
    if is_gpu and "flex" in kernels and mask.dilation == 1:
        return "flex"
    if kind == "part" or compiling or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return "dense"
    attention_mask.plan = make_plan(attention_mask, size, pieces=False)
    return "banded"


def kernels_for(dtype: torch.dtype, key_dim: int, val_dim: int, *, is_plain: bool) -> set[str]:
    """Which kernels of a GPU fit this type and these sizes; `is_plain`: no score bias, and keys of its own per head."""
    kernels = {"flex"} if dtype != torch.float64 and min(key_dim, val_dim) >= 16 else set()
    if is_plain and flash_can(dtype, key_dim, val_dim):
        kernels.add("flash")
    return kernels


def attend_banded(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, bias: Bias | None, scale: float | None, dropout: float
) -> Tensor:
    """q [B, H, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv] -> [B, H, Nq, Dv]"""
    added = None if bias is None else Added(bias, q, plan)
    if plan.order is not None:
        q, k, v = (x.index_select(2, plan.order) for x in (q, k, v))
    if plan.rows > 1:
        q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))  # [1, H, B · N, D]
    options = {"scale": scale, "dropout_p": dropout, "enable_gqa": q.shape[1] != k.shape[1]}
    whole = (_attend_pieces if plan.pieces else _attend_groups)(q, k, v, plan, added, options)
    if plan.rows > 1:
        whole = whole.view(whole.shape[1], plan.rows, -1, whole.shape[3]).transpose(0, 1)
    return whole if plan.undo is None else whole.index_select(2, plan.undo)


class Added:
    """A score bias for parts of the attention matrix."""

    def __init__(self, bias: Bias, q: Tensor, plan: Plan) -> None:
        self.bias, self.at, self.order, self.batch = bias, bias.at(q), plan.order, q.shape[0]
        self.dtype, self.device = q.dtype, q.device
        self.length = q.shape[2] if plan.rows > 1 else None  # of a row, where the plan has them as one

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """For query indices [R, c] and key indices [R, m]: [B|1, R, H, c, m]"""
        bias = self.bias
        rows = 1 if not bias.content and max(bias.q_pos.shape[0], bias.k_pos.shape[0]) == 1 else self.batch
        if self.order is not None:
            queries, keys = self.order[queries], self.order[keys]
        b = torch.arange(rows, device=self.device).view(-1, 1, 1, 1, 1)
        if self.length is not None:
            b = (queries // self.length)[None, :, None, :, None].clamp_max(rows - 1)
            queries, keys = queries % self.length, keys % self.length
        h = torch.arange(bias.heads, device=self.device).view(-1, 1, 1)
        return self.at(b, h, queries[None, :, None, :, None], keys[None, :, None, None, :]).to(self.dtype)


def _attend_pieces(q: Tensor, k: Tensor, v: Tensor, plan: Plan, added: Added | None, options: dict[str, Any]) -> Tensor:
    known: dict[int, Tensor] = {}  # masks with a bias that depends on distances alone, as shared masks do
    outputs, ranges = [], [keys for piece in plan.pieces for keys in piece.keys]
    queries = _slices(q, [piece.queries for piece in plan.pieces])
    keys, values = (iter(_slices(x, ranges)) for x in (k, v))
    for piece, one in zip(plan.pieces, queries, strict=True):
        own_keys, own_values = (_join([next(x) for _ in piece.keys]) for x in (keys, values))
        mask = None if piece.pairs is None else piece.pairs.additive(q.dtype, q.shape[0])
        is_causal = piece.is_causal
        if added is not None:
            number = piece.shared if added.bias.relative else -1
            if number in known:
                mask = known[number]
            else:
                i, j = indices([piece.queries], q.device), indices(piece.keys, q.device)
                bias = added(i, j).flatten(0, 1)  # [B|1, H, c, m]
                if is_causal:
                    later = torch.ones(bias.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
                    bias, is_causal = bias.masked_fill(later, float("-inf")), False
                mask = bias if mask is None else bias + mask
                if number >= 0:
                    known[number] = mask
        out = fused_attention(one, own_keys, own_values, mask, is_causal=is_causal, **options)
        outputs.append(out)
    return torch.cat(outputs, dim=2)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _slices(x: Tensor, ranges: list[Range]) -> tuple[Tensor, ...]:
    return Slices.apply(x, *ranges)  # type: ignore[no-any-return, no-untyped-call]


class Slices(torch.autograd.Function):
    """x[:, :, a:b] for several ranges. The gradients are added in one tensor, not in one as long as x for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *ranges: Range) -> tuple[Tensor, ...]:
        ctx.ranges, ctx.shape = ranges, x.shape
        return tuple(x[:, :, first:end] for first, end in ranges)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = gradients[0].new_zeros(ctx.shape)
        for (first, end), gradient in zip(ctx.ranges, gradients, strict=True):
            total[:, :, first:end] += gradient
        return (total, *[None] * len(ctx.ranges))


def _attend_groups(q: Tensor, k: Tensor, v: Tensor, plan: Plan, added: Added | None, options: dict[str, Any]) -> Tensor:
    batch, length = q.shape[0], q.shape[2]
    q, k, v = (_cut(x, plan.size) for x in (q, k, v))  # [B, blocks, H, c, D]
    outputs: list[Tensor] = []
    for group in plan.groups:
        queries = _select(q, group.rows)  # [B · R, H, c, D]
        keys, values = (_gather(x, group.keys) for x in (k, v))  # [B · R, H, m · c, D]
        mask = group.pairs.additive(q.dtype, batch)
        if added is not None:
            few = slice(0, 1) if group.shared and added.bias.relative else slice(None)
            bias = added(group.queries[few], group.tokens[few])  # [B|1, R|1, H, c, m·c]
            if bias.shape[1] > 1:
                bias = bias.expand(batch, -1, -1, -1, -1)
            mask = bias.flatten(0, 1) + mask
        out = fused_attention(queries, keys, values, mask, **options)
        outputs.append(out.view(batch, -1, *out.shape[1:]))  # [B, R, H, c, Dv]
    whole = _select(torch.cat(outputs, dim=1), torch.cat([group.rows for group in plan.groups]).argsort())
    whole = whole.view(batch, -1, *whole.shape[1:])  # [B, blocks, H, c, Dv]
    return whole.transpose(1, 2).flatten(2, 3)[:, :, :length]


def _cut(x: Tensor, size: int) -> Tensor:
    """[B, H, N, D] -> [B, blocks, H, c, D], contiguous"""
    missing = -x.shape[2] % size
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return x.view(*x.shape[:2], -1, size, x.shape[3]).transpose(1, 2).contiguous()


def _select(x: Tensor, blocks: Tensor) -> Tensor:
    """Blocks [R] of x [B, blocks, …] -> [B · R, …]

    As rows of a matrix, because the gradient, index_add, is 20 times slower along other axes on a CPU.
    """
    batch, count = x.shape[:2]
    rows = (torch.arange(batch, device=x.device)[:, None] * count + blocks).flatten()
    return x.reshape(batch * count, -1).index_select(0, rows).view(-1, *x.shape[2:])


def _gather(x: Tensor, blocks: Tensor) -> Tensor:
    """Blocks [R, m] of x [B, blocks, H, c, D], joined for each row: [B · R, H, m · c, D]"""
    found = _select(x, blocks.flatten())
    return found.view(x.shape[0] * blocks.shape[0], -1, *found.shape[1:]).transpose(1, 2).flatten(2, 3)
