"""Exercises of lesson 5: sinusoidal encoding, ALiBi, RoPE, a test of order-blindness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.lessons.checker import Hint, exercise, expect
from regard.nn.config import StackConfig
from regard.nn.position import ALiBi, Rotary, Sinusoidal, alibi_slopes, rotate


@exercise(1, "sinusoidal")
def sinusoidal(answer: Callable[..., Any]) -> None:
    table = torch.as_tensor(answer(50, 8))
    exact = Sinusoidal(StackConfig(dim=8, heads=1)).embed(torch.arange(50)[None])[0]
    if table.shape != (50, 8):
        raise Hint(
            f"The shape is {tuple(table.shape)} instead of (50, 8).",
            f"모양이 (50, 8)이 아니라 {tuple(table.shape)}입니다.",
        )
    if torch.allclose(table.double(), torch.cat((exact[:, 0::2], exact[:, 1::2]), dim=1), atol=1e-4):
        raise Hint(
            "You put all sines first, then all cosines. Here they are interleaved: sin, cos, sin, cos …",
            "사인을 모두 앞에, 코사인을 뒤에 두었습니다. 여기서는 sin, cos, sin, cos …로 번갈아 둡니다.",
        )
    expect(
        table[:, :2],
        exact[:, :2],
        "The first pair has the frequency 1: column 0 is sin(pos), column 1 is cos(pos) of the same angle.",
        "첫 쌍의 진동수는 1입니다. 0번 열은 sin(pos), 1번 열은 같은 각도의 cos(pos)입니다.",
    )
    expect(
        table,
        exact,
        "The exponent is 2i / dim: for dim = 8 the pairs have the frequencies 1, 0.1, 0.01 and 0.001.",
        "지수는 2i / dim입니다. dim = 8이면 쌍들의 진동수는 1, 0.1, 0.01, 0.001입니다.",
    )


@exercise(2, "alibi_bias")
def alibi_bias(answer: Callable[..., Any]) -> None:
    pos = torch.arange(6)[None]
    exact = ALiBi(StackConfig(dim=8, heads=8)).bias(pos, pos).dense(torch.zeros(1, 8, 6, 1))[0]
    for head, slope in enumerate(alibi_slopes(8).tolist()[:3]):
        result = torch.as_tensor(answer(6, slope))
        if result.shape == (6, 6) and (result > 0).any():
            raise Hint(
                "The bias lowers the score of far words: it is never positive.",
                "편향은 먼 단어의 점수를 낮춥니다. 양수가 될 수 없습니다.",
            )
        expect(
            result,
            exact[head],
            "Entry (i, j) is -slope · |i - j|: zero on the diagonal, the same on both sides of it.",
            "(i, j) 원소는 -slope · |i - j|입니다. 대각선은 0이고 양쪽이 대칭입니다.",
        )


@exercise(3, "rope")
def rope(answer: Callable[..., Any]) -> None:
    x, positions = torch.randn(5, 8), torch.tensor([0, 1, 2, 7, 30])
    result = torch.as_tensor(answer(x, positions))
    if result.shape != x.shape:
        raise Hint("The result has the shape of x.", "결과의 모양은 x와 같습니다.")
    expect(result[0], x[0], "At position 0 nothing is turned.", "위치 0에서는 회전하지 않습니다.")
    expect(
        result.norm(dim=1),
        x.norm(dim=1),
        "A rotation keeps the length of a vector: (a, b) becomes (a cos - b sin, b cos + a sin).",
        "회전은 벡터의 길이를 바꾸지 않습니다. (a, b)는 (a cos - b sin, b cos + a sin)이 됩니다.",
    )
    layer = Rotary(StackConfig(dim=8, heads=1, position="rope"))
    expect(
        result,
        rotate(x[None, None], layer.rotation(positions[None]), "interleaved")[0, 0],
        "The pairs are neighbours (x0, x1), (x2, x3) …, pair i turns by positions · base^(-2i/d), counterclockwise.",
        "쌍은 이웃한 (x0, x1), (x2, x3) …이고, i번째 쌍은 positions · base^(-2i/d)만큼 시계 반대 방향으로 돕니다.",
    )


@exercise(4, "is_order_blind")
def is_order_blind(answer: Callable[..., Any]) -> None:
    def attend(x: Tensor) -> Tensor:
        return torch.softmax(x @ x.T, dim=-1) @ x

    def last_only(x: Tensor) -> Tensor:
        return torch.cat((attend(x)[:-1], 2 * attend(x)[-1:]))  # only the last row knows its position

    def causal(x: Tensor) -> Tensor:
        hidden = torch.ones(len(x), len(x)).triu(1).bool()
        return torch.softmax((x @ x.T).masked_fill(hidden, float("-inf")), dim=-1) @ x

    table = torch.randn(16, 1)
    cases: tuple[tuple[Callable[[Tensor], Tensor], bool, str, str], ...] = (
        (attend, True, "attention without positions is blind: f(x[order]) equals f(x)[order]",
         "위치 정보가 없는 어텐션은 순서를 모릅니다. f(x[order])는 f(x)[order]와 같습니다"),
        (lambda x: attend(x + table[: len(x)]), False, "attention with positions is not",
         "위치를 더하면 순서를 압니다"),
        (causal, False, "a causal mask knows the order", "인과 마스크는 순서를 압니다"),
        (last_only, False, "here only the last row knows its position: try several orders, and compare all rows",
         "마지막 행만 위치를 압니다. 여러 순서를 시험하고 모든 행을 비교하세요"),
    )  # fmt: skip
    for f, truth, en, ko in cases:
        for _ in range(5):
            if bool(answer(f, 6, 4)) != truth:
                raise Hint(f"You return {not truth}, but {en}.", f"{not truth}를 반환했지만, {ko}.")
