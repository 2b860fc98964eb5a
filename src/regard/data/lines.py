"""Lines of text from files, and what can be wrong with them.

    a line   ends at \\n and nowhere else: U+2028, a form feed or a lone \\r belong to the sentence. A \\r before
             the \\n (files from Windows) and a byte order mark at the start are removed
    text     is UTF-8, strictly
    gzip     is recognised by its first two bytes, 1f 8b, which cannot begin a UTF-8 text

A bad line is still a line: `read_lines` yields a `Problem` in its place, so that line n stays line n. Only one
line is in memory at a time, and at most `longest` bytes of it.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LONGEST = 1_000_000  # bytes in a line

UNREADABLE = (EOFError, zlib.error, OSError)  # what reading a file may raise, gzip or not
Notes = Counter[tuple[str, str]]  # (file, what was changed) -> how often


@dataclass(frozen=True)
class Problem:
    """Why a line cannot be used; `fatal` if the whole file cannot."""

    file: str
    line: int | None
    what: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.file}{'' if self.line is None else f', line {self.line:,}'}: {self.what}"


def read_lines(path: Path, notes: Notes, longest: int = LONGEST) -> Iterator[str | Problem]:
    """One item per line: the text, or the problem, such as more than `longest` bytes."""
    name, number = str(path), 0
    try:
        with open_bytes(path) as file:
            while raw := file.readline(longest + 1):
                number += 1
                if len(raw) > longest and raw[-1:] != b"\n":
                    size = len(raw)
                    while raw[-1:] != b"\n" and (raw := file.readline(LONGEST)):
                        size += len(raw.removesuffix(b"\n"))
                    yield Problem(name, number, f"has {size:,} bytes, more than {longest:,}: do lines end with \\n?")
                    continue
                raw = raw.removesuffix(b"\n")
                if raw[-1:] == b"\r":
                    raw = raw[:-1]
                    notes[name, "a carriage return before the line end, removed"] += 1
                if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                    raw = raw[3:]
                    notes[name, "a byte order mark at the start, removed"] += 1
                try:
                    item: str | Problem = raw.decode()
                except UnicodeDecodeError as error:
                    item = Problem(name, number, undecodable(error, number == 1))
                yield item
    except UNREADABLE as error:
        yield unreadable(error, name, number)


def unreadable(error: Exception, name: str, line: int) -> Problem:
    """The problem that an error of UNREADABLE after `line` means."""
    match error:
        case EOFError():
            what = "the gzip file is truncated after this line; copy or download it again"
        case gzip.BadGzipFile() | zlib.error():
            what = f"the gzip file is damaged after this line ({error}); copy it again"
        case _:
            what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            return Problem(name, line or None, what, fatal=True)
    return Problem(name, line, what, fatal=True)


def undecodable(error: UnicodeDecodeError, first: bool = False) -> str:
    """What is wrong with bytes, perhaps the `first` of a file, that are not UTF-8."""
    utf16 = first and error.object[:2] in (b"\xff\xfe", b"\xfe\xff")
    hint = "; the file looks like UTF-16: convert it with  iconv -f UTF-16 -t UTF-8" * utf16
    return f"is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start + 1:,}{hint}"


def open_bytes(path: Path) -> IO[bytes]:
    """A file of bytes, decompressed if it is gzip."""
    file = path.open("rb")
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not zipped:
        return file
    file.close()
    # The outer buffer finds line ends in C; GzipFile's own readline is several times slower.
    return io.BufferedReader(gzip.GzipFile(path), 1 << 18)  # type: ignore[arg-type]


@contextmanager
def open_seekable(path: Path) -> Iterator[IO[bytes]]:
    """For random access: a gzip file is decompressed into a temporary file first."""
    with open_bytes(path) as file, tempfile.TemporaryFile() as unpacked:
        zipped = isinstance(getattr(file, "raw", None), gzip.GzipFile)
        if zipped:
            shutil.copyfileobj(file, unpacked)
            unpacked.seek(0)
        yield unpacked if zipped else file
