"""Exercises of lesson 14: parameters, the KV cache, the part with n², tiles of a softmax, the sign-flip test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from regard.cost import cost
from regard.lessons.checker import Hint, exercise, expect
from regard.models.config import ModelConfig


def decoder(**fields: Any) -> ModelConfig:
    return ModelConfig(architecture="decoder", vocab_size=10, position="rope", bias=False, **fields)


@exercise(1, "attention_parameters")
def attention_parameters(answer: Callable[..., Any]) -> None:
    for dim, heads, kv_heads in ((96, 8, 2), (64, 4, 1), (64, 4, 4)):
        exact = cost(decoder(dim=dim, heads=heads, kv_heads=kv_heads, layers=1)).parameters["decoder.attention"]
        result = answer(dim, heads, kv_heads)
        if result == exact - dim * dim:
            raise Hint("The output projection is missing: dim x dim.", "출력 투영(dim x dim)이 빠졌습니다.")
        if result == 4 * dim * dim != exact:
            raise Hint(
                f"With {kv_heads} of {heads} heads for keys and values, K and V are smaller than dim x dim.",
                f"키와 값의 헤드가 {heads}개 중 {kv_heads}개이면 K와 V는 dim x dim보다 작습니다.",
            )
        expect(
            result,
            exact,
            "Q and output have dim x dim weights, K and V dim x (kv_heads · dim / heads) each.",
            "Q와 출력은 dim x dim, K와 V는 각각 dim x (kv_heads · dim / heads)입니다.",
        )


@exercise(2, "cache_bytes")
def cache_bytes(answer: Callable[..., Any]) -> None:
    exact = cost(decoder(dim=64, heads=4, kv_heads=2, layers=3), seq=50, batch=5, dtype="bf16").kv_cache["self"]
    result = answer(3, 2, 16, 50, 5, 2)
    if result * 2 == exact:
        raise Hint("Both are stored, keys and values.", "키와 값을 모두 저장합니다.")
    if result * 3 == exact:
        raise Hint("Every layer has a cache of its own.", "레이어마다 캐시가 따로 있습니다.")
    expect(
        result,
        exact,
        "2 · layers · kv_heads · head_size · tokens · rows · bytes_each.",
        "2 · 레이어 수 · 키/값 헤드 수 · 헤드 차원 · 토큰 수 · 행 수 · 바이트 수입니다.",
    )


@exercise(3, "share_of_scores")
def share_of_scores(answer: Callable[..., Any]) -> None:
    for n, dim, ff_dim in ((64, 64, 256), (512, 64, 128), (6 * 96, 96, 384)):
        forward = cost(decoder(dim=dim, heads=4, layers=1, ff_dim=ff_dim), seq=n, batch=1).forward
        block = {name: count for name, count in forward.items() if name != "head"}
        result, exact = answer(n, dim, ff_dim), block["decoder.scores"] / sum(block.values())
        half = block["decoder.scores"] / 2
        rest = sum(block.values()) - block["decoder.scores"]
        if math.isclose(result, half / (half + rest), rel_tol=1e-6):
            raise Hint(
                "There are two products with n²: queries with keys, and weights with values.",
                "n²이 들어가는 곱은 두 개입니다. 쿼리와 키, 가중치와 값입니다.",
            )
        expect(
            result,
            exact,
            "Scores and sums are 4·n²·dim, projections 8·n·dim², feed-forward 4·n·dim·ff_dim.",
            "점수와 가중합은 4·n²·dim, 투영은 8·n·dim², 피드포워드는 4·n·dim·ff_dim입니다.",
            1e-6,
        )


@exercise(4, "merge")
def merge(answer: Callable[..., Any]) -> None:
    scores, values = 3 * torch.randn(9, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)

    def tile(part: slice) -> tuple[float, float, torch.Tensor]:
        m = float(scores[part].max())
        weights = torch.exp(scores[part] - m)
        return m, float(weights.sum()), weights @ values[part]

    pairs = [pair for at in (3, 7) for pair in itertools.permutations((tile(slice(0, at)), tile(slice(at, 9))))]
    merged = [answer(*pair) for pair in pairs]
    for m, _, _ in merged:
        expect(m, float(scores.max()), "m is the larger of the two maxima.", "m은 두 최댓값 중 큰 쪽입니다.")
    for _, total, o in merged:
        expect(
            torch.as_tensor(o) / total,
            scores.softmax(0) @ values,
            "Before they are added, l and o of each tile are multiplied by exp(m of the tile - m).",
            "더하기 전에 각 타일의 l과 o에 exp(타일의 m - m)을 곱해야 합니다.",
        )
        expect(
            total,
            float(torch.exp(scores - scores.max()).sum()),
            "l is a sum of exp(score - m), not a mean.",
            "l은 exp(점수 - m)의 평균이 아니라 합입니다.",
        )


@exercise(5, "sign_flip_p")
def sign_flip_p(answer: Callable[..., Any]) -> None:
    for differences in ([1.0, 2.0, 0.5], [-1.0, -2.0, -0.5], [0.3, -0.2, 0.4, 0.1], [0.2] * 6):
        signs = itertools.product((1, -1), repeat=len(differences))
        sums = [abs(sum(sign * one for sign, one in zip(each, differences, strict=True))) for each in signs]
        exact = sum(one >= abs(sum(differences)) - 1e-9 for one in sums) / len(sums)
        result = answer(differences)
        if result == 0:
            raise Hint(
                "The choice without a flip counts, too: p is at least 2 / 2ⁿ.",
                "뒤집지 않은 경우도 셉니다. p는 적어도 2 / 2ⁿ입니다.",
            )
        if math.isclose(result, exact / 2):
            raise Hint(
                "Compare absolute sums: a difference as large in the other direction counts as well.",
                "절댓값을 비교해야 합니다. 반대 방향으로 그만큼 큰 경우도 셉니다.",
            )
        expect(
            result,
            exact,
            f"For {differences} it is {exact:g}: of all 2ⁿ choices of signs, how many have an absolute sum as large?",
            f"{differences}에서는 {exact:g}입니다. 2ⁿ가지 부호 중 합의 절댓값이 그만큼 큰 것은 몇 개입니까?",
        )
