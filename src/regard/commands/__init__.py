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

A command that does not always need PyTorch also has  needs_torch(args) -> bool.

In `ARGUMENTS`, "RUN" is the positional argument `args.run`, "-o --out FILE" an option with a value and "--json" one
without; a nested table is a group of options with its title.

Slow imports (torch, numpy, the rest of regard) belong inside `run`, so that `regard NAME --help` is fast. A command
raises `UserError` for what the user can correct and does not catch other exceptions; `regard.cli` turns both into one
line and an exit code. The one-line help of a command is in the table of `regard.cli`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from regard.errors import UserError, suggest
from regard.messages import description, language, localize
from regard.terminal import aligned as aligned
from regard.terminal import screen_width as screen_width

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

Arguments = dict[str, Any]
COMMANDS: dict[str, tuple[str, str]] = {}  # name: (module, one-line help); `regard.cli` fills it
RUN: Arguments = {"RUN": "folder of a trained model"}
RUNS: Arguments = {"RUN": "folder of a trained model; those of others directly after it make an ensemble"}
DEVICE: Arguments = {"--device NAME": "cpu or cuda (default: cuda if available)"}
COMMENT = re.compile(r"(?<=\S {2})\S.*|(?<= {3})\S.*")  # of an example: what follows two or more spaces
REPEATABLE = {"action": "append", "default": []}


def positive(text: str) -> int:
    """The number of an option that must be 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number


def show(as_json: bool, content: Any, lines: Iterable[str]) -> None:
    """Print a result as JSON, or as text."""
    print(json.dumps(content, ensure_ascii=False, indent=1) if as_json else "\n".join(lines))


def find_command(arguments: Sequence[str]) -> int:
    """The place of the command in `arguments`, or their number if there is none: the first word without a dash.

    Of the options before it, only --lang has a value.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        at += 2 if arguments[at] == "--lang" else 1
    return min(at, len(arguments))


class Command(Protocol):
    """The interface of a command module."""

    __doc__: str | None
    ARGUMENTS: Arguments

    def run(self, args: argparse.Namespace) -> int | None: ...


class Formatter(argparse.RawDescriptionHelpFormatter):
    """The layout of --help; Korean characters take two columns each."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, actions, groups, localize("usage: "))

    def _split_lines(self, text: str, width: int) -> list[str]:
        if language() == "en":
            return super()._split_lines(text, width)
        import textwrap

        wide = re.sub(r"[ᄀ-ᇿ　-힣！-～]", "\\g<0>\0", text)  # a mark after each wide character
        return [line.replace("\0", "") for line in textwrap.wrap(wide, width)]


class Parser(argparse.ArgumentParser):
    """An argument parser that raises a `UserError` instead of exiting; `text` is a description, then examples."""

    def __init__(self, prog: str, text: str, arguments: Arguments, listing: str = "") -> None:
        about, title, examples = text.partition("examples:\n")
        super().__init__(
            prog=prog,
            description=description(prog.split()[-1], about).strip(),
            epilog=f"{listing}{localize(title)}{COMMENT.sub(lambda comment: localize(comment[0]), examples)}",
            formatter_class=Formatter,
            allow_abbrev=False,  # an abbreviation in a script breaks when an option is added
            add_help=False,
        )
        for group in (self._positionals, self._optionals):
            group.title = localize(group.title or "")
        self.add_argument("-h", "--help", action="help", help=localize("show this help message and exit"))
        self.add_argument("--debug", action="store_true", help=localize("show the traceback of an error"))
        groups: list[tuple[Any, Arguments]] = [(self, arguments)]
        for group, table in groups:
            for names, value in table.items():
                if isinstance(value, dict):
                    groups.append((self.add_argument_group(localize(names)), value))
                    continue
                text, keywords = value if isinstance(value, tuple) else (value, {})
                *options, last = names.split()
                if last.startswith("-"):  # an option without a metavar, and if it has no keywords, without a value
                    group.add_argument(*options, last, **keywords or {"action": "store_true"}, help=localize(text))
                else:
                    group.add_argument(*options or [last.lower()], metavar=last, **keywords, help=localize(text))

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see: {self.prog} --help)")

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own hides a full disk or a closed pipe

    def parse_all(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse all arguments; an unknown option is an error that suggests the most similar one."""
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            parsed, unknown = self.parse_known_intermixed_args(arguments)  # translate RUN --beam 5 TEXT
        if unknown and unknown[0].startswith("-"):
            name = unknown[0].partition("=")[0]
            options = [option for action in self._actions for option in action.option_strings]
            raise UserError(f"{self.prog} has no option {name!r}: {suggest(name, options)}")
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return parsed
