"""Fonts: which characters this machine can draw, so that a picture never shows an empty box for a letter.

A browser finds fonts by itself. A PNG is drawn here, so every letter of its labels must be in some font of
this machine. A font file lists the characters it has in its table `cmap`, as ranges:

    format 4    segments of 16-bit characters      format 12   groups of 32-bit characters
    (start, end) pairs; end inclusive              (OpenType specification, "cmap")

Only these tables are read, one font after another, until every character is found.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from regard.errors import UserError

ENDINGS = (".ttf", ".otf", ".ttc", ".otc")
REMEDY = (
    "install a font that has them (Noto Sans CJK for Korean, Chinese and Japanese: on Debian or Ubuntu "
    "apt install fonts-noto-cjk), name a font file with --font, or write .svg or .html, which use the reader's fonts"
)


def require(texts: Iterable[str], fonts: Iterable[str | Path] = ()) -> None:
    """A UserError that names the characters for which no font is here; `fonts` are further files."""
    lost = missing("".join(texts), fonts)
    if lost:
        some = ", ".join(f"{char} (U+{ord(char):04X})" for char in lost[:5])
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise UserError(f"no font on this machine has {some}{more}, so the PNG would show empty boxes: {REMEDY}")


def missing(text: str, fonts: Iterable[str | Path] = ()) -> list[str]:
    """The characters of `text` that no font has, in order."""
    wanted = {char for char in text if _drawn(char)}
    for path in (*map(str, fonts), *installed()):
        if not wanted:
            break
        wanted -= {char for char in wanted if any(low <= ord(char) <= high for low, high in ranges(path))}
    return sorted(wanted)


def _drawn(char: str) -> bool:
    """Blanks, controls, joiners and variation selectors have no glyph to miss."""
    return unicodedata.category(char) not in ("Zs", "Zl", "Zp", "Cc", "Cf") and not "\ufe00" <= char <= "\ufe0f"


def folders() -> list[Path]:
    """Where fonts lie on this system."""
    home = Path.home()
    match sys.platform:
        case "darwin":
            return [Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library/Fonts"]
        case "win32":
            windows = Path(os.environ.get("SYSTEMROOT", r"C:\Windows"))
            return [windows / "Fonts", home / "AppData/Local/Microsoft/Windows/Fonts"]
        case _:
            data = Path(os.environ.get("XDG_DATA_HOME", home / ".local/share"))
            return [Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), data / "fonts", home / ".fonts"]


@functools.cache
def installed() -> tuple[str, ...]:
    """All font files, those with the most characters (Noto's CJK, DejaVu) in front."""
    found = [
        os.path.join(folder, name)
        for root in folders()
        for folder, _, names in os.walk(root)
        for name in names
        if name.lower().endswith(ENDINGS)
    ]
    return tuple(sorted(found, key=lambda path: (not path.endswith(("DejaVuSans.ttf", "CJK-Regular.ttc")), path)))


@functools.cache
def ranges(path: str) -> tuple[tuple[int, int], ...]:
    """The characters of one font file as (first, last); none where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return tuple(_read(file))
    except (OSError, struct.error, ValueError):
        return ()


def _read(file: BinaryIO) -> Iterator[tuple[int, int]]:
    def take(form: str, at: int) -> tuple[int, ...]:
        file.seek(at)
        return struct.unpack(f">{form}", file.read(struct.calcsize(f">{form}")))

    start = take("I", 12)[0] if take("I", 0)[0] == 0x74746366 else 0  # "ttcf": a collection; its first font
    for entry in range(take("H", start + 4)[0]):
        tag, _, offset, _ = take("IIII", start + 12 + 16 * entry)
        if tag == 0x636D6170:  # "cmap"
            break
    else:
        return
    for index in range(take("H", offset + 2)[0]):
        table = offset + take("HHI", offset + 4 + 8 * index)[2]
        match take("H", table)[0]:
            case 4:
                count = take("H", table + 6)[0] // 2
                at = (table + 14, table + 16 + 2 * count, table + 16 + 6 * count)
                for part in zip(*(take(f"{count}H", place) for place in at), range(count), strict=True):
                    last, first, jump, segment = part
                    if not jump:
                        yield first, last
                        continue
                    # the glyph of each character stands in a list; 0 is the empty box
                    glyphs = take(f"{last - first + 1}H", at[2] + 2 * segment + jump) if first <= last < 0xFFFF else ()
                    yield from ((first + i, first + i) for i, glyph in enumerate(glyphs) if glyph)
            case 12:
                for group in range(take("I", table + 12)[0]):
                    first, last, _ = take("III", table + 16 + 12 * group)
                    yield first, last
