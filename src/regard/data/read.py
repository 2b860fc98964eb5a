"""Sentence pairs from files, one at a time, and every way in which a file can be wrong.

Parallel text is kept line by line: sentence n of one language stands in line n of its file, its translation
in line n of another, or both stand in one row of a table. One line too few and every pair after it is wrong
without looking wrong, so files are read in full before training: `check` makes one pass in constant memory
and names each bad line, `pairs` makes the same pass and yields the good ones.

What a line is, and where it can be wrong by itself, stands in `regard.data.lines`; tables are read by
`regard.data.table`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from regard.data.config import DataConfig, find, table_kind
from regard.data.lines import Notes, Problem, read_lines, refusal
from regard.data.table import jsonl_rows, parquet_rows, tsv_rows
from regard.errors import UserError

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
            raise UserError(f"{item}\n{remedy_for(item.fatal)}")


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
        good = f"{count:,} good pair{'s' * (count != 1)}"
        raise refusal(files, good, (fatal + bad)[:SHOWN], bad_count, remedy_for(bool(fatal)))
    if not count:
        bad_lines = f", {bad_count:,} bad lines such as  {bad[0]}" if bad else ""
        raise UserError(f"{names}: no sentence pairs{bad_lines}; put a sentence in each line")
    return Report(count, bad, bad_count, [f"{file}: {n:,} x {what}" for (file, what), n in notes.items()])


def remedy_for(fatal: bool) -> str:
    if fatal:
        return "Mend the file: skip_bad leaves out single lines, never these."
    return "Mend these lines, or leave them out with  skip_bad = true  in [data]."


def _scan(files: Sequence[str], config: DataConfig, notes: Notes) -> Iterator[Pair | Problem]:
    """Everything there is, the good and the bad, in order."""
    for paths in find(files, config.folder):
        if len(paths) == 2:
            yield from _aligned(*paths, notes)
        else:
            yield from _rows(paths[0], config, notes)


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


def _rows(path: Path, config: DataConfig, notes: Notes) -> Iterator[Pair | Problem]:
    """The pairs of a table."""
    named = config.source is not None
    kind, remedy = table_kind(path), "Set source and target in [data]"
    names = (config.source or "source", config.target or "target")
    match kind:
        case ".tsv":
            names = names if named else ("1", "2")
            remedy = "If the file has no header, leave source and target out of [data]"
            rows = tsv_rows(path, names, notes, header=named, remedy=remedy)
        case ".jsonl":
            rows = jsonl_rows(path, names, notes, remedy=remedy)
        case _:
            rows = parquet_rows(path, names, remedy=remedy)
    for row in rows:
        yield row if isinstance(row, Problem) else _cells(row[1][0], row[1][1], row[0], path, names)
