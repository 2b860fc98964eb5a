"""Exercises and their checks.

An exercise asks for one function. Its check calls that function and compares the result with an independent
computation; a wrong result gives a hint, in English and Korean, that names the likely mistake:

    @exercise(2, "split_heads")
    def _(answer):
        x = torch.randn(2, 5, 12)
        if answer(x, heads=3).shape != (2, 3, 5, 4):
            raise Hint("The heads come first: [B, H, T, D].", "헤드 축이 앞에 옵니다: [B, H, T, D].")
        expect(answer(x, heads=3), …, "…", "…")
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Check = Callable[[Callable[..., Any]], None]


class Hint(Exception):
    """What is wrong with a solution, in English and in Korean."""

    def __init__(self, en: str, ko: str) -> None:
        super().__init__(en)
        self.en, self.ko = en, ko


@dataclass(frozen=True)
class Exercise:
    """Exercise `number` of a lesson: write the function `name`; `check` raises a `Hint` for a wrong one."""

    number: int
    name: str
    check: Check


def exercise(number: int, name: str) -> Callable[[Check], Exercise]:
    """A decorator: the check of exercise `number`, whose function is called `name`."""
    return lambda check: Exercise(number, name, check)


def expect(result: Any, expected: Any, en: str, ko: str, tolerance: float = 1e-4) -> None:
    """Raise the hint unless `result` has the shape and, within `tolerance`, the values of `expected`."""
    try:
        got, want = torch.as_tensor(result, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise Hint(en, ko) from None
    if got.shape != want.shape or not torch.allclose(got, want, rtol=tolerance, atol=tolerance):
        raise Hint(en, ko)


def exercises(lesson: int) -> list[Exercise]:
    """The exercises of a lesson, in order."""
    module = importlib.import_module(f"regard.lessons.lesson_{lesson:02}")
    return sorted((one for one in vars(module).values() if isinstance(one, Exercise)), key=lambda one: one.number)
