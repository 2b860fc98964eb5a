"""The commands of `regard`, one module each.

`regard NAME` imports only `regard.commands.NAME`, so `regard --help` is fast.
A command module is a `Command`; its docstring is the text of `regard NAME --help`:

    '''What it does, in a paragraph.

    examples:
      regard NAME              the plain use
      regard NAME --option 3   a variation
    '''

    ARGUMENTS = {...}    # name and metavar: help text with the default, or (help text, keywords of add_argument)
    def run(args): ...   # returns the exit code; None is success

In `ARGUMENTS`, "RUN" is the positional argument `args.run`, "-o --out FILE" an option with a value and "--json" one
without; a nested table is a group of options with its title.

Slow imports (torch, numpy, the rest of regard) belong inside `run`, so that `regard NAME --help` is fast. A command
raises `UserError` for what the user can correct and does not catch other exceptions; `regard.cli` turns both into one
line and an exit code. The one-line help of a command is in the table of `regard.cli`.
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections.abc import Container, Iterable, Sequence
from typing import Any, Protocol

Arguments = dict[str, Any]
RUN: Arguments = {"RUN": "folder of a trained model"}
RUNS: Arguments = {"RUN": "folder of a trained model; those of others directly after it make an ensemble"}
DEVICE: Arguments = {"--device NAME": "cpu or cuda (default: cuda if available)"}
REPEATABLE = {"action": "append", "default": []}


def positive(text: str) -> int:
    """The number of an option that must be 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


def show(as_json: bool, content: Any, lines: Iterable[str]) -> None:
    """Print a result as JSON, or as text."""
    print(json.dumps(content, ensure_ascii=False, indent=1) if as_json else "\n".join(lines))


def screen_width(text: str) -> int:
    """Terminal columns of a text: two per wide character, none for marks."""
    visible = (char for char in text if unicodedata.category(char) not in ("Mn", "Me", "Cf"))
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in visible)


def aligned(rows: Iterable[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The rows of a table as lines, their columns aligned: those with a number in `right` to the right."""
    rows = list(rows)
    widths = [max(map(screen_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        gaps = [" " * (width - screen_width(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [gap + cell if i in right else cell + gap for i, (cell, gap) in enumerate(zip(row, gaps, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


class Command(Protocol):
    """The interface of a command module."""

    __doc__: str | None
    ARGUMENTS: Arguments

    def run(self, args: argparse.Namespace) -> int | None: ...
