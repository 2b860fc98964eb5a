"""The command line: `regard COMMAND ...`.

This module is only the frame. It finds the command, parses its arguments and turns whatever happens into
one readable line and an exit code:

    0    done
    1    the machine said no (file missing, disk full) or a fault in Regard itself
    2    the user can mend it: wrong argument, wrong value, missing package
    130  stopped with Ctrl-C        (128 + SIGINT)
    141  the reader of a pipe left  (128 + SIGPIPE)

What a command does lives in `regard.commands`, imported only when that command is named.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import regard
from regard.commands import Command
from regard.errors import UserError, suggest

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# name: (module, one-line help), in the order in which `regard --help` lists them
COMMANDS = {
    "demo": ("regard.commands.demo", "train a small Transformer here and look inside it"),
    "train": ("regard.commands.train", "train a model on your own sentence pairs or text"),
    "resume": ("regard.commands.resume", "go on with a run that was stopped"),
    "average": ("regard.commands.average", "make the mean of a run's last checkpoints its model"),
    "evaluate": ("regard.commands.evaluate", "BLEU, or perplexity, of a trained model on its test sets"),
    "runs": ("regard.commands.runs", "a table of runs: steps, loss, validation, test figures"),
    "translate": ("regard.commands.translate", "translate lines with a trained model"),
    "classify": ("regard.commands.classify", "name the class of texts, by a trained classifier"),
    "fill": ("regard.commands.fill", "find words for the gaps of a text, by a masked language model"),
    "explore": ("regard.commands.explore", "inspect a model and intervene in it, in the browser"),
    "generate": ("regard.commands.generate", "go on with a text, by a trained language model"),
    "caption": ("regard.commands.caption", "say what a picture shows, by a trained captioning model"),
    "predict": ("regard.commands.predict", "the numbers that follow, by a trained model of numbers"),
    "figure": ("regard.commands.figure", "draw the attention of a model, as PNG, SVG, HTML or JSON"),
    "attend": ("regard.commands.attend", "for every token what it attends to, as text or JSON"),
    "heads": ("regard.commands.heads", "what every head attends to and how much it matters"),
    "prune": ("regard.commands.prune", "remove heads from a model and save the smaller one"),
    "data": ("regard.commands.data", "download public data sets, check your own"),
    "cost": ("regard.commands.cost", "parameters, operations and memory of a model, before you build it"),
    "import": ("regard.commands.import_", "read a Hugging Face model into a Regard folder"),
    "export": ("regard.commands.export", "write a Regard folder as a Hugging Face model"),
}

DESCRIPTION = "Transformers from the formula up: build, train, look inside, ship."

EXAMPLES = """
regard demo              start here
regard demo --help       what a command can do, with examples
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s, so that they are reported like all others."""

    def __init__(self, prog: str, description: str, examples: str, listing: str = "") -> None:
        examples = textwrap.indent(textwrap.dedent(examples).strip("\n"), "  ")
        super().__init__(
            prog=prog,
            description=textwrap.dedent(description).strip(),
            epilog=f"{listing}examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # an abbreviation in a script breaks when an option is added
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see: {self.prog} --help)")

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own hides a full disk or a closed pipe

    def parse_all(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse, and answer an option that does not exist with the nearest one that does."""
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


def overview() -> Parser:
    """The parser in front of the command: its help lists them all."""
    width = max(map(len, COMMANDS))
    lines = "".join(f"  {name:<{width}}  {summary}\n" for name, (_, summary) in COMMANDS.items())
    parser = Parser("regard", DESCRIPTION, EXAMPLES, listing=f"commands:\n{lines}\n")
    parser.usage = "regard [--version] [--debug] COMMAND ..."
    version = f"regard {regard.__version__}"
    parser.add_argument("--version", action="version", version=version, help="show the version and exit")
    return parser


def dispatch(arguments: Sequence[str]) -> int:
    """Find the command in `arguments`, parse what follows it, run it."""
    # The options in front of a command take no value, so the first word without a dash is the command.
    at = next((i for i, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    parser = overview()
    parser.parse_all(arguments[:at])
    if at == len(arguments):
        parser.print_help()
        return 0
    name = arguments[at]
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}: {suggest(name, COMMANDS)}")
    command = cast(Command, importlib.import_module(COMMANDS[name][0]))
    parser = Parser(f"regard {name}", command.DESCRIPTION, command.EXAMPLES)
    command.add_arguments(parser)
    return command.run(parser.parse_all(arguments[at + 1 :]))


def describe(error: BaseException) -> tuple[int, str]:
    """The exit code and the line for an error that reached the frame."""
    first_line = next(iter(str(error).strip().splitlines()), "")
    match error:
        case UserError():
            return 2, str(error)
        case KeyboardInterrupt():
            return 130, "interrupted"
        case OSError(strerror=str(reason)):
            names = [repr(str(name)) for name in (error.filename, error.filename2) if name is not None]
            return 1, f"{reason}: {' -> '.join(names)}" if names else reason
        case OSError():
            return 1, first_line or type(error).__name__
    name = type(error).__name__
    return 1, f"{name}: {first_line} (unexpected; run again with --debug to see the traceback)"


def report(error: BaseException, debug: bool) -> int:
    """Print an error as one line, after its traceback if `debug`, and return the exit code."""
    if debug:
        import traceback

        traceback.print_exception(error)
    code, line = describe(error)
    print(f"error: {line}" if code != 130 else f"\n{line}", file=sys.stderr)
    return code


def close_output() -> None:
    """Send what is still buffered for a broken standard output nowhere: Python would complain at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `regard` with `arguments` (those of the process unless given) and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments or os.environ.get("REGARD_DEBUG", "0") not in ("", "0")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter shows ?, not a traceback
    try:
        try:
            code = dispatch(arguments)
        except SystemExit as stop:  # argparse leaves this way after --help and --version
            if not isinstance(stop.code, int):
                raise
            code = stop.code
        sys.stdout.flush()  # a full disk or a closed pipe shows here rather than after main
        return code
    except BrokenPipeError:
        close_output()
        return 141
    except (Exception, KeyboardInterrupt) as error:
        close_output()
        return report(error, debug)
