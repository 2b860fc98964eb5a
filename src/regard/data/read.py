"""Sentence pairs from files, one at a time, and every way in which a file can be wrong.

Parallel text is kept line by line: sentence n of one language stands in line n of its file, its translation
in line n of another, or both stand in one row of a table. One line too few and every pair after it is wrong
without looking wrong, so files are read in full before training: `check` makes one pass in constant memory
and names each bad line, `pairs` makes the same pass and yields the good ones.

    two files   line n belongs to line n
    TSV         columns are cut at tabs; quotes are literal
    JSONL       an object a line
    Parquet     two columns of text

What a line is, and where it can be wrong by itself, stands in `regard.data.lines`.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.config import DataConfig, find, table_kind
from regard.data.lines import LONGEST, Notes, Problem, decode, open_seekable, read_lines, too_long
from regard.errors import MissingExtra, UserError, suggest

SHOWN = 10  # problems that are listed


class Pair(NamedTuple):
    """A sentence and its translation, and where they stand."""

    source: str
    target: str
    file: str
    line: int


@dataclass(frozen=True)
class Report:
    """What `check` found: `count` good pairs, `bad_count` that are left out, the first of them in `bad`."""

    count: int
    bad: list[Problem]
    bad_count: int
    notes: list[str]


def pairs(files: Sequence[str], config: DataConfig, skip_bad: bool | None = None) -> Iterator[Pair]:
    """The pairs in `files`, one after another; `skip_bad` (config's, unless given) leaves bad lines out."""
    skip_bad = config.skip_bad if skip_bad is None else skip_bad
    for item in _scan(files, config, Counter()):
        if isinstance(item, Pair):
            yield item
        elif item.fatal or not skip_bad:
            raise UserError(f"{item}\n{_remedy(item.fatal)}")


def check(files: Sequence[str], config: DataConfig, skip_bad: bool | None = None) -> Report:
    """Read everything once; what is wrong becomes one UserError, or part of the report where it is skipped."""
    skip_bad = config.skip_bad if skip_bad is None else skip_bad
    notes: Notes = Counter()
    count = bad_count = 0
    bad: list[Problem] = []
    fatal: list[Problem] = []
    for item in _scan(files, config, notes):
        if isinstance(item, Pair):
            count += 1
            continue
        bad_count += 1
        shown = fatal if item.fatal else bad
        if len(shown) < SHOWN:
            shown.append(item)
    names = ", ".join(files)
    if fatal or (bad and not skip_bad):
        listed = [f"  {problem}" for problem in (fatal + bad)[:SHOWN]]
        rest = [f"  and {bad_count - len(listed):,} more"] if bad_count > len(listed) else []
        head = f"{names}: {bad_count:,} problem{'s' * (bad_count != 1)}, {count:,} good pair{'s' * (count != 1)}"
        raise UserError("\n".join([head, *listed, *rest, _remedy(bool(fatal))]))
    if not count:
        bad_lines = f", {bad_count:,} bad lines such as  {bad[0]}" if bad else ""
        raise UserError(f"{names}: no sentence pairs{bad_lines}; put a sentence in each line")
    return Report(count, bad, bad_count, [f"{file}: {n:,} x {what}" for (file, what), n in notes.items()])


def _remedy(fatal: bool) -> str:
    if fatal:
        return "Mend the file: skip_bad leaves out single lines, never these."
    return "Mend these lines, or leave them out with  skip_bad = true  in [data]."


def _scan(files: Sequence[str], config: DataConfig, notes: Notes) -> Iterator[Pair | Problem]:
    """Everything there is, the good and the bad, in order."""
    for paths in find(files, config.folder):
        if len(paths) == 2:
            yield from _aligned(*paths, notes)
            continue
        match table_kind(paths[0]):
            case ".tsv":
                rows = _tsv(paths[0], config, notes)
            case ".jsonl":
                rows = _jsonl(paths[0], config, notes)
            case _:
                rows = _parquet(paths[0], config)
        yield from rows


def _aligned(source: Path, target: Path, notes: Notes) -> Iterator[Pair | Problem]:
    left, right = read_lines(source, notes), read_lines(target, notes)
    for number, (a, b) in enumerate(zip_longest(left, right), 1):
        wrong = sorted((side for side in (a, b) if isinstance(side, Problem)), key=lambda side: not side.fatal)
        if wrong and (wrong[0].fatal or (a is not None and b is not None)):
            yield wrong[0]
            if wrong[0].fatal:
                return
        elif a is None or b is None:
            short, long, rest = (source, target, right) if a is None else (target, source, left)
            total = number + sum(1 for _ in rest)
            what = f"the file ends here, but {long} has {total:,} lines: one of them lacks or adds a line"
            yield Problem(str(short), number - 1, what, fatal=True)
            return
        else:
            assert isinstance(a, str) and isinstance(b, str)
            yield _pair(a, b, number, str(source), str(target))


def _pair(source: str, target: str, line: int, source_name: str, target_name: str) -> Pair | Problem:
    """A pair, unless a side has no sentence in it; the names are those of files or of columns."""
    for text, name in ((source, source_name), (target, target_name)):
        if "\0" in text:
            return Problem(name, line, "holds a NUL character; is this a text file?")
    blank = [not text or text.isspace() for text in (source, target)]
    if all(blank):
        return Problem(source_name, line, "is empty on both sides")
    if any(blank):
        empty, other = (source_name, target_name) if blank[0] else (target_name, source_name)
        return Problem(empty, line, f"is empty, but {other} has a sentence there")
    return Pair(source, target, source_name, line)


def _cells(source: str, target: str, line: int, path: Path, names: tuple[str, str]) -> Pair | Problem:
    """A pair from a row of a table: problems name the column, the pair names the file."""
    match _pair(source, target, line, *names):
        case Problem(file=column, what=what):
            return Problem(str(path), line, f"column {column!r} {what}")
    return Pair(source, target, str(path), line)


def _tsv(path: Path, config: DataConfig, notes: Notes) -> Iterator[Pair | Problem]:
    lines = enumerate(read_lines(path, notes), 1)
    names = (config.source or "1", config.target or "2")
    at, width = (0, 1), 0
    if config.source is not None:
        header = next(lines, (0, Problem(str(path), None, "is empty, without even a header", fatal=True)))[1]
        if isinstance(header, Problem):
            yield Problem(header.file, header.line, header.what, fatal=True)
            return
        columns = header.split("\t")
        if wrong := _wrong_columns(names, columns):
            hint = f"{wrong}. If the file has no header, leave source and target out of [data]"
            yield Problem(str(path), 1, hint, fatal=True)
            return
        at, width = (columns.index(names[0]), columns.index(names[1])), len(columns)
    for number, line in lines:
        if isinstance(line, Problem):
            yield line
            continue
        cells = line.split("\t")
        width = width or len(cells)  # without a header the first line says how many columns there are
        if len(cells) <= max(at):
            yield Problem(str(path), number, f"has {len(cells)} column{'s' * (len(cells) > 1)}, {max(at) + 1} needed")
        elif len(cells) > width:
            yield Problem(str(path), number, f"has {len(cells)} columns instead of {width}: is a tab in the text?")
        else:
            yield _cells(cells[at[0]], cells[at[1]], number, path, names)


def _jsonl(path: Path, config: DataConfig, notes: Notes) -> Iterator[Pair | Problem]:
    names = (config.source or "source", config.target or "target")
    for number, line in enumerate(read_lines(path, notes), 1):
        if isinstance(line, Problem):
            yield line
            continue
        row = _json_row(line, names)
        if isinstance(row, str):
            yield Problem(str(path), number, row)
        else:
            yield _cells(*row, number, path, names)


def _json_row(line: str, names: tuple[str, str]) -> tuple[str, str] | str:
    """The two texts, or what is wrong."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    if not isinstance(row, dict):
        return f'is no object; write  {{"{names[0]}": "…", "{names[1]}": "…"}}'
    for name in names:
        if name not in row:
            return f"{_wrong_columns((name,), list(row))}. Set source and target in [data]"
        if not isinstance(row[name], str):
            return f"{name!r} is {type(row[name]).__name__}, not text"
        if not row[name].isascii() and any("\ud800" <= char <= "\udfff" for char in row[name]):
            return f"{name!r} has half a surrogate pair (\\ud800 to \\udfff), which is no Unicode text"
    return row[names[0]], row[names[1]]


def _parquet(path: Path, config: DataConfig) -> Iterator[Pair | Problem]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("parquet", "pyarrow", f"{path}: reading Parquet") from None
    names = (config.source or "source", config.target or "target")
    number = 0
    try:
        with open_seekable(path) as file, parquet.ParquetFile(file) as table:
            schema = table.schema_arrow
            wrong = _wrong_columns(names, schema.names) or _wrong_types(arrow, names, schema)
            if wrong:
                yield Problem(str(path), None, f"{wrong}. Set source and target in [data]", fatal=True)
                return
            for batch in table.iter_batches(1024, columns=list(names)):
                sides = [_column_bytes(arrow, batch.column(name)) for name in names]
                for row in zip(*sides, strict=True):
                    number += 1
                    yield _parquet_row(row, number, path, names)
    except (arrow.ArrowException, OSError, EOFError, zlib.error) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        yield Problem(str(path), None, f"cannot be read as Parquet after row {number:,}: {reason}", fatal=True)


def _wrong_columns(names: Sequence[str], columns: Sequence[str]) -> str:
    """What keeps the columns from being found, or nothing."""
    for name in names:
        if columns.count(name) != 1:
            how = "twice" if name in columns else "nowhere"
            return f"column {name!r} is {how}; {suggest(name, [column[:40] for column in columns[:20]])}"
    return ""


def _wrong_types(arrow: Any, names: Sequence[str], schema: Any) -> str:
    for name in names:
        kind = schema.field(name).type
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary"):
            return f"column {name!r} holds {kind}, not text"
    return ""


def _column_bytes(arrow: Any, column: Any) -> list[bytes | None]:
    """A column's texts undecoded: Parquet does not check that they are UTF-8."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return list(column.cast(arrow.large_binary()).to_pylist())


def _parquet_row(row: tuple[bytes | None, ...], number: int, path: Path, names: tuple[str, str]) -> Pair | Problem:
    texts = []
    for cell, name in zip(row, names, strict=True):
        if cell is None:
            return Problem(str(path), number, f"column {name!r} has no value")
        text = decode(cell) if len(cell) <= LONGEST else too_long(len(cell))
        if text[1]:
            return Problem(str(path), number, f"column {name!r} {text[1]}")
        texts.append(text[0])
    return _cells(texts[0], texts[1], number, path, names)
