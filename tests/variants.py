"""Variants of what is tested in every run of the tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest


def slow(*values: object) -> list[object]:
    """Parameters that only  pytest -m slow  selects."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def mostly_slow(values: Iterable[object], usual: Sequence[object]) -> list[object]:
    """`values`, of which only `usual` are tested in every run."""
    return [one for value in values for one in ([value] if value in usual else slow(value))]
