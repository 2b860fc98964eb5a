"""Linear attention: the sum over the keys is a matrix of fixed size, so that time grows with N instead of N².

Attention compares each query with each key. If the comparison is a product of features, φ(q)ᵀ φ(k), the sum over the
keys does not depend on the query and is computed once:

    out_i = Σ_j φ(q_i)ᵀφ(k_j) v_j / Σ_j φ(q_i)ᵀφ(k_j)  =  φ(q_i)ᵀ S / φ(q_i)ᵀ z,    S = Σ_j φ(k_j) v_jᵀ,  z = Σ_j φ(k_j)

    linear        φ(x) = elu(x) + 1                                                Katharopoulos et al. 2020
    performer     φ_m(x) = exp(ω_m · x - |x|² / 2) / sqrt(M), ω_m ~ N(0, I)        Choromanski et al. 2021
                  E[φ(q)ᵀ φ(k)] = exp(q · k): softmax attention, up to an error of order 1 / sqrt(M)
    gated-linear  S_t = diag(α_t) S_{t-1} + k_t v_tᵀ,  out_t = q_tᵀ S_t,  α = σ(W₂ W₁ x + b)^(1/16)
                  out = W_o (norm(out_t) ⊙ silu(W_r x)): forgets by content        Yang et al. 2024

    x [B, N, dim]   q [B, H, N, F]   k [B, Hkv, N, F]   v [B, Hkv, N, Dv]   S [B, Hkv, F, Dv]   F: features

In a decoder S is a state that each token adds to: a recurrent network whose memory does not grow with the text. In
training, chunks of C tokens are computed in parallel: within a chunk by a C x C matrix as in attention, and from
earlier chunks by their sum S. An encoder sums over all keys; with gates, half of its heads read from left to right and
half from right to left. z is S with v = 1, so it is one more column of v. Padding has φ(k) = 0 and α = 1; the state of
a packed row starts at 0 in every document.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.config import CHUNK, PART, RANK, StackConfig
from regard.nn.mask import AttentionMask
from regard.nn.multihead import Context
from regard.nn.norm import RMSNorm
from regard.nn.position import rotate
from regard.nn.texts import Texts
from regard.nn.trace import Traceable

STRONGEST = -4.0  # log α: at most 8 gates lie between a token and its reference, and exp(2 · 8 · 4) is finite
SEGMENT = 2048  # tokens that a CPU computes at once: the memory of larger tensors would be returned and taken each time
START = -1e4  # the logarithm of the scale of an empty state
State = tuple[Tensor, Tensor]  # S [B, Hkv, 1, F, Dv], and the logarithm of its scale [B, Hkv, 1, 1, 1]


def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1, which is positive."""
    return F.elu(x) + 1


def random_exponents(x: Tensor, features: Tensor) -> Tensor:
    """ω_m · x - |x|² / 2, the logarithm of the positive random features; x […, D], features [M, D] -> […, M]."""
    return x @ features.T - x.square().sum(dim=-1, keepdim=True) / 2


def orthogonal_features(count: int, dim: int, seed: int) -> Tensor:
    """Random vectors [count, dim], N(0, I) each, orthogonal in blocks of `dim`: that makes the error smaller."""
    source, device = torch.Generator().manual_seed(seed), "cpu"  # a model on another device has the same ones
    square = [torch.randn(dim, dim, generator=source, device=device) for _ in range(-(-count // dim))]
    lengths: Tensor = torch.randn(count, dim, generator=source, device=device).norm(dim=1, keepdim=True)
    pairs = [torch.linalg.qr(one) for one in square]
    # the signs of R make Q uniformly distributed (Mezzadri 2007); without them the estimate would be biased
    directions = torch.cat([(q * r.diagonal().sign()).T for q, r in pairs])[:count]
    return directions * lengths


def causal_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_gate: Tensor | None = None,
    document: Tensor | None = None,
    state: State | None = None,
    k_is_log: bool = False,
) -> tuple[Tensor, State]:
    """Σ_{j ≤ i} (q_i · k_j, times the gates after j) v_j, and the state after the last token.

    q [B, G, R, N, F], k and log_gate [B, G, 1, N, F], v [B, G, 1, N, Dv] -> [B, G, R, N, Dv]: R queries share a key.
    document [B, N]: only keys of the same one. With `k_is_log`, k is given by its logarithm, and the result of each
    chunk has a scale of its own, which cancels in a quotient: exp never overflows.
    """
    count = q.shape[-2]
    size = count if count <= PART else min(CHUNK, -(-count // PART) * PART)
    q, v = _chunks(q, size), _chunks(v, size)  # […, chunks, C, F]
    k = _chunks(k, size, -math.inf if k_is_log else 0.0)
    scale = q.new_full((*k.shape[:-3], 1, 1, 1), START) if state is None else state[1][..., None, :, :]
    carried: Tensor | None = None  # how much of the state before a chunk is left in it
    if k_is_log:
        highest = torch.maximum(k.detach().amax(dim=(-2, -1), keepdim=True).cummax(dim=-3).values, scale)
        carried = torch.exp(torch.cat((scale, highest[..., :-1, :, :]), dim=-3) - highest)
        k, scale = torch.exp(k - highest), highest[..., -1:, :, :]
    decay, q_in, k_out = carried, q, k
    if log_gate is not None:
        log_gate = _chunks(log_gate.clamp_min(STRONGEST), size)
        sums = log_gate.cumsum(dim=-2)
        weights = GatedProducts.apply(q, k, sums)  # type: ignore[no-untyped-call]
        q_in, k_out = q * sums.exp(), k * (sums[..., -1:, :] - sums).exp()
        decay = sums[..., -1:, :].exp().transpose(-2, -1)  # [B, G, 1, chunks, F, 1]
    else:
        weights = q @ k.transpose(-2, -1)
    visible = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    if document is not None:
        document = F.pad(document, (0, -count % size), value=-1)
        document = document.view(document.shape[0], 1, 1, -1, size, 1)
        last = document[..., -1:, :]
        before = torch.cat((last[..., :1, :, :], last[..., :-1, :, :]), dim=-3)  # no state comes before the first chunk
        visible = visible & (document == document.transpose(-2, -1))
        k_out = k_out * (document == last)
        q_in = q_in * (document == before)
        same = (last == before).to(q.dtype)
        decay = same if decay is None else decay * same
    update = k_out.transpose(-2, -1) @ v  # [B, G, 1, chunks, F, Dv]
    first = None if state is None else state[0][..., None, :, :]
    states = scan(decay, update, first)  # after each chunk
    start = torch.zeros_like(update[..., :1, :, :]) if first is None else first
    earlier = torch.cat((start, states[..., :-1, :, :]), dim=-3)
    if carried is not None:
        earlier = earlier * carried
    out = weights.masked_fill(~visible, 0.0) @ v + q_in @ earlier
    return out.flatten(-3, -2)[..., :count, :], (states[..., -1, :, :], scale[..., -1, :, :])


def _chunks(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """[…, N, F] -> […, chunks, size, F], padded at the end."""
    padded = F.pad(x, (0, 0, 0, -x.shape[-2] % size), value=value)
    return padded.reshape(*x.shape[:-2], -1, size, x.shape[-1])


class GatedProducts(torch.autograd.Function):
    """Σ_f q_if k_jf exp(sums_if - sums_jf) for all pairs of a chunk […, C, C]; those with j > i have to be masked.

    exp(sums_i) · exp(-sums_j) overflows where much is forgotten. So both are taken relative to the middle of i's part.
    The scaled keys are one copy per part; the backward pass computes them again instead of storing them.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, sums: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, sums)
        rows, columns, *_ = _relative(q, k, sums)
        products = rows @ columns.transpose(-2, -1)  # […, parts, rows of a part, C]
        return products.flatten(-3, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, sums = ctx.saved_tensors
        rows, columns, row_scale, column_scale = _relative(q, k, sums)
        products = _chunks(gradients[0], rows.shape[-2])
        q_gradient = ((products @ columns) * row_scale).flatten(-3, -2)
        k_gradient = ((products.transpose(-2, -1) @ rows) * column_scale).sum(dim=-3).sum_to_size(k.shape)
        return q_gradient, k_gradient, (q * q_gradient).sum_to_size(sums.shape) - k * k_gradient


def _relative(q: Tensor, k: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries […, parts, rows, F] and keys […, parts, C, F] relative to the middle of a part, and their factors."""
    part = min(PART, q.shape[-2])
    middle = sums[..., part // 2 :: part, None, :]  # […, parts, 1, F]
    row_scale = (_chunks(sums, part) - middle).exp()
    column_scale = (middle - sums[..., None, :, :]).clamp_max(-STRONGEST * PART / 2).exp()  # more: j > i
    return _chunks(q, part) * row_scale, k[..., None, :, :] * column_scale, row_scale, column_scale


def scan(decay: Tensor | None, update: Tensor, first: Tensor | None) -> Tensor:
    """s_c = decay_c · s_{c-1} + update_c along dimension -3, from `first` […, 1, F, Dv]; None: decay 1, from 0."""
    if first is not None:
        begin = update[..., :1, :, :] + (first if decay is None else decay[..., :1, :, :] * first)
        update = torch.cat((begin, update[..., 1:, :, :]), dim=-3)
    if update.shape[-3] == 1:
        return update
    states: Tensor = update.cumsum(dim=-3) if decay is None else Recurrence.apply(decay, update)  # type: ignore[no-untyped-call]
    return states


class Recurrence(torch.autograd.Function):
    """s_c = decay_c · s_{c-1} + update_c from s_{-1} = 0. The backward pass is the same recurrence from the end."""

    @staticmethod
    def forward(ctx: Any, decay: Tensor, update: Tensor) -> Tensor:
        states = _recurrence(decay, update)
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        decay, states = ctx.saved_tensors
        following = torch.cat((decay[..., 1:, :, :], torch.zeros_like(decay[..., :1, :, :])), dim=-3)
        gradient = _recurrence(following.flip(-3), gradients[0].flip(-3)).flip(-3)
        before = torch.cat((torch.zeros_like(states[..., :1, :, :]), states[..., :-1, :, :]), dim=-3)
        return (gradient * before).sum_to_size(decay.shape), gradient


def _recurrence(decay: Tensor, update: Tensor) -> Tensor:
    """In a loop on a CPU; elsewhere in log₂ steps, each over all chunks at once."""
    if update.device.type == "cpu" and not torch.compiler.is_compiling():
        states = torch.empty_like(update)
        now = torch.zeros_like(update[..., 0, :, :])
        for chunk, (left, new) in enumerate(zip(decay.unbind(-3), update.unbind(-3), strict=True)):
            now = torch.addcmul(new, left, now, out=states.select(-3, chunk))
        return states
    return doubling_recurrence(decay, update)


def doubling_recurrence(decay: Tensor, update: Tensor) -> Tensor:
    """After step n, element c has the last 2ⁿ updates (Hillis & Steele 1986)."""
    step = 1
    while step < update.shape[-3]:
        update = torch.cat(
            (update[..., :step, :, :], torch.addcmul(update[..., step:, :, :], decay[..., step:, :, :],
            update[..., :-step, :, :])), dim=-3,
        )  # fmt: skip
        decay = torch.cat((decay[..., :step, :, :], decay[..., step:, :, :] * decay[..., :-step, :, :]), dim=-3)
        step *= 2
    return update


def full_sum(q: Tensor, k: Tensor, v: Tensor, texts: Texts | None = None) -> Tensor:
    """The same over all keys, before and after the query; the shapes are those of `causal_sum`.

    With `texts`, over the keys of the same text of a packed row; for a short one, q kᵀ is smaller than kᵀ v.
    """
    if texts is None:
        return q @ (k.transpose(-2, -1) @ v)
    groups, features = q.shape[1], q.shape[-1]

    def split(x: Tensor) -> list[Tensor]:
        """[B, G, R, N, F] -> [T, G, R, L, F] for each group of texts."""
        rows = texts.split(x.permute(0, 3, 1, 2, 4).flatten(2))
        return [row.view(*row.shape[:2], groups, -1, x.shape[-1]).permute(0, 2, 3, 1, 4) for row in rows]

    outputs = []
    for own_q, own_k, own_v in zip(split(q), split(k), split(v), strict=True):
        own_k = own_k.transpose(-2, -1)
        is_short = own_q.shape[-2] < features
        out = (own_q @ own_k) @ own_v if is_short else own_q @ (own_k @ own_v)
        outputs.append(out.permute(0, 3, 1, 2, 4).flatten(2))
    return texts.join(outputs).view(len(q), q.shape[3], groups, -1, v.shape[-1]).permute(0, 2, 3, 1, 4)


def both_ways(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, document: Tensor | None = None, *, forward: int
) -> Tensor:
    """The first `forward` key/value heads read from left to right, the others from right to left; as `causal_sum`."""
    ahead, back = zip(*(x.tensor_split([forward], dim=1) for x in (q, k, v, log_gate)), strict=True)
    outputs = []
    if forward:
        outputs.append(causal_sum(*ahead[:3], log_gate=ahead[3], document=document)[0])
    if forward < q.shape[1]:
        q, k, v, log_gate = (x.flip(-2) for x in back)
        document = None if document is None else document.flip(-1)
        outputs.append(causal_sum(q, k, v, log_gate=log_gate, document=document)[0].flip(-2))
    return torch.cat(outputs, dim=1)


class LinearAttention(Traceable):
    """Self-attention with elu(x) + 1 or positive random features, as a replacement of `MultiHead`."""

    stages = ("q", "k", "v", "heads", "output")

    def __init__(self, config: StackConfig, *, layer: int = 0, causal: bool = False, kind: str = "linear") -> None:
        super().__init__()
        self.config, self.layer, self.causal, self.kind = config, layer, causal, kind
        self.heads, self.key_heads = config.heads, config.key_heads
        key_size = self.key_heads * config.key_dim
        self.sizes = (self.heads * config.key_dim, key_size, self.key_heads * config.val_dim)
        self.qkv = nn.Linear(config.dim, sum(self.sizes), bias=config.bias)
        self.out = nn.Linear(self.heads * config.val_dim, config.dim, bias=config.bias)
        self.q_norm = RMSNorm(config.key_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.key_dim, eps=config.norm_eps) if config.qk_norm else None
        if kind == "performer":  # saved with the weights, because these are trained for them
            features = orthogonal_features(config.feature_count, config.key_dim, config.mixer_seed + layer)
            self.features = nn.Buffer(features.to(self.qkv.weight.device))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q, k = _split(q, self.heads, self.q_norm), _split(k, self.key_heads, self.k_norm)
        v = _split(v, self.key_heads)
        if context.rotation is not None:
            q, k = (rotate(part, context.rotation, self.config.pairs) for part in (q, k))
        q, k, v = self.mark("q", q), self.mark("k", k), self.mark("v", v)
        exact = torch.promote_types(x.dtype, torch.float32)  # sums over many tokens
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = q.to(exact), k.to(exact), v.to(exact)
            q = q.view(q.shape[0], self.key_heads, self.heads // self.key_heads, *q.shape[2:])
            heads = self.mix(x, q, k[:, :, None], v[:, :, None], context)
        heads = self.mark("heads", heads.flatten(1, 2).to(x.dtype))  # [B, H, N, Dv]
        return self.mark("output", self.project(x, heads.transpose(1, 2)))

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q [B, Hkv, H / Hkv, N, D], k and v [B, Hkv, 1, N, D] -> [B, Hkv, H / Hkv, N, Dv]."""
        if not q.numel():
            return q.new_zeros(*q.shape[:-1], v.shape[-1])
        own = context.attention_mask
        is_real = None if own.q.is_real is None else own.q.is_real[:, None, None, :, None]  # [B, 1, 1, N, 1]
        if not self.causal:
            return self.sums(x, q, k, v, is_real, own, None)[0]
        state = None if context.cache is None else context.cache.states.get(self.layer)
        size = q.shape[-2]
        outputs: list[Tensor] = []
        if x.device.type == "cpu" and own.q.document is None and not torch.compiler.is_compiling():
            size = min(size, SEGMENT)
        texts = torch.split(x, size, dim=1)
        parts = zip(*(torch.split(part, size, dim=-2) for part in (q, k, v)), strict=True)
        masks = [None] * len(texts) if is_real is None else torch.split(is_real, size, dim=-2)
        for text, (own_q, own_k, own_v), mask in zip(texts, parts, masks, strict=True):
            out, state = self.sums(text, own_q, own_k, own_v, mask, own, state)
            outputs.append(out)
        if context.cache is not None and state is not None:
            context.cache.states[self.layer] = state
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-2)

    def sums(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, is_real: Tensor | None, own: AttentionMask,
        state: State | None,
    ) -> tuple[Tensor, State | None]:  # fmt: skip
        """The output of some tokens, and in a decoder the state after them, from the one before."""
        is_log = self.kind == "performer"
        if is_log:
            root = math.sqrt(abs(self.config.scale))  # φ(q)ᵀ φ(k) is exp(scale · q · k) on average
            q, k = (random_exponents(part * root, self.features.to(part)) for part in (q, k))
            q = torch.exp(q - q.detach().amax(dim=-1, keepdim=True))  # a factor of each query cancels
        else:
            q, k = elu_features(q), elu_features(k)
        if is_real is not None:
            k = torch.where(is_real, k, -math.inf if is_log else 0.0)
        v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)  # the denominator is one more column
        if self.causal:
            sums, state = causal_sum(q, k, v, document=own.q.document, state=state, k_is_log=is_log)
        else:
            if is_log:  # so does one of all keys
                k = torch.exp(k - k.detach().amax(dim=(-2, -1), keepdim=True).clamp_min(START))
            sums = full_sum(q, k, v, None if own.q.document is None else own.q.texts)
        return sums[..., :-1] / sums[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny), state

    def project(self, x: Tensor, heads: Tensor) -> Tensor:
        """The output [B, N, dim] from the heads [B, N, H, Dv]."""
        output: Tensor = self.out(heads.flatten(2))
        return output


class GatedLinearAttention(LinearAttention):
    """Linear attention that forgets: every element of a key has a gate, computed from the token."""

    def __init__(self, config: StackConfig, *, layer: int = 0, causal: bool = False) -> None:
        super().__init__(config, layer=layer, causal=causal, kind="gated-linear")
        self.gate_down = nn.Linear(config.dim, RANK, bias=False)
        self.gate_up = nn.Linear(RANK, self.sizes[1])
        self.output_gate = nn.Linear(config.dim, self.heads * config.val_dim, bias=False)
        self.heads_norm = RMSNorm(config.val_dim, eps=config.norm_eps)

    def sums(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, is_real: Tensor | None, own: AttentionMask,
        state: State | None,
    ) -> tuple[Tensor, State | None]:  # fmt: skip
        gate = _split(self.gate_up(self.gate_down(x.to(self.gate_up.weight.dtype))), self.key_heads).to(q.dtype)
        log_gate = F.logsigmoid(gate)[:, :, None] / RANK
        if is_real is not None:
            k, log_gate = torch.where(is_real, k, 0.0), torch.where(is_real, log_gate, 0.0)
        q = q * self.config.scale
        if not self.causal:
            forward = (self.key_heads + (self.layer + 1) % 2) // 2  # a single one alternates from layer to layer
            return both_ways(q, k, v, log_gate, own.q.document, forward=forward), None
        return causal_sum(q, k, v, log_gate=log_gate, document=own.q.document, state=state)

    def project(self, x: Tensor, heads: Tensor) -> Tensor:
        gate = F.silu(self.output_gate(x)).view_as(heads)
        return super().project(x, self.heads_norm(heads) * gate)


def _split(x: Tensor, heads: int, norm: nn.Module | None = None) -> Tensor:
    """[B, N, H · D] -> [B, H, N, D]"""
    parts = x.view(*x.shape[:2], heads, x.shape[2] // heads)
    return (parts if norm is None else norm(parts)).transpose(1, 2)
