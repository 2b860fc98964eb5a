"""Panels: several views in one figure. The heads of a layer with their labels, attention over a picture, the
stages of one query.

    head_panels      [heads, rows, columns]   every head a labelled map
    picture_panels   [panels, places]         a picture for each word (or head), coloured where it was looked at
    stage_panel      one query                a line a key: q·k, scaled, masked, softmax, length of the weighted value

Over a picture, the picture itself is grey and attention is orange, its strength the weight over the panel's
largest: no colour of the picture can be taken for attention. Dosovitskiy et al. 2021, figure 6, show the same by
brightness, which a dark picture hides.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.explore.draw import (
    LEVELS,
    Tokens,
    as_array,
    colour_legend,
    colour_levels,
    empty_figure,
    notes_on,
    pair_tip,
    png_uri,
    short_number,
    svg_frame,
    svg_text,
    weight_range,
)
from regard.explore.report import escape, text_width, token_label

WIDTH = 1400  # panels stand side by side up to here
PICTURE = 148  # pixels of a picture's side
ORANGE = "#e8590c"


def head_panels(weights: Any, rows: Tokens, columns: Tokens, names: Sequence[str], *, title: str = "") -> str:
    """The maps [len(names), rows, columns] with a name above each and a label at every row and column."""
    stack, name = as_array(weights, (len(rows), len(columns)), (3,)), title or "Attention of every head"
    if not stack.size:
        return empty_figure(name, "There are no heads or no tokens to show.")
    n, m = stack.shape[1:]
    cell = max(6.0, min(24.0, 300.0 // max(n, m)))
    size = min(12.0, max(9.0, cell - 1))
    sides = {i: token_label(rows[i], 110) for i in range(0, n, math.ceil((size + 0.5) / cell))}
    tops = {j: token_label(columns[j], 110) for j in range(0, m, math.ceil((size + 0.5) / cell))}
    rise = max(text_width(label, size) for label in tops.values()) + 12
    left = 24 + max(text_width(label, size) for label in sides.values())
    captions = [f"{name}, max {np.fmax.reduce(grid, None):.2f}" for name, grid in zip(names, stack, strict=True)]
    step = max(m * cell + 26, max(map(text_width, captions)) + 14)  # a map of few columns is narrower than its name
    across = min(len(names), max(1, int((WIDTH - left) // step)))
    top, tall = 24 + 26 * bool(title), 22 + rise + n * cell + 26
    parts = [svg_text(16, 30, title, "head")]
    for index, caption in enumerate(captions):
        x, y = left + index % across * step, top + index // across * tall
        grid = stack[index]
        parts.append(svg_text(x, y + 14, caption, "mute"))
        labels = ""
        for i, label in sides.items() if index % across == 0 else ():
            labels += svg_text(x - 6, y + 22 + rise + (i + 0.5) * cell + 0.34 * size, label, anchor="end")
        for j, label in tops.items():
            labels += svg_text(x + (j + 0.5) * cell + 0.34 * size, y + 16 + rise, label, turn=-90)
        parts.append(f'<g style="font-size:{size:g}px">{labels}</g>')
        parts.append(f'<g transform="translate({x:.1f} {y + 22 + rise:.1f})">{_cells(grid, rows, columns, cell)}</g>')
    bottom = top + math.ceil(len(names) / across) * tall
    notes = notes_on(stack, "Each map has its own scale, up to the largest weight written above it.")
    parts.append(colour_legend(left, bottom, "smallest" if weight_range(stack)[0] else "0", "largest", notes))
    width = max(left + across * step, left + 480, 32 + text_width(title, 15))
    about = f"{len(names)} maps of {n} rows by {m} columns. {' '.join(notes)}"
    return svg_frame(width, bottom + 28 + 20 * len(notes), name, about, "".join(parts))


def _cells(grid: np.ndarray, rows: Tokens, columns: Tokens, cell: float) -> str:
    levels, parts = colour_levels(grid), []
    box = f'width="{cell - 0.5:g}" height="{cell - 0.5:g}"'
    for (i, j), value in np.ndenumerate(grid):
        hint = escape(pair_tip(token_label(rows[i]), token_label(columns[j]), value))
        place = f'x="{j * cell:g}" y="{i * cell:g}" {box}'
        parts.append(f'<rect {place} class="k{levels[i, j]}"><title>{hint}</title></rect>')
    return "".join(parts)


def picture_panels(
    picture: Any, down: int, across: int, weights: Any, names: Tokens, *, title: str = "", columns: int | None = None
) -> str:
    """One panel for each row of weights [len(names), down · across] over picture [channels, height, width], 0 to 1."""
    pixels = np.clip(np.nan_to_num(np.asarray(picture, dtype=np.float64)), 0, 1)
    stack, name = as_array(weights, (len(names), down * across)), title or "Attention over the picture"
    if not stack.size:
        return empty_figure(name, "There is nothing to show.")
    per_row = columns or min(len(names) + 1, 6)
    top, step, tall = 24 + 26 * bool(title), PICTURE + 14, PICTURE + 44
    grey, colour = _image(_grey(pixels)), _image(_colour(pixels))
    mark = f"picture-{zlib.crc32(grey.encode()):08x}"  # a page may hold several figures, each with its picture
    parts = [f'<defs><g id="{mark}">{grey}</g></defs>', svg_text(16, 30, title, "head")]
    first = [] if columns else [("the picture", colour, "")]
    shown = [(token_label(name, PICTURE), f'<use href="#{mark}"/>', _veil(row, down, across, name))
             for name, row in zip(names, stack, strict=True)]  # fmt: skip
    peaks = [""] * len(first) + [f"max {np.fmax.reduce(row, None):.2f}" for row in stack]
    for index, ((caption, image, veil), peak) in enumerate(zip(first + shown, peaks, strict=True)):
        x, y = 16 + index % per_row * step, top + index // per_row * tall
        frame = f'<path class="rule" d="M0 0h{PICTURE}v{PICTURE}H0z"/>'
        parts.append(f'<g transform="translate({x} {y})">{image}{veil}{frame}</g>')
        parts.append(svg_text(x, y + PICTURE + 17, caption) + svg_text(x, y + PICTURE + 32, peak, "mute small"))
    count = len(first) + len(shown)
    bottom = top + math.ceil(count / per_row) * tall
    notes = notes_on(stack, "Orange: where it looked, each panel up to its own largest weight.")
    parts += [svg_text(16, bottom + 18 + 20 * i, note, "mute") for i, note in enumerate(notes)]
    width = max(32 + min(count, per_row) * step, 440, 32 + text_width(title, 15))
    about = f"{len(names)} panels over a picture of {down} by {across} squares. {' '.join(notes)}"
    return svg_frame(width, bottom + 10 + 20 * len(notes), name, about, "".join(parts))


def _veil(row: np.ndarray, down: int, across: int, name: str) -> str:
    """Squares of one panel; a weight that is not finite is drawn in sand."""
    high, wide, tall, parts = weight_range(row)[1], PICTURE / across, PICTURE / down, []
    for place, value in enumerate(row):
        i, j = divmod(place, across)
        look = f'fill="{ORANGE}" fill-opacity="{0.8 * max(value, 0.0) / high:.3f}"'
        look = f'class="k{LEVELS}"' if math.isnan(value) else look
        hint = escape(pair_tip(token_label(name), f"{i},{j}", value))
        box = f'x="{j * wide:.2f}" y="{i * tall:.2f}" width="{wide:.2f}" height="{tall:.2f}"'
        parts.append(f"<rect {box} {look}><title>{hint}</title></rect>")
    return "".join(parts)


def _grey(pixels: np.ndarray) -> np.ndarray:
    """Luminance by Rec. 709, for 3 or 4 channels; the mean of others."""
    mix = (0.2126, 0.7152, 0.0722)
    grey = np.tensordot(mix, pixels[:3], 1) if pixels.shape[0] in (3, 4) else pixels.mean(axis=0)
    return np.repeat(grey[None], 3, axis=0)


def _colour(pixels: np.ndarray) -> np.ndarray:
    return pixels[:3] if pixels.shape[0] in (3, 4) else _grey(pixels)


def _image(pixels: np.ndarray) -> str:
    """[3, height, width] between 0 and 1 as an image of PICTURE pixels a side."""
    data = png_uri(np.rint(pixels * 255).astype(np.uint8).transpose(1, 2, 0))
    return f'<image width="{PICTURE}" height="{PICTURE}" preserveAspectRatio="none" href="{data}"/>'


def stage_panel(stages: Sequence[tuple[str, Any]], columns: Tokens, *, title: str = "", note: str = "") -> str:
    """One line a key: each stage is (name, numbers [len(columns)]), drawn as a bar with its number; -inf is hidden."""
    name, count = title or "One query, stage by stage", len(columns)
    if not count:
        return empty_figure(name, "There are no tokens to show.")
    labels = [token_label(token, 150) for token in columns]
    left, step, tall, bar = 28 + max(map(text_width, labels)), 150, 21, 82
    top = 62 + 26 * bool(title)
    parts = [svg_text(16, 30, title, "head")]
    for i, label in enumerate(labels):
        parts.append(svg_text(left - 10, top + i * tall + 15, label, anchor="end"))
    for at, (stage, numbers) in enumerate(stages):
        values = np.asarray(numbers, dtype=np.float64)
        finite = values[np.isfinite(values)]
        low, high = min(0.0, finite.min(initial=0.0)), max(0.0, finite.max(initial=0.0))
        unit = bar / ((high - low) or 1.0)
        x = left + at * step
        parts.append(svg_text(x, top - 10, stage, "mute"))
        parts.append(f'<path class="rule" d="M{x - low * unit:.1f} {top}v{count * tall}"/>')
        for i, value in enumerate(values):
            y = top + i * tall
            if not math.isfinite(value):
                parts.append(
                    svg_text(x - low * unit + 6, y + 15, "hidden" if value < 0 else "not a number", "mute small")
                )
                continue
            start, level = x + (min(value, 0) - low) * unit, 22 if value >= 0 else 10
            parts.append(
                f'<rect x="{start:.1f}" y="{y + 4}" width="{max(abs(value) * unit, 0.5):.1f}" height="{tall - 8}" '
                f'class="k{level}"/>' + svg_text(x + bar + 6, y + 15, f"{value:.3f}", "mute small")
            )
    bottom = top + count * tall
    parts.append(svg_text(16, bottom + 26, note, "mute"))
    width = max(left + len(stages) * step, 32 + text_width(title, 15), 32 + text_width(note))
    about = f"{count} keys, stages: {', '.join(stage for stage, _ in stages)}. {note}"
    return svg_frame(width, bottom + (44 if note else 20), name, about, "".join(parts))


def label_map(values: Any, texts: Sequence[Sequence[str]], *, title: str = "", note: str = "") -> str:
    """Numbers [layers, heads] as colours, with words in every cell; layers may differ in their number of heads."""
    rows = [list(map(float, row)) for row in values]
    name, most = title or "Heads", max(map(len, rows), default=0)
    if not most:
        return empty_figure(name, "There are no heads to show.")
    table = np.full((len(rows), most), np.nan)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    levels, wide, tall, left, top = colour_levels(table), 112, 46, 76, 40 + 26 * bool(title)
    parts = [svg_text(16, 30, title, "head")]
    parts += [svg_text(left + (j + 0.5) * wide, top - 8, f"head {j}", "mute", "middle") for j in range(most)]
    for i, row in enumerate(rows):
        parts.append(svg_text(16, top + (i + 0.5) * tall + 4, f"layer {i}", "mute"))
        for j, value in enumerate(row):
            level, x, y = int(levels[i, j]), left + j * wide, top + i * tall
            kind = "" if level == LEVELS else "mid" * (level > 14) + " on" * (level > 20)
            hint = escape(f"layer {i}, head {j}: {texts[i][j]}, {value:.4f}")
            box = f'x="{x}" y="{y}" width="{wide - 2}" height="{tall - 2}" class="k{level}"'
            parts.append(f"<rect {box}><title>{hint}</title></rect>")
            parts.append(
                svg_text(x + wide / 2 - 1, y + 18, token_label(texts[i][j], wide + 34), f"cell {kind}", "middle")
            )
            parts.append(svg_text(x + wide / 2 - 1, y + 34, f"{value:+.4f}", f"cell {kind}", "middle"))
    bottom = top + len(rows) * tall
    low, high = (short_number(float(f"{end:.2g}")) for end in weight_range(table))
    parts.append(colour_legend(left, bottom + 14, low, high, [note] if note else []))
    width = max(left + most * wide + 14, left + 300, 32 + text_width(title, 15), left + 16 + text_width(note))
    about = f"{len(rows)} layers of up to {most} heads. {note}"
    return svg_frame(width, bottom + 44 + 20 * bool(note), name, about, "".join(parts))
