"""Figures written as text: attention maps and curves as SVG, with no plotting library.

A map of attention turns a weight a_ij (query i looks at key j; a row sums to one) into a colour. Equal steps
of a weight should look like equal steps, in print and to colour-blind eyes too. So there is a single hue, and
lightness carries the number, linear in the perceptual space OKLCH (Ottosson 2020):

    lightness(a) = L_0 + (L_1 - L_0) (a - low) / (high - low),      low = min(0, min a),  high = max(0, max a)

L_0 is close to the background: near-white on light screens, near-black on dark ones. Both scales travel
inside the SVG as CSS and the reader's `prefers-color-scheme` chooses, stand-alone or inside a page.

Shapes: `heat_map` takes [rows, columns], `head_grid` [layers, heads, rows, columns]; layers and heads count
from 0, as in code. A number that is not finite is never drawn as if it were zero: it gets a colour of its own,
or a gap, and is counted. Small maps are shapes with a tooltip per cell; large ones are palette PNG images.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regard.errors import UserError
from regard.explore.report import FIGURE_CSS, escape, text_width, token_label

Tokens = Sequence[str]

LEVELS = 32  # steps of the colour scale; entry LEVELS of a palette means "not finite"
SIDE = 400  # an image has at most 400 x 400 pixels, all images of a figure together too: about 270 kB
CELLS = 3_600  # up to 60 x 60 cells are drawn one by one, each with its tooltip
POINTS = 1_000  # a curve is thinned to about as many points as it has pixels
DASHES = ("none", "7 4", "2 4", "12 4 2 4", "4 2")
SCALED = "Each map has its own scale, up to the largest weight written below it."
THINNED = "Thinned: each pixel shows the largest weight of its block."


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


def _svg(width: float, height: float, title: str, about: str, body: str, fluid: bool = False) -> str:
    """The frame. A fluid figure shrinks with its page; others keep their labels readable and scroll."""
    least = "" if fluid else f"min-width:{min(width, max(340, 0.8 * width)):.0f}px;"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="rg{" fluid" * fluid}" role="img" '
        f'aria-label="{escape(title)}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" style="max-width:100%;{least}height:auto"><title>{escape(title)}</title>'
        f"<desc>{escape(about)}</desc><style>{STYLE}</style>{body}</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "", turn: int = 0) -> str:
    extra = f' class="{kind}"' * bool(kind) + f' text-anchor="{anchor}"' * bool(anchor)
    extra += f' transform="rotate({turn} {x:.1f} {y:.1f})"' * bool(turn)
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escape(text)}</text>' if text else ""


def _empty(title: str, message: str) -> str:
    width = 32 + max(330, text_width(title, 15), text_width(message))
    return _svg(width, 76, title, message, _text(16, 30, title, "head") + _text(16, 56, message, "mute"))


def _number(value: float) -> str:
    """A short number for an axis: 12,000, 0.25, 3e-5."""
    if value and not 1e-4 <= abs(value) < 1e7:
        return re.sub(r"(\.?0*)e\+?(-?)0*", r"e\2", f"{value:.6e}")
    return f"{value:,.10g}"


def _array(numbers: Any, last: tuple[int, int], sizes: tuple[int, ...] = (2,), field: str = "weights") -> np.ndarray:
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
    array[~(np.abs(array) < 1e300)] = np.nan  # infinities have no place on a scale either
    return array


def _tip(row: str, column: str, value: float) -> str:
    """A tooltip; the left-to-right marks keep right-to-left tokens from turning the arrow around."""
    return f"{row} \u200e→ {column}\u200e: {value:.3f}"


def _peak(grid: np.ndarray, rows: Tokens, columns: Tokens) -> str:
    i, j = divmod(int(np.argmax(np.nan_to_num(grid, nan=-np.inf))), grid.shape[1])
    return _tip(rows[i], columns[j], grid[i, j])


def _range(grid: np.ndarray) -> tuple[float, float]:
    low, high = float(np.fmin.reduce(grid, None, initial=0.0)), float(np.fmax.reduce(grid, None, initial=0.0))
    return low, (high if high > low else low + 1.0)


def _levels(grid: np.ndarray) -> np.ndarray:
    """The colour step of every weight, LEVELS where it is not finite; [rows, columns] of bytes."""
    low, high = _range(grid)
    return np.nan_to_num(np.rint((grid - low) / (high - low) * (LEVELS - 1)), nan=LEVELS).astype(np.uint8)


def _image(grid: np.ndarray, x: float, y: float, width: float, height: float, side: int) -> str:
    """A map as two palette PNGs, light and dark. Beyond side x side pixels a pixel shows the largest weight
    of its block, so that a lone strong cell stays visible."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    for axis, count in enumerate(grid.shape):
        grid = np.fmax.reduceat(grid, np.arange(0, count, -(-count // side)), axis=axis)
    header = struct.pack(">IIBBBBB", grid.shape[1], grid.shape[0], 8, 3, 0, 0, 0)  # 8 bits, palette
    pixels = zlib.compress(np.pad(_levels(grid), ((0, 0), (1, 0))).tobytes(), 9)  # filter 0 begins a row
    place, images = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" preserveAspectRatio="none"', ""
    for name, palette in (("light", LIGHT), ("dark", DARK)):
        colours = bytes.fromhex("".join(palette).replace("#", ""))
        parts = ((b"IHDR", header), (b"PLTE", colours), (b"IDAT", pixels), (b"IEND", b""))
        png = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)
        data = base64.b64encode(png).decode()
        images += f'<image class="{name}" {place} href="data:image/png;base64,{data}"/>'
    return images


def _legend(x: float, y: float, low: str, high: str, notes: Sequence[str]) -> str:
    """The colour scale between its two ends, and below it what the reader must know."""
    bar = round(x + text_width(low) + 8)
    scale = "".join(f'<path d="M{bar + 4 * i} {y:.0f}h5v10h-5z" class="k{i}"/>' for i in range(LEVELS))
    scale += _text(x, y + 10, low, "mute") + _text(bar + 4 * LEVELS + 8, y + 10, high, "mute")
    return scale + "".join(_text(x, y + 36 + 20 * i, note, "mute") for i, note in enumerate(notes))


def _notes(grid: np.ndarray, *notes: str) -> list[str]:
    lost = int(np.isnan(grid).sum())
    return [note for note in (*notes, f"Not finite, in sand: {lost:,} of {grid.size:,}." * bool(lost)) if note]


def _cells(grid: np.ndarray, rows: Tokens, columns: Tokens, wide: float, tall: float) -> str:
    """The map, its corner at the origin: cells with tooltips and, where there is room, their weights."""
    (n, m), gap = grid.shape, (1.5 if min(wide, tall) >= 20 else 0.5)
    if grid.size > CELLS:  # an image has no cells to point at; clear strips tell each row's largest weight
        step, parts = -(-n // SIDE), [_image(grid, 0, 0, m * wide, n * tall, SIDE)]
        for i in range(0, n, step):
            tip = escape(_peak(grid[i : i + step], rows[i : i + step], columns))
            parts.append(
                f'<path d="M0 {i * tall:.2f}h{m * wide:.0f}v{step * tall:.2f}H0z" fill="none" '
                f'pointer-events="all"><title>{tip}</title></path>'
            )
        return "".join(parts)
    levels, parts, box = _levels(grid), [], f'width="{wide - gap:.4g}" height="{tall - gap:.4g}"'
    for (i, j), value in np.ndenumerate(grid):
        level, tip = int(levels[i, j]), escape(_tip(rows[i], columns[j], value))
        parts.append(f'<rect x="{j * wide:g}" y="{i * tall:g}" {box} class="k{level}"><title>{tip}</title></rect>')
        if min(wide, tall) >= 30 and 4 <= level < LEVELS and abs(value) < 10:
            kind = "cell" + " mid" * (level > 14) + " on" * (level > 20)  # black or white, at least 4.5 : 1
            x, y = (j + 0.5) * wide - gap / 2, (i + 0.5) * tall + 3
            parts.append(_text(x, y, f"{value:.2f}", kind, "middle"))
    return "".join(parts)


def heat_map(
    weights: Any, rows: Tokens, columns: Tokens, *, title: str = "", row_label: str = "", column_label: str = ""
) -> str:
    """One head or alignment [len(rows), len(columns)] as a labelled map with a colour scale."""
    grid, name = _array(weights, (len(rows), len(columns))), title or "Attention weights"
    if not grid.size:
        return _empty(name, "There are no tokens to show.")
    rows, columns = ([token_label(token, 400) for token in tokens] for tokens in (rows, columns))
    n, m = grid.shape
    tall, wide = (min(38.0, max(13.0, 620 // count)) if count <= 60 else 780 / count for count in (n, m))
    if max(n, m) <= 60:
        tall = wide = min(tall, wide)
    size = min(13.0, max(11.0, min(tall, wide) - 2))
    sides = {i: token_label(rows[i]) for i in range(0, n, math.ceil(12.9 / tall))}  # thinned in narrow cells
    tops = {j: token_label(columns[j]) for j in range(0, m, math.ceil(12.9 / wide))}
    reach = max(text_width(label, size) for label in tops.values())
    turn = 0 if reach <= wide - 4 else -45 if wide >= 22 else -90
    rise = {0: 14.0, -45: 0.72 * reach + 14, -90: reach + 12}[turn]
    left = 28 + max(text_width(label, size) for label in sides.values()) + 22 * bool(row_label)
    top = 16 + 26 * bool(title) + 24 * bool(column_label) + rise
    right, bottom = left + m * wide, top + n * tall
    labels = ""
    for i, label in sides.items():
        labels += _text(left - 8, top + (i + 0.5) * tall + 0.32 * size, label, anchor="end")
    for j, label in tops.items():
        x = left + (j + 0.5) * wide + size * (0.2 if turn == -45 else 0.34 if turn else 0)
        labels += _text(x, top - 7, label, anchor="" if turn else "middle", turn=turn)
    low, high = (_number(float(f"{end:.3g}")) for end in _range(grid))
    notes = _notes(grid, THINNED if grid.size > CELLS and max(n, m) > SIDE else "")
    body = (
        _text(16, 30, title, "head")
        + _text(left, 30 + 26 * bool(title), column_label, "mute")
        + _text(26, (top + bottom) / 2, row_label, "mute", "middle", -90)
        + f'<g style="font-size:{size:g}px">{labels}</g><g transform="translate({left:.1f} {top:.1f})">'
        + f"{_cells(grid, rows, columns, wide, tall)}</g>"
        + _legend(left, bottom + 20, low, high, notes)
    )
    width = max(right + 16 + 0.72 * reach * (turn == -45), left + (420 if notes else 240), 32 + text_width(title, 15))
    about = f"{n} rows by {m} columns. Largest weight {_peak(grid, rows, columns)}. {' '.join(notes)}"
    return _svg(width, bottom + 48 + 20 * len(notes), name, about, body)


def head_grid(weights: Any, rows: Tokens, columns: Tokens, *, title: str = "") -> str:
    """All heads [layers, heads, len(rows), len(columns)], or one layer [heads, ...], as small maps."""
    name, stack = title or "Attention of every head", _array(weights, (len(rows), len(columns)), (3, 4))
    if not stack.size:
        return _empty(name, "There are no heads or no tokens to show.")
    rows, columns = ([token_label(token, 400) for token in tokens] for tokens in (rows, columns))
    layers, heads, n, m = (1, *stack.shape)[-4:]
    side = min(SIDE, max(12, math.isqrt(SIDE * SIDE // (layers * heads))))
    wide = min(150.0, max(56.0, 800 / heads - 12))
    tall = wide * min(1.6, max(0.4, n / m))
    left, top = 80, 44 + 26 * bool(title)
    parts = [_text(16, 30, title, "head")]
    for layer, head in np.ndindex(layers, heads):
        x, y, grid = (
            left + head * (wide + 12),
            top + layer * (tall + 30),
            stack.reshape(layers, heads, n, m)[layer, head],
        )
        tip = f"layer {layer}, head {head}: largest weight {_peak(grid, rows, columns)}"
        parts.append(_text(x + wide / 2, y - 10, f"head {head}", "mute", "middle") if layer == 0 else "")
        parts.append(_text(16, y + tall / 2 + 4, f"layer {layer}", "mute") if head == 0 else "")
        parts.append(
            f"<g><title>{escape(tip)}</title>{_image(grid, x, y, wide, tall, side)}"
            f'<path class="rule" d="M{x:.1f} {y:.1f}h{wide:.1f}v{tall:.1f}h-{wide:.1f}z"/>'
            + _text(x + wide, y + tall + 14, f"max {np.fmax.reduce(grid, None):.2f}", "mute small", "end")
            + "</g>"
        )
    bottom = top + layers * (tall + 30)
    notes = _notes(stack, SCALED, THINNED if side < max(n, m) else "")
    parts.append(_legend(left, bottom + 4, "smallest" if _range(stack)[0] else "0", "largest", notes))
    width = max(left + heads * (wide + 12) + 4, left + 480, 32 + text_width(title, 15))
    about = f"{layers} layers of {heads} heads, {n} rows by {m} columns each. {' '.join(notes)}"
    return _svg(width, bottom + 32 + 20 * len(notes), name, about, "".join(parts))


def _axis(values: np.ndarray, log: bool = False, snap: bool = False) -> tuple[float, float, list[float]]:
    """Ends and round ticks of an axis, as log10 for a log axis; `snap` moves the ends out to ticks."""
    low, high = float(values.min()), float(values.max())
    if high - low <= 1e-9 * max(abs(low), abs(high)) + 1e-200:  # a lone value gets room on both sides
        room = 1.0 if log or abs(low) < 1e-200 else 0.5 * abs(low)
        low, high = low - room, high + room
    low = 0.0 if not log and 0 < low < 0.05 * high else low  # steps counted from 1, losses near 0
    if log:  # 1, 2, 5, 10, 20 ... or, over many decades, some powers of ten
        every, marks = (1, (1, 2, 5)) if high - low < 3 else (math.ceil((high - low) / 6), (1,))
        powers = range(math.floor(low), math.ceil(high) + every, every)
        ticks = [power + math.log10(mark) for power in powers for mark in marks]
    else:  # steps of 1, 2 or 5 times a power of ten
        power = 10.0 ** math.floor(math.log10((high - low) / 5))
        step = next(mark * power for mark in (1, 2, 5, 10) if mark * power >= 0.999 * (high - low) / 5)
        ticks = [i * step for i in range(math.floor(low / step) - 1, math.ceil(high / step) + 2)]
    slack = 1e-9 * (high - low)
    if snap:
        low, high = max(t for t in ticks if t <= low + slack), min(t for t in ticks if t >= high - slack)
    return low, high, [t for t in ticks if low - slack <= t <= high + slack]


def _thin(points: np.ndarray) -> np.ndarray:
    """[n, 2] to about POINTS rows: of every block the lowest, the highest and one gap stay, in order."""
    if len(points) <= POINTS:
        return points
    keep = {0, len(points) - 1}
    for block in np.array_split(np.arange(len(points)), POINTS // 2):
        y = points[block, 1]  # argmin itself finds the first NaN where there is one
        some = (y.argmin(), np.nan_to_num(y, nan=np.inf).argmin(), np.nan_to_num(y, nan=-np.inf).argmax())
        keep |= {int(block[i]) for i in some}
    return points[sorted(keep)]


def _curve(points: np.ndarray, kind: int) -> str:
    """A line through [n, 2] screen points, broken at NaN; a point without neighbours becomes a dot."""
    parts, look = [], f"s{kind % 6}"
    for run in np.split(points, np.flatnonzero(np.isnan(points[:, 1]))):
        run = run[~np.isnan(run[:, 1])]
        if len(run) == 1:
            parts.append(f'<circle cx="{run[0, 0]:.1f}" cy="{run[0, 1]:.1f}" r="2.5" class="dot {look}"/>')
        elif len(run):
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
            parts.append(f'<polyline class="curve {look}" stroke-dasharray="{DASHES[kind % 5]}" points="{line}"/>')
    return "".join(parts)


def line_chart(
    series: Mapping[str, Sequence[tuple[float, float]]], *, title: str, x_label: str, y_label: str, log_y: bool = False
) -> str:
    """Curves of (x, y) points, such as the loss over the steps; gaps where a value cannot be drawn."""
    curves, lost, legend, about = {}, 0, [], []
    for name, points in series.items():
        curves[name] = line = _array(points, (len(points), 2), field=f"series {name!r}")
        if log_y:
            line[:, 1] = np.log10(line[:, 1], where=line[:, 1] > 0, out=np.full(len(line), np.nan))
        line[np.isnan(line).any(axis=1)] = np.nan
        lost += int(np.isnan(line[:, 1]).sum())
    drawn = np.concatenate([np.zeros((0, 2)), *curves.values()])
    drawn = drawn[~np.isnan(drawn[:, 1])]
    why = "not finite or not positive" if log_y else "not finite"
    note = f"Gaps: {lost:,} {'value' if lost == 1 else 'values'} {why}." if lost else ""
    if not len(drawn):
        return _empty(title or "Chart", f"There are no points to draw. {note}")
    (x0, x1, across), (y0, y1, up) = _axis(drawn[:, 0]), _axis(drawn[:, 1], log_y, snap=True)
    names = [_number(10**tick if log_y else tick) for tick in up]
    left, right, x, y = 30 + max(text_width(tick, 20) for tick in names), 664.0, 16.0, 40 + 24 * bool(title)
    for i, (name, line) in enumerate(curves.items()):
        label, last = token_label(name, 260), line[~np.isnan(line[:, 1]), 1][-1:]
        if x > 16 and x + 50 + text_width(label, 19) > right:
            x, y = 16.0, y + 26
        legend.append(_curve(np.array([[x, y - 4], [x + 26, y - 4]]), i) + _text(x + 34, y, label))
        x += 66 + text_width(label, 19)
        end = "".join(f", last {10**value if log_y else value:.4g}" for value in last)
        about.append(f"{name}: {len(line):,} points{end}.")
    top, bottom = y + 56, y + 316
    flip = np.array([(right - left) / (x1 - x0), (top - bottom) / (y1 - y0)])
    parts = [_text(16, 30, title, "head"), *legend, _text(16, top - 18, y_label, "mute")]
    parts += [_text(right, bottom + 52, x_label, "mute", "end"), _text(16, bottom + 80, note, "mute")]
    for tick, label in zip(up, names, strict=True):
        height = bottom + (tick - y0) * flip[1]
        parts.append(f'<path class="rule" d="M{left:.1f} {height:.1f}H{right}"/>')
        parts.append(_text(left - 10, height + 4.5, label, "mute", "end"))
    parts += [_text(left + (t - x0) * flip[0], bottom + 26, _number(t), "mute", "middle") for t in across]
    for i, (line, words) in enumerate(zip(curves.values(), about, strict=True)):
        line = (_thin(line) - (x0, y0)) * flip + (left, bottom)
        parts.append(f"<g><title>{escape(words)}</title>{_curve(line, i)}</g>")
    return _svg(
        696, bottom + 68 + 28 * bool(note), title or "Chart", " ".join([*about, note]), "".join(parts), fluid=True
    )
