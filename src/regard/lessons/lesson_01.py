"""Exercises of lesson 1: a weighted mean, softmax, attention, self-attention as a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from regard.lessons.checker import Hint, exercise, expect


@exercise(1, "weighted_mean")
def weighted_mean(answer: Callable[..., Any]) -> None:
    weights, values = torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.randn(4, 3)
    result = torch.as_tensor(answer(weights, values))
    if result.shape != (3,):
        raise Hint(
            f"The result has shape {tuple(result.shape)} instead of (3,): sum over the vectors, not over their "
            "elements.",
            f"결과의 모양이 (3,)이 아니라 {tuple(result.shape)}입니다. 벡터의 원소가 아니라 벡터들을 더해야 합니다.",
        )
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True))
    expect(
        result,
        mean,
        "The weights already sum to 1: multiply each vector by its weight and add, without dividing by n.",
        "가중치의 합은 이미 1입니다. 벡터마다 가중치를 곱해 더하고, n으로 나누지 않습니다.",
    )


@exercise(2, "softmax")
def softmax(answer: Callable[..., Any]) -> None:
    scores = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 0.5]])
    expect(
        answer(scores),
        F.softmax(scores, dim=1),
        "Each row has to sum to 1: divide by the sum of the row (dim=1, keepdim=True).",
        "행마다 합이 1이어야 합니다. 행의 합(dim=1, keepdim=True)으로 나누세요.",
    )
    large = torch.tensor([[1000.0, 999.0, 0.0], [-1000.0, -1001.0, -1002.0]])
    expect(
        answer(large),
        F.softmax(large, dim=1),
        "exp(1000) overflows, and exp(-1000) underflows to 0: subtract the largest score of each row first.",
        "exp(1000)은 오버플로가, exp(-1000)은 언더플로가 됩니다. 먼저 행마다 가장 큰 점수를 빼세요.",
    )


@exercise(3, "attention")
def attention(answer: Callable[..., Any]) -> None:
    q, k, v = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 2)
    results = answer(q, k, v)
    if not isinstance(results, tuple) or len(results) != 2:
        raise Hint("Return two tensors: (output, weights).", "텐서 두 개 (출력, 가중치)를 반환하세요.")
    output, weights = results
    if torch.as_tensor(weights).shape != (3, 5):
        raise Hint(
            "The weights have one row per query and one column per key: [3, 5] here. Did you transpose k?",
            "가중치는 쿼리마다 한 행, 키마다 한 열입니다. 여기서는 [3, 5]입니다. k를 전치했는지 확인하세요.",
        )
    expect(
        weights.sum(dim=1),
        torch.ones(3),
        "Each row of the weights has to sum to 1: apply softmax over the keys, dim=-1.",
        "가중치의 행마다 합이 1이어야 합니다. 소프트맥스는 키 방향(dim=-1)으로 적용합니다.",
    )
    expect(
        weights,
        F.softmax(torch.einsum("nd,md->nm", q, k) / 2.0, dim=1),
        "The scores have to be divided by the root of d_k, the size of a key: here √4 = 2.",
        "점수를 키의 차원 d_k의 제곱근으로 나누어야 합니다. 여기서는 √4 = 2입니다.",
    )
    expect(
        output,
        torch.einsum("nm,md->nd", weights, v),
        "The output is the weighted mean of the values: weights @ v.",
        "출력은 값의 가중 평균, 즉 weights @ v입니다.",
    )


@exercise(4, "SelfAttention")
def self_attention(answer: Callable[..., Any]) -> None:
    for bias in (False, True):
        layer, x = answer(6, 4, 3, bias=bias), torch.randn(5, 6)
        shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
        expected: dict[str, tuple[int, ...]] = {"q.weight": (4, 6), "k.weight": (4, 6), "v.weight": (3, 6)}
        if bias:
            expected |= {"q.bias": (4,), "k.bias": (4,), "v.bias": (3,)}
        if shapes != expected:
            raise Hint(
                f"With bias={bias}, the parameters should be {expected}, and are {shapes}.",
                f"bias={bias}일 때 파라미터는 {expected}이어야 하는데 {shapes}입니다.",
            )
        with torch.no_grad():
            for parameter in layer.parameters():  # so that a missing scale or role is visible
                parameter.normal_()
            q, k, v = (F.linear(x, part.weight, part.bias) for part in (layer.q, layer.k, layer.v))
            if (result := layer(x)).shape != (5, 3):
                raise Hint(
                    f"The output has shape {tuple(result.shape)} instead of [n, value_dim] = (5, 3).",
                    f"출력의 모양이 [n, value_dim] = (5, 3)이 아니라 {tuple(result.shape)}입니다.",
                )
            expect(
                result,
                F.scaled_dot_product_attention(q[None], k[None], v[None])[0],
                "Compute softmax(q kᵀ / √key_dim) v with the three layers: key_dim is 4 here, not dim = 6.",
                "세 레이어로 softmax(q kᵀ / √key_dim) v를 계산하세요. 여기서 key_dim은 4이고, dim = 6이 아닙니다.",
            )
