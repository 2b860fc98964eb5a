"""Documents from files, piece by piece, however long they are.

A document (a text file, a part of one between separators, a row of a table) may be larger than memory, so it is
handed on in pieces of about 100,000 characters. Pieces are turned into tokens one by one; they are cut where no
token can lie across the cut: before a line end or a space that follows a letter or a sign. GPT-2's pattern never
joins white space to what stands before it, so byte-level BPE, bytes and characters give the same tokens as
for the whole text.

    a file "… the end.\\nThe next …"    ->    "… the end."    "\\nThe next …"

The text stays as it is, line ends of Windows included; only a byte order mark at the start of a file is left out.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from regard.data.config import table_kind
from regard.data.lines import UNREADABLE, Notes, Problem, open_bytes, unreadable
from regard.data.table import Row, csv_rows, jsonl_rows, parquet_rows, tsv_rows
from regard.data.text import TextData, find_texts
from regard.errors import UserError

PIECE = 100_000  # characters
BLOCK = 1 << 20  # bytes read at once
LONGEST = 1 << 28  # bytes of a row in a table; a longer document belongs into a text file
SHOWN = 10  # problems that are listed
REMEDY = "Set column in [data]"


class Piece(NamedTuple):
    """A part of a document; `ends` where it is the last."""

    text: str
    ends: bool


@dataclass(frozen=True)
class Survey:
    """What one pass over some files found."""

    documents: int
    characters: int
    bytes: int
    bad: int = 0  # rows that are left out
    notes: tuple[str, ...] = ()


def pieces(files: Sequence[str], config: TextData) -> Iterator[Piece]:
    """The documents of `files` in order."""
    for item in _scan(files, config, Counter()):
        if isinstance(item, Piece):
            yield item
        elif item.fatal or not config.skip_bad:
            raise UserError(f"{item}\n{_remedy(item.fatal)}")


def survey(files: Sequence[str], config: TextData) -> Survey:
    """Read everything once; what is wrong becomes one UserError."""
    notes: Notes = Counter()
    documents = characters = size = bad = 0
    shown: list[Problem] = []
    fatal = False
    for item in _scan(files, config, notes):
        if isinstance(item, Piece):
            documents, characters, size = documents + item.ends, characters + len(item.text), size + utf8(item.text)
            continue
        bad, fatal = bad + 1, fatal or item.fatal
        if len(shown) < SHOWN:
            shown.append(item)
    names = ", ".join(files)
    if fatal or (bad and not config.skip_bad):
        listed = "".join(f"\n  {problem}" for problem in shown)
        more = f"\n  and {bad - len(shown):,} more" * (bad > len(shown))
        raise UserError(f"{names}: {bad:,} problem{'s' * (bad != 1)}{listed}{more}\n{_remedy(fatal)}")
    if not characters:
        raise UserError(f"{names}: no text; a language model needs some to learn from")
    told = [f"{file}: {n:,} x {what}" for (file, what), n in notes.items()]
    told += [f"left out: {problem}" for problem in shown]
    return Survey(documents, characters, size, bad, tuple(told))


def utf8(text: str) -> int:
    """How many bytes the text has as UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def part(stream: Iterable[Piece], begin: int, end: int) -> Iterator[Piece]:
    """The characters from `begin` to before `end` of all documents end to end."""
    at = 0
    for text, ends in stream:
        first, last = max(begin - at, 0), min(end - at, len(text))
        at += len(text)
        if first < last or (ends and begin < at <= end and not text):
            yield Piece(text[first:last], ends and at <= end)
        if at >= end:
            return


def cut(text: str, start: int = 0) -> int:
    """Where a piece that begins at `start` ends: after at most PIECE characters, where no token lies across."""
    for mark in "\n ":
        at = start + PIECE + 1
        for _ in range(1000):
            at = text.rfind(mark, start + 1, at)
            if at < 0:
                break
            if not text[at - 1].isspace():
                return at
    return next(at for at in range(start + PIECE, start, -1) if at == start + 1 or not _joined(text[at - 1 : at + 1]))


def _joined(pair: str) -> bool:
    """Whether two characters are one in NFC, or the second is a mark on what stands before it."""
    return bool(unicodedata.combining(pair[1])) or len(unicodedata.normalize("NFC", pair)) < len(pair)


def _remedy(fatal: bool) -> str:
    if fatal:
        return "Mend the file: skip_bad leaves out single rows of a table, never these."
    return "Mend these rows, or leave them out with  skip_bad = true  in [data]."


def _scan(files: Sequence[str], config: TextData, notes: Notes) -> Iterator[Piece | Problem]:
    """Everything there is, the good and the bad, in order."""
    for path in find_texts(files, config.folder):
        rows: Iterator[Row | Problem]
        match f".{config.table}" if config.table else table_kind(path):
            case ".jsonl":
                rows = jsonl_rows(path, (config.column,), notes, remedy=REMEDY, longest=LONGEST)
            case ".parquet":
                rows = parquet_rows(path, (config.column,), remedy=REMEDY, longest=LONGEST)
            case ".tsv":
                rows = tsv_rows(path, (config.column,), notes, header=True, remedy=REMEDY)
            case ".csv":
                rows = csv_rows(path, (config.column,), notes, header=True, remedy=REMEDY)
            case _:
                yield from _plain(path, config.separator, notes)
                continue
        for row in rows:
            yield from (row,) if isinstance(row, Problem) else _document(row[1][0], str(path), row[0], notes)


def _document(text: str, file: str, number: int, notes: Notes) -> Iterator[Piece | Problem]:
    """A document that is in memory."""
    if "\0" in text:
        yield Problem(file, number, "holds a NUL character; is this text?")
        return
    if not text:
        notes[file, "an empty document, left out"] += 1
        return
    start = 0
    while len(text) - start > PIECE:
        end = cut(text, start)
        yield Piece(text[start:end], False)
        start = end
    yield Piece(text[start:], True)


def _plain(path: Path, separator: str | None, notes: Notes) -> Iterator[Piece | Problem]:
    """A text file, in constant memory."""
    held, begun, name = "", False, str(path)
    spare = PIECE + len(separator or "")  # so much has to be there before a piece is cut off
    for text in _decoded(path, notes):
        if isinstance(text, Problem):
            yield text
            return
        held += text
        while True:
            at = held.find(separator) if separator else -1
            if 0 <= at <= PIECE:
                if at or begun:
                    yield Piece(held[:at], True)
                held, begun = held[at + len(separator or "") :], False
            elif len(held) > spare:
                at = cut(held)
                yield Piece(held[:at], False)
                held, begun = held[at:], True
            else:
                break
    if held or begun:
        yield Piece(held, True)
    elif separator is None:
        notes[name, "an empty document, left out"] += 1


def _decoded(path: Path, notes: Notes) -> Iterator[str | Problem]:
    """The text of a file, block by block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    name, read, line = str(path), 0, 1
    try:
        with open_bytes(path) as file:
            while True:
                block = file.read(BLOCK)
                pending = len(decoder.getstate()[0])  # bytes of a character that the last block has begun
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    at, bad = read - pending + error.start + 1, error.object[error.start]
                    line += error.object[: error.start].count(b"\n")
                    hint = "; the file looks like UTF-16: convert it with  iconv -f UTF-16 -t UTF-8"
                    utf16 = at <= 2 and error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
                    yield Problem(
                        name, line, f"is not UTF-8: byte {bad:#04x} at place {at:,}{hint * utf16}", fatal=True
                    )
                    return
                if not read and text.startswith("\ufeff"):
                    text = text[1:]
                    notes[name, "a byte order mark at the start, left out"] += 1
                read, line = read + len(block), line + text.count("\n")
                if "\0" in text:
                    yield Problem(name, None, "holds a NUL character; is this a text file?", fatal=True)
                    return
                if text:
                    yield text
                if not block:
                    return
    except UNREADABLE as error:
        yield unreadable(error, name, line)
