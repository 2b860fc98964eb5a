"""Lines of text files, or what is wrong with them.

A line ends at \\n and nowhere else: U+2028, a form feed or a lone \\r belong to the sentence. A \\r before the \\n
(files from Windows) and a byte order mark at the start are removed, which `Notes` count. Text is UTF-8, strictly. A
file may be gzipped, which its first two bytes say (1f 8b; no UTF-8 text begins with them).
"""

from __future__ import annotations

import gzip
import io
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

LONGEST = 1_000_000  # bytes in a line
UNREADABLE = (EOFError, zlib.error, OSError)  # what reading a file may raise, gzip or not
ENCODINGS = {  # bytes of text other than UTF-8: pairs that are Hangul syllables; letters with accents among ASCII
    "CP949": rb"([\x00-\x7f]|[\xb0-\xc8][\xa1-\xfe])+",
    "CP1252": rb"([\x00-\x7f]|(?<![\x80-\xff])[\xc0-\xff](?![\x80-\xff]))+",
}
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
                if isinstance(item, str) and not item.isascii() and not unicodedata.is_normalized("NFC", item):
                    notes[name, "a line with decomposed letters (not NFC), which [text] normalize composes"] += 1
                yield item
    except UNREADABLE as error:
        yield unreadable(error, name, number)


def unreadable(error: Exception, name: str, line: int) -> Problem:
    """The problem that an error of UNREADABLE after `line` means."""
    what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if isinstance(error, EOFError):
        what = "the gzip file is truncated after this line; copy or download it again"
    elif isinstance(error, gzip.BadGzipFile | zlib.error):
        what = f"the gzip file is damaged after this line ({error}); copy it again"
    return Problem(name, line or None, what, fatal=True)


def undecodable(error: UnicodeDecodeError, first: bool = False) -> str:
    """What is wrong with bytes, perhaps the `first` of a file, that are not UTF-8."""
    raw = bytes(error.object)
    is_utf16 = first and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
    guesses = ["UTF-16"] if is_utf16 else [name for name, form in ENCODINGS.items() if re.fullmatch(form, raw)]
    hint = f"; the file looks like {guesses[0]}: convert it with  iconv -f {guesses[0]} -t UTF-8" if guesses else ""
    return f"is not UTF-8: byte {raw[error.start]:#04x} at position {error.start + 1:,}{hint}"


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
