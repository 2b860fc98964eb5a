"""SVG: what every figure is made of, written as text: a frame, labels, cells, images, a colour scale.

An attention map turns a weight a_ij (query i attends to key j; a row sums to one) into a colour. Equal steps of a
weight should look like equal steps, in print and to colour-blind readers too. So there is a single hue, and
lightness carries the number, linear in the perceptual space OKLCH (Ottosson 2020):

    lightness(a) = L_0 + (L_1 - L_0) (a - low) / (high - low),      low = min(0, min a),  high = max(0, max a)

L_0 is close to the background: near-white on light screens, near-black on dark ones. Both scales are in the SVG as
CSS and `prefers-color-scheme` chooses between them, stand-alone or inside a page. A number that is not finite is
never drawn as if it were zero: it gets a colour of its own and is counted.

For programs that take no SVG, resvg (package `resvg-py`, extra `figure`) renders a figure as PNG, in its light colours
at `zoom` times its size in pixels. It takes each character from an installed font that has it. Where none has, it draws
an empty box or nothing, so the labels are tried one character at a time first and a missing font is reported.
"""

from __future__ import annotations

import base64
import os
import re
import struct
import unicodedata
import zlib
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np

from regard.errors import MissingExtra, UserError
from regard.explore.html import FIGURE_CSS, escape, text_width
from regard.files import write_atomically
from regard.messages import localize

Tokens = Sequence[str]

LEVELS = 32  # steps of the colour scale; entry LEVELS of a palette means "not finite"
SIDE = 400  # an image, or all images of a figure together, has at most 400 x 400 pixels: about 270 kB
LARGEST = 16_384  # pixels per side; a larger image takes gigabytes
FONT_SIGNATURES = (b"\0\1\0\0", b"true", b"OTTO", b"ttcf")
NO_CHARACTER = "\u0378"  # unassigned in Unicode, so that no font has it
REMEDY = (
    "install a font that has them (Noto Sans CJK for Korean, Chinese and Japanese: on Debian or Ubuntu "
    "apt install fonts-noto-cjk)"
)
WITHOUT = "name a font file with --font, or write .svg or .html, which use the reader's fonts"
_LABEL = re.compile(r"<text[^>]*>([^<]*)</text>")


def _scale(anchors: str) -> list[str]:
    """LEVELS colours between six that are evenly spaced in OKLCH lightness, and sand for "not finite"."""
    rgb = np.array([list(bytes.fromhex(colour)) for colour in anchors.split()])  # [6, 3]
    steps = np.linspace(0, len(rgb) - 1, LEVELS)
    mixed = np.stack([np.interp(steps, range(len(rgb)), channel) for channel in rgb.T], axis=1)  # [LEVELS, 3]
    return ["#" + bytes(np.rint(colour).astype(np.uint8)).hex() for colour in mixed] + ["#b9a078"]


LIGHT = _scale("f1f5fa b5cff5 7da9ea 4c83d4 215db3 003b89")
DARK = _scale("1f2630 2a466e 3b68ab 598edd 85b7ff bee0ff")


def _fills(palette: list[str]) -> str:
    return "".join(f".rg .k{i}{{fill:{colour}}}" for i, colour in enumerate(palette))


STYLE = f"{FIGURE_CSS}{_fills(LIGHT)}@media screen and (prefers-color-scheme:dark){{{_fills(DARK)}}}"


def frame(
    width: float, height: float, title: str, about: str, body: str, *, name: str = "", fluid: bool = False
) -> str:
    """The <svg> element under its title; without one, `name` names it for screen readers only.

    A fluid figure shrinks with its page; others keep their labels readable and scroll.
    """
    title = localize(title)
    name, width = escape(title or localize(name)), max(width, 32 + text_width(title, 15))
    least = "" if fluid else f"min-width:{min(width, max(340, 0.8 * width)):.0f}px;"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="rg{" fluid" * fluid}" role="img" '
        f'aria-label="{name}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" style="max-width:100%;{least}height:auto"><title>{name}</title>'
        f"<desc>{escape(about)}</desc><style>{STYLE}</style>{label(16, 30, title, 'head')}{body}</svg>"
    )


def label(x: float, y: float, text: str, kind: str = "", anchor: str = "", turn: int = 0) -> str:
    extra = f' class="{kind}"' * bool(kind) + f' text-anchor="{anchor}"' * bool(anchor)
    extra += f' transform="rotate({turn} {x:.1f} {y:.1f})"' * bool(turn)
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>' if text else ""


def empty_figure(title: str, *messages: str) -> str:
    message = " ".join(map(localize, messages))
    width = 32 + max(330, text_width(message))
    return frame(width, 76, title, message, label(16, 56, message, "mute"))


def short_number(value: float) -> str:
    """A number for an axis: 12,000, 0.25, 3e-5."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return re.sub(r"(\.?0*)e\+?(-?)0*", r"e\2", f"{value:.6e}")
    return f"{value:,.10g}"


def as_array(numbers: Any, last: tuple[int, int], sizes: tuple[int, ...] = (2,), field: str = "weights") -> np.ndarray:
    """A copy whose last two axes have the lengths `last` and whose number of axes is one of `sizes`."""
    try:
        array = np.array(np.asarray(numbers), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{field}: {error}; give numbers of shape {last}") from error
    if array.size == 0 and 0 in last:
        return np.zeros((0,) * (sizes[-1] - 2) + last)
    if array.ndim not in sizes or array.shape[-2:] != last:
        fits = " or ".join(str([*("layers", "heads")[4 - size :], *last]) for size in sizes).replace("'", "")
        raise UserError(f"{field}: the shape is {array.shape}; give {fits}, one number for each pair of labels")
    array[~(np.abs(array) < 1e300)] = np.nan  # infinities are not on any scale either
    return array


def pair_tip(row: str, column: str, value: float) -> str:
    """A tooltip; the left-to-right marks keep right-to-left tokens from turning the arrow around."""
    return f"{row} \u200e→ {column}\u200e: {value:.3f}"


def peak(grid: np.ndarray, rows: Tokens, columns: Tokens) -> str:
    i, j = divmod(int(np.argmax(np.nan_to_num(grid, nan=-np.inf))), grid.shape[1])
    return pair_tip(rows[i], columns[j], grid[i, j])


def weight_range(grid: np.ndarray) -> tuple[float, float]:
    low, high = float(np.fmin.reduce(grid, None, initial=0.0)), float(np.fmax.reduce(grid, None, initial=0.0))
    return low, (high if high > low else low + 1.0)


def colour_levels(grid: np.ndarray) -> np.ndarray:
    """The colour step of every weight, LEVELS where it is not finite; [rows, columns] of bytes."""
    low, high = weight_range(grid)
    return np.nan_to_num(np.rint((grid - low) / (high - low) * (LEVELS - 1)), nan=LEVELS).astype(np.uint8)


def png_uri(pixels: np.ndarray, palette: Sequence[str] = ()) -> str:
    """A PNG of palette indices [height, width] or RGB bytes [height, width, 3], as a data URI."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, 3 if palette else 2, 0, 0, 0)
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each row starts with filter type 0
    colours = [(b"PLTE", bytes.fromhex("".join(palette).replace("#", "")))] if palette else []
    parts = ((b"IHDR", header), *colours, (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def palette_image(grid: np.ndarray, x: float, y: float, width: float, height: float, side: int) -> str:
    """A map as two palette PNGs, light and dark. Beyond side x side pixels, a pixel shows the largest weight of its
    block, so that a single large weight stays visible."""
    for axis, count in enumerate(grid.shape):
        grid = np.fmax.reduceat(grid, np.arange(0, count, -(-count // side)), axis=axis)
    levels = colour_levels(grid)
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none"'
    return "".join(
        f'<image class="{name}" {box} href="{png_uri(levels, palette)}"/>'
        for name, palette in (("light", LIGHT), ("dark", DARK))
    )


def colour_legend(x: float, y: float, low: str, high: str, notes: Sequence[str]) -> str:
    """The colour scale with its two ends, and notes below it."""
    bar = round(x + text_width(low) + 8)
    scale = "".join(f'<path d="M{bar + 4 * i} {y:.0f}h5v10h-5z" class="k{i}"/>' for i in range(LEVELS))
    scale += label(x, y + 10, low, "mute") + label(bar + 4 * LEVELS + 8, y + 10, high, "mute")
    return scale + "".join(label(x, y + 36 + 20 * i, note, "mute") for i, note in enumerate(notes))


def notes_on(grid: np.ndarray, *notes: str) -> list[str]:
    lost = int(np.isnan(grid).sum())
    lines = (*notes, f"Not finite, in sand: {lost:,} of {grid.size:,}." * bool(lost))
    return [localize(line) for line in lines if line]


def figure_size(svg: str) -> tuple[float, float]:
    """Width and height of a figure."""
    width, height = (float(number) for number in re.findall(r'(?:width|height)="([\d.]+)"', svg)[:2])
    return width, height


def document(svg: str) -> bytes:
    """A figure as the content of an SVG file."""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{svg}\n'.encode("utf-8", "replace")


def svg_file(path: str | os.PathLike[str], svg: str) -> Path:
    """Save a figure as a file of its own, for browsers, editors and papers."""
    write_atomically(path, document(svg))
    return Path(path).resolve()


def to_png(svg: str, *, zoom: float = 2.0, fonts: Sequence[str | Path] = ()) -> bytes:
    """The bytes of a PNG file; `fonts` are font files besides those of the system."""
    width, height = figure_size(svg)
    if max(width, height) * zoom > LARGEST:
        raise UserError(
            f"the image would have {width * zoom:.0f} x {height * zoom:.0f} pixels, more than {LARGEST} per side: "
            "lower --zoom, show fewer layers, or write .svg"
        )
    for font in map(Path, fonts):
        if not font.is_file():
            raise UserError(f"--font {font}: there is no such file")
        if not font.read_bytes().startswith(FONT_SIGNATURES):
            raise UserError(f"--font {font}: is not a font file; give a .ttf, .otf or .ttc file")
    files = [str(font) for font in fonts]
    check_fonts(unescape("".join(_LABEL.findall(svg))), files)
    return _render(svg, zoom, files)


def check_fonts(text: str, fonts: Sequence[str] = (), without: str = WITHOUT) -> None:
    """A UserError if a PNG cannot show some character; `without` is how to do without another font."""
    missing = characters_without_font(text, fonts)
    if missing:
        some = ", ".join(f"{char} (U+{ord(char):04X})" for char in missing[:5])
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise UserError(f"no installed font has {some}{more}, so the PNG would show empty boxes: {REMEDY}, {without}")


def characters_without_font(text: str, fonts: Sequence[str] = ()) -> list[str]:
    """The characters of `text` that are rendered like one that no font has, although they are visible."""

    def alone(char: str) -> bytes:
        return _render(frame(40, 40, "", "", label(8, 24, char)), 1.0, fonts)

    box = alone(NO_CHARACTER)
    visible = {char for char in text if unicodedata.category(char) not in ("Zs", "Zl", "Zp", "Cc", "Cf", "Mn")}
    return [char for char in sorted(visible) if alone(char) == box]


def _render(svg: str, zoom: float, fonts: Sequence[str]) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise MissingExtra("figure", "resvg-py", "drawing a PNG") from None
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom, background="#ffffff", font_files=list(fonts)))
