"""Who turns gradients into steps.

    adamw   θ ← (1 - lr λ) θ - lr · m̂ / (sqrt(v̂) + ε)        each number by itself: Loshchilov & Hutter 2019
    muon    θ ← (1 - lr λ) θ - lr' · U Vᵀ                     a matrix as a whole, momentum = U S Vᵀ: Jordan et al. 2024

Muon takes the momentum of a matrix and makes all its singular values 1 (nearly, by a few products of matrices), so
that rare directions get steps as long as common ones. It is meant for the matrices inside the blocks; tables, the
output layer, norms and biases stay with AdamW. lr' = 0.2 · lr · sqrt(larger side) makes a step as long as AdamW's
(Liu et al. 2025, arXiv 2502.16982), so that one `lr` and one schedule serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn.block import Block
from regard.train.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that [train] asks for, over all parameters of the model."""
    matrices = block_matrices(model) if config.optimizer == "muon" else []
    known = {id(matrix) for matrix in matrices}
    adamw = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if id(parameter) not in known],
        lr=torch.tensor(config.lr, device=device) if config.graph else config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
        capturable=config.graph,
    )
    if not matrices:
        return adamw
    muon = torch.optim.Muon(matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
    return Together([muon, adamw])


def block_matrices(model: nn.Module) -> list[Tensor]:
    """The weights of the linear maps inside the blocks of a Transformer."""
    blocks = (module for module in model.modules() if isinstance(module, Block))
    linears = (module for block in blocks for module in block.modules() if isinstance(module, nn.Linear))
    return list({id(linear.weight): linear.weight for linear in linears}.values())


class Together(torch.optim.Optimizer):
    """Several optimizers, each with parameters of its own, as one: their groups and their state in one place."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})  # the same dicts, not copies
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()
