"""Rows of files: one reader for every table, one checker for every task.

    TSV, TXT    columns are separated by tabs; quotes are literal. A header names them, or they are counted: "1", "2"
    CSV         by the one of  , ; tab |  that the first line has, or by `delimiter`; quoted cells as in RFC 4180
    JSONL       one object per line
    Parquet     needs the extra `parquet`
    text        one text per line; two files whose lines belong together make rows of two cells

Lines are those of `regard.data.lines`: any file may be compressed, and text may have another encoding than UTF-8. Cells
of TSV, CSV and text are strings; JSONL and Parquet may contain other values, which `convert` checks per column. A row
that cannot be used becomes a `Problem` with file, line and reason, so row n stays row n. Files are read in constant
memory, one row at a time, and at most `longest` bytes of it.

`Rows` is what a task reads: iterating yields the good rows (and stops at a bad one unless `skip_bad`), `check` makes
one pass and reports every problem at once. The two files of parallel text, for example, are checked in full before
training: with one line missing, every later pair would be wrong without looking wrong.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

from regard.data.lines import LONGEST, UNREADABLE, UTF8, Notes, Problem, open_bytes, read_lines, undecodable
from regard.data.sets import find_files
from regard.errors import MissingExtra, UserError, suggest
from regard.messages import localize
from regard.progress import watched

T = TypeVar("T")
SHOWN = 10  # problems that are listed
TABLES = ("tsv", "csv", "jsonl", "parquet")
DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "|"}  # that are recognised in a CSV file
HEADERS = {  # a first line of these is taken for a header
    "source", "target", "src", "tgt", "trg", "input", "output", "text", "label", "sentence", "sentence1", "sentence2",
    "translation", "question", "answer", "prompt", "response", "english", "korean", "german", "french", "japanese",
    "chinese", "spanish", "en", "ko", "de", "fr", "ja", "zh", "es", "it", "ru", "pt", "nl", "pl", "cs", "tr",
    "ar", "vi",
}  # fmt: skip
Records = Iterator[tuple[int, Any] | Problem]  # number of each row, and its line, cells or values
Pick = Callable[[Any], tuple[Any, ...]]  # from a record to the values of the columns; ValueError: what is wrong with it
Convert = Callable[[Any], Any]  # a cell as it is used; ValueError says what is wrong with it


class Row(NamedTuple):
    """Cells of a row and where it is."""

    cells: tuple[Any, ...]
    file: str
    line: int


@dataclass(frozen=True)
class Report:
    """What `Rows.check` found: `count` good rows, `bad_count` that are left out, the first of them in `bad`."""

    files: str
    count: int
    bad: list[Problem]
    bad_count: int
    notes: list[str]
    totals: dict[str, int]  # what `Rows.tally` has added up: texts per class, characters

    def print(self) -> None:
        """Notes, and the rows that are left out, on standard error."""
        for note in self.notes:
            print(localize(f"note: {note}"), file=sys.stderr)
        if self.bad_count:
            lines = f"{self.bad_count:,} bad line{'s' * (self.bad_count != 1)}"
            line = f"left out: {lines} of {self.files}{_listed(self.bad, self.bad_count)}"
            print(localize(line), file=sys.stderr)


@dataclass(frozen=True)
class Rows(Generic[T]):
    """Rows of `files`: `scan` yields each or its problem. `what` and `remedy` are for messages."""

    files: Sequence[str]
    scan: Callable[[Notes], Iterator[T | Problem]]
    skip_bad: bool | None = None  # leave bad rows out; None: there is no such setting, so messages do not propose it
    what: str = "rows"
    remedy: str = "put one in each line"
    tally: Callable[[T, Counter[str]], None] = lambda row, totals: None

    def __iter__(self) -> Iterator[T]:
        for item in self.scan(Counter()):
            if not isinstance(item, Problem):
                yield item
            elif item.fatal or not self.skip_bad:
                raise UserError(f"{item}\n{self._remedy(item.fatal)}")

    def check(self, each: Callable[[T], None] = lambda row: None) -> Report:
        """Read everything once and pass every good row to `each`; what is wrong becomes one UserError."""
        notes, totals, names = Notes(), Counter[str](), ", ".join(self.files)
        count = bad_count = 0
        bad: list[Problem] = []
        fatal: list[Problem] = []
        for item in watched(self.scan(notes), f"reading {names}", self.what):
            if isinstance(item, Problem):
                bad_count += 1
                listed = fatal if item.fatal else bad
                listed += [item][: SHOWN - len(listed)]
            else:
                count += 1
                self.tally(item, totals)
                each(item)
        if fatal or (bad and not self.skip_bad):
            good = f"{count:,} good {self.what if count != 1 else self.what.removesuffix('s')}"
            problems = f"{bad_count:,} problem{'s' * (bad_count != 1)}"
            first = _listed((fatal + bad)[:SHOWN], bad_count)
            raise UserError(f"{names}: {problems}, {good}{first}\n{self._remedy(bool(fatal))}")
        if not count:
            skipped = f" ({bad_count:,} bad lines are left out, such as  {bad[0]})" if bad else ""
            raise UserError(f"{names}: no {self.what}{skipped}; {self.remedy}")
        changes = [f"{file}: {n:,} x {what}" for (file, what), n in notes.items()]
        return Report(names, count, bad, bad_count, changes, dict(totals))

    def read(self) -> list[T]:
        """All good rows; what is left out is reported on standard error."""
        rows: list[T] = []
        self.check(rows.append).print()
        return rows

    def _remedy(self, fatal: bool) -> str:
        if self.skip_bad is None:
            return "Fix the file and try again."
        if fatal:
            return "Fix the file: skip_bad leaves out single lines, never these."
        return "Fix these lines, or leave them out with  skip_bad = true  in [data]."


def _listed(problems: Sequence[Problem], count: int) -> str:
    more = f"\n  and {count - len(problems):,} more" * (count > len(problems))
    return "".join(f"\n  {problem}" for problem in problems) + more


def read_rows(
    files: Sequence[str], columns: Sequence[str], folder: str | Path = ".", skip_bad: bool | None = None, **how: Any
) -> Rows[Any]:
    """The named columns of tables, a `Row` each or what `make` returns; `how` are fields of `Table`."""
    paths = find_files(files, folder)

    def scan(notes: Notes) -> Iterator[Any]:
        for path in paths:
            yield from Table(path, columns, notes, **how)

    return Rows(files, scan, skip_bad)


def table_kind(name: str | Path) -> str | None:
    """One of TABLES, by the file name; None for other files."""
    suffix = Path(str(name).lower().removesuffix(".gz").removesuffix(".zst")).suffix[1:]
    return suffix if suffix in TABLES else None


def text(value: Any) -> str:
    """A cell that has to be text."""
    if value is None:
        raise ValueError("has no value")
    if not isinstance(value, str):
        raise ValueError(f"is {type(value).__name__}, not text")
    if "\0" in value:
        raise ValueError("contains a NUL character; is this text?")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError("has half a surrogate pair (\\ud800 to \\udfff), which is not Unicode text")
    return value


def label(value: Any) -> str:
    """A cell that is text, a whole number, or true or false."""
    return json.dumps(value) if isinstance(value, int) else text(value)


@dataclass(frozen=True)
class Table:
    """The named columns of one file: iterating yields every row, or its problem."""

    path: Path
    columns: Sequence[str]
    notes: Notes
    kind: str | None = None  # one of TABLES or "text"; None: what the file name says, otherwise TSV
    header: bool = True  # of TSV and CSV; without one, columns are counted: "1", "2", other names in their order
    optional: Collection[str] = ()  # columns that may be missing: None
    convert: Mapping[str, Convert] = field(default_factory=dict)  # by default, cells are text
    encoding: str = UTF8  # of text files; Parquet has its own
    delimiter: str | None = None  # of TSV and CSV; None: tab, or what the first line of CSV has
    longest: int = LONGEST  # bytes of a row
    remedy: str = ""  # ends an error about a missing column
    make: Callable[[Row, Notes], Any] = lambda row, notes: row  # what a row becomes; ValueError: what is wrong with it

    def __iter__(self) -> Iterator[Any]:
        kind = self.kind or table_kind(self.path) or "tsv"
        records = self._parquet_rows() if kind == "parquet" else self._records(kind)
        picks: dict[str, Pick] = {"text": lambda line: (line,), "jsonl": self._from_json, "parquet": tuple}
        pick = picks.get(kind) or self._pick_columns(records, kind)
        if isinstance(pick, Problem):
            yield pick
            return
        for record in records:
            if isinstance(record, Problem):
                yield record
                continue
            number, content = record
            try:
                cells = tuple(map(self._cell, self.columns, pick(content)))
                row = self.make(Row(cells, str(self.path), number), self.notes)
            except ValueError as error:
                yield Problem(str(self.path), number, str(error))
            else:
                yield row

    def _cell(self, name: str, value: Any) -> Any:
        try:
            value = _decoded(value, self.longest) if isinstance(value, bytes) else value
            return None if value is None and name in self.optional else self.convert.get(name, text)(value)
        except ValueError as error:
            raise ValueError(f"column {name!r} {error}") from None

    def _wrong(self, names: Sequence[str]) -> str:
        """What keeps the columns from being found among the names, or nothing."""
        for name in self.columns:
            if names.count(name) != 1 and name not in self.optional:
                how = "there twice" if name in names else "missing"
                return f"column {name!r} is {how}; {suggest(name, [known[:40] for known in names[:20]])}. {self.remedy}"
        return ""

    def _positions(self) -> list[int]:
        """Where the columns are in a file without a header."""
        return [int(name) - 1 if name.isdecimal() else at for at, name in enumerate(self.columns)]

    def _pick_columns(self, records: Records, kind: str) -> Pick | Problem:
        """A function that takes the columns from the cells of a row, by the header if there is one."""
        positions, width = self._positions(), 0
        if self.header:
            first = next(records, Problem(str(self.path), None, "is empty, without even a header"))
            if isinstance(first, Problem):
                return replace(first, fatal=True)
            names = [cell.strip() for cell in first[1]]
            if wrong := self._wrong(names):
                return Problem(str(self.path), 1, wrong, fatal=True)
            positions, width = [names.index(name) if name in names else -1 for name in self.columns], len(names)
        least, sign = max(positions) + 1, "tab" if kind == "tsv" else "delimiter or quote"

        def pick(cells: list[str]) -> tuple[str | None, ...]:
            nonlocal width
            if len(cells) < least:
                raise ValueError(f"has {len(cells)} column{'s' * (len(cells) > 1)}, {least} needed")
            if not width:  # without a header the first line says how many columns there are
                width = len(cells)
                if {cell.strip().lower() for cell in cells} <= HEADERS:
                    names = [f"{name} = {cells[at]!r}" for name, at in zip(self.columns, positions, strict=True)]
                    raise ValueError(f"looks like a header: name its columns in [data]: {', '.join(names)}")
            if len(cells) > width:
                raise ValueError(f"has {len(cells)} columns instead of {width}: is there a {sign} in the text?")
            return tuple(cells[at] if at >= 0 else None for at in positions)

        return pick

    def _from_json(self, line: str) -> tuple[Any, ...]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from None
        if not isinstance(row, dict):
            example = ", ".join(f'"{name}": "…"' for name in self.columns if name not in self.optional)
            raise ValueError(f"is not an object; write  {{{example}}}")
        if wrong := self._wrong(list(row)):
            raise ValueError(wrong)
        return tuple(row.get(name) for name in self.columns)

    def names(self) -> list[str]:
        """The columns of the file: its header, the keys of its first object, or its schema."""
        kind = self.kind or table_kind(self.path) or "tsv"
        if kind == "parquet":
            _, parquet = _arrow(self.path)
            with open_bytes(self.path) as file, parquet.ParquetFile(_seekable(file)) as table:
                return list(table.schema_arrow.names)
        first: Any = next(self._records(kind), (0, "{}" if kind == "jsonl" else []))
        if isinstance(first, Problem):
            raise UserError(str(first))
        return list(json.loads(first[1])) if kind == "jsonl" else [cell.strip() for cell in first[1]]

    def _records(self, kind: str) -> Records:
        """The cells of TSV and CSV (where the number is that of the last line of a row), the line of other files."""
        lines = read_lines(self.path, self.notes, self.longest, self.encoding)
        if kind == "csv":
            yield from self._csv_records(lines)
            return
        tab = self.delimiter or "\t"
        for number, line in enumerate(lines, 1):
            yield line if isinstance(line, Problem) else (number, line.split(tab) if kind == "tsv" else line)

    def _csv_records(self, items: Iterator[str | Problem]) -> Records:
        bad: list[Problem] = []

        def lines() -> Iterator[str]:
            """With their ends; one that cannot be read ends the file, since it may be part of a longer row."""
            for line in items:
                if isinstance(line, Problem):
                    bad.append(replace(line, fatal=True))
                    return
                yield line + "\n"

        rest = lines()
        first = next(rest, "")
        try:
            reader = csv.reader(chain((first,), rest), delimiter=self._delimiter(first), strict=True)
        except ValueError as error:
            yield Problem(str(self.path), 1, str(error), fatal=True)
            return
        while True:
            try:
                csv.field_size_limit(self.longest)  # for all readers of this process, which may have other limits
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                yield Problem(str(self.path), reader.line_num, f"is not CSV: {error}")
                continue
            if cells:  # an empty line has none
                yield reader.line_num, cells
        yield from bad

    def _delimiter(self, first: str) -> str:
        """What separates the cells of a CSV file, by its first line; a ValueError where that allows two readings."""
        if self.delimiter is not None:
            return self.delimiter
        csv.field_size_limit(self.longest)
        cells = {sign: [cell.strip() for cell in next(csv.reader([first], delimiter=sign), ())] for sign in DELIMITERS}
        several = [sign for sign in cells if len(cells[sign]) > 1]
        if len(several) < 2:
            return several[0] if several else ","
        most = max(map(len, cells.values()))
        needed = {*self.columns} - {*self.optional}
        named = [sign for sign in several if needed <= {*cells[sign]}] if self.header and needed else []
        width = most if self.header else max(self._positions()) + 1
        fitting = named or [sign for sign in several if len(cells[sign]) == width]
        if len(fitting) != 1:
            signs = " or ".join(DELIMITERS[sign] for sign in several)
            raise ValueError(f'may be separated by {signs}: set  delimiter = "{several[0]}"  in [data], or another')
        return fitting[0]

    def _parquet_rows(self) -> Records:
        (arrow, parquet), name, number = _arrow(self.path), str(self.path), 0
        try:
            with open_bytes(self.path) as file, parquet.ParquetFile(_seekable(file)) as table:
                names = table.schema_arrow.names
                if wrong := self._wrong(names):
                    yield Problem(name, None, wrong, fatal=True)
                    return
                for batch in table.iter_batches(1024, columns=[name for name in self.columns if name in names]):
                    missing = [None] * len(batch)
                    values = [_undecoded(arrow, batch.column(n)) if n in names else missing for n in self.columns]
                    for row in zip(*values, strict=True):
                        number += 1
                        yield number, row
        except (arrow.ArrowException, *UNREADABLE) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            yield Problem(name, None, f"cannot be read as Parquet after row {number:,}: {reason}", fatal=True)


def aligned_rows(source: Path, target: Path, notes: Notes, encoding: str = UTF8) -> Iterator[Row | Problem]:
    """Line n of one file with line n of the other; files of different length are one fatal problem."""
    left, right = (read_lines(path, notes, encoding=encoding) for path in (source, target))
    for number, (a, b) in enumerate(zip_longest(left, right), 1):
        if fatal := [side for side in (a, b) if isinstance(side, Problem) and side.fatal]:
            yield fatal[0]
            return
        if a is None or b is None:
            short, long, rest = (source, target, right) if a is None else (target, source, left)
            total = number + sum(1 for _ in rest)
            what = f"the file ends here, but {long} has {total:,} lines: one of them lacks or adds a line"
            yield Problem(str(short), number - 1, what, fatal=True)
            return
        if isinstance(a, Problem):
            yield a
        elif isinstance(b, Problem):
            yield b
        elif "\0" in a or "\0" in b:
            file = source if "\0" in a else target
            yield Problem(str(file), number, "contains a NUL character; is this a text file?")
        else:
            yield Row((a, b), str(source), number)


def _arrow(path: Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("parquet", "pyarrow", f"{path}: reading Parquet") from None
    return pyarrow, parquet


def _seekable(file: IO[bytes]) -> IO[bytes]:
    """A file that Parquet can be read from: its index is at the end."""
    return file if file.seekable() else io.BytesIO(file.read())


def _undecoded(arrow: Any, column: Any) -> list[Any]:
    """The values of a column, texts as bytes."""
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_text = str(column.type) in ("string", "large_string", "string_view", "binary", "large_binary")
    return list((column.cast(arrow.large_binary()) if is_text else column).to_pylist())


def _decoded(raw: bytes, longest: int) -> str:
    """The text of Parquet, which does not check that it is UTF-8."""
    if len(raw) > longest:
        raise ValueError(f"has {len(raw):,} bytes, more than {longest:,}")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(undecodable(error).partition(";")[0]) from None  # another encoding is no Parquet
