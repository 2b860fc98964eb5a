"""Errors meant for people.

A `UserError` says what was wrong in the words of the person who caused it: the field, the value it had,
and what to do instead. The command line prints it as one line and exits with code 2; a library user can
catch it as a `ValueError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave cannot work; the message names the field, the value and the remedy."""


class MissingExtra(UserError):
    """An optional part of Regard is not installed; the message names the extra that brings it."""

    def __init__(self, extra: str, package: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: install it with  pip install 'regard[{extra}]'")


class MissingFiles(UserError):
    """Files that are named are not there; a command may add where else it looks for them."""


class Unfinished(UserError):
    """Work that has stopped halfway, and goes on from there when the same command is run again."""


def suggest(value: str, choices: Iterable[str]) -> str:
    """The end of an error about a wrong name: the nearest right one, and the whole list."""
    names = sorted(choices)
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}Choose one of: {', '.join(names)}"
