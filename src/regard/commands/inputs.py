"""The inputs of a prediction command: arguments, files, standard input or a prompt.

Files have one input per line, or are tables with a column of them (`--files`, `--column`). Standard input is read as it
comes: what a pipe has to give is processed at once, so an endless one gives output while it runs, and a file is read in
large pieces, which batch well. In a terminal without any inputs, a prompt asks for them.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regard.errors import UserError
from regard.files import name_some
from regard.messages import localize

if TYPE_CHECKING:
    from regard.data.lines import Problem
    from regard.data.tables import Row

PIECE = 2**18  # bytes of standard input that are read at most at once
ROWS = 8192  # inputs of files that are read at most at once
PROMPT = "> "


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


def check_inputs(args: argparse.Namespace, texts: bool = True) -> None:
    """Inputs are arguments (`texts`, or names of files) or in files, and the output can be written."""
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
    if texts:
        check_texts(args)


def check_texts(args: argparse.Namespace) -> None:
    """Arguments that are texts, and not names of files."""
    names = [text for text in args.inputs if len(text.split()) == 1 and os.path.isfile(text)]
    if names and len(names) == len(args.inputs):
        what, read = ("is the name of a file", "its") if len(names) == 1 else ("are names of files", "their")
        shown = ", ".join(map(repr, names[:3])) + ", …" * (len(names) > 3)
        raise UserError(f"{shown} {what}: read {read} lines with  --files {' '.join(names[:3])}")
    if names:
        note(f"{name_some(names)}: the name of a file, and the name itself is the input; --files reads files")


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
    print(localize(f"Enter {what} per line; Ctrl-D ends"), file=sys.stderr)
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


def note(text: str) -> None:
    report(f"note: {text}")


def report(line: str) -> None:
    """A line on standard error, above a progress bar."""
    from tqdm import tqdm

    tqdm.write(localize(line), file=sys.stderr)
