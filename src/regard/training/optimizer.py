"""Optimizers (AdamW, or Muon for the weight matrices of the blocks and AdamW for the rest) and learning rates.

    adamw   θ ← (1 - lr λ) θ - lr · m̂ / (sqrt(v̂) + ε)        element by element: Loshchilov & Hutter 2019
    muon    θ ← (1 - lr λ) θ - lr' · U Vᵀ                     a matrix as a whole, momentum = U S Vᵀ: Jordan et al. 2024

Weight decay λ applies to matrices; norm gains and biases are excluded.

Muon replaces the singular values of a matrix's momentum by 1 (approximately, with a few Newton-Schulz iterations), so
that rare directions get updates as large as common ones. It is meant for the matrices inside the blocks; embeddings,
the output layer, norms and biases stay with AdamW. lr' = 0.2 · lr · sqrt(larger side) matches the RMS of AdamW's update
(Liu et al. 2025, arXiv 2502.16982), so one `lr` and one schedule serve both.

The schedules give the learning rate over the steps, as a fraction of its peak, each after a linear warmup:

    inverse-sqrt   min(step / warmup, sqrt(warmup / step))                     Vaswani et al. 2017, eq. 3
    cosine         (1 + cos(π (step - warmup) / (steps - warmup))) / 2         Loshchilov & Hutter 2017
    linear         1 - (step - warmup) / (steps - warmup)                      down to 0: Bergsma et al. 2025
    constant       1

The paper writes  d^-0.5 · min(step^-0.5, step · warmup^-1.5);  its peak, at step = warmup, is lr = (d · warmup)^-0.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn.block import Block
from regard.training.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that [train] asks for, over all parameters of the model."""

    def learning_rate() -> float | Tensor:
        """A CUDA graph reads the learning rate from the device, where `Trainer` writes it."""
        return torch.tensor(config.lr, device=device) if config.cuda_graph else config.lr

    decay = config.weight_decay
    matrices = block_matrices(model) if config.optimizer == "muon" else []
    in_muon = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in in_muon]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() > 1], "lr": learning_rate()},
        {"params": [p for p in others if p.dim() < 2], "lr": learning_rate(), "weight_decay": 0.0},  # gains, biases
    ]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=decay,
        fused=True,
        capturable=config.cuda_graph,
    )
    return Combined([Muon(matrices, learning_rate(), decay), adamw]) if matrices else adamw


def block_matrices(model: nn.Module) -> list[Tensor]:
    """The weights of the linear layers inside the blocks of a Transformer."""
    blocks = (module for module in model.modules() if isinstance(module, Block))
    linears = (module for block in blocks for module in block.modules() if isinstance(module, nn.Linear))
    return list({id(linear.weight): linear.weight for linear in linears}.values())


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with adjust_lr_fn = "match_rms_adamw", for use in a CUDA graph.

    PyTorch's reads the learning rate on the host, which a graph cannot record, and updates one matrix at a time;
    here matrices of equal shape are updated together.
    """

    MOMENTUM = 0.95
    COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7

    def __init__(self, matrices: Iterable[Tensor], lr: float | Tensor, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            for matrices in by_shape.values():
                self._update(matrices, group["lr"], group["weight_decay"])

    def _update(self, matrices: list[Tensor], lr: Any, weight_decay: float) -> None:
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix)}
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - self.MOMENTUM)
        nesterov = torch._foreach_lerp(gradients, momenta, self.MOMENTUM)
        adjusted_lr = lr * (0.2 * math.sqrt(max(matrices[0].shape)))
        updates = self.orthogonalize(torch.stack(nesterov)).to(matrices[0].dtype) * adjusted_lr
        torch._foreach_mul_(matrices, 1 - lr * weight_decay)
        torch._foreach_sub_(matrices, updates.unbind())

    @classmethod
    def orthogonalize(cls, stack: Tensor) -> Tensor:
        """[n, rows, columns] -> the same with singular values near 1, in bf16: X ← aX + (bA + cA²)X, A = X Xᵀ."""
        a, b, c = cls.COEFFICIENTS
        tall = stack.shape[1] > stack.shape[2]
        x = (stack.mT if tall else stack).bfloat16()
        x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=cls.EPS)
        for _ in range(cls.ITERATIONS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if tall else x).contiguous()


class Combined(torch.optim.Optimizer):
    """Several optimizers over disjoint parameters as one: their groups and their state in one place."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})  # the same dicts, not copies
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update number `step`, counted from 1."""
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * step / warmup
    done = min((step - warmup) / max(config.steps - warmup, 1), 1.0)  # of the steps after the warmup
    match config.schedule:
        case "inverse-sqrt":
            return config.lr * math.sqrt(max(warmup, 1) / step)
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return config.lr * (1 - done)
        case "constant":
            return config.lr


def paper_rate(dim: int, warmup: int) -> float:
    """The peak of the paper's schedule for a model of width `dim`."""
    return float((dim * warmup) ** -0.5)
