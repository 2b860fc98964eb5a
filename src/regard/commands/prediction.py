"""What the prediction commands share: options, inputs, outputs, and what happens to an input that cannot be used.

Inputs are arguments, the lines of files or a column of tables (`--files`, `--column`), or the lines of standard input;
in a terminal without any, a prompt asks for them. Standard input is read as it comes: what a pipe has to give is
processed at once, so an endless one gives output while it runs, and a file is read in large pieces, which batch well.

Outputs are lines of text, rows of a table or JSON lines, in the order of the inputs. One input that cannot be used is
reported, its output is empty (in JSON it is "error"), the others are processed, and the exit code is `SOME_FAILED`.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from io import BufferedReader
from itertools import chain, count, islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from regard.commands import DEVICE, RUN, Arguments, positive
from regard.errors import UserError, listed
from regard.files import name_some

if TYPE_CHECKING:
    from regard.data.lines import Problem
    from regard.data.tables import Row
    from regard.predict.bundle import Predictor, TextPrediction

Kind = TypeVar("Kind", bound="Predictor[Any, Any]")
PIECE = 2**18  # bytes of standard input that are read at most at once
ROWS = 8192  # inputs of files that are read at most at once
PROMPT = "> "
SOME_FAILED = 3  # exit code
YES_OR_NO = {"action": argparse.BooleanOptionalAction}


def input_options(
    name: str,
    what: str,
    json: str,
    files: str = "",
    column: str = "",
    runs: Arguments = RUN,
    device: Arguments = DEVICE,
) -> Arguments:
    """The options that all prediction commands have: `what` are the inputs, `json` is an output in JSON."""
    return {
        **runs,
        f"inputs {name}": (f"{what} (default: standard input, or a prompt in a terminal)", {"nargs": "*"}),
        "--files FILE": (files or "read them from these files: one per line, or a column of a table", {"nargs": "+"}),
        "--column NAME": column or "column of a table (default: the recipe's)",
        "--encoding NAME": ("encoding of --files or standard input, such as cp949 (utf-8)", {"default": "utf-8"}),
        "-o --out FILE": "save to a file, which appears when it is complete",
        **device,
        "--json": f"print one JSON object per {json}",
    }


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


def is_run(text: str) -> bool:
    return os.path.isfile(os.path.join(text, "recipe.toml"))


def take_runs(args: argparse.Namespace) -> None:
    """Folders of trained models at the start of the inputs form an ensemble with RUN: they become `args.ensemble`."""
    args.ensemble = list(takewhile(is_run, args.inputs))
    del args.inputs[: len(args.ensemble)]


def is_ensemble(args: argparse.Namespace) -> bool:
    """Whether `take_runs` finds further folders, or has found some."""
    return bool(vars(args).get("ensemble")) or any(map(is_run, args.inputs[:1]))


def search_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a search that were passed: fields of `SearchConfig`."""
    from regard.predict.config import SearchConfig

    return {name: value for name in SearchConfig.__dataclass_fields__ if (value := vars(args).get(name)) is not None}


def open_predictor(args: argparse.Namespace, *kinds: type[Kind]) -> Kind:
    """The predictor of the model in RUN, with the options of a search; another kind is refused, with its command."""
    from regard.models.folder import find_device
    from regard.tasks.registry import load

    bundle = load(args.run, find_device(args.device), ensemble=getattr(args, "ensemble", ()))
    kind = bundle.predictor_class
    if kind is None or not issubclass(kind, kinds):
        use = "" if kind is None else f"; use  regard {kind.COMMAND} {args.run}"
        raise UserError(f"{args.run}: {listed((one.NEEDS for one in kinds), 'or')} is needed here{use}")
    predictor: Any = bundle.predictor
    if search := search_options(args):
        predictor.config = predictor.configured(**search)
    return cast(Kind, predictor)


def check_inputs(args: argparse.Namespace) -> None:
    """Inputs are arguments or in files, only files have columns, and the output can be written."""
    if args.inputs and args.files:
        raise UserError(f"--files {args.files[0]}: there are inputs as arguments too; pass one of them")
    if args.column is not None and not args.files:
        raise UserError(f"--column {args.column}: is a column of --files, and there are none")
    from regard.data.lines import check_encoding, ends_lines

    args.encoding = check_encoding(args.encoding, "--encoding")
    if not args.files and not ends_lines(args.encoding):
        raise UserError(f"--encoding {args.encoding}: standard input is read by lines, which it has not; use --files")
    if args.out is not None and (os.path.isdir(args.out) or not os.path.isdir(os.path.dirname(args.out) or ".")):
        raise UserError(f"-o {args.out}: is a folder, or in one that does not exist; pass the name of a file")


def check_texts(args: argparse.Namespace) -> None:
    """Arguments that are texts, and not names of files."""
    names = [text for text in args.inputs if len(text.split()) == 1 and os.path.isfile(text)]
    if names and len(names) == len(args.inputs):
        what, read = ("is the name of a file", "its") if len(names) == 1 else ("are names of files", "their")
        shown = ", ".join(map(repr, names[:3])) + ", …" * (len(names) > 3)
        raise UserError(f"{shown} {what}: read {read} lines with  --files {' '.join(names[:3])}")
    if names:
        note(f"{name_some(names)}: the name of a file, and the name itself is the input; --files reads files")


@dataclass
class Item:
    """An input: a text, a sequence of numbers, or the name of a file."""

    number: int  # counted from 1
    text: str
    where: str = ""  # it comes from, for messages
    error: str | None = None  # why it cannot be used
    origin: Mapping[str, Any] = field(default_factory=dict)  # {"file", "row"} of --files
    more: Sequence[Any] = ()  # cells of further columns

    def __str__(self) -> str:
        return f"{self.where}: {self.error}" if self.where else str(self.error)


@dataclass
class Chunk:
    """Inputs that are processed together; `failed` gets the rows that cannot be used, with the reasons."""

    items: list[Item]
    out: TextIO
    count: Callable[[Sequence[int]], object]  # is called with rows that are done before all are
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        return [item.text for item in self.items]

    @property
    def first(self) -> int:
        """The index of the first input."""
        return self.items[0].number - 1

    def each(self, predict: Callable[[Item], Any]) -> list[Any]:
        """`predict` of every item on its own: a UserError concerns that item."""
        outputs: list[Any] = []
        for row, item in enumerate(self.items):
            try:
                outputs.append(None if item.error else predict(item))
            except UserError as error:
                self.failed[row] = str(error)
                outputs.append(None)
        return outputs


Shown = Iterable[tuple[dict[str, Any], Iterable[Sequence[object]]]]  # objects of JSON, each with its rows of text


@dataclass(frozen=True)
class Inputs:
    """What the inputs of a command are."""

    name: str  # in JSON
    what: str = "a text"  # for the prompt
    argument: str = "TEXT"  # for messages about an argument; "": it is a file, which a message names
    column: str = "text"  # of a table
    cell: Callable[[Any], str] | None = None  # from a cell to the input, if it is not text
    more: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)  # further columns, what reads their cells
    is_list: Callable[[Path], bool] = lambda path: True  # whether a file of --files lists inputs, or is one
    rows: Callable[[], Iterator[Row | Problem]] | None = None  # those of --files, where they are not lists of inputs


def is_list(path: Path) -> bool:
    """Whether a file lists inputs, by its name."""
    from regard.data.tables import table_kind

    return table_kind(path) is not None or ".txt" in path.suffixes[-2:]  # images.txt.gz


def file_inputs(name: str, column: str) -> Inputs:
    """Inputs that are files, such as images; `--files` are these, or lists of their names."""
    return Inputs(name, "a file name", "", column, is_list=is_list)


@dataclass
class Results:
    """Writes the output of each input in order, and counts those that failed.

    Failures among arguments and files wait for the first success: without any, there is no output at all.
    """

    args: argparse.Namespace
    inputs: Inputs
    out: TextIO
    header: Sequence[object]
    empty: Callable[[Item], Sequence[object]]
    done: int = 0
    failed: int = 0
    waiting: list[Item] | None = None

    def add(self, item: Item, shown: Callable[[], Shown]) -> None:
        self.done += 1
        self.failed += item.error is not None
        if item.error is not None and self.waiting is not None:
            self.waiting.append(item)
            return
        self.begin()
        if item.error is not None:
            self._write_failure(item)
            return
        for value, rows in shown():
            write(self.args, value, *rows, out=self.out)

    def begin(self) -> None:
        """Write the header, and the failures that waited."""
        if self.header and not self.args.json:
            write(self.args, {}, self.header, out=self.out)
        waiting, self.waiting, self.header = self.waiting or [], None, ()
        for item in waiting:
            self._write_failure(item)

    def _write_failure(self, item: Item) -> None:
        report(f"error: {item}")
        row = () if is_prompt(self.args) else self.empty(item)
        value = {self.inputs.name: item.text, "error": item.error, **item.origin}
        write(self.args, value, *([row] if row else []), out=self.out)

    def end(self) -> int:
        """The exit code; an error if every input failed."""
        if not self.failed or is_prompt(self.args):
            self.begin()
            return 0
        if self.failed < self.done:
            report(f"note: {self.failed:,} of {self.done:,} inputs failed")
            return SOME_FAILED
        if self.waiting and self.done == 1:
            raise UserError(str(self.waiting[0]))
        for item in self.waiting or ():
            report(f"error: {item}")
        raise UserError(f"none of the inputs ({self.done:,}) could be processed")


def predict_inputs(
    args: argparse.Namespace,
    inputs: Inputs,
    predict: Callable[[Chunk], Sequence[Any]],
    show: Callable[[Item, Any], Shown],
    *,
    size: int = 1,
    header: Sequence[object] = (),
    empty: Callable[[Item], Sequence[object]] = lambda item: ("",),
    after: Callable[[], None] = lambda: None,
) -> int:
    """Predict all inputs, `size` at a time, and write the outputs; returns the exit code.

    `show` gives the output of an item, `empty` the row of one that failed (without cells: none). `after` is called at
    the end, and in a prompt after each input: for notes about all of them.
    """
    from tqdm import tqdm

    total, pieces = open_inputs(args, inputs)
    shown = total > 0 and sys.stderr.isatty() and (args.out is not None or not sys.stdout.isatty())
    tqdm.monitor_interval = 0  # no thread of its own: see `regard.predict.workers`
    with opened(args.out) as out, tqdm(total=total, unit=" inputs", disable=not shown, leave=False) as bar:
        waiting: list[Item] | None = [] if args.inputs or args.files else None
        results = Results(args, inputs, out, header, empty, waiting=waiting)
        for piece in pieces:
            for at in range(0, len(piece), size):
                chunk = Chunk(piece[at : at + size], out, lambda rows: bar.update(len(rows)))
                for row, (item, output) in enumerate(zip(chunk.items, predict(chunk), strict=True)):
                    item.error = item.error or chunk.failed.get(row)
                    results.add(item, partial(show, item, output))
                out.flush()
                bar.update(results.done - bar.n)
                if is_prompt(args):
                    after()
        code = results.end()
    after()
    return code


def is_prompt(args: argparse.Namespace) -> bool:
    """Whether a prompt asks for the inputs."""
    return not args.inputs and not args.files and sys.stdin is not None and sys.stdin.isatty()


def open_inputs(args: argparse.Namespace, inputs: Inputs) -> tuple[int, Iterator[list[Item]]]:
    """How many inputs there are (0: not known), and the inputs, as many together as arrive together."""
    if args.files:
        return open_files(args, inputs)
    if args.inputs:
        items = [_argument(number, text, inputs.argument) for number, text in enumerate(args.inputs, 1)]
        return len(items), iter([items])
    if sys.stdin is None:
        raise UserError("standard input is closed: pass the inputs as arguments, or files")
    if is_prompt(args):
        return 0, ([item] for item in ask(inputs.what))
    total = 0
    if sys.stdin.buffer.seekable() and sys.stderr.isatty():
        begin = sys.stdin.buffer.tell()
        total = sum(piece.count(b"\n") for piece in iter(lambda: sys.stdin.buffer.read(PIECE), b""))
        sys.stdin.buffer.seek(begin)
    return total, read_lines(args.encoding)


def _argument(number: int, text: str, argument: str) -> Item:
    """An argument of the command line, whose bytes the shell passes on whatever their encoding."""
    if not argument:  # the name of a file
        return Item(number, text)
    return _decoded(number, text.encode(errors="surrogateescape"), f"{argument} {number}")


def _decoded(number: int, raw: bytes, where: str, first: bool = False, encoding: str = "utf-8") -> Item:
    from regard.data.lines import undecodable

    try:
        return Item(number, raw.decode(encoding), where)
    except UnicodeDecodeError as error:
        return Item(number, "", where, undecodable(error, first, encoding))


def ask(what: str) -> Iterator[Item]:
    """What a person enters at a prompt, with line editing where Python has it; blank lines are ignored."""
    print(f"Enter {what} per line; Ctrl-D ends", file=sys.stderr)
    shown = sys.stdout.isatty()
    if shown:
        with suppress(ImportError):
            importlib.import_module("readline")  # `input` uses it
    for number in count(1):
        try:
            if shown:
                line = input(PROMPT)
            else:  # `input` would write the prompt to standard output
                print(PROMPT, end="", file=sys.stderr, flush=True)
                if not (line := sys.stdin.readline()):
                    raise EOFError
        except EOFError:
            print(file=sys.stderr)
            return
        except UnicodeDecodeError as error:
            yield Item(number, "", error=f"is not {error.encoding} text; enter it again")
            continue
        if line.strip():
            yield _decoded(number, line.removesuffix("\n").encode(errors="surrogateescape"), "")


def read_lines(encoding: str) -> Iterator[list[Item]]:
    """The complete lines of each read of standard input."""
    stdin = cast(BufferedReader, sys.stdin.buffer)
    parts, number = list[bytes](), 0
    for piece in chain(iter(lambda: stdin.read1(PIECE), b""), [b""]):
        parts.append(piece)
        if piece and b"\n" not in piece:
            continue
        *lines, rest = b"".join(parts).split(b"\n")
        if not piece and rest:  # the last line may lack its end
            lines.append(rest)
        parts = [rest]
        if lines and number == 0:
            lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
        if lines:
            lines = [line.removesuffix(b"\r") for line in lines]  # \r\n of Windows
            numbered = enumerate(lines, number + 1)
            yield [_decoded(at, line, f"standard input, line {at:,}", at == 1, encoding) for at, line in numbered]
        number += len(lines)


def open_files(args: argparse.Namespace, inputs: Inputs) -> tuple[int, Iterator[list[Item]]]:
    """The number of inputs in files, and the inputs; a file is read to its end first, since it may be damaged."""
    from regard.data.lines import Notes, Problem
    from regard.data.sets import find_files
    from regard.data.tables import Row, read_rows, table_kind

    column = args.column or inputs.column
    how: dict[str, Any] = {"remedy": "Name the column with --column", "convert": dict(inputs.more)}
    if inputs.cell is not None:
        how["convert"][column] = inputs.cell

    def scan(path: Path) -> Iterator[Row | Problem]:
        if not inputs.is_list(path):
            yield Row((str(path),), "", 0)
            return
        kind = "text" if args.column is None and table_kind(path) is None and not inputs.more else None
        rows = read_rows([str(path)], (column, *inputs.more), kind=kind, encoding=args.encoding, **how)
        yield from rows.scan(Notes())

    def scan_all() -> Iterator[Row | Problem]:
        return chain.from_iterable(map(scan, paths)) if inputs.rows is None else inputs.rows()

    def items() -> Iterator[Item]:
        for number, row in enumerate(scan_all(), 1):
            (text, *more), error = (("",), row.what) if isinstance(row, Problem) else (row.cells, None)
            where = f"{row.file}, line {row.line:,}"
            if not row.file:
                yield Item(number, text)
            elif inputs.argument:
                yield Item(number, text, where, error, {"file": row.file, "row": row.line}, more)
            else:  # names in a list are relative to its folder, as in training data
                yield Item(number, str(Path(row.file).parent / text), where, error)

    paths, total = find_files(args.files) if inputs.rows is None else [], 0
    for row in scan_all():
        if isinstance(row, Problem) and row.fatal:
            raise UserError(f"{row}\nFix the file and try again.")
        total += 1
    if not total:
        raise UserError(f"{', '.join(args.files)}: no inputs; put one in each line")
    rows = items()
    return total, iter(lambda: list(islice(rows, ROWS)), [])


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


def show_texts(inputs: Inputs, name: str, several: bool) -> Callable[[Item, TextPrediction], Shown]:
    """Translations or captions, `name` in JSON: their texts, or `several` of each input with their scores."""

    def show(item: Item, output: TextPrediction) -> Shown:
        if output.note:
            note(output.note)
        n_best = [{name: one.text, "score": one.score, "log_probability": one.log_probability} for one in output.n_best]
        rows = [(item.number, one.score, one.text) for one in output.n_best] if several else [(output.text,)]
        yield {inputs.name: item.text, **n_best[0], "n_best": n_best, **item.origin}, rows

    return show


def note(text: str) -> None:
    report(f"note: {text}")


def report(line: str) -> None:
    """A line on standard error, above a progress bar."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


@contextmanager
def opened(name: str | None) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if name is None:
        yield sys.stdout
        return
    path = Path(name).resolve()  # follow links, so that a link stays a link
    if path.exists() and not path.is_file():  # a device, such as /dev/null
        with path.open("w", encoding="utf-8", errors="replace") as file:
            yield file
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("x", encoding="utf-8", errors="replace") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
