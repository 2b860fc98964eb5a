"""PNG: a figure for programs that take no SVG, such as slides or a paper's submission form.

resvg (package `resvg-py`, extra `figure`) renders the SVG in its light colours at `zoom` times its size in pixels. It
takes each character from an installed font that has it. Where none has, it draws an empty box or nothing, so the
labels are tried one character at a time first and a missing font is reported before anything is written.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from html import unescape
from pathlib import Path

from regard.errors import MissingExtra, UserError
from regard.explore.html import escape
from regard.explore.svg import STYLE, svg_size

LARGEST = 16_384  # pixels per side; a larger image takes gigabytes
FONT_SIGNATURES = (b"\0\1\0\0", b"true", b"OTTO", b"ttcf")
NO_CHARACTER = "\u0378"  # unassigned in Unicode, so that no font has it
REMEDY = (
    "install a font that has them (Noto Sans CJK for Korean, Chinese and Japanese: on Debian or Ubuntu "
    "apt install fonts-noto-cjk), name a font file with --font, or write .svg or .html, which use the reader's fonts"
)
_LABEL = re.compile(r"<text[^>]*>([^<]*)</text>")


def to_png(svg: str, *, zoom: float = 2.0, fonts: Sequence[str | Path] = ()) -> bytes:
    """The bytes of a PNG file; `fonts` are font files besides those of the system."""
    width, height = svg_size(svg)
    if max(width, height) * zoom > LARGEST:
        raise UserError(
            f"the image would have {width * zoom:.0f} x {height * zoom:.0f} pixels, more than {LARGEST} per side: "
            "lower --zoom, show fewer layers, or write .svg"
        )
    for font in fonts:
        if not Path(font).is_file():
            raise UserError(f"--font {font}: there is no such file")
        with open(font, "rb") as file:
            if file.read(4) not in FONT_SIGNATURES:
                raise UserError(f"--font {font}: is not a font file; give a .ttf, .otf or .ttc file")
    files = [str(font) for font in fonts]
    missing = characters_without_font(unescape("".join(_LABEL.findall(svg))), files)
    if missing:
        some = ", ".join(f"{char} (U+{ord(char):04X})" for char in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise UserError(f"no installed font has {some}{more}, so the PNG would show empty boxes: {REMEDY}")
    return _render(svg, zoom, files)


def characters_without_font(text: str, fonts: Sequence[str] = ()) -> list[str]:
    """The characters of `text` that are rendered like one that no font has, although they are visible."""

    def alone(char: str) -> bytes:
        label = f'<text x="8" y="24">{escape(char)}</text>'
        head = '<svg xmlns="http://www.w3.org/2000/svg" class="rg" width="40" height="40">'
        return _render(f"{head}<style>{STYLE}</style>{label}</svg>", 1.0, fonts)

    box = alone(NO_CHARACTER)
    visible = {char for char in text if unicodedata.category(char) not in ("Zs", "Zl", "Zp", "Cc", "Cf", "Mn")}
    return [char for char in sorted(visible) if alone(char) == box]


def _render(svg: str, zoom: float, fonts: Sequence[str]) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise MissingExtra("figure", "resvg-py", "drawing a PNG") from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom, background="#ffffff", font_files=list(fonts)))
