"""`regard train` with settings small enough for a test, as the tests of every task call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from regard.cli import main


def training(small: Sequence[str], *recipe: str) -> Callable[..., int]:
    """The command on the CPU, with the settings `small`; the function takes the recipe unless it is given here."""

    def train(*arguments: str) -> int:
        name, *others = (*recipe, *arguments)
        return main(["train", name, *small, *others, "--device", "cpu"])

    return train
