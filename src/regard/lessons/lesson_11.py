"""Exercises of lesson 11: the loss of masked tokens, mean pooling, BERT's masking, span corruption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from regard.lessons.checker import Hint, exercise, expect


@exercise(1, "masked_lm_loss")
def masked_lm_loss(answer: Callable[..., Any]) -> None:
    logits, ids = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    chosen = torch.tensor([[True, False, False, True, False], [False, False, True, False, False]])
    each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view(2, 5)
    result = torch.as_tensor(answer(logits, ids, chosen))
    if result.shape == () and torch.allclose(result, each.mean()):
        raise Hint(
            "All positions are counted: only the chosen ones are predicted, the others are visible.",
            "모든 위치를 계산했습니다. 예측하는 것은 고른 위치뿐이고 나머지는 모델이 이미 보고 있습니다.",
        )
    expect(
        result,
        each[chosen].mean(),
        "Take the mean over the three chosen positions, not over all ten.",
        "열 개 전체가 아니라 고른 위치 세 개에 대해 평균해야 합니다.",
    )


@exercise(2, "mean_pool")
def mean_pool(answer: Callable[..., Any]) -> None:
    states = torch.randn(2, 4, 3)
    is_real = torch.tensor([[True, True, True, True], [True, True, False, False]])
    result = torch.as_tensor(answer(states, is_real))
    if result.shape != (2, 3):
        raise Hint(
            f"The result has shape {tuple(result.shape)} instead of (2, 3): one vector per text, the mean over its "
            "tokens.",
            f"결과의 모양이 (2, 3)이 아니라 {tuple(result.shape)}입니다. 글마다 토큰을 평균한 벡터 하나가 필요합니다.",
        )
    expect(
        result,
        torch.stack([states[0].mean(dim=0), states[1, :2].mean(dim=0)]),
        "Padding must not count: add only the vectors of real tokens, and divide by their number in that row.",
        "패딩은 빼야 합니다. 실제 토큰의 벡터만 더하고, 그 행의 실제 토큰 수로 나눕니다.",
    )


@exercise(3, "replace_chosen")
def replace_chosen(answer: Callable[..., Any]) -> None:
    ids, random_ids = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[50, 60, 70, 80, 90]])
    chosen = torch.tensor([[True, True, True, False, False]])
    dice = torch.tensor([[0.3, 0.85, 0.95, 0.3, 0.85]])
    before = ids.clone()
    result = torch.as_tensor(answer(ids, chosen, dice, random_ids, 1))
    if not torch.equal(ids, before):
        raise Hint(
            "The original ids were changed, but they are the labels: work on a copy.",
            "원래 ids가 바뀌었습니다. ids는 레이블이므로 복사본을 바꾸세요.",
        )
    if result.shape == ids.shape and result[0, 3:].tolist() != [8, 9]:
        raise Hint("Tokens that were not chosen stay as they are.", "고르지 않은 토큰은 그대로 두어야 합니다.")
    expect(
        result,
        [[1, 60, 7, 8, 9]],
        "Of the chosen tokens: dice 0.3 → mask_id, 0.85 → the random token, 0.95 → unchanged.",
        "고른 토큰 가운데 dice가 0.3이면 mask_id, 0.85이면 무작위 토큰, 0.95이면 그대로입니다.",
    )


@exercise(4, "corrupt_spans")
def corrupt_spans(answer: Callable[..., Any]) -> None:
    tokens = [10, 11, 12, 13, 14, 15, 16]
    source, target = (list(part) for part in answer(tokens, [(1, 3), (5, 6)], [100, 101, 102]))
    if source[-1:] != [16]:
        raise Hint(
            "The tokens after the last span are missing from the source.",
            "마지막 구간 뒤의 토큰이 입력에 빠져 있습니다.",
        )
    if source != [10, 100, 13, 14, 101, 16]:
        raise Hint(
            f"The source should be [10, 100, 13, 14, 101, 16], yours is {source}: one sentinel in place of each span.",
            f"입력은 [10, 100, 13, 14, 101, 16]이어야 하지만 결과는 {source}입니다. 구간마다 센티널 하나로 바꿉니다.",
        )
    if target != [100, 11, 12, 101, 15]:
        raise Hint(
            f"The target should be [100, 11, 12, 101, 15], yours is {target}: each sentinel, then the tokens of its "
            "span.",
            f"정답은 [100, 11, 12, 101, 15]여야 하지만 결과는 {target}입니다. 센티널 다음에 그 구간의 토큰이 옵니다.",
        )
