"""Lines of text files, or what is wrong with them.

A line ends at \\n and nowhere else: U+2028, a form feed or a lone \\r belong to the sentence. A \\r before the \\n
(files from Windows) and a byte order mark at the start are removed, which `Notes` count. Text is UTF-8, strictly, or in
another encoding that the caller names; what looks like one is suggested, never assumed. A file may be compressed with
gzip or Zstandard, which its first bytes say (1f 8b, 28 b5 2f fd; no text begins with them).
"""

from __future__ import annotations

import codecs
import gzip
import io
import re
import unicodedata
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from regard.errors import MissingExtra, UserError, suggest

LONGEST = 1_000_000  # bytes in a line
UTF8 = "utf-8"
UNREADABLE = (EOFError, zlib.error, OSError)  # what reading a file may raise, compressed or not
ZSTD = b"\x28\xb5\x2f\xfd"  # how a frame of Zstandard begins (RFC 8878)
BLOCK = 1 << 14  # bytes of a file that are converted at once
ENCODINGS = {  # bytes of text other than UTF-8: pairs that are Hangul syllables; letters with accents among ASCII
    "CP949": rb"([\x00-\x7f]|[\xb0-\xc8][\xa1-\xfe])+",
    "CP1252": rb"([\x00-\x7f]|(?<![\x80-\xff])[\xc0-\xff](?![\x80-\xff]))+",
}
SUGGESTED = ("utf-8", "utf-16", "cp949", "euc-kr", "cp1252", "latin-1", "shift_jis", "gb18030", "big5", "cp1251")
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


class Damaged(OSError):
    """A compressed file whose content cannot be restored."""


def check_encoding(name: str, setting: str = "encoding =") -> str:
    """The encoding as Python calls it; a UserError unless it is one of text."""
    try:
        "\n".encode(name)
        return codecs.lookup(name).name
    except (LookupError, ValueError):
        near = suggest(name.lower(), SUGGESTED)
        raise UserError(f"{setting} {name!r}: unknown; {near}, or another of Python's") from None


def read_lines(path: Path, notes: Notes, longest: int = LONGEST, encoding: str = UTF8) -> Iterator[str | Problem]:
    """One item per line: the text, or the problem, such as more than `longest` bytes."""
    name, number = str(path), 0
    by_line = ends_lines(encoding)
    try:
        with open_bytes(path, None if by_line else encoding) as file:
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
                    item: str | Problem = raw.decode(encoding if by_line else UTF8)
                except UnicodeDecodeError as error:
                    item = Problem(name, number, undecodable(error, number == 1, encoding))
                else:
                    if number == 1 and (guess := _unmarked_utf16(raw)):
                        yield Problem(name, 1, f"every other byte is 0, as in UTF-16: {_set(guess)}", fatal=True)
                        return
                    if encoding != UTF8 and by_line and not raw.isascii() and _is_utf8(raw):
                        notes[name, f"a line that would also be UTF-8; is encoding = {encoding!r} correct?"] += 1
                if isinstance(item, str) and not item.isascii() and not unicodedata.is_normalized("NFC", item):
                    notes[name, "a line with decomposed letters (not NFC), which [text] normalize composes"] += 1
                yield item
    except UnicodeError as error:
        yield Problem(name, number + 1, undecodable(error, encoding=encoding), fatal=True)
    except UNREADABLE as error:
        yield unreadable(error, name, number)


def unreadable(error: Exception, name: str, line: int) -> Problem:
    """The problem that an error of UNREADABLE after `line` means."""
    what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    kind = "Zstandard" if isinstance(error, Damaged) or "Zstandard" in str(error) else "gzip"
    if isinstance(error, EOFError):
        what = f"the {kind} file is truncated after this line; copy or download it again"
    elif isinstance(error, gzip.BadGzipFile | zlib.error | Damaged):
        what = f"the {kind} file is damaged after this line ({error}); copy it again"
    return Problem(name, line or None, what, fatal=True)


def undecodable(error: UnicodeError, first: bool = False, encoding: str = UTF8) -> str:
    """What is wrong with bytes, perhaps the `first` of a file, that are not in the encoding."""
    if not isinstance(error, UnicodeDecodeError):  # without a byte order mark
        return f"is not {encoding.upper()}: {error}"
    raw = bytes(error.object)
    what = f"is not {encoding.upper()}: byte {raw[error.start]:#04x} at position {error.start + 1:,}"
    if encoding != UTF8:
        return f"{what}; the file looks like UTF-8, which needs no  encoding" if _is_utf8(raw) else what
    is_utf16 = first and raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    guesses = ["UTF-16"] if is_utf16 else [name for name, form in ENCODINGS.items() if re.fullmatch(form, raw)]
    if not guesses:
        return what
    return f"{what}; it looks like {guesses[0]}: {_set(guesses[0].lower())}"


def _set(encoding: str) -> str:
    return f'set  encoding = "{encoding}"  in [data], or pass  --encoding {encoding}'


def _unmarked_utf16(raw: bytes) -> str | None:
    """UTF-16 without a byte order mark, if that is what ASCII text is in: every other byte is 0."""
    even, odd = (bool(half.strip(b"\0")) for half in (raw[::2], raw[1::2]))
    return None if raw.count(0) < 2 or even == odd else "utf-16-le" if even else "utf-16-be"


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def ends_lines(encoding: str) -> bool:
    """Whether the byte 0a is the end of a line, as in every extension of ASCII; not in UTF-16, EBCDIC or ISO 2022."""
    return "\n".encode(encoding) == b"\n" and not encoding.startswith("iso2022")


def open_bytes(path: Path, encoding: str | None = None) -> IO[bytes]:
    """A file of bytes, decompressed if it is gzip or Zstandard, and as UTF-8 if it has another `encoding`."""
    file = path.open("rb")
    magic = file.read(4)
    file.seek(0)
    raw: Any = file
    if magic[:2] == b"\x1f\x8b":
        file.close()
        raw = gzip.GzipFile(path)
    elif magic == ZSTD:
        raw = _Zstandard(file)
    if encoding is not None:
        raw = _Converted(raw, encoding)
    # The outer buffer finds line ends in C; GzipFile's own readline is several times slower.
    return file if raw is file else io.BufferedReader(raw, 1 << 18)


class _Blocks(io.RawIOBase):
    """The bytes of a file, converted block by block: `convert` returns those of the next one, nothing at the end."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.held = file, memoryview(b"")

    @abstractmethod
    def convert(self) -> bytes: ...

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self.held:
            self.held = memoryview(self.convert())
        count = min(len(buffer), len(self.held))
        buffer[:count], self.held = self.held[:count], self.held[count:]
        return count

    def close(self) -> None:
        self.file.close()
        super().close()


class _Zstandard(_Blocks):
    """The content of a file of one or more frames."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        try:
            import zstandard
        except ImportError:
            file.close()
            raise MissingExtra("zstd", "zstandard", f"{file.name}: reading Zstandard") from None
        self.error, self.decompressor = zstandard.ZstdError, zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self.frame, self.rest = self.decompressor.decompressobj(), b""

    def convert(self) -> bytes:
        while raw := self.rest or self.file.read(BLOCK):
            if self.frame.eof:
                self.frame = self.decompressor.decompressobj()
            try:
                content: bytes = self.frame.decompress(raw)
            except self.error as error:
                raise Damaged(str(error)) from None
            self.rest = self.frame.unused_data if self.frame.eof else b""
            if content:
                return content
        if not self.frame.eof:
            raise EOFError("a frame of Zstandard has no end")
        return b""


class _Converted(_Blocks):
    """Text of another encoding as UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        super().__init__(file)
        self.decoder = codecs.getincrementaldecoder(encoding)()

    def convert(self) -> bytes:
        while raw := self.file.read(BLOCK):
            if text := self.decoder.decode(raw):
                return text.encode()
        return self.decoder.decode(b"", final=True).encode()
