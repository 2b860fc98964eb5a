"""Banded attention: scaled_dot_product_attention over the visible blocks alone.

A window of w tokens leaves a band of the attention matrix; computing all of it and masking most of it costs N² all the
same. Here the queries are cut into blocks, and each block is given only the key blocks that it can see:

    keys     [ 0 | 1 | 2 | 3 | 4 | 5 ]
    query 0    ■                          blocks with as many keys form a group, which is one call of
    query 1    ■   ■                      scaled_dot_product_attention: [B · rows, H, c, D] queries and
    query 2    ■   ■   ■                  [B · rows, H, m · c, D] keys of m blocks
    query 3        ■   ■   ■
    query 4            ■   ■   ■          c · m · c scores per row: O(N · w) in time and memory

Which blocks are visible is known from the bounds of the mask (`regard.nn.blocks`); inside a block the predicate
decides. Where the mask depends on distances alone, the rows in the middle of the band share one mask. Tokens of a
dilated window are rearranged first, so that those that attend to each other are neighbours. Values and gradients are
those of dense attention, with biases and attention dropout, on any device (Beltagy et al. 2020, section 3.1: "chunks").
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.blocks import cut
from regard.nn.mask import AttentionMask, Token, causal
from regard.nn.position import Bias

LONG = 512  # keys from which on masked blocks are skipped


@dataclass
class Group:
    """Query blocks that see as many key blocks: one call of scaled_dot_product_attention."""

    rows: Tensor  # [R] query blocks
    keys: Tensor  # [R, m] key blocks of each
    queries: Tensor  # [R, c] indices of the queries
    tokens: Tensor  # [R, m · c] indices of the keys
    visible: Tensor  # bool [B|1, R, c, m · c]; one row if `shared`
    shared: bool
    added: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def additive(self, dtype: torch.dtype, batch: int) -> Tensor:
        """[B · R | R | 1, 1, c, m · c], 0 for visible pairs and -inf for others."""
        if dtype not in self.added:
            visible = self.visible
            if visible.shape[0] < batch and visible.shape[1] > 1:
                visible = visible.expand(batch, -1, -1, -1)
            flat = visible.flatten(0, 1)[:, None]
            self.added[dtype] = torch.zeros_like(flat, dtype=dtype).masked_fill(~flat, float("-inf"))
        return self.added[dtype]


@dataclass
class Plan:
    size: int  # c, the tokens of a block
    groups: list[Group]
    back: Tensor  # [blocks] where each query block is in the concatenated groups
    order: Tensor | None  # of the tokens, if they are rearranged
    undo: Tensor | None


def make_plan(attention_mask: AttentionMask, size: int) -> Plan:
    """Which blocks of `size` tokens to compute, and their masks; it reads tensors, and serves all layers."""
    rearranged = attention_mask.rearranged()
    order = None if rearranged is None else rearranged.order
    own = attention_mask if rearranged is None else rearranged
    lengths = own.q.length, own.k.length
    rows, columns = (-(-length // size) for length in lengths)
    some = own.bounds(size)[0].any(dim=0).expand(rows, columns).cpu()  # for any row of the batch
    seen = [row.nonzero().flatten().tolist() for row in some]
    offsets = _offsets(own, size)
    groups: list[Group] = []
    alike: dict[tuple[int, ...], list[int]] = {}
    if offsets is not None:
        q_first, k_first = offsets
        for row, keys in enumerate(seen):
            if q_first[row] is not None and all(k_first[key] is not None for key in keys):
                alike.setdefault(tuple(q_first[row] - k_first[key] for key in keys), []).append(row)
    single = set(range(rows))
    for together in alike.values():
        if len(together) > 3 and seen[together[0]]:
            groups.append(_group(own, size, together, [seen[row] for row in together], shared=True))
            single -= {*together}
    for together in _buckets({row: max(1, len(seen[row])) for row in sorted(single)}):
        groups.append(_group(own, size, together, [seen[row] for row in together], shared=False))
    back = torch.cat([group.rows for group in groups]).argsort()
    return Plan(size, groups, back, order, None if order is None else order.argsort())


def _offsets(own: AttentionMask, size: int) -> tuple[list[int | None], list[int | None]] | None:
    """The first position of each block whose positions have the same step; None for others, and where it is no help."""
    if not own.mask.relative or max(own.mask.rows, own.q.rows, own.k.rows) > 1:
        return None
    step = own.mask.dilation if own.order is not None else 1
    sides = []
    for side in (own.q, own.k):
        pos = cut(side.pos, size)[0]  # [blocks, size]; an incomplete block repeats a position, so its step is not even
        even = (pos.diff(dim=-1) == step).all(dim=-1).tolist()
        sides.append([first if is_even else None for first, is_even in zip(pos[:, 0].tolist(), even, strict=True)])
    return sides[0], sides[1]


def _buckets(counts: dict[int, int]) -> list[list[int]]:
    """Rows by their number of key blocks; padding to the largest number of a bucket adds little work."""
    buckets: list[list[int]] = []
    for row in sorted(counts, key=lambda row: counts[row]):
        if buckets:
            least = sum(counts[other] for other in buckets[-1])  # of the bucket without padding
            if counts[row] * (len(buckets[-1]) + 1) <= max(1.25 * (least + counts[row]), 16):
                buckets[-1].append(row)
                continue
        buckets.append([row])
    return buckets


def _group(own: AttentionMask, size: int, rows: list[int], seen: list[list[int]], shared: bool) -> Group:
    device, most = own.q.pos.device, max(1, *map(len, seen))
    keys = torch.tensor([[*blocks, *[-1] * (most - len(blocks))] for blocks in seen], device=device)  # -1: none
    block = torch.tensor(rows, device=device)
    inside = torch.arange(size, device=device)
    queries = block[:, None] * size + inside  # [R, c]
    tokens = (keys[:, :, None] * size + inside).flatten(1)  # [R, m · c]
    exists = (tokens >= 0) & (tokens < own.k.length)
    queries, tokens = queries.clamp_max(own.q.length - 1), tokens.clamp(0, own.k.length - 1)
    few = slice(0, 1) if shared else slice(None)
    q = _tokens(own, True, queries[few], 3)
    k = _tokens(own, False, tokens[few], 2)
    visible = own.mask.predicate(q, k) & exists[few][None, :, None]  # [B|1, R, c, m · c]
    return Group(block, keys.clamp_min(0), queries, tokens, visible.expand(-1, -1, size, -1), shared)


def _tokens(own: AttentionMask, are_queries: bool, at: Tensor, axis: int) -> Token:
    """The queries or keys at these indices [R, n], as [B|1, R, c, 1] or [B|1, R, 1, m · c]."""
    side = own.q if are_queries else own.k
    index = own.index(side)[at][None].unsqueeze(axis)
    batch = torch.arange(max(own.mask.rows, side.rows), device=at.device).view(-1, 1, 1, 1)
    return Token(batch, index, *side.apply(lambda x: x[:, at].unsqueeze(axis)), in_blocks=True)


def prepare(attention_mask: AttentionMask, device: torch.device, dropout: float, *, allow_flex: bool) -> str:
    """How "fused" computes attention: "dense", "banded" or "flex"; makes the plan of banded attention, once.

    Banded attention reads tensors to plan, so a compiled or captured layer needs a plan that was made before it.
    """
    if attention_mask.plan is not None:
        return "banded"
    mask, is_cpu = attention_mask.mask, device.type == "cpu"
    is_causal, compiling = mask.implies(causal), torch.compiler.is_compiling()
    if attention_mask.kind != "other" or torch.compiler.is_exporting() or (compiling and is_cpu):
        return "dense"
    if mask.reach is None and not (is_causal and is_cpu):
        return "dense"
    queries, keys = attention_mask.q.length, attention_mask.k.length
    reach = (2 * keys if mask.reach is None else mask.reach) // (2 if is_causal else 1)
    size = 1 << min(9, max(6, (reach // 2).bit_length() - 1))  # 64 to 512
    if min(queries, keys) < (LONG if mask.reach is not None else 4 * LONG):
        return "dense"
    if not is_causal and reach + size > 0.75 * keys:
        return "dense"
    if device.type == "cuda" and allow_flex and not dropout and mask.dilation == 1:
        return "flex"
    if compiling or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return "dense"
    attention_mask.plan = make_plan(attention_mask, size)
    return "banded"


def flex_can(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether FlexAttention has kernels for this type and these sizes of keys and values."""
    return dtype != torch.float64 and min(sizes) >= 16


def attend_banded(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, *, bias: Bias | None, scale: float | None, dropout: float
) -> Tensor:
    """q [B, H, Nq, D], k [B, Hkv, Nk, D], v [B, Hkv, Nk, Dv] -> [B, H, Nq, Dv]"""
    batch, heads, length = q.shape[:3]
    grouped = heads != k.shape[1]
    at = None if bias is None else bias.at(q)
    q, k, v = (_cut(x, plan) for x in (q, k, v))  # [B, blocks, H, c, D]
    outputs = []
    for group in plan.groups:
        queries = _select(q, group.rows)  # [B · R, H, c, D]
        keys, values = (_gather(x, group.keys) for x in (k, v))  # [B · R, H, m · c, D]
        mask = group.additive(q.dtype, batch)
        if bias is not None and at is not None:
            few = slice(0, 1) if group.shared and bias.relative else slice(None)
            rows = 1 if not bias.content and max(bias.q_pos.shape[0], bias.k_pos.shape[0]) == 1 else batch
            i, j = group.queries[few], group.tokens[few]
            if plan.order is not None:
                i, j = plan.order[i], plan.order[j]
            b = torch.arange(rows, device=q.device).view(-1, 1, 1, 1, 1)
            h = torch.arange(bias.heads, device=q.device).view(-1, 1, 1)
            added = at(b, h, i[None, :, None, :, None], j[None, :, None, None, :]).to(q.dtype)  # [B|1, R|1, H, c, m·c]
            if added.shape[1] > 1:
                added = added.expand(batch, -1, -1, -1, -1)
            mask = added.flatten(0, 1) + mask
        out = F.scaled_dot_product_attention(
            queries, keys, values, mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
        outputs.append(out.view(batch, -1, *out.shape[1:]))  # [B, R, H, c, Dv]
    whole = _select(torch.cat(outputs, dim=1), plan.back)
    whole = whole.view(batch, -1, *whole.shape[1:])  # [B, blocks, H, c, Dv]
    whole = whole.transpose(1, 2).flatten(2, 3)[:, :, :length]
    return whole if plan.undo is None else whole.index_select(2, plan.undo)


def _cut(x: Tensor, plan: Plan) -> Tensor:
    """[B, H, N, D] -> [B, blocks, H, c, D], contiguous"""
    if plan.order is not None:
        x = x.index_select(2, plan.order)
    missing = -x.shape[2] % plan.size
    if missing:
        x = F.pad(x, (0, 0, 0, missing))
    return x.view(*x.shape[:2], -1, plan.size, x.shape[3]).transpose(1, 2).contiguous()


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
