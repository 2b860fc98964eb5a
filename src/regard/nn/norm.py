"""Norms: every vector brought to one size, so that layers need not fear what the one before has done.

    layer   (x - mean) / std · g + b                     Ba et al. 2016
    rms     x / rms · g,  rms = sqrt(mean(x²))           Zhang & Sennrich 2019

`MultiHead` norms queries and keys of each head where `qk_norm` is set: scores then grow with the angle between them
and the learned g alone, not with their lengths, and cannot run away (Henry et al. 2020; Dehghani et al. 2023).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn.config import StackConfig


def make_norm(config: StackConfig) -> nn.Module:
    match config.norm:
        case "layer":
            return LayerNorm(config.dim, eps=config.norm_eps)
        case "rms":
            return RMSNorm(config.dim, eps=config.norm_eps)
        case "none":
            return nn.Identity()


class LayerNorm(nn.LayerNorm):
    """Gives back the type it was given: autocast would widen to float32, which the next product narrows again."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """As LayerNorm: what comes in decides the type."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
