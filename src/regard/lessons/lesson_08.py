"""Exercises of lesson 8: shifted targets, smoothed labels, the schedule, a masked loss, gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.lessons.checker import Hint, exercise, expect


@exercise(1, "shift")
def shift(answer: Callable[..., Any]) -> None:
    reads, predicts = (list(side) for side in answer([7, 8, 9], bos=1, eos=2))
    if len(reads) != 4 or len(predicts) != 4:
        raise Hint(
            f"Three tokens need four positions; yours have {len(reads)} and {len(predicts)}. The decoder reads <s> and "
            "all tokens, and predicts all tokens and </s>.",
            f"토큰이 셋이면 위치는 넷입니다. 작성한 결과는 {len(reads)}개와 {len(predicts)}개입니다. 디코더는 <s>와 "
            "모든 토큰을 읽고, 모든 토큰과 </s>를 예측합니다.",
        )
    if reads == predicts:
        raise Hint(
            "Both are the same: the decoder would only have to copy its input. What it predicts is one position ahead.",
            "두 리스트가 같습니다. 디코더는 입력을 베끼기만 하면 됩니다. 예측할 토큰은 한 칸 앞에 있어야 합니다.",
        )
    expect(
        [reads, predicts],
        [[1, 7, 8, 9], [7, 8, 9, 2]],
        "The decoder reads <s> first and never reads </s>; it predicts </s> last and never predicts <s>.",
        "디코더는 <s>를 맨 먼저 읽고 </s>는 읽지 않습니다. </s>는 맨 뒤에 예측하고 <s>는 예측하지 않습니다.",
    )


@exercise(2, "smoothed")
def smoothed(answer: Callable[..., Any]) -> None:
    target = torch.as_tensor(answer(2, 5, 0.1), dtype=torch.float64)
    if target.shape != (5,) or abs(float(target.sum()) - 1) > 1e-5:
        raise Hint(
            f"The result must be a distribution over 5 tokens with sum 1; yours has the sum {float(target.sum()):.3f}.",
            f"결과는 합이 1인 5개 토큰의 분포여야 합니다. 작성한 결과의 합은 {float(target.sum()):.3f}입니다.",
        )
    logits = torch.randn(1, 5, dtype=torch.float64)
    loss = -(target * logits.log_softmax(dim=-1)).sum()
    expect(
        loss,
        F.cross_entropy(logits, torch.tensor([2]), label_smoothing=0.1),
        "ε is divided among all V tokens, the correct one included: 1 - ε + ε/V for it and ε/V for every other one.",
        "ε은 정답을 포함한 V개 토큰 모두가 나눕니다. 정답은 1 - ε + ε/V, 나머지는 ε/V입니다.",
    )


@exercise(3, "learning_rate")
def learning_rate(answer: Callable[..., Any]) -> None:
    peak = (512 * 4000) ** -0.5
    expect(
        answer(2000, 512, 4000),
        peak / 2,
        "During warm-up the rate is proportional to the step: at step 2,000 of 4,000 it is half of the peak.",
        "웜업 동안 학습률은 스텝에 비례합니다. 4,000 가운데 2,000 스텝에서는 최댓값의 절반입니다.",
        tolerance=1e-9,
    )
    expect(
        answer(16000, 512, 4000),
        peak / 2,
        "After warm-up the rate falls with the square root: at four times the warm-up it is half of the peak.",
        "웜업이 끝나면 제곱근에 반비례해 줄어듭니다. 웜업의 네 배인 스텝에서는 최댓값의 절반입니다.",
        tolerance=1e-9,
    )


@exercise(4, "masked_loss")
def masked_loss(answer: Callable[..., Any]) -> None:
    logits, labels = torch.randn(2, 4, 6), torch.tensor([[3, 1, 5, 2], [4, 2, 0, 0]])
    result = answer(logits, labels, 0)
    flat = logits.flatten(0, 1), labels.flatten()
    if torch.as_tensor(result).shape == () and torch.allclose(torch.as_tensor(result), F.cross_entropy(*flat)):
        raise Hint(
            "Padding is counted: two of the eight labels are padding and must not contribute.",
            "패딩까지 계산했습니다. 레이블 여덟 개 중 두 개는 패딩이므로 빼야 합니다.",
        )
    expect(
        result,
        F.cross_entropy(*flat, ignore_index=0),
        "Divide the sum by the number of real labels (6), not by all positions (8), and take a minus sign.",
        "합을 전체 위치 수(8)가 아니라 실제 레이블 수(6)로 나누고 음의 부호를 붙여야 합니다.",
    )


@exercise(5, "accumulate")
def accumulate(answer: Callable[..., Any]) -> None:
    model = nn.Linear(3, 1)
    batches = [(torch.randn(rows, 3), torch.randn(rows, 1)) for rows in (2, 7, 4)]

    def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    (expected,) = torch.autograd.grad((model(inputs) - labels).square().mean(), [model.weight])
    model.weight.grad = torch.full_like(model.weight, 1e6)  # left over from an earlier step
    answer(model, batches, loss_sum)
    got = model.weight.grad
    if got is None or got.abs().max() > 1e3:
        raise Hint(
            "The gradients of an earlier step are still in there: call model.zero_grad() first, once.",
            "이전 스텝의 그래디언트가 남아 있습니다. 먼저 model.zero_grad()를 한 번 호출해야 합니다.",
        )
    expect(
        got,
        expected,
        "Add up the gradients of the summed losses and divide once by the tokens of all batches: a mean of the "
        "batches' means gives tokens of small batches more weight, and zero_grad between batches forgets the earlier "
        "ones.",
        "손실 합의 그래디언트를 모두 더한 뒤 전체 토큰 수로 한 번만 나눕니다. 배치 평균을 다시 평균하면 작은 배치의 "
        "토큰이 더 큰 비중을 갖고, 배치 사이에 zero_grad를 호출하면 앞의 배치가 지워집니다.",
    )
