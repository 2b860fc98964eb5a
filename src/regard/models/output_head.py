"""The output layer: the logits of the next token, or the values of the next step.

    logits = W x (+ b)        x [B, N, dim], W [vocab_size, dim] -> [B, N, vocab_size]
    values = W x + b          x [B, N, dim]                 -> [B, N, feature_dim]

W may be the embedding matrix of the tokens (weight tying, Press & Wolf 2017): then it adds no parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.config import ModelConfig


class OutputHead(nn.Module):
    """Token logits, with the weight of `tied` if that is not None; or values."""

    def __init__(self, config: ModelConfig, size: int, tied: nn.Embedding | None) -> None:
        super().__init__()
        self.layer = nn.Linear(config.dim, config.dim) if config.head_layer else None
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if config.head_layer else nn.Identity()
        self.project = nn.Linear(config.dim, size, bias=False)
        if tied is not None:
            self.project.weight = tied.weight
        self.bias = nn.Parameter(torch.zeros(size)) if config.logit_bias or config.output_head == "values" else None
        self.scale = config.logit_scale
        self.gelu = "tanh" if config.activation == "gelu-tanh" else "none"  # the form of GELU that the layers have

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.transform(x), self.project.weight, self.bias)

    def transform(self, x: Tensor) -> Tensor:
        """The input of the last matmul."""
        if self.layer is not None:
            x = self.norm(F.gelu(self.layer(x), approximate=self.gelu))
        return x if self.scale == 1.0 else x * self.scale
