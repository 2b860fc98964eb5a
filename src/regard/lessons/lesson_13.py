"""Exercises of lesson 13: entropy, the previous-token score, a logit lens, what each head wrote."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from regard.lessons.checker import Hint, exercise, expect


@exercise(1, "entropy")
def entropy(answer: Callable[..., Any]) -> None:
    weights = torch.tensor([[[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]])
    result = torch.as_tensor(answer(weights))
    if not bool(torch.isfinite(result).all()):
        raise Hint(
            "A weight of 0 gives 0 · log 0 = NaN: clamp the weights before the logarithm.",
            "가중치가 0이면 0 · log 0 = NaN이 됩니다. 로그를 취하기 전에 하한을 두세요.",
        )
    expect(
        result,
        [[0.0, math.log(2), math.log(4)]],
        "One number per query, in nats and not negative: 0 for a single key, ln 2 for two equal ones, ln 4 for four.",
        "쿼리마다 음이 아닌 nat 단위의 값 하나입니다. 키 하나에만 주면 0, 둘에 똑같이 주면 ln 2, 넷이면 ln 4입니다.",
    )


@exercise(2, "previous_score")
def previous_score(answer: Callable[..., Any]) -> None:
    weights = torch.rand(2, 5, 5).tril()
    weights = weights / weights.sum(dim=-1, keepdim=True)
    result = torch.as_tensor(answer(weights))
    expected = torch.stack([weights[:, i, i - 1] for i in range(1, 5)]).mean(dim=0)
    if result.shape == (2,) and torch.allclose(result, expected * 4 / 5):
        raise Hint(
            "The first query has no token before it: divide by N - 1 queries, not by N.",
            "첫 쿼리에는 앞 토큰이 없습니다. N이 아니라 N - 1개의 쿼리로 나누세요.",
        )
    expect(
        result,
        expected,
        "Query i and key i - 1: the diagonal below the main one (offset=-1), one mean per head.",
        "쿼리 i와 키 i - 1, 곧 주대각선 바로 아래의 대각선(offset=-1)을 헤드마다 평균합니다.",
    )


@exercise(3, "lens")
def lens(answer: Callable[..., Any]) -> None:
    embedded, matrix = torch.randn(3, 8), torch.randn(5, 8)
    added = [torch.randn(3, 8), torch.randn(3, 8)]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (8,))

    result = list(answer(embedded, added, norm, matrix))
    if len(result) != 3:
        raise Hint(
            f"There are three readings, after the embeddings and after each of two sub-layers; yours has "
            f"{len(result)}.",
            f"임베딩 뒤와 두 하위 레이어 뒤, 모두 세 번 읽어야 하지만 결과는 {len(result)}개입니다.",
        )
    streams = [embedded, embedded + added[0], embedded + added[0] + added[1]]
    if torch.allclose(torch.as_tensor(result[2]), streams[2] @ matrix.T, atol=1e-4):
        raise Hint("The final norm is missing.", "마지막 정규화가 빠졌습니다.")
    expect(
        torch.stack([torch.as_tensor(one) for one in result]),
        torch.stack([norm(stream) @ matrix.T for stream in streams]),
        "Read the whole residual stream, the sum of everything so far, not what a single sub-layer added; the norm "
        "is for reading only and does not change the stream.",
        "한 하위 레이어가 더한 것이 아니라 지금까지의 합인 잔차 스트림 전체를 읽어야 합니다. 정규화는 읽을 때만 "
        "적용하고 스트림은 바꾸지 않습니다.",
    )


@exercise(4, "head_contributions")
def head_contributions(answer: Callable[..., Any]) -> None:
    heads, output, direction = torch.randn(3, 4), torch.randn(6, 12), torch.randn(6)
    result = torch.as_tensor(answer(heads, output, direction))
    if result.shape != (3,):
        raise Hint(
            f"One number per head is needed, (3,); yours has shape {tuple(result.shape)}.",
            f"헤드마다 숫자 하나, (3,)이 필요하지만 결과의 모양은 {tuple(result.shape)}입니다.",
        )
    expect(
        result.sum(),
        direction @ (output @ heads.flatten()),
        "The contributions have to sum to direction · (output @ heads.flatten()).",
        "기여도의 합은 direction · (output @ heads.flatten())과 같아야 합니다.",
        tolerance=1e-3,
    )
    expected = [direction @ (output[:, 4 * head : 4 * head + 4] @ heads[head]) for head in range(3)]
    expect(
        result,
        torch.stack(expected),
        "Head h uses the columns h · D to (h + 1) · D of the output projection.",
        "헤드 h는 출력 투영의 h · D부터 (h + 1) · D까지의 열을 사용합니다.",
        tolerance=1e-3,
    )
