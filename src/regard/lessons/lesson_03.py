"""Exercises of lesson 3: causal and padding masks, masked softmax, a window with a cache, a test for leaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.lessons.checker import Hint, exercise, expect
from regard.nn.attention import attention_stages
from regard.nn.mask import AttentionMask, Positions, causal, window

CPU = torch.device("cpu")


def check_boolean(mask: Any) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise Hint("The mask should be a tensor of booleans.", "마스크는 불리언 텐서여야 합니다.")


@exercise(1, "causal_mask")
def causal_mask(answer: Callable[..., Any]) -> None:
    mask, positions = answer(4), Positions.of(4, CPU)
    check_boolean(mask)
    exact = AttentionMask(causal, positions, positions).dense()[0, 0]
    if torch.equal(mask, exact.T):
        raise Hint(
            "Rows are queries and columns keys: the first row may attend to the first key only.",
            "행이 쿼리, 열이 키입니다. 첫 행은 첫 키에만 주목할 수 있습니다.",
        )
    if mask.shape == exact.shape and not mask.diagonal().any():
        raise Hint(
            "A token may attend to itself: the diagonal is True.",
            "토큰은 자기 자신에게 주목할 수 있습니다. 대각선은 True입니다.",
        )
    expect(mask, exact, "True on and below the diagonal, [n, n].", "대각선과 그 아래가 True인 [n, n]입니다.")


@exercise(2, "padding_mask")
def padding_mask(answer: Callable[..., Any]) -> None:
    mask = answer([3, 1], 4)
    check_boolean(mask)
    exact = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    if mask.shape != (2, 1, 1, 4):
        raise Hint(
            f"The shape is {tuple(mask.shape)} instead of [batch, 1, 1, n] = (2, 1, 1, 4): the last axis is the keys.",
            f"모양이 [배치, 1, 1, n] = (2, 1, 1, 4)가 아니라 {tuple(mask.shape)}입니다. 마지막 축이 키입니다.",
        )
    if torch.equal(mask[:, 0, 0], ~exact):
        raise Hint("True means a real token, False padding.", "True가 실제 토큰, False가 패딩입니다.")
    expect(
        mask[:, 0, 0],
        exact,
        "A sentence of length 3 has the real positions 0, 1 and 2: position < length.",
        "길이가 3인 문장의 실제 위치는 0, 1, 2입니다. 위치 < 길이입니다.",
    )


@exercise(3, "masked_softmax")
def masked_softmax(answer: Callable[..., Any]) -> None:
    scores, mask = torch.randn(2, 3, 4, 5), torch.rand(2, 1, 4, 5) < 0.6
    mask[0, 0, 1], mask[1, 0, 2] = True, False
    q, k = torch.eye(5).expand(2, 3, 5, 5)[:, :, :4], torch.zeros(2, 3, 5, 5)
    exact = attention_stages(q, k, k, mask, score=lambda q, k: scores, scale=1.0).weights
    result = torch.as_tensor(answer(scores, mask))
    if result.isnan().any():
        raise Hint(
            "A row without a True is NaN: the softmax of nothing but -inf. Replace such rows by zeros.",
            "True가 없는 행이 NaN입니다. -inf만 있는 행의 소프트맥스이기 때문입니다. 그런 행은 0으로 바꾸세요.",
        )
    expect(
        result[1, :, 2],
        torch.zeros(3, 5),
        "A row without a True must be all zero; -1e9 instead of -inf makes it uniform.",
        "True가 없는 행은 모두 0이어야 합니다. -inf 대신 -1e9를 쓰면 균등해집니다.",
    )
    seen = mask.any(dim=-1).expand(2, 3, 4)
    expect(
        result.sum(dim=-1)[seen],
        torch.ones(int(seen.sum())),
        "Rows do not sum to 1: mask the scores before the softmax, not the weights after it.",
        "행의 합이 1이 아닙니다. 소프트맥스 뒤의 가중치가 아니라 앞의 점수를 마스킹하세요.",
    )
    expect(
        result,
        exact,
        "Masked scores have to become -inf: 0 is an ordinary score, with e^0 = 1.",
        "마스킹된 점수는 -inf가 되어야 합니다. 0은 평범한 점수이고 e^0 = 1입니다.",
    )


@exercise(4, "step_mask")
def step_mask(answer: Callable[..., Any]) -> None:
    for queries, keys, size in ((4, 4, 4), (1, 5, 8), (2, 6, 3)):
        mask = answer(queries, keys, size)
        check_boolean(mask)
        q, k = Positions.of(queries, CPU, start=keys - queries), Positions.of(keys, CPU)
        exact = AttentionMask(causal & window(size), q, k).dense()[0, 0]
        expect(
            mask,
            exact,
            f"For {queries} queries, {keys} keys and window {size}: query i is at position keys - queries + i, and "
            f"attends to {size} tokens at most, itself included.",
            f"쿼리 {queries}개, 키 {keys}개, 윈도우 {size}: i번째 쿼리의 위치는 keys - queries + i이고, "
            f"자신을 포함해 최대 {size}개 토큰에 주목합니다.",
        )


@exercise(5, "leaks")
def leaks(answer: Callable[..., Any]) -> None:
    def attend(x: Tensor, mask: Tensor) -> Tensor:
        return attention_stages(x[None, None], x[None, None], x[None, None], mask).output[0, 0]

    triangle = torch.ones(6, 6, dtype=torch.bool).tril()
    hole = triangle.clone()
    hole[4, 5] = True  # only the last token leaks, to the one before it
    early = triangle.clone()
    early[0, 1] = True

    def after(x: Tensor) -> Tensor:
        scores = torch.softmax(x @ x.T, dim=-1) * triangle
        return scores @ x

    leak = (
        (lambda x: attend(x, triangle | True), "attention without a mask leaks", "마스크 없는 어텐션은 샙니다"),
        (
            lambda x: attend(x, hole),
            "only the last token leaks here: change every future",
            "마지막 토큰만 샙니다. 모든 미래를 바꾸어 보세요",
        ),
        (
            lambda x: attend(x, early),
            "only row 0 leaks here: compare every past",
            "0번 행만 샙니다. 모든 과거를 비교하세요",
        ),
        (after, "masking after the softmax leaks by the denominator", "소프트맥스 뒤의 마스킹은 분모로 샙니다"),
    )
    tight = (
        (lambda x: attend(x, triangle), "causal attention does not leak", "인과 어텐션은 새지 않습니다"),
        (lambda x: x.cumsum(dim=0), "a running sum does not leak", "누적합은 새지 않습니다"),
    )
    for truth, cases in ((False, tight), (True, leak)):
        for f, en, ko in cases:
            if bool(answer(f, 6, 4)) != truth:
                raise Hint(f"You return {not truth}, but {en}.", f"{not truth}를 반환했지만, {ko}.")
