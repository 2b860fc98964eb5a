"""scaled_dot_product_attention in the number format in which it is fast.

On a CPU, PyTorch's kernels are slower in 16 bits than in 32, above all in the backward pass: in fp16 at any length, and
in bf16 with up to about 512 queries; over longer sequences bf16 is faster. So short ones are computed in float32:

    q, k, v in bf16 or fp16  ->  float32  ->  softmax(Q Kᵀ / sqrt(d_k)) V  ->  the type of q
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 512  # queries up to which bf16 is slower


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v; the arguments of F.scaled_dot_product_attention."""
    if not _is_faster_in_32_bits(q):
        return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, **options)
    with torch.autocast("cpu", enabled=False):
        q32, k32, v32 = (x.float() for x in (q, k, v))
        mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
        return F.scaled_dot_product_attention(q32, k32, v32, mask, dropout_p, **options).to(q.dtype)


def _is_faster_in_32_bits(q: Tensor) -> bool:
    if q.device.type != "cpu" or q.dtype == torch.float64:  # autocast leaves 64 bits as they are
        return False
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
    return dtype == torch.float16 or (dtype == torch.bfloat16 and q.shape[-2] <= SHORT)
