"""Lines of text from files, and what can be wrong with one.

    a line   ends at \\n and nowhere else: U+2028, a form feed or a lone \\r belong to the sentence. A \\r before
             the \\n (files from Windows) is left out, and so is a byte order mark at the start
    text     is UTF-8, strictly
    gzip     is recognised by its first two bytes, 1f 8b, with which no UTF-8 text begins

A bad line is still a line: `read_lines` yields a `Problem` in its place, so that line n stays line n. No more
than one line is in memory, and never more than `longest` bytes of it.
"""

from __future__ import annotations

import gzip
import io
import shutil
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from regard.errors import UserError

LONGEST = 1_000_000  # bytes in a line; more is no sentence

UNREADABLE = (EOFError, zlib.error, OSError)  # what reading a file may raise, gzip or not
Notes = Counter[tuple[str, str]]  # (file, what was mended) -> how often


@dataclass(frozen=True)
class Problem:
    """Why a line cannot be used; `fatal` where it spoils the whole file."""

    file: str
    line: int | None
    what: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.file}{'' if self.line is None else f', line {self.line:,}'}: {self.what}"


def read_lines(path: Path, notes: Notes, longest: int = LONGEST) -> Iterator[str | Problem]:
    """One item for each line: the text, or why there is none, as where it has more than `longest` bytes."""
    name, number = str(path), 0
    try:
        with open_bytes(path) as file:
            while raw := file.readline(longest + 1):
                number += 1
                if len(raw) > longest and raw[-1:] != b"\n":
                    size = len(raw)
                    while raw[-1:] != b"\n" and (raw := file.readline(LONGEST)):
                        size += len(raw.removesuffix(b"\n"))
                    yield Problem(name, number, too_long(size, longest)[1])
                    continue
                raw = raw.removesuffix(b"\n")
                if raw[-1:] == b"\r":
                    raw = raw[:-1]
                    notes[name, "a carriage return before the line's end, left out"] += 1
                if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                    raw = raw[3:]
                    notes[name, "a byte order mark at the start, left out"] += 1
                text, wrong = decode(raw)
                if wrong and number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    wrong += "; the file looks like UTF-16: convert it with  iconv -f UTF-16 -t UTF-8"
                yield Problem(name, number, wrong) if wrong else text
    except UNREADABLE as error:
        yield unreadable(error, name, number)


def refusal(files: Sequence[str], good: str, shown: Sequence[Problem], count: int, remedy: str) -> UserError:
    """The error about `count` problems, the first of which are `shown`; `good` says what was found besides."""
    listed = [f"  {problem}" for problem in shown]
    rest = [f"  and {count - len(listed):,} more"] if count > len(listed) else []
    head = f"{', '.join(files)}: {count:,} problem{'s' * (count != 1)}, {good}"
    return UserError("\n".join([head, *listed, *rest, remedy]))


def left_out(files: Sequence[str], shown: Sequence[Problem], count: int) -> str:
    """What is said about `count` bad rows that are left out, the first of which are `shown`."""
    more = f"\n  and {count - len(shown):,} more" * (count > len(shown))
    listed = "".join(f"\n  {problem}" for problem in shown)
    return f"left out: {count:,} bad line{'s' * (count != 1)} of {', '.join(files)}{listed}{more}"


def unreadable(error: Exception, name: str, line: int) -> Problem:
    """What an error of UNREADABLE means, which came up after `line`."""
    match error:
        case EOFError():
            what = "the gzip file is cut off after this line; copy or download it again"
        case gzip.BadGzipFile() | zlib.error():
            what = f"the gzip file is damaged after this line ({error}); copy it again"
        case _:
            what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
            return Problem(name, line or None, what, fatal=True)
    return Problem(name, line, what, fatal=True)


def decode(raw: bytes) -> tuple[str, str]:
    """(text, what is wrong with it): one of the two is empty."""
    try:
        return raw.decode(), ""
    except UnicodeDecodeError as error:
        return "", f"is not UTF-8: byte {raw[error.start]:#04x} at place {error.start + 1}"


def too_long(size: int, longest: int = LONGEST) -> tuple[str, str]:
    what = "sentence" if longest == LONGEST else "document"
    return "", f"has {size:,} bytes; more than {longest:,} is no {what}. Do lines end with \\n?"


def open_bytes(path: Path) -> IO[bytes]:
    """A file of bytes, unpacked if it is gzip."""
    file = path.open("rb")
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not zipped:
        return file
    file.close()
    # The outer buffer finds the lines in C; GzipFile's own readline is several times slower.
    return io.BufferedReader(gzip.GzipFile(path), 1 << 18)  # type: ignore[arg-type]


def open_seekable(path: Path) -> IO[bytes]:
    """For readers that jump about in a file: what is gzipped is unpacked into a temporary file first."""
    file = open_bytes(path)
    if not (isinstance(file, io.BufferedReader) and isinstance(file.raw, gzip.GzipFile)):
        return file
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    try:
        with file:
            shutil.copyfileobj(file, unpacked)
    except BaseException:
        unpacked.close()
        raise
    unpacked.seek(0)
    return unpacked
