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

from regard.nn.chunks import STRONGEST, refuse_second_derivative
from regard.nn.config import RANK, StackConfig
from regard.nn.mask import Positions
from regard.nn.multihead import Context
from regard.nn.norm import RMSNorm
from regard.nn.position import rotate
from regard.nn.sums import START, Features, State, causal_sum, packed_sum, quotient, with_ones
from regard.nn.trace import Traceable


class EluFeatures(torch.autograd.Function):
    """elu(x) + 1, whose derivative is exp(x) = elu(x) + 1 for x < 0, and 1 else: only the output is stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = F.elu(x) + 1  # not in place: torch.compile of PyTorch 2.11 would lose the gradient
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        refuse_second_derivative()
        (out,) = ctx.saved_tensors
        of_x: Tensor = gradients[0] * out.clamp_max(1)
        return of_x


def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1, which is positive."""
    return EluFeatures.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def random_features(matrix: Tensor, scale: float = 1.0) -> Features:
    """The positive random features of ω_m = matrix[m] [M, D], for which φ(q)ᵀ φ(k) is exp(scale · q · k) on average."""
    root = math.sqrt(abs(scale))

    def of_q(q: Tensor) -> Tensor:
        """A factor of each query cancels, so exp(-|q|² / 2) is left out, and exp cannot overflow."""
        products = (q * root) @ matrix.to(q).T
        return (products - products.detach().amax(dim=-1, keepdim=True)).exp_()

    return Features(
        of_q, lambda k: (k * root) @ matrix.to(k).T, lambda k: k.square().sum(dim=-1, keepdim=True) * (-abs(scale) / 2)
    )


def orthogonal_features(count: int, dim: int, seed: int) -> Tensor:
    """Random vectors [count, dim], N(0, I) each, orthogonal in blocks of `dim`: that makes the error smaller."""
    source, device = torch.Generator().manual_seed(seed), "cpu"  # a model on another device has the same ones
    square = [torch.randn(dim, dim, generator=source, device=device) for _ in range(-(-count // dim))]
    lengths: Tensor = torch.randn(count, dim, generator=source, device=device).norm(dim=1, keepdim=True)
    pairs = [torch.linalg.qr(one) for one in square]
    # the signs of R make Q uniformly distributed (Mezzadri 2007); without them the estimate would be biased
    directions = torch.cat([(q * r.diagonal().sign()).T for q, r in pairs])[:count]
    return directions * lengths


def scales_of_texts(largest: Tensor, tokens: Positions) -> Tensor:
    """The maximum of each text, at least START: [B, G, 1, N, 1] -> [B, G, 1, N|1, 1]."""
    if tokens.document is None:
        return largest.amax(dim=-2, keepdim=True).clamp_min(START)
    number = tokens.text_numbers()[1]
    text = (number - number[:, :1])[:, None].expand(*largest.shape[:2], -1)  # [B, G, N]
    values = largest[:, :, 0, :, 0]
    return torch.full_like(values, START).scatter_reduce(2, text, values, "amax").gather(2, text)[:, :, None, :, None]


def both_ways(
    q: Tensor, k: Tensor, v: Tensor, *, log_gate: Tensor, is_real: Tensor | None = None,
    document: Tensor | None = None, forward: int,
) -> Tensor:  # fmt: skip
    """The first `forward` key/value heads read from left to right, the others from right to left; as `causal_sum`."""

    def turn(x: Tensor) -> Tensor:
        return torch.cat((x[:, :forward], x[:, forward:].flip(-2)), dim=1)

    is_real, document = (None if x is None else turn(x.expand(-1, q.shape[1], -1, -1, -1)) for x in (is_real, document))
    out, _ = causal_sum(turn(q), turn(k), turn(v), log_gate=turn(log_gate), is_real=is_real, document=document)
    return turn(out)


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
        with torch.autocast(x.device.type, enabled=False):
            q = q.view(q.shape[0], self.key_heads, self.heads // self.key_heads, *q.shape[2:])
            heads = self.mix(x, q, k[:, :, None], v[:, :, None], context)
        heads = self.mark("heads", heads.flatten(1, 2).to(x.dtype))  # [B, H, N, Dv]
        return self.mark("output", self.project(x, heads.transpose(1, 2)))

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q [B, Hkv, H / Hkv, N, D], k and v [B, Hkv, 1, N, D] -> [B, Hkv, H / Hkv, N, Dv]."""
        if not q.numel():
            return q.new_zeros(*q.shape[:-1], v.shape[-1])
        tokens = context.attention_mask.q
        is_real, document = (
            None if y is None else y[:, None, None, :, None] for y in (tokens.is_real, tokens.document)
        )
        if self.causal:
            state = None if context.cache is None else context.cache.states.get(self.layer)
            out, state = self.earlier(x, q, k, v, is_real=is_real, document=document, state=state)
            if context.cache is not None:
                context.cache.states[self.layer] = state
            return out
        return self.both_sides(x, q, k, v, is_real, document, tokens)

    def earlier(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, State]:
        """The sums over earlier keys, and the state after the last one."""
        return causal_sum(q, k, v, features=self.map, **given)

    def both_sides(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, is_real: Tensor | None, document: Tensor | None,
        tokens: Positions,
    ) -> Tensor:  # fmt: skip
        """The sums over all keys."""
        exact = torch.promote_types(q.dtype, torch.float32)
        q, k = (part.to(exact).contiguous() for part in (q, k))
        q, k = self.map.of_q(q), self.map.keys(k, is_real, lambda largest: scales_of_texts(largest, tokens))
        v = with_ones(v, exact)
        sums = q @ (k.transpose(-2, -1) @ v) if document is None else packed_sum(q, k, v, document)
        return quotient(sums).to(x.dtype)

    @property
    def map(self) -> Features:
        if self.kind == "performer":
            return random_features(self.features, self.config.scale)
        return Features(elu_features, elu_features)

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

    def earlier(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, State]:
        return causal_sum(q * self.config.scale, k, v, log_gate=self.log_gate(x), **given)

    def both_sides(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, is_real: Tensor | None, document: Tensor | None,
        tokens: Positions,
    ) -> Tensor:  # fmt: skip
        forward = (self.key_heads + (self.layer + 1) % 2) // 2  # a single one alternates from layer to layer
        q, log_gate = q * self.config.scale, self.log_gate(x)
        return both_ways(q, k, v, log_gate=log_gate, is_real=is_real, document=document, forward=forward)

    def log_gate(self, x: Tensor) -> Tensor:
        """log α [B, Hkv, 1, N, D], in 32 bits or more."""
        gate = _split(self.gate_up(self.gate_down(x.to(self.gate_up.weight.dtype))), self.key_heads)[:, :, None]
        gate = gate.clamp_min(STRONGEST * RANK).to(torch.promote_types(x.dtype, torch.float32))
        return F.logsigmoid(gate) / RANK

    def project(self, x: Tensor, heads: Tensor) -> Tensor:
        gate = F.silu(self.output_gate(x)).view_as(heads)
        return super().project(x, self.heads_norm(heads) * gate)


def _split(x: Tensor, heads: int, norm: nn.Module | None = None) -> Tensor:
    """[B, N, H · D] -> [B, H, N, D]"""
    parts = x.view(*x.shape[:2], heads, x.shape[2] // heads)
    return (parts if norm is None else norm(parts)).transpose(1, 2)
