"""Rows of tables, the named columns of them, one row at a time.

    TSV         columns are cut at tabs; quotes are literal. A header names them, or they are counted: "1", "2"
    CSV         columns are cut at commas, or at semicolons where the first line has no comma; a cell in double quotes
                may hold either, line ends, and "" for a quote (RFC 4180)
    JSONL       an object a line
    Parquet     columns of text

Each reader yields (number of the row, texts of the columns asked for), or a `Problem` in its place; a file that
cannot be read at all is one fatal problem. `remedy` is the end of an error about a column that is not there.
Cells of JSONL and Parquet are text, and in the columns of `numbers` also whole numbers and true or false.
"""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from regard.data.lines import LONGEST, Notes, Problem, decode, open_seekable, read_lines, too_long
from regard.errors import MissingExtra, suggest

Row = tuple[int, tuple[str, ...]]


def tsv_rows(path: Path, names: Sequence[str], notes: Notes, *, header: bool, remedy: str) -> Iterator[Row | Problem]:
    lines = enumerate(read_lines(path, notes), 1)
    at, width = [int(name) - 1 for name in names] if not header else [], 0
    if header:
        head = next(lines, (0, Problem(str(path), None, "is empty, without even a header", fatal=True)))[1]
        if isinstance(head, Problem):
            yield Problem(head.file, head.line, head.what, fatal=True)
            return
        columns = head.split("\t")
        if wrong := _wrong_columns(names, columns):
            yield Problem(str(path), 1, f"{wrong}. {remedy}", fatal=True)
            return
        at, width = [columns.index(name) for name in names], len(columns)
    for number, line in lines:
        if isinstance(line, Problem):
            yield line
            continue
        cells = line.split("\t")
        width = width or len(cells)  # without a header the first line says how many columns there are
        yield _chosen(cells, at, width, str(path), number, "tab")


def csv_rows(path: Path, names: Sequence[str], notes: Notes, *, header: bool, remedy: str) -> Iterator[Row | Problem]:
    """The number of a row is that of its last line."""
    bad: list[Problem] = []
    lines = _until_bad(read_lines(path, notes), bad)
    first = next(lines, "")
    if not first:
        yield from bad or [Problem(str(path), None, "is empty, without even a header", fatal=True)]
        return
    delimiter = ";" if ";" in first and "," not in first else ","
    reader = csv.reader(chain((first,), lines), delimiter=delimiter, strict=True)
    at, width = [int(name) - 1 for name in names] if not header else [], 0
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            yield Problem(str(path), reader.line_num, f"is not CSV: {error}")
            continue
        if not at:
            if wrong := _wrong_columns(names, cells):
                yield Problem(str(path), 1, f"{wrong}. {remedy}", fatal=True)
                return
            at, width = [cells.index(name) for name in names], len(cells)
        elif cells:  # an empty line has none
            width = width or len(cells)
            yield _chosen(cells, at, width, str(path), reader.line_num, "comma or quote")
    yield from bad


def _until_bad(lines: Iterator[str | Problem], bad: list[Problem]) -> Iterator[str]:
    """The lines with their ends; one that cannot be read ends a CSV file, since it may be part of a longer row."""
    for line in lines:
        if isinstance(line, Problem):
            bad.append(Problem(line.file, line.line, line.what, fatal=True))
            return
        yield line + "\n"


def _chosen(cells: Sequence[str], at: Sequence[int], width: int, path: str, number: int, sign: str) -> Row | Problem:
    """The cells asked for, unless there are too few, or more than there are columns."""
    if len(cells) <= max(at):
        return Problem(path, number, f"has {len(cells)} column{'s' * (len(cells) > 1)}, {max(at) + 1} needed")
    if len(cells) > width:
        return Problem(path, number, f"has {len(cells)} columns instead of {width}: is a {sign} in the text?")
    return number, tuple(cells[i] for i in at)


def jsonl_rows(
    path: Path,
    names: Sequence[str],
    notes: Notes,
    *,
    remedy: str,
    longest: int = LONGEST,
    numbers: Collection[str] = (),
) -> Iterator[Row | Problem]:
    for number, line in enumerate(read_lines(path, notes, longest), 1):
        if isinstance(line, Problem):
            yield line
            continue
        row = _json_row(line, names, remedy, numbers)
        yield Problem(str(path), number, row) if isinstance(row, str) else (number, row)


def _json_row(line: str, names: Sequence[str], remedy: str, numbers: Collection[str]) -> tuple[str, ...] | str:
    """The texts, or what is wrong."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    if not isinstance(row, dict):
        example = ", ".join(f'"{name}": "…"' for name in names)
        return f"is no object; write  {{{example}}}"
    for name in names:
        if name not in row:
            return f"{_wrong_columns((name,), list(row))}. {remedy}"
        if name in numbers and isinstance(row[name], int):
            row[name] = json.dumps(row[name])  # true, not True
        if not isinstance(row[name], str):
            return f"{name!r} is {type(row[name]).__name__}, not text"
        if not row[name].isascii() and any("\ud800" <= char <= "\udfff" for char in row[name]):
            return f"{name!r} has half a surrogate pair (\\ud800 to \\udfff), which is no Unicode text"
    return tuple(row[name] for name in names)


def parquet_rows(
    path: Path, names: Sequence[str], *, remedy: str, longest: int = LONGEST, numbers: Collection[str] = ()
) -> Iterator[Row | Problem]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("parquet", "pyarrow", f"{path}: reading Parquet") from None
    number = 0
    try:
        with open_seekable(path) as file, parquet.ParquetFile(file) as table:
            schema = table.schema_arrow
            wrong = _wrong_columns(names, schema.names) or _wrong_types(arrow, names, schema, numbers)
            if wrong:
                yield Problem(str(path), None, f"{wrong}. {remedy}", fatal=True)
                return
            for batch in table.iter_batches(1024, columns=list(names)):
                columns = [_column_bytes(arrow, batch.column(name)) for name in names]
                for row in zip(*columns, strict=True):
                    number += 1
                    yield _parquet_row(row, number, path, names, longest)
    except (arrow.ArrowException, OSError, EOFError, zlib.error) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        yield Problem(str(path), None, f"cannot be read as Parquet after row {number:,}: {reason}", fatal=True)


def _parquet_row(
    row: tuple[bytes | None, ...], number: int, path: Path, names: Sequence[str], longest: int
) -> Row | Problem:
    texts = []
    for cell, name in zip(row, names, strict=True):
        if cell is None:
            return Problem(str(path), number, f"column {name!r} has no value")
        text = decode(cell) if len(cell) <= longest else too_long(len(cell), longest)
        if text[1]:
            return Problem(str(path), number, f"column {name!r} {text[1]}")
        texts.append(text[0])
    return number, tuple(texts)


def _wrong_columns(names: Sequence[str], columns: Sequence[str]) -> str:
    """What keeps the columns from being found, or nothing."""
    for name in names:
        if columns.count(name) != 1:
            how = "twice" if name in columns else "nowhere"
            return f"column {name!r} is {how}; {suggest(name, [column[:40] for column in columns[:20]])}"
    return ""


def _wrong_types(arrow: Any, names: Sequence[str], schema: Any, numbers: Collection[str]) -> str:
    for name in names:
        kind = schema.field(name).type
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if name in numbers and (arrow.types.is_integer(kind) or arrow.types.is_boolean(kind)):
            continue
        if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary"):
            return f"column {name!r} holds {kind}, not text"
    return ""


def _column_bytes(arrow: Any, column: Any) -> list[bytes | None]:
    """A column's texts undecoded: Parquet does not check that they are UTF-8."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if arrow.types.is_integer(column.type) or arrow.types.is_boolean(column.type):
        column = column.cast(arrow.string())
    return list(column.cast(arrow.large_binary()).to_pylist())
