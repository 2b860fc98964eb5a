"""Errors with messages for users.

A `UserError` names the field, its value and the remedy. The command line prints it as one line and exits with code 2;
as a library, catch it as a `ValueError`.
"""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
import sys
from collections.abc import Iterable


class UserError(ValueError):
    """Invalid input or settings; the message names the field, the value and the remedy."""


class MissingExtra(UserError):
    """An optional dependency is not installed; the message names the extra that includes it."""

    def __init__(self, extra: str, package: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: install it with  pip install 'regard[{extra}]'")


class MissingFiles(UserError):
    """Files that do not exist; a command may add where else it looks for them."""


class Unfinished(UserError):
    """Interrupted work that continues where it stopped when the same command is run again."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: work ends as it does after Ctrl-C."""


def is_of_the_system(error: BaseException | None) -> bool:
    """Whether an error comes from the operating system, as that of a full disk does, and not from the input."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None


def suggest(value: str, choices: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the most similar valid one, and the complete list."""
    names = sorted(choices)
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}Choose one of: {', '.join(names)}"


def listed(names: Iterable[object], word: str = "and") -> str:
    """A list as a person writes it: "a", "a and b", "a, b and c"."""
    texts = [*map(str, names)]
    return f" {word} ".join([*([", ".join(texts[:-1])] if texts[1:] else []), *texts[-1:]])


def program() -> str:
    """How to call `regard` from here: by name if it is on the PATH, else by the path in this environment."""
    if shutil.which("regard"):
        return "regard"
    beside = os.path.join(os.path.dirname(sys.executable), "regard")
    here = os.path.relpath(beside)
    return shlex.quote(beside if here.startswith("..") else here)
