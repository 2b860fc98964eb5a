"""Exercises of lesson 10: the log-probability of a sentence, greedy search, the nucleus, beam search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.lessons.checker import Hint, exercise, expect

EOS = 0
NEXT = {  # the last token (None: the beginning) -> probabilities; greedy takes 1, the best sentence begins with 2
    None: [0.0, 0.6, 0.4, 0.0],
    1: [0.30, 0.0, 0.35, 0.35],
    2: [0.1, 0.0, 0.0, 0.9],
    3: [0.9, 0.1, 0.0, 0.0],
}


def following(prefix: Sequence[int]) -> Tensor:
    return torch.tensor(NEXT[prefix[-1] if prefix else None]).log()


def total(tokens: Sequence[int]) -> float:
    steps = zip((None, *tokens), tokens, strict=False)
    return sum(math.log(NEXT[before][after] or 1e-300) for before, after in steps)


@exercise(1, "log_probability")
def log_probability(answer: Callable[..., Any]) -> None:
    tokens = [1, 2, 3, EOS]
    result = float(answer(following, tokens))
    if 0 < result < 1:
        raise Hint(
            "This is a probability: return the sum of the logarithms, a negative number.",
            "이 값은 확률입니다. 음수인 로그의 합을 반환해야 합니다.",
        )
    expect(
        result,
        total(tokens),
        "The first token counts too, given the empty list, and each token is given those before it, not itself.",
        "빈 리스트가 주어졌을 때의 첫 토큰도 더해야 하고, 각 토큰은 자신이 아니라 그 앞의 토큰들이 주어진 확률입니다.",
    )


@exercise(2, "greedy")
def greedy(answer: Callable[..., Any]) -> None:
    def straight(prefix: Sequence[int]) -> Tensor:
        return torch.tensor([[0.1, 0.7, 0.2], [0.1, 0.2, 0.7], [0.8, 0.1, 0.1]][min(len(prefix), 2)]).log()

    result = list(answer(straight, EOS, 10))
    if EOS in result:
        raise Hint(
            "The result is without eos: stop before you append it.",
            "결과에는 eos가 없어야 합니다. 덧붙이기 전에 멈추세요.",
        )
    expect(
        result,
        [1, 2],
        "Ask for the probabilities after all tokens so far, and take the most probable token each time.",
        "지금까지의 모든 토큰 다음의 확률을 구하고, 매번 확률이 가장 높은 토큰을 고릅니다.",
    )
    endless = list(answer(lambda prefix: torch.tensor([0.1, 0.9]).log(), EOS, 5))
    expect(
        endless,
        [1] * 5,
        f"Without eos the search has to stop after limit = 5 tokens; yours returned {len(endless)}.",
        f"eos가 나오지 않으면 limit = 5개에서 멈추어야 하지만 {len(endless)}개를 반환했습니다.",
    )


@exercise(3, "top_p")
def top_p(answer: Callable[..., Any]) -> None:
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    result = torch.as_tensor(answer(probabilities.clone(), 0.7))
    if result.shape == (4,) and abs(float(result.sum()) - 1) > 1e-4:
        raise Hint(
            f"The result sums to {float(result.sum()):.2f}: normalise after cutting.",
            f"결과의 합이 {float(result.sum()):.2f}입니다. 자른 다음 다시 정규화하세요.",
        )
    expect(
        result,
        [0.0, 2 / 3, 0.0, 1 / 3],
        "For p = 0.7 the nucleus of (0.1, 0.5, 0.15, 0.25) is {0.5, 0.25}: the token that reaches p is still part of "
        "it, and every token keeps its own position.",
        "p = 0.7일 때 (0.1, 0.5, 0.15, 0.25)의 nucleus는 {0.5, 0.25}입니다. p에 도달하게 하는 토큰까지 포함하고, "
        "토큰의 위치는 그대로 둡니다.",
    )
    expect(
        answer(probabilities.clone(), 0.3),
        [0.0, 1.0, 0.0, 0.0],
        "The most probable token is always in the nucleus, also when it alone exceeds p.",
        "확률이 가장 높은 토큰은 혼자 p를 넘더라도 언제나 nucleus에 들어갑니다.",
    )


@exercise(4, "beam_search")
def beam_search(answer: Callable[..., Any]) -> None:
    result = [int(token) for token in answer(following, 2, EOS, 6)]
    if EOS in result:
        raise Hint("Return the hypothesis without eos.", "가설에서 eos를 빼고 반환하세요.")
    if result[:1] == [1]:
        raise Hint(
            "With a beam of 2 the best sentence begins with token 2; yours begins as greedy search does. Rank the "
            "extensions of all hypotheses together, by their total log-probability.",
            "빔이 2이면 가장 좋은 문장은 토큰 2로 시작하지만, 결과는 그리디 탐색처럼 시작합니다. 모든 가설의 확장을 "
            "한꺼번에 로그 확률의 합으로 정렬하세요.",
        )
    every = (list(one) for size in range(4) for one in itertools.product((1, 2, 3), repeat=size))
    best = max(every, key=lambda tokens: total([*tokens, EOS]))
    if result != best:
        raise Hint(
            f"The most probable finished hypothesis is {best}, yours is {result}: a finished one needs the probability "
            "of eos, and the best of all finished ones is returned.",
            f"확률이 가장 높은 끝난 가설은 {best}이지만 결과는 {result}입니다. 끝난 가설에는 eos의 확률도 더하고, "
            "그중 가장 좋은 것을 반환해야 합니다.",
        )
