"""Exercises of lesson 7: the context vector, additive scores, hard alignment, a recurrent network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from regard.lessons.checker import Hint, exercise, expect
from regard.nn.attention import attention_stages
from regard.nn.score import additive


@exercise(1, "context")
def context(answer: Callable[..., Any]) -> None:
    s, h = torch.randn(4), torch.randn(6, 4)
    stages = attention_stages(s[None, None, None], h[None, None], h[None, None], scale=1.0)
    result = torch.as_tensor(answer(s, h))
    scaled = torch.softmax(h @ s / 2, dim=0) @ h
    if result.shape == scaled.shape and torch.allclose(result, scaled, atol=1e-4):
        raise Hint("In 2015 the scores were not divided by √d.", "2015년에는 점수를 √d로 나누지 않았습니다.")
    if result.shape == (4,) and torch.allclose(result, (h @ s) @ h, atol=1e-4):
        raise Hint(
            "The scores have to become weights that sum to 1: softmax.",
            "점수를 합이 1인 가중치로 바꾸어야 합니다: softmax.",
        )
    expect(
        result,
        stages.output[0, 0, 0],
        "softmax over the n states, then the weighted sum of the states: a vector [d].",
        "상태 n개에 대한 소프트맥스를 구한 뒤 상태를 가중합합니다. 결과는 벡터 [d]입니다.",
    )


@exercise(2, "additive_score")
def additive_score(answer: Callable[..., Any]) -> None:
    s, h = torch.randn(3), torch.randn(5, 4)
    u, w, v = torch.randn(6, 3), torch.randn(6, 4), torch.randn(6)
    exact = additive(s[None, None, None], h[None, None], u.T[None], w.T[None], v[None])[0, 0, 0]
    result = answer(s, h, u, w, v)
    linear = (u @ s + h @ w.T) @ v
    if torch.is_tensor(result) and result.shape == linear.shape and torch.allclose(result, linear, atol=1e-4):
        raise Hint(
            "The tanh is missing: without it, the score is linear and the query adds the same to all keys.",
            "tanh가 빠졌습니다. 없으면 점수가 선형이 되어 쿼리가 모든 키에 같은 값을 더할 뿐입니다.",
        )
    expect(
        result,
        exact,
        "The sum U s + W h is inside the tanh, and v multiplies the result: n scores.",
        "U s + W h의 합이 tanh 안에 있고, 그 결과에 v를 곱합니다. 점수는 n개입니다.",
    )


@exercise(3, "align")
def align(answer: Callable[..., Any]) -> None:
    weights = torch.tensor([[0.1, 0.8, 0.1], [0.4, 0.3, 0.3], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]])
    result = list(answer(weights))
    if result == [1, 0, 2, 0]:
        raise Hint(
            "Rows whose largest weight is not above 0.5 have no clear alignment: None.",
            "가장 큰 가중치가 0.5를 넘지 않는 행은 정렬이 분명하지 않습니다: None.",
        )
    if result == [1, None, 2, 0]:
        raise Hint("A weight of exactly 0.5 is not above 0.5.", "정확히 0.5인 가중치는 0.5를 넘지 않습니다.")
    if result != [1, None, 2, None]:
        raise Hint(
            f"You return {result} instead of [1, None, 2, None]: one source position (column) for each row.",
            f"[1, None, 2, None]이 아니라 {result}입니다. 행마다 원문 위치(열) 하나입니다.",
        )


@exercise(4, "run_rnn")
def run_rnn(answer: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    peer = torch.nn.RNN(3, 5)
    u, w, first, second = (weight.detach() for weight in peer.parameters())
    b = first + second
    x = torch.randn(7, 3)
    with torch.no_grad():
        exact = peer(x)[0]
    result = torch.as_tensor(answer(x, w, u, b))
    if result.shape == exact[-1].shape and torch.allclose(result, exact[-1], atol=1e-4):
        raise Hint(
            "Return all n states, not only the last one.", "마지막 상태만이 아니라 n개의 상태를 모두 반환하세요."
        )
    alone = torch.tanh(x @ u.T + b)
    if result.shape == alone.shape and torch.allclose(result, alone, atol=1e-4):
        raise Hint(
            "Each state depends on the one before it: W h_{t-1} is missing.",
            "각 상태는 이전 상태에 의존합니다. W h_{t-1}이 빠졌습니다.",
        )
    expect(
        result,
        exact,
        "Start with h = 0 and apply tanh(W h + U x_t + b) word by word; the new h is the next step's old one.",
        "h = 0에서 시작하여 단어마다 tanh(W h + U x_t + b)를 적용하세요. 새 h가 다음 단계의 이전 h입니다.",
    )
