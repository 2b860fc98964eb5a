"""Causal sums in chunks of C tokens: matmuls within a chunk, and a state from one to the next.

    out_i = Σ_{j ≤ i} (q_i · k_j) v_j        S_c = S_{c-1} + K_cᵀ V_c        chunk c of queries Q, keys K, values V

    out_c = tril(Q_c K_cᵀ) V_c + Q_c S_{c-1}       O(N · C) for the first part, O(N · F) for the second

    Q [chunks, B, G, R · C, F]   K [chunks, B, G, C, F]   V [chunks, B, G, C, E]   S [chunks + 1, B, G, F, E]

With gates, S_t = diag(α_t) S_{t-1} + k_t v_tᵀ, the product of a query and a key is Σ_f q_f k_f exp(a_i - a_j)_f, where
a is the sum of log α from the beginning of the chunk. Relative to m, its value in the middle, exp(a_i - m) and
exp(m - a_j) are finite for all tokens of a chunk, so they are factors of q and k. The sums are those of above, except
that a state is multiplied by a decay between chunks (Yang et al. 2024, section 4.2).

Autograd would store every intermediate tensor, and read and write the states of all chunks several times. So the
backward pass is written out. It computes the weights tril(Q Kᵀ) again, and the recurrence from the end:

    dS_{c-1} = Q_cᵀ dout_c + dS_c,   dQ_c = tril(dout_c V_cᵀ) K_c + dout_c S_{c-1}ᵀ,   dK_c, dV_c likewise with dS_c
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

STRONGEST = -4.0  # log α: at most 16 gates lie between a token and the middle of its chunk, and exp(16 · 4) is finite
Gradients = tuple[Tensor | None, ...]


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


class Packed(NamedTuple):
    """Several documents in a row: which tokens of a chunk, and which states, belong together."""

    number: Tensor  # [chunks, B, G|1, C, 1]: the document of each token
    earlier: Tensor  # [chunks, B, G|1, C, 1]: it is that of the state before the chunk
    last: Tensor  # [chunks, B, G|1, C, 1]: it is that of the state after the chunk, the document of the last token
    same: Tensor  # [chunks, B, G|1, 1, 1]: both states are of the same document

    @staticmethod
    def of(document: Tensor, size: int, *, backwards: bool = False) -> Packed:
        """With `backwards`, the state before a chunk is that of later tokens."""
        number = to_chunks(F.pad(document.long(), (0, 0, 0, -document.shape[-2] % size), value=-1), size)
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


def refuse_second_derivative() -> None:
    """In a backward pass that is written out: with `create_graph`, the gradient would have none itself, silently."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError("linear attention has no second derivative: remove create_graph, or use mixer = 'full'")


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
        refuse_second_derivative()
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
        refuse_second_derivative()
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

    On a CPU in a loop. Elsewhere each operation is a kernel to start, so n states are √n blocks of √n: the loop runs
    first within all blocks at once, then over the blocks, to which it adds the last state of the one before.
    """
    others, before = (states[:-1], states[-1]) if backwards else (states[1:], states[0])
    count, step = len(others), -1 if backwards else 1
    size, on_cpu = 1, states.device.type == "cpu" and not torch.compiler.is_compiling()
    while not on_cpu and (size + 1) ** 2 <= count:  # Dynamo does not know math.isqrt
        size += 1
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
