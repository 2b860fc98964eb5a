"""Linformer: the keys and values of N tokens are projected to a fixed length, which queries attend to.

    out = softmax(Q (E K)ᵀ / sqrt(d_k)) (F V)          E, F [length, N], learned              Wang et al. 2020, eq. 7

The matrix of attention weights is close to one of low rank, so a few mixtures of keys serve as well as all of them,
and time and memory grow with N · length instead of N². Column n of E and F belongs to position n: a text may have at
most `max_length` tokens, and shorter ones use the first columns. All heads share E and F.

    x [B, N, dim]   q [B, H, N, D]   E K [B, Hkv, length, D]   F V [B, Hkv, length, Dv]   ->   [B, N, dim]

A mixture contains later tokens, so only an encoder can use it. Padding has no part in the mixtures, and each document
of a packed row has mixtures of its own (`regard.nn.texts`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.errors import UserError
from regard.nn.attention import attention_stages
from regard.nn.config import StackConfig
from regard.nn.mask import Positions
from regard.nn.multihead import Context
from regard.nn.norm import RMSNorm
from regard.nn.sdpa import fused_attention
from regard.nn.texts import Texts
from regard.nn.trace import Traceable

# for batches that differ in shape: cuDNN takes up to a second to prepare its kernels for a new one
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class LinformerAttention(Traceable):
    """A replacement of self-attention in an encoder."""

    stages = ("q", "k", "v", "heads", "output")

    def __init__(self, config: StackConfig, *, layer: int = 0) -> None:
        super().__init__()
        self.config, self.layer, self.heads, self.key_heads = config, layer, config.heads, config.key_heads
        key_size = self.key_heads * config.key_dim
        self.sizes = (self.heads * config.key_dim, key_size, self.key_heads * config.val_dim)
        self.qkv = nn.Linear(config.dim, sum(self.sizes), bias=config.bias)
        self.key_projection = _projection(config)
        self.value_projection = _projection(config)
        self.out = nn.Linear(self.heads * config.val_dim, config.dim, bias=config.bias)
        self.q_norm = RMSNorm(config.key_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.key_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        positions = context.attention_mask.q
        self._check(positions)
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q = self.mark("q", self.q_norm(_heads(q, self.heads)).transpose(1, 2))
        k = self.k_norm(_heads(k, self.key_heads)).flatten(2)
        if positions.document is None:
            heads = self._attend(q, k, v, positions)
        else:
            heads = self._attend_texts(q, k, v, positions.texts)
        heads = self.mark("heads", heads)
        return self.mark("output", self.out(heads.transpose(1, 2).flatten(2)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
        """q [B, H, N, D], k [B, N, Hkv · D], v [B, N, Hkv · Dv] -> [B, H, N, Dv], one text per row."""
        k = self._shorten(k, self.key_projection, positions)
        v = self._shorten(v, self.value_projection, positions)
        k = self.mark("k", _heads(k, self.key_heads).transpose(1, 2))  # [B, Hkv, length, D]
        v = self.mark("v", _heads(v, self.key_heads).transpose(1, 2))
        dropout, scale = self.config.attention_dropout if self.training else 0.0, self.config.scale
        if self.config.attention == "reference":
            return attention_stages(q, k, v, scale=scale, dropout=dropout).output
        return fused_attention(q, k, v, dropout_p=dropout, scale=scale, enable_gqa=self.heads != self.key_heads)

    def _attend_texts(self, q: Tensor, k: Tensor, v: Tensor, texts: Texts) -> Tensor:
        """The same for packed rows; `k` and `v` of a trace have one row per text."""
        queries, keys, values = (texts.split(x) for x in (q.transpose(1, 2).flatten(2), k, v))
        outputs = []
        with self.joined(0), sdpa_kernel(KERNELS):
            for own, own_k, own_v in zip(queries, keys, values, strict=True):
                heads = _heads(own, self.heads).transpose(1, 2)
                out = self._attend(heads, own_k, own_v, Positions.of(own.shape[1], q.device))  # no token: k = v = 0
                outputs.append(out.transpose(1, 2).flatten(2))
        return _heads(texts.join(outputs), self.heads).transpose(1, 2)

    def _shorten(self, x: Tensor, projection: Tensor, positions: Positions) -> Tensor:
        """[B, N, D] -> [B, length, D], by the columns of the tokens' positions."""
        rows = projection[: x.shape[1]] if positions.start == 0 else projection[positions.pos.clamp_max(self.last)]
        if positions.is_real is not None:
            x = torch.where(positions.is_real[..., None], x, 0.0)
        return rows.transpose(-2, -1) @ x

    @property
    def last(self) -> int:
        return self.key_projection.shape[0] - 1

    def _check(self, positions: Positions) -> None:
        length = positions.length
        if length > self.last + 1:  # padding and packed rows may be longer
            length = int(positions.text_lengths().max())
        if length > self.last + 1:
            raise UserError(
                f"sequence of {length} tokens is longer than max_length = {self.last + 1} of mixer = 'linformer': "
                "shorten it, raise max_length, or use a mixer without a limit, such as 'linear'"
            )


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, H · D] -> [B, N, H, D]"""
    return x.view(*x.shape[:2], heads, x.shape[2] // heads)


def _projection(config: StackConfig) -> nn.Parameter:
    """[max_length, length]: a random projection, which keeps products of long vectors on average."""
    bound = config.projected_length**-0.5
    return nn.Parameter(torch.empty(config.max_length, config.projected_length).uniform_(-bound, bound))
