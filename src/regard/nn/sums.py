"""The sums over keys of linear attention: of all earlier tokens, of one more token, or of all tokens of a text.

    out_i = Σ_j φ(q_i) · φ(k_j) v_j / Σ_j φ(q_i) · φ(k_j)       the denominator is the sum with v = 1: one more column

    q [B, G, R, N, D]   k [B, G, 1, N, D]   v [B, G, 1, N, Dv]   ->   [B, G, R, N, Dv]        R queries share a key

Features may be exponentials that would overflow (Performer). They are computed relative to the largest one, a scale
that cancels in the quotient if all keys of a sum have the same: that of a chunk and what came before it, or of a text.
How sums over earlier tokens are computed is in `regard.nn.chunks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.chunks import ChunkedSum, Gated, Packed, from_chunks, refuse_second_derivative, to_chunks
from regard.nn.config import chunk_size

SEGMENT = 2048  # tokens that a CPU computes at once: the memory of larger tensors would be returned and taken each time
START = -1e4  # the logarithm of the scale of an empty state
State = tuple[Tensor, Tensor]  # S [B, G, 1, F, E], and the logarithm of its scale [B, G, 1, 1, 1]


@dataclass(frozen=True)
class Features:
    """φ for queries and for keys; with `added`, φ(k) = exp(of_k(k) + added(k)), which would overflow."""

    of_q: Callable[[Tensor], Tensor]  # […, D] -> […, F]
    of_k: Callable[[Tensor], Tensor]
    added: Callable[[Tensor], Tensor] | None = None  # […, D] -> […, 1]

    def keys(self, k: Tensor, is_real: Tensor | None, scale_of: Callable[[Tensor], Tensor]) -> Tensor:
        """φ(k), 0 where a key is not `is_real` […, 1].

        With `added` relative to exp(scale_of(largest)), where `largest` […, 1] is the logarithm of the largest feature
        of each key. Keys that are summed up must have the same scale, which then cancels in a quotient.
        """
        products = self.of_k(k)
        if self.added is None:
            return products if is_real is None else torch.where(is_real, products, 0.0)
        added = self.added(k)
        if is_real is not None:
            added = torch.where(is_real, added, -math.inf)
        largest = products.detach().amax(dim=-1, keepdim=True) + added.detach()
        return (products + (added - scale_of(largest))).exp_()


def causal_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    features: Features | None = None,
    log_gate: Tensor | None = None,
    is_real: Tensor | None = None,
    document: Tensor | None = None,
    state: State | None = None,
) -> tuple[Tensor, State]:
    """Σ_{j ≤ i} (q_i · k_j, times the gates after j) v_j, and the state after the last token.

    q [B, G, R, N, D], k and log_gate [B, G, 1, N, D], v [B, G, 1, N, Dv] -> [B, G, R, N, Dv]: R queries share a key.
    No gate may be stronger than STRONGEST. With `features`, φ(q_i) · φ(k_j) instead, divided by their sum over j. Keys
    that are not `is_real`, or of another `document` [B, G|1, 1, N, 1] each, add nothing. Computed in 32 bits or more.
    """
    if q.shape[-2] == 1 and state is not None:
        return one_token(q, k, v, features, log_gate, is_real, state)
    parts = [(q, k, v, log_gate, is_real)]
    if q.device.type == "cpu" and q.shape[-2] > SEGMENT and document is None and not torch.compiler.is_compiling():
        few = [[None] * -(-q.shape[-2] // SEGMENT) if x is None else torch.split(x, SEGMENT, dim=-2) for x in parts[0]]
        parts = list(zip(*few, strict=True))
    outputs = []
    for part in parts:
        out, state = _causal_sum(*part, features, document, state)
        outputs.append(out)
    assert state is not None
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2), state


def one_token(
    q: Tensor, k: Tensor, v: Tensor, features: Features | None, log_gate: Tensor | None, is_real: Tensor | None,
    state: State,
) -> tuple[Tensor, State]:  # fmt: skip
    """`causal_sum` of the next token: the recurrence itself, S ← diag(α) S + k vᵀ and out = qᵀ S."""
    exact, dtype = torch.promote_types(q.dtype, torch.float32), q.dtype
    q, k, v = q.to(exact), k.to(exact), v.to(exact) if features is None else with_ones(v, exact)
    before = scale = state[1]
    if features is not None:

        def scale_of(largest: Tensor) -> Tensor:
            nonlocal scale
            scale = torch.maximum(largest, before)
            return scale

        q, k = features.of_q(q), features.keys(k, is_real, scale_of)
    elif is_real is not None:
        k = torch.where(is_real, k, 0.0)
    decay = (before - scale).exp()
    if log_gate is not None:
        decay = log_gate.to(exact).exp().mT  # [B, G, 1, F, 1]
        decay = decay if is_real is None else torch.where(is_real, decay, 1.0)
    total = torch.addcmul(k.mT @ v, state[0], decay)
    sums = q @ total
    return (sums if features is None else quotient(sums)).to(dtype), (total, scale)


def _causal_sum(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor | None, is_real: Tensor | None, features: Features | None,
    document: Tensor | None, state: State | None,
) -> tuple[Tensor, State]:  # fmt: skip
    (_, _, reads, count, _), dtype = q.shape, q.dtype
    size = chunk_size(count, is_gated=log_gate is not None)
    exact = torch.promote_types(dtype, torch.float32)  # sums over many tokens
    q, k = to_chunks(q, size, exact), to_chunks(k, size, exact)
    v = to_chunks(v, size)
    if is_real is None and count % size and features is not None:
        is_real = torch.ones(1, 1, 1, count, 1, dtype=torch.bool, device=q.device)
    is_real = None if is_real is None else to_chunks(is_real, size)
    packed = None if document is None else Packed.of(document, size)
    first = None if state is None else state[0][:, :, 0]
    scale = q.new_full((*k.shape[1:3], 1, 1), START) if state is None else state[1][:, :, 0]
    log_decay: Tensor | None = None  # of the state, from each chunk to the next one
    if features is None:
        k, v = k if is_real is None else torch.where(is_real, k, 0.0), v.to(exact).contiguous()
    else:
        q, v = features.of_q(q), with_ones(v, exact)
        scales = Scales(scale, packed)
        k = features.keys(k, is_real, scales.of)
        if features.added is not None:
            log_decay, scale = scales.log_decay, scales.last
            first = None if first is None else first * scales.before.exp()
    if log_gate is not None:
        gates = to_chunks(log_gate, size, exact)
        gates = gates if is_real is None else torch.where(is_real, gates, 0.0)
        q, k, middle, total = Gated.apply(q, k, gates)  # type: ignore[no-untyped-call]
        log_decay = F.pad(middle[1:], (0, 0, 0, 0, 0, 0, 0, 1)) + total - middle  # to the middle of the next one
        log_decay = log_decay[..., None]
        first = None if first is None else first * middle[0].exp()[..., None]
    masks: Any = [None] * 4
    if packed is not None:
        others = packed.others
        masks = [(others | torch.ones_like(others[:1, :1, :1]).triu(1))[:, :, :, None], *packed.masks(reads)]
    out, last = ChunkedSum.apply(q, k, v, log_decay, first, *masks)  # type: ignore[no-untyped-call]
    out = from_chunks(out if features is None else quotient(out), reads, count, dtype)
    return out, (last[:, :, None], scale[:, :, None])


def packed_sum(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    """Σ_j (q_i · k_j) v_j over all keys of the same document, before and after the query; shapes as in `causal_sum`."""
    (_, _, reads, count, _), size = q.shape, chunk_size(q.shape[-2], is_gated=False)
    parts = [to_chunks(x, size).contiguous() for x in (q, k, v)]
    before, after = Packed.of(document, size), Packed.of(document, size, backwards=True)
    others = before.others[:, :, :, None]
    out, _ = ChunkedSum.apply(*parts, None, None, others, *before.masks(reads))  # type: ignore[no-untyped-call]
    later, _ = ChunkedSum.apply(*parts, None, None, None, *after.masks(reads), True)  # type: ignore[no-untyped-call]
    return from_chunks(out + later, reads, count, out.dtype)


def with_ones(v: Tensor, dtype: torch.dtype) -> Tensor:
    """[…, Dv] -> […, Dv + 1]: the sum of the weights, by which `quotient` divides, is one more column."""
    return torch.cat((v, v.new_ones(1, dtype=dtype).expand(*v.shape[:-1], 1)), dim=-1)


def quotient(sums: Tensor) -> Tensor:
    """[…, E] -> […, E - 1], divided by the last column; 0 / 0 is 0."""
    return Quotient.apply(sums)  # type: ignore[no-any-return, no-untyped-call]


class Quotient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor) -> Tensor:
        divisor = sums[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny)
        out = sums[..., :-1] / divisor
        ctx.save_for_backward(out, divisor)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        refuse_second_derivative()
        out, divisor = ctx.saved_tensors
        is_empty = divisor <= torch.finfo(divisor.dtype).tiny
        of_out = torch.where(is_empty, 0.0, gradients[0] / divisor)
        return torch.cat((of_out, -(of_out * out).sum(dim=-1, keepdim=True)), dim=-1)


class Scales:
    """The logarithms of the scales of keys: the largest of their text up to the end of each chunk, at least `start`."""

    def __init__(self, start: Tensor, packed: Packed | None) -> None:
        self.start, self.packed = start, packed  # start [B, G, 1, 1]

    def of(self, largest: Tensor) -> Tensor:
        """[chunks, B, G, C, 1] -> the scales [chunks, B, G, C|1, 1]; also sets those of states."""
        if self.packed is None:
            scales = ends = torch.maximum(largest.amax(dim=-2, keepdim=True).cummax(dim=0).values, self.start)
        else:
            inside = largest.mT.masked_fill(self.packed.others, -math.inf).amax(dim=-1, keepdim=True)
            inside = torch.maximum(inside, self.start)
            ends = running_maximum(inside[..., -1:, :], self.packed.same)
            before = torch.cat((self.start[None], ends[:-1]))
            scales = torch.where(self.packed.earlier, torch.maximum(inside, before), inside)
        begins = scales[..., :1, :]
        # from the scale of each state to that of the next chunk, if its first token is of the same text
        self.log_decay = ends - torch.cat((begins[1:], ends[-1:]))
        if self.packed is not None:
            self.log_decay[:-1].masked_fill_(~self.packed.earlier[1:, ..., :1, :], 0.0)
        self.before, self.last = self.start - begins[0], ends[-1]
        return scales


def running_maximum(values: Tensor, continues: Tensor) -> Tensor:
    """The maximum along dimension 0 since the last element that does not continue, in log₂ steps (Hillis & Steele)."""
    step = 1
    while step < len(values):
        before = torch.maximum(values[step:], values[:-step])
        values = torch.cat((values[:step], torch.where(continues[step:], before, values[step:])))
        continues = torch.cat((continues[:step], continues[step:] & continues[:-step]))
        step *= 2
    return values
