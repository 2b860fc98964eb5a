"""Dropout: random elements are set to zero, so that no unit can rely on a single other one.

    y = x · m / (1 - p)          m_i = 0 with probability p, else 1            Srivastava et al. 2014

On a GPU this is PyTorch's dropout. On a CPU PyTorch generates one random number per element, which takes longer than
the layer itself. The generator makes 64 random bits at a time; here 16 of them decide about one element, so p is
rounded to a multiple of 1 / 65,536 and sampling takes a quarter of the time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, p: float) -> Tensor:
    """Set each element of `x` to zero with probability `p` and divide the others by 1 - p."""
    if x.device.type != "cpu" or p == 1.0:
        return F.dropout(x, p)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = bits[: x.numel()].view(x.shape) >= round(p * 2**16) - 2**15
    return x * kept.to(x.dtype).mul_(1 / (1 - p))
