"""Dropout: some numbers are left out at random, so that no part of a model can rely on another one alone.

    y = x · m / (1 - p)          m_i = 0 with probability p, else 1            Srivastava et al. 2014

On a GPU this is PyTorch's. On a CPU PyTorch draws a random number for every element, one after the other, which costs
more than the layer beside it. A generator makes 64 random bits at a time; here each 16 of them decide about one
element, so p is rounded to 1 / 65,536 and drawing costs a quarter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, chance: float) -> Tensor:
    """`x` with each element left out with probability `chance`, the others made larger by as much."""
    if x.device.type != "cpu" or chance == 1.0:
        return F.dropout(x, chance)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = bits[: x.numel()].view(x.shape) >= round(chance * 2**16) - 2**15
    return x * kept.to(x.dtype).mul_(1 / (1 - chance))
