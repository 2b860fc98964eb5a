"""Causal sums of linear attention in chunks of C tokens: matmuls within a chunk, and a state from one to the next.

    out_i = Σ_{j ≤ i} (q_i · k_j) v_j        S_c = S_{c-1} + K_cᵀ V_c        chunk c of queries Q, keys K, values V

    out_c = tril(Q_c K_cᵀ) V_c + Q_c S_{c-1}       O(N · C) for the first part, O(N · F) for the second

    Q [chunks, B, G, R · C, F]   K [chunks, B, G, C, F]   V [chunks, B, G, C, E]   S [chunks + 1, B, G, F, E]

With gates, S_t = diag(α_t) S_{t-1} + k_t v_tᵀ, the product of a query and a key is Σ_f q_f k_f exp(a_i - a_j)_f, where
a is the sum of log α from the beginning of the chunk. Relative to m, its value in the middle, exp(a_i - m) and
exp(m - a_j) are finite for all tokens of a chunk, so they are factors of q and k. The sums are those of above, except
that a state is multiplied by a decay between chunks (Yang et al. 2024, section 4.2). A decay also keeps the states of a
Performer, whose keys are exponentials, relative to the largest key so far.

Autograd would store every intermediate tensor, and read and write the states of all chunks several times. So the
backward pass is written out. It computes the weights tril(Q Kᵀ) again, and the recurrence from the end:

    dS_{c-1} = Q_cᵀ dout_c + dS_c,   dQ_c = tril(dout_c V_cᵀ) K_c + dout_c S_{c-1}ᵀ,   dK_c, dV_c likewise with dS_c
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.config import chunk_size

STRONGEST = -4.0  # log α: at most 16 gates lie between a token and the middle of its chunk, and exp(16 · 4) is finite
SEGMENT = 2048  # tokens that a CPU computes at once: the memory of larger tensors would be returned and taken each time
START = -1e4  # the logarithm of the scale of an empty state
State = tuple[Tensor, Tensor]  # S [B, G, 1, F, E], and the logarithm of its scale [B, G, 1, 1, 1]
Gradients = tuple[Tensor | None, ...]


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


def to_chunks(x: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """[B, G, R, N, D] -> [chunks, B, G, R · size, D], 0 after the end."""
    if missing := -x.shape[-2] % size:
        x = F.pad(x, (0, 0, 0, missing))
    tokens = x.permute(0, 3, 1, 2, 4)  # as a layer has them: the backward pass copies once
    parts = torch.unflatten(tokens, 1, (-1, size)).permute(1, 0, 3, 4, 2, 5)
    return (parts if dtype is None else parts.to(dtype, memory_format=torch.contiguous_format)).flatten(3, 4)


def from_chunks(out: Tensor, reads: int, count: int, dtype: torch.dtype) -> Tensor:
    """[chunks, B, G, R · C, Dv] -> [B, G, R, N, Dv]"""
    out = torch.unflatten(out, 3, (reads, -1)).permute(1, 0, 4, 2, 3, 5)  # [B, chunks, C, G, R, Dv]
    out = out.to(dtype, memory_format=torch.contiguous_format).flatten(1, 2)[:, :count]
    return out.permute(0, 2, 3, 1, 4)


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
        out, divisor = ctx.saved_tensors
        of_out = gradients[0] / divisor
        return torch.cat((of_out, -torch.linalg.vecdot(of_out, out)[..., None]), dim=-1)


class Packed(NamedTuple):
    """Several documents in a row: which tokens of a chunk, and which states, belong together."""

    number: Tensor  # [chunks, B, G|1, C, 1]: the document of each token
    earlier: Tensor  # [chunks, B, G|1, C, 1]: it is that of the state before the chunk
    last: Tensor  # [chunks, B, G|1, C, 1]: it is that of the state after the chunk, the document of the last token
    same: Tensor  # [chunks, B, G|1, 1, 1]: both states are of the same document

    @staticmethod
    def of(document: Tensor, size: int, *, backwards: bool = False) -> Packed:
        """With `backwards`, the state before a chunk is that of later tokens."""
        number = to_chunks(F.pad(document, (0, 0, 0, -document.shape[-2] % size), value=-1), size)
        end = number[..., :1, :] if backwards else number[..., -1:, :]
        # there is no state before the first chunk
        before = torch.cat((end[1:], end[-1:])) if backwards else torch.cat((end[:1], end[:-1]))
        return Packed(number, number == before, number == end, end == before)

    @property
    def others(self) -> Tensor:
        """[chunks, B, G|1, C, C]: pairs of different documents."""
        return self.number != self.number.mT

    def masks(self, reads: int) -> tuple[Tensor, ...]:
        """`earlier` of R · C queries, `last` and `same`."""
        return self.earlier.repeat(1, 1, 1, reads, 1), self.last, self.same


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


class Gated(torch.autograd.Function):
    """q exp(a - m), k exp(m - a), m and the total of a chunk, for the sums a of log α [chunks, B, G, C, F]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, log_gate: Tensor) -> tuple[Tensor, ...]:
        sums = log_gate.cumsum(dim=-2)
        middle, total = sums[..., sums.shape[-2] // 2, :].clone(), sums[..., -1, :].clone()
        factor = sums.sub_(middle[..., None, :]).exp_()
        q, k = (_reads(q, factor) * factor[:, :, :, None]).flatten(3, 4), k / factor
        ctx.save_for_backward(q, k, factor)
        return q, k, middle, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        q, k, factor = ctx.saved_tensors
        of_q, of_k, of_middle, of_total = gradients
        of_sums = (_reads(q, factor) * _reads(of_q, factor)).sum(dim=3).addcmul_(k, of_k, value=-1)
        middle = factor.shape[-2] // 2
        of_sums[..., middle, :] += of_middle - of_sums.sum(dim=-2)
        of_sums[..., -1, :] += of_total
        of_gate = of_sums.flip(-2).cumsum(dim=-2).flip(-2)
        return (_reads(of_q, factor) * factor[:, :, :, None]).flatten(3, 4), of_k / factor, of_gate


def _reads(q: Tensor, one: Tensor) -> Tensor:
    """[chunks, B, G, R · C, F] -> [chunks, B, G, R, C, F], where `one` has C tokens."""
    return torch.unflatten(q, 3, (-1, one.shape[3]))


class ChunkedSum(torch.autograd.Function):
    """tril(Q Kᵀ) V + Q S of all chunks, and the last state, from the state `first` [B, G, F, E] or 0.

    log_decay [chunks, B, G, F|1, 1] or None: what a state, with the keys of the chunk, is multiplied by after it. With
    `backwards`, S is the sum over later chunks, and the output is Q S alone.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, first: Tensor | None,
        hidden: Tensor | None, earlier: Tensor | None, last: Tensor | None, same: Tensor | None,
        backwards: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        half = None if log_decay is None else (log_decay / 2).exp()
        states = q.new_empty(len(q) + 1, *k.shape[1:3], k.shape[-1], v.shape[-1])
        before, after = _sides(states, backwards)
        states[-1 if backwards else 0] = 0.0 if first is None else first
        torch.bmm(_flat(k).mT, _flat(_times(v, last)), out=_flat(after))
        if half is not None:
            decay_(after, half)
        accumulate(states, _kept(half, same, q.dtype), backwards=backwards)
        out = torch.bmm(_flat(_times(q, earlier)), _flat(before))
        if not backwards:
            _add_product(out, _weights(q, k, hidden), _flat(v))
        ctx.save_for_backward(q, k, v, half, states, hidden, earlier, last, same)
        ctx.backwards = backwards
        ctx.set_materialize_grads(False)
        return out.view(*q.shape[:-1], -1), states[0 if backwards else -1].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        q, k, v, half, states, hidden, earlier, last, same = ctx.saved_tensors
        (out, end), backwards = gradients, ctx.backwards
        out = q.new_zeros(*q.shape[:-1], v.shape[-1]) if out is None else out.contiguous()
        of_states = torch.empty_like(states)
        (before, after), (of_before, of_after) = _sides(states, backwards), _sides(of_states, backwards)
        of_states[0 if backwards else -1] = 0.0 if end is None else end
        of_decay = of_first = None
        with torch.autocast(q.device.type, enabled=False):
            of_earlier = _flat(_times(out, earlier))
            torch.bmm(_flat(q).mT, of_earlier, out=_flat(of_before))
            accumulate(of_states, _kept(half, same, q.dtype), backwards=not backwards)
            if ctx.needs_input_grad[4]:
                of_first = of_states[-1 if backwards else 0].clone()
            if ctx.needs_input_grad[3]:
                of_decay = (of_after * after).sum(dim=-1, keepdim=True).sum_to_size(half.shape)
            of_updates = _flat(of_after if half is None else decay_(of_after, half))
            of_q = torch.bmm(of_earlier, _flat(before).mT)
            of_k = torch.bmm(_flat(_times(v, last)), of_updates.mT)
            of_v = torch.bmm(_flat(_times(k, last)), of_updates)
            if not backwards:
                of_weights = _weights(out, v, hidden)
                _add_product(of_q, of_weights, _flat(k))
                _add_product(of_k, of_weights.mT, _flat(q))
                _add_product(of_v, _weights(q, k, hidden).mT, _flat(out))
        return of_q.view_as(q), of_k.view_as(k), of_v.view_as(v), of_decay, of_first, *[None] * 5


def _sides(states: Tensor, backwards: bool) -> tuple[Tensor, Tensor]:
    """The states before and after each chunk."""
    return (states[1:], states[:-1]) if backwards else (states[:-1], states[1:])


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, 2)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """In place; PyTorch's counter of FLOPs does not know `baddbmm_`."""
    return torch.baddbmm(total, left, right, out=total)


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def decay_(states: Tensor, half: Tensor) -> Tensor:
    """Times half². With gates in two steps: half² may be 0 in 32 bits where its product with k exp(m - a) is not."""
    return states.mul_(half).mul_(half) if half.shape[-2] > 1 else states.mul_(half.square())


def _kept(half: Tensor | None, same: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The part of a state that is left in the next one."""
    decay = None if half is None else half.square()
    return decay if same is None else same.to(dtype) if decay is None else decay * same


def _weights(rows: Tensor, columns: Tensor, hidden: Tensor | None) -> Tensor:
    """The products of visible pairs [chunks · B · G, R · C, C]; those of hidden ones may be infinite before."""
    weights = torch.bmm(_flat(rows), _flat(columns).mT)
    if hidden is None:
        torch.unflatten(weights, 1, (-1, columns.shape[3])).tril_()
    else:
        weights.view(*rows.shape[:3], -1, columns.shape[3], columns.shape[3]).masked_fill_(hidden, 0.0)
    return weights


def accumulate(states: Tensor, decay: Tensor | None, *, backwards: bool = False) -> None:
    """In place, s[c + 1] += decay[c] · s[c] for c = 0, 1, …; backwards, s[c] += decay[c] · s[c + 1] for c = …, 1, 0.

    On a CPU in a loop. Elsewhere every operation has a price, so n states are √n blocks of √n: the loop runs first
    within all blocks at once, then over the blocks, to which it adds the last state of the one before.
    """
    others, before = (states[:-1], states[-1]) if backwards else (states[1:], states[0])
    count, step = len(others), -1 if backwards else 1
    size = 1 if states.device.type == "cpu" and not torch.compiler.is_compiling() else max(1, math.isqrt(count))
    if decay is None:
        if size > 1:
            states.copy_(states.flip(0).cumsum(dim=0).flip(0)) if backwards else states.cumsum_(dim=0)
            return
        decay = states.new_ones(1).expand(count, *[1] * (states.dim() - 1))
    rest = count % size
    whole = slice(rest, None) if backwards else slice(0, count - rest)
    blocks, factors = (torch.unflatten(x[whole], 0, (-1, size)) for x in (others, decay))
    inside = range(size)[::step]
    for last, i in pairwise(inside):
        blocks[:, i].addcmul_(factors[:, i], blocks[:, last])
    factors = factors.flip(1).cumprod(dim=1).flip(1) if backwards else factors.cumprod(dim=1)
    for i in range(len(blocks))[::step]:
        before = blocks[i].addcmul_(factors[i], before)[inside[-1]]
    for i in range(count)[::step][count - rest :]:
        before = others[i].addcmul_(decay[i], before)
