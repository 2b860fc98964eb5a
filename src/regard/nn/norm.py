"""Normalisation: keeps activations at a fixed scale, which makes deep stacks trainable.

    layer   (x - mean) / std · g + b                     Ba et al. 2016
    rms     x / rms · g,  rms = sqrt(mean(x²))           Zhang & Sennrich 2019

With `qk_norm`, `MultiHead` applies the RMS norm to the queries and keys of each head: the attention scores then
depend on the angle between query and key and on the learned g, and cannot grow without bound during training
(Henry et al. 2020; Dehghani et al. 2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.config import StackConfig


class LayerNorm(nn.LayerNorm):
    """Returns the dtype of its input; autocast would return float32, which the next matmul casts back."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """Returns the dtype of its input, as `LayerNorm` does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


NORMS: dict[str, type[nn.Module]] = {"layer": LayerNorm, "rms": RMSNorm, "none": nn.Identity}


def make_norm(config: StackConfig) -> nn.Module:
    return NORMS[config.norm](config.dim, eps=config.norm_eps)
