"""What the prediction commands share: the options of a search, inputs, and outputs as a table or as JSON lines.

Standard input is read as it comes: what a pipe has to give is processed at once, so an endless one gives output while
it runs, and a file is read in large pieces, which batch well.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from regard.commands import positive
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.predict.bundle import Predictor, TextPrediction

Kind = TypeVar("Kind", bound="Predictor[Any, Any]")
PIECE = 2**18  # bytes of standard input that are read at most at once
YES_OR_NO = {"action": argparse.BooleanOptionalAction}

# Fields of `regard.predict.config.SearchConfig`, as options
DECODING = "decoding (default: the table [decode] of the recipe)"
SEARCH = {
    "--beam N": ("hypotheses kept at every step (1: greedy search)", {"type": int}),
    "--n-best N": ("outputs for each input (1)", {"type": positive}),
    "--length-penalty A": ("score = log P / ((5 + length) / 6)^A (0)", {"type": float}),
    "--coverage-penalty B": ("weight of the penalty for source tokens with little attention (0)", {"type": float}),
    "--early-stopping": ("stop at the first N finished hypotheses, not when no other can rank higher", YES_OR_NO),
    "--sample": ("sample from the distribution instead of searching", YES_OR_NO),
    "--temperature T": ("below 1: more probable tokens; above 1: less probable ones (1)", {"type": float}),
    "--top-k K": ("only the K most probable tokens; 1: always the most probable (0: all)", {"type": int}),
    "--top-p P": ("only the most probable tokens whose probabilities sum to P (1)", {"type": float}),
    "--seed N": ("the same seed gives the same samples (1)", {"type": int}),
    "--min-length N": ("fewest tokens of an output (0)", {"type": int}),
    "--max-length N": ("most tokens of an output (twice the source, plus 50)", {"type": positive}),
    "--no-repeat-ngram N": ("no N tokens in a row occur twice (0: off)", {"type": int}),
}


def take_runs(args: argparse.Namespace, inputs: list[str]) -> None:
    """Folders of trained models at the start of the `inputs` form an ensemble with RUN: they become `args.ensemble`."""
    args.ensemble = list(takewhile(lambda text: os.path.isfile(os.path.join(text, "recipe.toml")), inputs))
    del inputs[: len(args.ensemble)]


def open_predictor(args: argparse.Namespace, *kinds: type[Kind]) -> Kind:
    """The predictor of the model in RUN, with the options of a search; another kind is refused, with its command."""
    from regard.models.folder import find_device
    from regard.predict.config import SearchConfig
    from regard.tasks.registry import load

    bundle = load(args.run, find_device(args.device), ensemble=getattr(args, "ensemble", ()))
    kind = bundle.predictor_class
    if kind is None or not issubclass(kind, kinds):
        use = "" if kind is None else f"; use  regard {kind.COMMAND} {args.run}"
        raise UserError(f"{args.run}: {kinds[0].NEEDS} is needed here{use}")
    predictor: Any = bundle.predictor
    options = {name: value for name, value in vars(args).items() if value is not None}
    if search := {name: options[name] for name in SearchConfig.__dataclass_fields__ if name in options}:
        predictor.config = predictor.configured(**search)
    return cast(Kind, predictor)


def check_inputs(args: argparse.Namespace) -> None:
    """Texts are arguments or in files, and only files have columns."""
    if args.text and args.files:
        raise UserError(f"--files {args.files[0]}: there is a TEXT too; pass one of them")
    if args.column is not None and not args.files:
        raise UserError(f"--column {args.column}: is a column of --files, and there are none")


def read_texts(
    texts: Sequence[str], check: Callable[[list[str]], object] = len
) -> Iterator[tuple[list[str], Callable[[Sequence[int]], object]]]:
    """The texts of the command line, or the lines of standard input, some at a time; `check` raises an error.

    A file is checked to its end before its first lines are returned, so that no output precedes an error; a pipe is
    checked as it comes. If standard error is a terminal, a progress bar shows how much of a file is done; the function
    that is returned with the texts counts some of them before all are done.
    """
    from tqdm import tqdm

    if sys.stdin is None and not texts:
        raise UserError("standard input is closed: pass texts as arguments, or files")
    total = done = 0
    if not texts and sys.stdin.buffer.seekable():
        begin = sys.stdin.buffer.tell()
        for lines in read_lines():
            check(lines)
            total += len(lines)
        sys.stdin.buffer.seek(begin)
    shown = total > 0 and sys.stderr.isatty() and not sys.stdout.isatty()
    tqdm.monitor_interval = 0  # no thread of its own: see `regard.predict.workers`
    with tqdm(total=total, unit=" lines", disable=not shown, leave=False) as bar:
        for lines in [list(texts)] if texts else read_lines():
            check(lines)
            yield lines, lambda rows: bar.update(len(rows))
            done += len(lines)
            bar.update(done - bar.n)


def read_lines() -> Iterator[list[str]]:
    """The complete lines of each read of standard input."""
    stdin = cast(BufferedReader, sys.stdin.buffer)
    rest, number = b"", 0
    for piece in chain(iter(lambda: stdin.read1(PIECE), b""), [b""]):
        *lines, rest = (rest + piece).split(b"\n")
        if not piece and rest:  # the last line may lack its end
            lines = [rest]
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


def read_tables(
    files: Sequence[str], column: str | None, default: str, size: int
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """`size` texts at a time, each with {"file", "row"}: a column of tables, or without a `column` lines of text."""
    from regard.data.sets import find_files
    from regard.data.tables import read_rows, table_kind

    tables = [
        read_rows(
            [str(path)],
            (column or default,),
            kind="text" if column is None and table_kind(path) is None else None,
            remedy="Name the column with --column",
        )
        for path in find_files(files)
    ]
    for table in tables:  # every file is read to its end before the first output
        table.check()
    inputs = ((row.cells[0], {"file": row.file, "row": row.line}) for row in chain.from_iterable(tables))
    while chunk := list(islice(inputs, size)):
        yield chunk


def write(args: argparse.Namespace, value: dict[str, Any], *rows: Sequence[object], out: TextIO | None = None) -> None:
    """A prediction as a JSON object or as rows of a table, where probabilities have four digits.

    Line ends in a cell become spaces, and between other cells tabs too.
    """
    if args.json:
        print(json.dumps(value, ensure_ascii=False), file=out)
        return
    for row in rows:
        cells = (f"{cell:.4f}" if isinstance(cell, float) else " ".join(str(cell).splitlines()) for cell in row)
        print(*(cell if len(row) == 1 else cell.replace("\t", " ") for cell in cells), sep="\t", file=out)


def write_texts(
    args: argparse.Namespace, names: tuple[str, str], inputs: Sequence[str], outputs: Sequence[TextPrediction],
    several: bool, first: int, out: TextIO | None = None,
) -> None:  # fmt: skip
    """Translations or captions: their texts, or `several` of each input with their scores.

    `names` are those of an input and of its output in JSON, `first` is the index of the first input.
    """
    for number, (text, output) in enumerate(zip(inputs, outputs, strict=True), first + 1):
        if output.note:
            note(output.note)
        n_best = [{names[1]: one.text, "score": one.score} for one in output.n_best]
        rows = [(number, one.score, one.text) for one in output.n_best] if several else [(output.text,)]
        write(args, {names[0]: text, **n_best[0], "n_best": n_best}, *rows, out=out)
    (out or sys.stdout).flush()


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def opened(name: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if name is None:
        yield sys.stdout
        return
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"-o {name}: is a folder, or in one that does not exist; pass the name of a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
