"""The output layer: a score for every token that could come next, or the numbers of the next step.

    logits = W x (+ b)        x [B, N, dim], W [vocab_size, dim] -> [B, N, vocab_size]
    values = W x + b          x [B, N, dim]                 -> [B, N, feature_dim]

W may be the table that the tokens were read from (tied: Press & Wolf 2017): then it adds no parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.config import ModelConfig


class Head(nn.Module):
    """States to token logits, tied to an embedding table when one is given; or to values."""

    def __init__(self, config: ModelConfig, size: int, table: nn.Embedding | None) -> None:
        super().__init__()
        self.layer = nn.Linear(config.dim, config.dim) if config.head_layer else None
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps) if config.head_layer else nn.Identity()
        self.project = nn.Linear(config.dim, size, bias=False)
        if table is not None:
            self.project.weight = table.weight
        self.bias = nn.Parameter(torch.zeros(size)) if config.logit_bias or config.output_head == "values" else None
        self.scale = config.logit_scale

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = F.linear(self.ready(x), self.project.weight, self.bias)
        return logits

    def ready(self, x: Tensor) -> Tensor:
        """What W is multiplied with."""
        if self.layer is not None:
            x = self.norm(F.gelu(self.layer(x)))
        return x if self.scale == 1.0 else x * self.scale
