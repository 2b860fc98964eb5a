"""The commands of `regard`, one module each.

`regard NAME` imports only `regard.commands.NAME`, so `regard --help` is fast.
A command module is a `Command`; its docstring is the text of `regard NAME --help`:

    '''What it does, in a paragraph.

    examples:
      regard NAME              the plain use
      regard NAME --option 3   a variation
    '''

    def add_arguments(parser): ...   # options, with defaults in the help texts
    def run(args) -> int: ...        # returns the exit code

Slow imports (torch, numpy, the rest of regard) belong inside `run`, so that `regard NAME --help` is fast. A command
raises `UserError` for what the user can correct and does not catch other exceptions; `regard.cli` turns both into one
line and an exit code. The one-line help of a command is in the table of `regard.cli`.
"""

from __future__ import annotations

import argparse
from typing import Protocol


class Command(Protocol):
    """The interface of a command module."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...
