"""PNG: a figure for places that take no SVG, such as a slide or a paper's submission form.

The SVG is drawn by resvg (through the package `resvg-py`, extra `figure`): the same figure, its light
colours, at `zoom` times its size in pixels. It shapes every script and takes each letter from a font that
has it; where none has, `regard.explore.fonts` says so before anything is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from regard.errors import MissingExtra, UserError
from regard.explore.fonts import ranges, require
from regard.files import write_whole

LARGEST = 16_384  # pixels a side: more is no picture to look at, and takes gigabytes
_LABEL = re.compile(r"<text[^>]*>([^<]*)</text>")


def to_png(svg: str, *, zoom: float = 2.0, fonts: Sequence[str | Path] = ()) -> bytes:
    """The bytes of a PNG file; `fonts` are font files besides those of the system."""
    try:
        import resvg_py
    except ImportError:
        raise MissingExtra("figure", "resvg-py", "drawing a PNG") from None
    width, height = (float(number) for number in re.findall(r'(?:width|height)="([\d.]+)"', svg)[:2])
    if max(width, height) * zoom > LARGEST:
        raise UserError(
            f"the picture would be {width * zoom:.0f} x {height * zoom:.0f} pixels, more than {LARGEST} a side: "
            "lower --zoom, show fewer layers, or write .svg"
        )
    for font in fonts:
        if not Path(font).is_file():
            raise UserError(f"--font {font}: there is no such file")
        if not ranges(str(font)):
            raise UserError(f"--font {font}: is not a font that can be read; give a .ttf, .otf or .ttc file")
    require(_LABEL.findall(svg), fonts)
    files = [str(font) for font in fonts]
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom, background="#ffffff", font_files=files))


def png_file(path: str | os.PathLike[str], svg: str, *, zoom: float = 2.0, fonts: Sequence[str | Path] = ()) -> Path:
    """Draw a figure and write it, whole or not at all."""
    write_whole(path, to_png(svg, zoom=zoom, fonts=fonts))
    return Path(path).resolve()
