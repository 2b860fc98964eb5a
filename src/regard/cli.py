"""The command line: `regard COMMAND ...`.

This module finds the command, parses its arguments and turns errors into one readable line and an exit code (see
`EXIT_CODES`). The commands are in `regard.commands`; a command's module is imported only when it is called.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn, cast

import regard
from regard.commands import COMMANDS, Command, Parser, find_command
from regard.errors import Terminated, UserError, suggest
from regard.messages import LANGUAGES, VARIABLE, check_language, description, localize, using
from regard.start import import_torch

# purpose: {command: one-line help}, in the order of `regard --help`; the module is regard.commands.NAME
GROUPS = {
    "start here": {
        "lesson": "read the course, in English or Korean, and check your solutions",
        "demo": "train a small Transformer on this machine and inspect it",
    },
    "train and evaluate": {
        "train": "train a model from a recipe",
        "resume": "continue an interrupted run",
        "average": "average the last checkpoints of a run",
        "evaluate": "compute the metrics of a trained model on its test sets",
        "runs": "list runs: steps, losses, metrics",
        "ablate": "what each part is worth: a recipe and changes to it, over several seeds",
        "compare": "is the difference between finished runs larger than chance?",
        "tune": "search for the best settings of a recipe",
    },
    "predict": {
        "translate": "translate text with an encoder-decoder model",
        "generate": "continue a prompt with a language model",
        "classify": "classify texts or images",
        "tag": "tag the words of a text: names, places, parts of speech",
        "fill": "predict the masked words of a text with a masked language model",
        "caption": "describe images with a captioning model",
        "predict": "forecast a series, or predict values from features",
        "score": "log-probability of given translations or texts",
    },
    "inspect": {
        "explore": "open a model in the browser: attention, activations, interventions",
        "figure": "save attention weights as PNG, SVG, HTML or JSON",
        "attend": "print the tokens that each token attends to",
        "heads": "what each attention head does and how much it matters",
        "prune": "remove attention heads and save the smaller model",
    },
    "data and models": {
        "data": "download public data sets, check your own",
        "tokenize": "show the tokens of text, or the text of tokens",
        "tokenizer": "train a tokenizer on text files",
        "cost": "parameters, FLOPs and memory of a model without building it",
        "import": "convert a Hugging Face model to a Regard folder",
        "export": "save a run for other programs: Hugging Face, ONNX, CTranslate2",
        "serve": "serve models over HTTP",
    },
    "shell": {
        "completion": "print a script that completes commands, options and runs in bash, zsh or fish",
    },
}
COMMANDS.update(
    (name, (f"regard.commands.{name if name != 'import' else 'import_'}", summary))  # import: a keyword of Python
    for commands in GROUPS.values()
    for name, summary in commands.items()
)
# commands that import PyTorch before anything else
HEAVY = COMMANDS.keys() - {"runs", "compare", "data", "tokenize", "tokenizer", "cost", "serve", "completion"}

LANG = "language of messages and reports: en or ko (default: that of the locale)"
HELP = """Transformers from the formula up: build, train, inspect and deploy them.

examples:
  regard demo                    train a small model and see its attention
  regard train recipe.toml       train your own
  regard train --help            the options of a command, with examples
"""

# 130 = 128 + SIGINT, 141 = 128 + SIGPIPE, 143 = 128 + SIGTERM; 2 is a `UserError`
EXIT_CODES = """exit codes:
  0    success
  1    system error (missing file, full disk) or a bug in Regard
  2    invalid argument, setting or input, or a missing package
  3    some inputs of a prediction, runs of a study or exercises failed; the others are done
  130  interrupted with Ctrl-C
  141  the output pipe was closed
  143  terminated by SIGTERM, as kill and systemd do

"""


def overview() -> Parser:
    """The parser for the options before the command; its help lists all commands."""
    width = max(map(len, COMMANDS))
    listing = ""
    for purpose, commands in GROUPS.items():
        lines = (f"  {name:<{width}}  {localize(summary)}\n" for name, summary in commands.items())
        listing += f"{localize(purpose)}:\n{''.join(lines)}\n"
    listing += description("exit_codes", EXIT_CODES).strip() + "\n\n"
    version = {"action": "version", "version": f"regard {regard.__version__}"}
    options = {"--version": ("show the version and exit", version), "--lang LANG": LANG}
    parser = Parser("regard", HELP, options, listing)
    parser.usage = "regard [--version] [--debug] [--lang LANG] COMMAND ..."
    return parser


def chosen_language(arguments: Sequence[str]) -> str | None:
    """The value of --lang among the options before the command, if it has a valid one."""
    words = [part for word in arguments[: find_command(arguments)] for part in word.split("=", 1)]
    values = [value for option, value in pairwise(words) if option == "--lang" and value in LANGUAGES]
    return values[-1] if values else None


def dispatch(arguments: Sequence[str]) -> int:
    """Find the command in `arguments`, parse what follows it, run it."""
    if chosen := os.environ.get(VARIABLE):
        check_language(chosen, VARIABLE)
    at = find_command(arguments)
    if at > 0 or not arguments:
        parser = overview()
        if (chosen := parser.parse_all(arguments[:at]).lang) is not None:
            check_language(chosen, "--lang")
        if at == len(arguments):
            parser.print_help()
            return 0
    name = arguments[at]
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}: {suggest(name, COMMANDS)}")
    command = cast(Command, importlib.import_module(COMMANDS[name][0]))
    parser = Parser(f"regard {name}", command.__doc__ or "", command.ARGUMENTS)
    parsed = parser.parse_all(arguments[at + 1 :])
    if name in HEAVY and getattr(command, "needs_torch", lambda args: True)(parsed):
        import_torch(defer=name in GROUPS["predict"])
    return command.run(parsed) or 0


def report(error: BaseException, debug: bool) -> int:
    """Print an error as one line, after its traceback if `debug`, and return the exit code."""
    if debug:
        import traceback

        traceback.print_exception(error)
    first_line = next(iter(str(error).strip().splitlines()), "")
    code, line = (
        1,
        f"error: {type(error).__name__}: {first_line} (unexpected; run again with --debug to see the traceback)",
    )
    match error:
        case UserError():
            code, line = 2, f"error: {error}"
        case Terminated():
            code, line = 143, "\nterminated"
        case KeyboardInterrupt():
            code, line = 130, "\ninterrupted"
        case OSError(strerror=str(reason)):
            names = [repr(str(name)) for name in (error.filename, error.filename2) if name is not None]
            line = f"error: {reason}: {' -> '.join(names)}" if names else f"error: {reason}"
        case OSError():
            line = f"error: {first_line or type(error).__name__}"
    print(localize(line), file=sys.stderr)
    return code


def close_output() -> None:
    """Discard what is buffered for a broken standard output: otherwise Python reports it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `regard` with `arguments` (default: those of the process) and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with using(chosen_language(arguments)):
        return run(arguments)


def run(arguments: Sequence[str]) -> int:
    """`dispatch`, with errors as one line and an exit code."""
    debug = "--debug" in arguments or os.environ.get("REGARD_DEBUG", "0") not in ("", "0")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # an unprintable character becomes ?, not a traceback
    try:
        try:
            code = dispatch(arguments)
        except SystemExit as stop:  # argparse exits this way after --help and --version
            if not isinstance(stop.code, int):
                raise
            code = stop.code
        sys.stdout.flush()  # report a full disk or a closed pipe here rather than after main
        return code
    except BrokenPipeError:
        close_output()
        return 141
    except (Exception, KeyboardInterrupt) as error:
        close_output()
        return report(error, debug)


def start() -> NoReturn:
    """The process `regard`: `main`, and for a prediction an end that does not take PyTorch apart."""
    arguments, exit_code = sys.argv[1:], list[int]()
    if {*arguments[find_command(arguments) :][:1]} & GROUPS["predict"].keys():
        atexit.register(end_process, exit_code)
    exit_code.append(main(arguments))
    sys.exit(exit_code[0])


def end_process(exit_code: Sequence[int]) -> None:
    """End a process that has done its work: Python would delete every object first, which takes 0.1 s or more.

    `atexit` calls this last, because it is registered first: threads have ended, and what others registered is done.
    """
    if exit_code and "coverage" not in sys.modules:  # registered before, and to be called after this
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code[0])
