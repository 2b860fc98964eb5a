"""Documents: the [data] table of a recipe that learns from plain text, and its text, piece by piece.

    [data]
    train = ["input.txt"]                 a file, a pattern ("part-*.txt"), a folder with all files in it
    valid_fraction = 0.1                  the last tenth of its characters is held out; or  valid = ["valid.jsonl"]
    test = { wiki = ["wiki.parquet"] }    named sets, evaluated at the end

A text file is one document; `separator` splits it into several. In a table (.jsonl, .parquet, .tsv and .csv with a
header) every row is a document, and `column` names its text.

A document may be larger than memory, so it is read in pieces of about 100,000 characters, which are tokenised one by
one. Pieces end where no token can span the cut: before a line end or a space that follows another character. GPT-2's
pattern never joins white space to the text before it, so byte-level BPE, bytes and characters give the same tokens as
for the whole text.

    a file "… the end.\\nThe next …"    ->    "… the end."    "\\nThe next …"

The text is not changed, line ends of Windows included; only a byte order mark at the start of a file is removed.
"""

from __future__ import annotations

import io
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from regard.data.lines import UNREADABLE, Notes, Problem, open_bytes, read_lines, undecodable, unreadable
from regard.data.sets import Group, TextFiles, file_groups, file_names, find_files
from regard.data.tables import Rows, Table, table_kind
from regard.errors import UserError

PIECE = 100_000  # characters
BLOCK = 1 << 20  # bytes read at once
LONGEST = 1 << 28  # bytes of a row in a table; a longer document belongs in a text file


@dataclass(frozen=True, kw_only=True)
class TextData(TextFiles):
    """Where the text is, and which of it is used."""

    valid_fraction: float = 0.0  # fraction of the characters of `train`, its end, that is used in place of `valid`
    column: str = "text"  # name of the column of texts in a table
    table: Literal["tsv", "csv", "jsonl", "parquet"] | None = None  # format of every file; none: by its extension
    separator: str | None = None  # string between the documents of a text file, such as "<|endoftext|>"

    WEIGHTED: ClassVar[bool] = True
    EXAMPLE: ClassVar[str] = "input.txt"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_valid_fraction(self.valid_fraction)
        if self.valid_fraction and len(file_groups(self.train)) > 1:
            raise UserError(
                f"valid_fraction = {self.valid_fraction}: would hold out the end of the last group of train; name "
                "validation files with valid"
            )
        if self.separator == "":
            raise UserError("separator = '': remove it to read a text file as one document")

    def find(self, files: Sequence[str] | Sequence[Group]) -> list[Path]:
        return find_files(file_names(files), self.folder, folders=True)

    def groups(self, name: str, files: Sequence[str] | Sequence[Group], characters: int) -> list[Iterable[Piece]]:
        """The text of a set, by groups of files that have so many `characters` together."""
        parts = file_groups(files)
        if len(parts) == 1:
            return [part(self.read(files), *self.span(name, characters))]
        return [self.read(group.files) for group in parts]

    def span(self, name: str, characters: int) -> tuple[int, int]:
        """Which of the characters of its files a set has: "valid" may be the last part of "train"."""
        border = int(characters * (1 - self.valid_fraction))
        if name == "valid" and self.valid_fraction:
            return border, characters
        return 0, border if name == "train" else characters

    def read(self, files: Sequence[str] | Sequence[Group]) -> Rows[Piece]:
        """The documents of `files` in order; `totals` are documents, characters and bytes."""

        def scan(notes: Notes) -> Iterator[Piece | Problem]:
            how: dict[str, Any] = {
                "kind": self.table,
                "longest": LONGEST,
                "remedy": "Set column in [data]",
                **self.format,
            }
            for path in self.find(files):
                if (self.table or table_kind(path)) is None:
                    yield from split(_decoded(path, notes, self.encoding), self.separator, str(path), notes)
                    continue
                for row in Table(path, (self.column,), notes, **how):
                    blocks = [row] if isinstance(row, Problem) else _blocks(row.cells[0])
                    yield from split(blocks, None, str(path), notes)

        def tally(piece: Piece, totals: Counter[str]) -> None:
            totals.update(documents=piece.ends, characters=len(piece.text), bytes=utf8(piece.text))

        return Rows(file_names(files), scan, self.skip_bad, "text", "a language model needs some to learn from", tally)


class Piece(NamedTuple):
    """A part of a document; `ends` if it is the last."""

    text: str
    ends: bool


def utf8(text: str) -> int:
    """The number of bytes of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def part(stream: Iterable[Piece], begin: int, end: int) -> Iterator[Piece]:
    """The characters from `begin` to before `end` of all documents, concatenated."""
    at = 0
    for text, ends in stream:
        first, last = max(begin - at, 0), min(end - at, len(text))
        at += len(text)
        if first < last or (ends and begin < at <= end and not text):
            yield Piece(text[first:last], ends and at <= end)
        if at >= end:
            return


def cut(text: str) -> int:
    """Where the first piece of a longer text ends: after at most PIECE characters, where no token spans the cut."""
    for mark in "\n ":
        at = PIECE + 1
        for _ in range(1000):
            at = text.rfind(mark, 1, at)
            if at < 0:
                break
            if not text[at - 1].isspace():
                return at
    return next(at for at in range(PIECE, 0, -1) if at == 1 or not _joined(text[at - 1 : at + 1]))


def _joined(pair: str) -> bool:
    """Whether two characters compose to one in NFC, or the second is a combining mark."""
    return bool(unicodedata.combining(pair[1])) or len(unicodedata.normalize("NFC", pair)) < len(pair)


def split(blocks: Iterable[str | Problem], separator: str | None, file: str, notes: Notes) -> Iterator[Piece | Problem]:
    """The documents of a text that arrives block by block, in constant memory."""
    held, begun = "", False
    spare = PIECE + len(separator or "")  # characters needed before a piece is split off
    for text in blocks:
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
        notes[file, "an empty document, skipped"] += 1


def _blocks(text: str) -> list[str]:
    return [text[at : at + BLOCK] for at in range(0, len(text), BLOCK)]


def _decoded(path: Path, notes: Notes, encoding: str) -> Iterator[str | Problem]:
    """The text of a file, block by block."""
    name, line, begun = str(path), 1, False
    try:
        with open_bytes(path) as file:
            decoded = io.TextIOWrapper(file, encoding, newline="")  # line ends stay as they are
            while text := decoded.read(BLOCK):
                if not begun and text.startswith("\ufeff"):
                    text = text[1:]
                    notes[name, "a byte order mark at the start, removed"] += 1
                line, begun = line + text.count("\n"), True
                if "\0" in text:
                    plain = Problem(name, None, "contains a NUL character; is this a text file?", fatal=True)
                    first = next(read_lines(path, Notes(), encoding=encoding), plain)
                    yield first if isinstance(first, Problem) else plain
                    return
                yield text
    except UnicodeError as error:  # found again by lines, which says where
        problems = (item for item in read_lines(path, Notes(), 1 << 40, encoding) if isinstance(item, Problem))
        yield replace(next(problems, Problem(name, line, undecodable(error, encoding=encoding))), fatal=True)
    except UNREADABLE as error:
        yield unreadable(error, name, line)
