"""Exercises of lesson 2: the size of scores, entropy, the derivative of the softmax, temperature."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from regard.lessons.checker import Hint, exercise, expect


@exercise(1, "score_std")
def score_std(answer: Callable[..., Any]) -> None:
    for size, q_std, k_std in ((64, 1.0, 1.0), (64, 0.5, 1.0), (100, 2.0, 0.1)):
        q, k = q_std * torch.randn(5_000, size), k_std * torch.randn(5_000, size)
        measured = (q * k).sum(dim=1).std()
        expect(
            answer(size, q_std, k_std),
            measured,
            f"For key_dim = {size}, q_std = {q_std}, k_std = {k_std} the standard deviation is about {measured:.2f}: "
            "variances of the products add up, so take the root of their sum at the end.",
            f"key_dim = {size}, q_std = {q_std}, k_std = {k_std}일 때 표준편차는 약 {measured:.2f}입니다. "
            "더해지는 것은 분산이므로, 마지막에 그 합의 제곱근을 구하세요.",
            tolerance=0.05,
        )


@exercise(2, "entropy")
def entropy(answer: Callable[..., Any]) -> None:
    weights = torch.tensor([[0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
    by_hand = torch.tensor([math.log(4), -0.7 * math.log(0.7) - 0.3 * math.log(0.1)])
    result = torch.as_tensor(answer(weights))
    if result.shape == by_hand.shape and torch.allclose(result, by_hand / math.log(2), atol=1e-4):
        raise Hint(
            "This is the entropy in bits: use the natural logarithm.",
            "비트 단위의 엔트로피입니다. 자연로그를 쓰세요.",
        )
    expect(
        result,
        by_hand,
        "H = -Σ w ln w over each row: one number per row, ln 4 = 1.386 for four equal weights.",
        "행마다 H = -Σ w ln w입니다. 행마다 수 하나이며, 같은 가중치 네 개이면 ln 4 = 1.386입니다.",
    )
    expect(
        answer(torch.tensor([[1.0, 0.0, 0.0]])),
        [0.0],
        "A weight of 0 contributes 0, but 0 · ln 0 is NaN in floating point: see torch.xlogy.",
        "가중치 0은 0을 더해야 하지만 부동소수점에서 0 · ln 0은 NaN입니다. torch.xlogy를 참고하세요.",
        tolerance=1e-6,
    )


@exercise(3, "softmax_jacobian")
def softmax_jacobian(answer: Callable[..., Any]) -> None:
    scores = torch.randn(5)
    exact = torch.autograd.functional.jacobian(lambda s: torch.softmax(s, dim=0), scores)
    result = torch.as_tensor(answer(scores))
    if result.shape != (5, 5):
        raise Hint(
            "The result is a matrix: ∂wᵢ/∂sⱼ for every pair i, j.", "결과는 모든 i, j에 대한 ∂wᵢ/∂sⱼ의 행렬입니다."
        )
    expect(
        result.diagonal(),
        exact.diagonal(),
        "On the diagonal the derivative is wᵢ (1 - wᵢ), with w = softmax(scores).",
        "대각선의 미분은 w = softmax(scores)일 때 wᵢ (1 - wᵢ)입니다.",
    )
    expect(
        result,
        exact,
        "Outside of the diagonal the derivative is -wᵢ wⱼ: raising one score lowers the other weights.",
        "대각선 밖의 미분은 -wᵢ wⱼ입니다. 점수 하나를 올리면 다른 가중치는 줄어듭니다.",
    )


@exercise(4, "temperature")
def temperature(answer: Callable[..., Any]) -> None:
    scores = torch.tensor([3.0, 1.0, 0.2, -2.0, 0.5])
    for target in (0.2, 1.0, 1.5):
        value = float(answer(scores, target))
        if not value > 0:
            raise Hint(f"T = {value}: a temperature is positive.", f"T = {value}: 온도는 양수입니다.")
        weights = torch.softmax(scores / value, dim=0)
        got = -torch.xlogy(weights, weights).sum()
        expect(
            got,
            target,
            f"For target = {target} you return T = {value:.4g}, at which the entropy is {got:.3f}. If it is too low, T "
            "has to be larger.",
            f"target = {target}일 때 반환한 T = {value:.4g}의 엔트로피는 {got:.3f}입니다. "
            "엔트로피가 낮으면 T를 키워야 합니다.",
            tolerance=2e-3,
        )
