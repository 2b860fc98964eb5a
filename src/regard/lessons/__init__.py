"""The course: fourteen lessons from the weighted mean to a trained Transformer, in English and Korean.

04-many-heads.en.md    the lesson; its Python blocks run from top to bottom
04-many-heads.ko.md    the same in Korean, with the same code
lesson_04.py           the checks of its exercises (`regard lesson check 4 my.py`)
images/04-*.svg        its figures, drawn by the code of the lesson

In a notebook, `from regard.lessons import check`, then `check(4, split_heads)` checks a function.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "check":  # imported when it is used: the list of the lessons needs no checks
        from regard.lessons.attempt import check

        return check
    raise AttributeError(f"module 'regard.lessons' has no attribute {name!r}")
