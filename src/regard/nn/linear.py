"""The linear map: what a Transformer spends most of its time on.

    y = x Wᵀ + b          x [..., in]   W [out, in]   b [out]   ->   y [..., out]

With g = ∂loss/∂y and all places in one row, [T, out], the gradients are products too:

    ∂loss/∂x = g W          ∂loss/∂W = gᵀ x          ∂loss/∂b = Σ_t g_t

PyTorch's CPU builds for x86 have two libraries for them. nn.Linear takes MKL; oneDNN, made for neural networks, is
faster at y and ∂loss/∂x for many rows of float32 (on an AMD EPYC by a tenth), no faster at ∂loss/∂W, and is taken here
for the first two. It writes code for every number of rows that it meets, which takes a millisecond, and keeps it, which
takes nearly a megabyte: so it gets full multiples of 256, as batches of packed text are, and padded batches of any
length stay with MKL. PyTorch lends it as an operation of its compiler, without a gradient, and unknown to
FlopCounterMode: count under `torch.backends.mkldnn.flags(enabled=False)`, which turns it off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 256  # and multiples of it


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, by the faster library."""
    if torch.compiler.is_compiling() or not (_suits(x, weight, bias) and _available()):
        return F.linear(x, weight, bias)
    return product(x, weight, bias)


def _suits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Float32 on a CPU, in full multiples; sizes that do not agree are left to F.linear, whose message names them."""
    given = (x, weight) if bias is None else (x, weight, bias)
    plain = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in given)
    agree = x.shape[-1:] == weight.shape[1:] and (bias is None or bias.shape == weight.shape[:1])
    return plain and agree and x.numel() > 0 and x.shape[:-1].numel() % ROWS == 0


def _available() -> bool:
    """Both libraries are there: beside another than MKL (Apple's, Arm's) oneDNN may be the slower one."""
    mkl, dnn = torch.backends.mkl, torch.backends.mkldnn
    there: bool = mkl.is_available() and dnn.is_available() and bool(dnn.enabled)  # type: ignore[no-untyped-call]
    return there and not torch.is_autocast_enabled("cpu")


class _Product(torch.autograd.Function):
    """x Wᵀ + b by oneDNN; its gradients are made of operations that have gradients themselves."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.contiguous()  # oneDNN reads on from its first number
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), g = ctx.saved_tensors, outer[0].flatten(0, -2)  # [T, out]
        to_x, to_weight, to_bias = ctx.needs_input_grad
        return (
            product(outer[0], weight.T, None) if to_x else None,
            g.T @ x.flatten(0, -2) if to_weight else None,
            g.sum(dim=0) if to_bias else None,
        )

    @staticmethod
    def jvp(ctx: Any, *along: Tensor | None) -> Tensor:
        """How y moves when x, W and b move along these: forward-mode differentiation."""
        (x, weight), (to_x, to_weight, to_bias) = ctx.saved_tensors, along
        parts = (
            None if to_x is None else F.linear(to_x, weight),
            None if to_weight is None else F.linear(x, to_weight),
            None if to_bias is None else to_bias.expand(*x.shape[:-1], -1),
        )
        return sum(part for part in parts if part is not None)  # type: ignore[return-value]


product: Callable[..., Tensor] = _Product.apply
