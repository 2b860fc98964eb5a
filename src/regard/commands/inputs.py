"""What the prediction commands read: the options of a search, and texts from arguments, files or standard input.

Standard input is read as it comes: what a pipe has to give is processed at once, so an endless one gives output while
it runs, and a file is read in large pieces, which batch well.
"""

from __future__ import annotations

import argparse
import codecs
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from regard.commands import positive
from regard.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm

    from regard.predict.bundle import Predictor

Kind = TypeVar("Kind", bound="Predictor[Any, Any]")
PIECE = 2**18  # bytes of standard input that are read at most at once
GPU = "cuda if available"

# Fields of `regard.predict.config.SearchConfig`, as options: type, metavar, help
SEARCH: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "beam": (int, "N", "hypotheses kept at every step (1: greedy search)"),
    "n_best": (positive, "N", "outputs for each input (1)"),
    "length_penalty": (float, "A", "score = log P / ((5 + length) / 6)^A (0)"),
    "coverage_penalty": (float, "B", "weight of the penalty for source tokens with little attention (0)"),
    "early_stopping": (bool, "", "stop at the first N finished hypotheses, not when no other can rank higher"),
    "sample": (bool, "", "sample from the distribution instead of searching"),
    "temperature": (float, "T", "below 1: more probable tokens; above 1: less probable ones (1)"),
    "top_k": (int, "K", "only the K most probable tokens; 1: always the most probable (0: all)"),
    "top_p": (float, "P", "only the most probable tokens whose probabilities sum to P (1)"),
    "seed": (int, "N", "the same seed gives the same samples (1)"),
    "min_length": (int, "N", "fewest tokens of an output (0)"),
    "max_length": (positive, "N", "most tokens of an output (twice the source, plus 50)"),
    "no_repeat_ngram": (int, "N", "no N tokens in a row occur twice (0: off)"),
}


def add_run(parser: argparse.ArgumentParser, device: str, json: str) -> None:
    """The arguments of every prediction command; `json` names what an object of --json holds."""
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    default = None if device == GPU else device
    parser.add_argument("--device", default=default, metavar="NAME", help=f"cpu or cuda (default: {device})")
    parser.add_argument("--json", action="store_true", help=f"print one JSON object per {json}")


def add_search(parser: argparse.ArgumentParser, *names: str, **renamed: str) -> None:
    """Options for these fields of a SearchConfig; `renamed` are fields whose option has another name."""
    group = parser.add_argument_group("decoding (default: the table [decode] of the recipe)")
    for name, option in {**{name: name for name in names}, **renamed}.items():
        kind, metavar, text = SEARCH[name]
        flag = f"--{option.replace('_', '-')}"
        if kind is bool:
            group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=text)
        else:
            group.add_argument(flag, dest=name, type=kind, metavar=metavar, help=text)


def search_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a SearchConfig that were passed as options."""
    return {name: value for name in SEARCH if (value := getattr(args, name, None)) is not None}


def open_predictor(args: argparse.Namespace, *kinds: type[Kind]) -> Kind:
    """The predictor of the model in RUN; one of another kind is refused, with the command for it."""
    from regard.models.folder import find_device
    from regard.tasks.registry import load

    bundle = load(args.run, find_device(args.device))
    kind = bundle.predictor_class
    if kind is None or not issubclass(kind, kinds):
        use = "" if kind is None else f"; use  regard {kind.COMMAND} {args.run}"
        raise UserError(f"{args.run}: {kinds[0].NEEDS} is needed here{use}")
    return cast(Kind, bundle.predictor)


def read_texts(
    texts: Sequence[str], bar: tqdm[Any], check: Callable[[list[str]], object] | None = None
) -> Iterator[list[str]]:
    """The texts of the command line, or the lines of standard input, some at a time; `check` raises an error.

    A file is checked to its end before its first lines are returned, so that no output precedes an error; a pipe is
    checked as it comes.
    """
    if not texts and check is not None and sys.stdin.buffer.seekable():
        begin = sys.stdin.buffer.tell()
        for lines in read_lines(None):
            check(lines)
        sys.stdin.buffer.seek(begin)
    for lines in [list(texts)] if texts else read_lines(bar):
        if check is not None:
            check(lines)
        yield lines


def read_lines(bar: tqdm[Any] | None) -> Iterator[list[str]]:
    """The complete lines of each read of standard input."""
    stdin = cast(BufferedReader, sys.stdin.buffer)
    rest, number, taken = b"", 0, 0
    while True:
        piece = stdin.read1(PIECE)
        *lines, rest = (rest + piece).split(b"\n")
        if not piece and rest:  # the last line may lack its end
            lines, rest = [rest], b""
        lines = [line.removesuffix(b"\r") for line in lines]  # a file from Windows
        if lines and number == 0:
            lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
        try:
            texts = [line.decode("utf-8") for line in lines]
        except UnicodeDecodeError as error:
            bad = next(at for at, line in enumerate(lines, start=number + 1) if line == error.object)
            where = f"standard input: line {bad}, byte {error.start + 1}"
            raise UserError(f"{where} is not UTF-8 text; convert the file first") from None
        if texts:
            yield texts
        number += len(texts)
        taken += len(piece)
        if bar is not None:
            bar.update(taken - bar.n)  # the bar may have counted some of it already
        if not piece:
            return


def progress(texts: Sequence[str]) -> tqdm[Any]:
    """A progress bar on standard error, if that is a terminal and the length of the input is known."""
    from tqdm import tqdm

    if sys.stdin is None and not texts:
        raise UserError("standard input is closed: pass texts as arguments, or files")
    try:
        status = os.fstat(sys.stdin.fileno() if sys.stdin else -1)
        total = status.st_size if stat.S_ISREG(status.st_mode) and not texts else 0
    except (OSError, ValueError):  # no standard input, or one that is not a file
        total = 0
    shown = bool(total) and sys.stderr.isatty() and not sys.stdout.isatty()
    tqdm.monitor_interval = 0  # no thread of its own: see `regard.predict.workers`
    return tqdm(total=total, unit="B", unit_scale=True, disable=not shown, leave=False)


def read_prompt(prompt: str | None, file: str | None, may_be_empty: bool) -> str:
    """The whole text of an argument, a file or standard input, line ends included."""
    if prompt is not None and file is not None:
        raise UserError(f"--prompt-file {file}: there is a PROMPT too; pass one of them")
    if prompt is not None:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # the shell has passed bytes of another encoding
            raise UserError(f"PROMPT: character {error.start + 1} is not UTF-8 text; convert it first") from None
        return prompt
    if file is None and (may_be_empty or sys.stdin is None or sys.stdin.isatty()):
        return ""
    name = file or "standard input"
    try:
        return (Path(file).read_bytes() if file else sys.stdin.buffer.read()).decode("utf-8")
    except OSError as error:
        raise UserError(f"{name}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: byte {error.start + 1} is not UTF-8 text; convert it first") from None
