"""Fused attention in 16 bits on a CPU: when it is computed in 32 bits, and that its values are those of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.nn.attention import attention_stages
from regard.nn.sdpa import SHORT, fused_attention


class Kernels(TorchDispatchMode):
    """Records the types in which attention is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func):
            self.types += [x.dtype for x in args if isinstance(x, Tensor) and x.dim() == 4 and x.shape[1] == HEADS]
        return func(*args, **(kwargs or {}))


HEADS = 2


def qkv(length: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(length)
    return [torch.randn(1, HEADS, length, 16).to(dtype).requires_grad_() for _ in range(3)]


def computed_in(length: int, dtype: torch.dtype, autocast: torch.dtype | None = None) -> set[torch.dtype]:
    with Kernels() as kernels, torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        fused_attention(*qkv(length, dtype)).float().sum().backward()
    assert len(kernels.types) >= 6  # of the forward and of the backward pass
    return set(kernels.types)


@pytest.mark.parametrize(
    ("dtype", "length", "computed"),
    [
        (torch.bfloat16, SHORT, torch.float32),
        (torch.bfloat16, SHORT + 1, torch.bfloat16),
        (torch.float16, 2 * SHORT, torch.float32),
        (torch.float32, 64, torch.float32),
        (torch.float64, 64, torch.float64),
    ],
)
def test_attention_is_computed_in_the_faster_format(dtype: torch.dtype, length: int, computed: torch.dtype) -> None:
    assert computed_in(length, dtype) == {computed}


@pytest.mark.parametrize(("length", "computed"), [(SHORT, torch.float32), (SHORT + 1, torch.bfloat16)])
def test_autocast_does_not_change_the_format_back(length: int, computed: torch.dtype) -> None:
    assert computed_in(length, torch.float32, autocast=torch.bfloat16) == {computed}
    assert computed_in(length, torch.float64, autocast=torch.bfloat16) == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_the_formula(dtype: torch.dtype) -> None:
    q, k, v = qkv(40, dtype)
    visible = torch.rand(1, 1, 40, 40) < 0.5
    visible[:, :, 7] = False  # a query without keys gets zeros
    added = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))
    gradient = torch.randn(1, HEADS, 40, 16).to(dtype)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attention_stages(*exact, visible).output
    expected.backward(gradient.double())
    for mask in (visible, added):
        for x in (q, k, v):
            x.grad = None
        out = fused_attention(q, k, v, mask)
        out.backward(gradient)
        assert out.dtype == dtype and not out[:, :, 7].any()
        for own, other in zip((out, q.grad, k.grad, v.grad), (expected, *(x.grad for x in exact)), strict=True):
            assert own is not None and other is not None
            error = (own.double() - other).norm() / other.norm()
            assert error < torch.finfo(dtype).eps  # no more than rounding the result
