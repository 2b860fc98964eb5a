"""Windows by FlashAttention, whose kernels know a band of keys: no mask, no blocks, nothing to compile.

    query i attends to the keys i - a … i + b                   causal window of n: a = n - 1, b = 0

FlashAttention (Dao et al. 2022, 2023) computes the scores in tiles that never leave the chip; with a band it skips the
tiles outside. PyTorch offers this in `varlen_attn`, for sequences of any length one after another, in half precision.

    q, k, v [B, H, N, D] -> [B, H, N, D]
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.nn.mask import AttentionMask


def flash_can(dtype: torch.dtype, key_dim: int, val_dim: int) -> bool:
    """Whether there are kernels for this type and these sizes."""
    return dtype in (torch.bfloat16, torch.float16) and key_dim == val_dim and key_dim % 8 == 0 and key_dim <= 256


def band_of(attention_mask: AttentionMask) -> tuple[float, float] | None:
    """The band of a mask, where the queries are the keys, and indices differ as positions do."""
    own = attention_mask
    return own.mask.band if own.q is own.k and own.q.start is not None and own.order is None else None


def attend_flash(q: Tensor, k: Tensor, v: Tensor, attention_mask: AttentionMask, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # here, since it imports PyTorch's compiler, for a second

    (rows, heads, length, size), band = q.shape, band_of(attention_mask)
    assert band is not None
    starts = torch.arange(0, (rows + 1) * length, length, device=q.device, dtype=torch.int32)
    before, after = (-1 if side >= length else int(side) for side in band)  # -1: no limit
    q, k, v = (x.transpose(1, 2).reshape(rows * length, heads, size) for x in (q, k, v))
    out = varlen_attn(q, k, v, starts, starts, length, length, scale=scale, window_size=(before, after))
    assert isinstance(out, Tensor)
    return out.view(rows, length, heads, size).transpose(1, 2)
