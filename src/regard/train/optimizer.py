"""Who turns gradients into steps.

    adamw   θ ← (1 - lr λ) θ - lr · m̂ / (sqrt(v̂) + ε)        each number by itself: Loshchilov & Hutter 2019
    muon    θ ← (1 - lr λ) θ - lr' · U Vᵀ                     a matrix as a whole, momentum = U S Vᵀ: Jordan et al. 2024

The decay λ is for matrices: it keeps what they multiply small. Gains of norms and biases are left out of it.

Muon takes the momentum of a matrix and makes all its singular values 1 (nearly, by a few products of matrices), so
that rare directions get steps as long as common ones. It is meant for the matrices inside the blocks; tables, the
output layer, norms and biases stay with AdamW. lr' = 0.2 · lr · sqrt(larger side) makes a step as long as AdamW's
(Liu et al. 2025, arXiv 2502.16982), so that one `lr` and one schedule serve both.

Both are those of torch.optim, whose own classes load PyTorch's compiler before the first step: a second or more that
nothing here needs. And Muon takes all matrices of one shape at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.block import Block
from regard.train.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that [train] asks for, over all parameters of the model."""

    def rate() -> float | Tensor:
        """A recorded step reads its learning rate from the device, where `Trainer` puts it."""
        return torch.tensor(config.lr, device=device) if config.graph else config.lr

    decay, betas = config.weight_decay, (config.betas[0], config.betas[1])
    matrices = block_matrices(model) if config.optimizer == "muon" else []
    known = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in known]
    tables = [parameter for parameter in others if parameter.dim() > 1 or not decay]
    vectors = [parameter for parameter in others if parameter.dim() < 2 and decay]  # gains, biases
    parts: list[Steps] = [Muon(matrices, lr=rate(), weight_decay=decay)] if matrices else []
    for parameters, λ in ((tables, decay), (vectors, 0.0)):
        if parameters:
            parts.append(AdamW(parameters, lr=rate(), betas=betas, eps=config.eps, weight_decay=λ))
    return parts[0] if len(parts) == 1 else Together(parts)


def block_matrices(model: nn.Module) -> list[Tensor]:
    """The weights of the linear maps inside the blocks of a Transformer."""
    blocks = (module for module in model.modules() if isinstance(module, Block))
    linears = (module for block in blocks for module in block.modules() if isinstance(module, nn.Linear))
    return list({id(linear.weight): linear.weight for linear in linears}.values())


class Groups(torch.optim.Optimizer):
    """Parameters, their settings and their state, as torch.optim has them, without the base's __init__: see above."""

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(parameters), **settings}]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:
        raise UserError("the state of this optimizer is saved with its model: see regard.train.checkpoint")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (one for group in self.param_groups for one in group["params"]):
            parameter.grad = None


class Steps(Groups, ABC):
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if learning := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self.move(learning, group)

    @abstractmethod
    def move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of these parameters, which have gradients, by the settings of their group."""


class AdamW(Steps):
    """torch.optim.AdamW with fused = True."""

    @torch.no_grad()
    def move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                zero = torch.zeros((), device=parameter.device)
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": zero, **moments}
        counts, means, squares = (
            [self.state[parameter][name] for parameter in parameters] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        torch._foreach_add_(counts, 1)
        torch._fused_adamw_(
            parameters, _gradients(parameters), means, squares, [], counts, lr=group["lr"], beta1=group["betas"][0],
            beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False,
            maximize=False,
        )  # fmt: skip


class Muon(Steps):
    """torch.optim.Muon with adjust_lr_fn = "match_rms_adamw".

    Matrices of one shape go together: a few large products in place of hundreds of small ones. And `lr` may be a
    tensor, so that a graph can record the step.
    """

    MOMENTUM = 0.95
    COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7

    @torch.no_grad()
    def move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        alike: dict[torch.Size, list[Tensor]] = {}
        for matrix in parameters:
            alike.setdefault(matrix.shape, []).append(matrix)
            if not self.state[matrix]:
                self.state[matrix] = {"momentum_buffer": torch.zeros_like(matrix)}
        lr = group["lr"]
        for shape, matrices in alike.items():
            gradients, momenta = _gradients(matrices), [self.state[matrix]["momentum_buffer"] for matrix in matrices]
            torch._foreach_lerp_(momenta, gradients, 1 - self.MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, self.MOMENTUM)  # Nesterov
            length = lr * (0.2 * math.sqrt(max(shape)))
            steps = self.orthogonal(torch.stack(ahead)).to(matrices[0].dtype) * length
            torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
            torch._foreach_sub_(matrices, steps.unbind())

    @classmethod
    def orthogonal(cls, stack: Tensor) -> Tensor:
        """[n, rows, columns] -> the same with singular values near 1, in bf16: X ← aX + (bA + cA²)X, A = X Xᵀ."""
        a, b, c = cls.COEFFICIENTS
        tall = stack.shape[1] > stack.shape[2]
        x = (stack.mT if tall else stack).bfloat16()
        x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=cls.EPS)
        for _ in range(cls.ITERATIONS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return (x.mT if tall else x).contiguous()


class Together(Groups):
    """Several optimizers, each with parameters of its own, as one: their groups and their state in one place."""

    def __init__(self, parts: Sequence[Steps]) -> None:
        super().__init__(())
        self.param_groups = [group for part in parts for group in part.param_groups]  # the same dicts, not copies
        self.parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
