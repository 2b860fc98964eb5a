"""Exercises of lesson 6: LayerNorm, sub-layers in both orders, feed-forward, parameters of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from regard.lessons.checker import Hint, exercise, expect
from regard.nn.block import Block
from regard.nn.config import StackConfig


@exercise(1, "layer_norm")
def layer_norm(answer: Callable[..., Any]) -> None:
    x, gain, bias = 3 * torch.randn(2, 5, 4) + 1, torch.randn(4), torch.randn(4)
    one, zero = torch.ones(4), torch.zeros(4)
    plain = torch.as_tensor(answer(x, one, zero))
    if plain.shape == x.shape and torch.allclose(plain, F.layer_norm(x, (4,)) * (3 / 4) ** 0.5, atol=1e-3):
        raise Hint(
            "You divide the variance by dim - 1, as torch.var does by default: LayerNorm divides by dim.",
            "분산을 dim - 1로 나누었습니다(torch.var의 기본값). LayerNorm은 dim으로 나눕니다.",
        )
    expect(
        plain,
        F.layer_norm(x, (4,)),
        "Each word has mean 0 and variance 1 afterwards: take both over the last axis, with keepdim=True.",
        "결과는 단어마다 평균 0, 분산 1입니다. 둘 다 마지막 축에 대해 keepdim=True로 구하세요.",
    )
    expect(
        answer(x, gain, bias),
        F.layer_norm(x, (4,), gain, bias),
        "Multiply by the gain, then add the bias.",
        "gain을 곱한 다음 bias를 더하세요.",
    )
    expect(
        answer(torch.zeros(1, 4), one, zero),
        torch.zeros(1, 4),
        "A constant vector has variance 0: eps must be inside of the root, so that nothing is divided by 0.",
        "모든 원소가 같으면 분산이 0입니다. 0으로 나누지 않도록 eps를 제곱근 안에 더하세요.",
    )
    small = 1e-3 * x
    expect(
        answer(small, one, zero),
        F.layer_norm(small, (4,)),
        "eps is added to the variance, before the root, not to the standard deviation.",
        "eps는 표준편차가 아니라 제곱근을 구하기 전의 분산에 더합니다.",
    )


@exercise(2, "sublayer")
def sublayer(answer: Callable[..., Any]) -> None:
    x = torch.randn(3, 8)
    weight = torch.randn(8, 8)
    layers = (lambda x: torch.relu(x @ weight)), (lambda x: F.layer_norm(x, (8,)))
    pre, post = answer(x, *layers, "pre"), answer(x, *layers, "post")
    f, norm = layers
    if torch.allclose(pre, norm(x + f(x)), atol=1e-5) and torch.allclose(post, x + f(norm(x)), atol=1e-5):
        raise Hint(
            "You swapped them: pre normalises the input of f, post the sum.",
            "두 순서가 바뀌었습니다. pre는 f의 입력을, post는 합을 정규화합니다.",
        )
    expect(
        pre,
        x + f(norm(x)),
        "pre is x + f(norm(x)): the residual path adds x itself, not norm(x).",
        "pre는 x + f(norm(x))입니다. 잔차 경로는 norm(x)가 아니라 x 자체를 더합니다.",
    )
    expect(
        post,
        norm(x + f(x)),
        "post is norm(x + f(x)): the norm comes after the addition.",
        "post는 norm(x + f(x))입니다. 정규화는 더한 뒤에 합니다.",
    )


@exercise(3, "feed_forward")
def feed_forward(answer: Callable[..., Any]) -> None:
    x, w1, w_gate, w2 = torch.randn(2, 3, 4), torch.randn(4, 6), torch.randn(4, 6), torch.randn(6, 4)
    expect(
        answer(x, w1, w2),
        F.relu(x @ w1) @ w2,
        "Without a gate: relu after the first matrix, nothing after the second.",
        "게이트가 없으면 첫 행렬 뒤에 relu를 적용하고, 둘째 행렬 뒤에는 아무것도 하지 않습니다.",
    )
    expect(
        answer(x, w1, w2, w_gate),
        (F.silu(x @ w_gate) * (x @ w1)) @ w2,
        "With a gate: silu(x @ w_gate) times x @ w1 (no relu), with silu(z) = z · sigmoid(z).",
        "게이트가 있으면 silu(x @ w_gate)와 x @ w1의 곱입니다(relu 없음). silu(z) = z · sigmoid(z)입니다.",
    )


@exercise(4, "block_parameters")
def block_parameters(answer: Callable[..., Any]) -> None:
    for dim, ff_dim, memory in ((16, 48, False), (16, 48, True)):
        block = Block(StackConfig(dim=dim, heads=2, ff_dim=ff_dim), memory=memory)
        exact = sum(parameter.numel() for parameter in block.parameters())
        got = answer(dim, ff_dim, memory)
        part = "cross-attention has four matrices, biases and a norm of its own" if memory else (
            "attention 4 dim² + 4 dim, feed-forward 2 dim · ff_dim + ff_dim + dim, and two norms of 2 dim"
        )  # fmt: skip
        ko = "크로스 어텐션에도 행렬 네 개와 편향, 정규화가 따로 있습니다" if memory else (
            "어텐션 4 dim² + 4 dim, 피드포워드 2 dim · ff_dim + ff_dim + dim, 2 dim짜리 정규화가 둘입니다"
        )  # fmt: skip
        call = f"block_parameters({dim}, {ff_dim}, {memory})"
        expect(got, exact, f"{call} is {exact}, not {got}: {part}.", f"{call}은 {got}이 아니라 {exact}입니다. {ko}.")
