"""Maps and images as SVG, without a plotting library: attention of one head, of the heads of a layer, or of all heads.

    heat_map      [rows, columns]                  one head or a mean, with labels, values and a colour scale
    head_panels   [heads, rows, columns]           every head a labelled map
    head_grid     [layers, heads, rows, columns]   small maps without labels
    image_panels  [panels, patches]                an image per word (or head), its patches coloured by their weight
    gallery       [n, channels, height, width]     images with captions

Layers and heads count from 0, as in code. Small maps are rectangles with a tooltip per cell; large ones are palette
PNG images. `regard.explore.svg` describes the colour scale.

Under attention, an image is grey and attention is orange, with an opacity proportional to the weight over the panel's
largest: no colour of the image can be mistaken for attention. Dosovitskiy et al. 2021, figure 6, show the same by
brightness, which a dark image hides.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.explore import svg
from regard.explore.html import escape, text_width, token_label
from regard.explore.svg import Tokens
from regard.messages import localize

WIDTH = 1400  # panels are side by side up to this width
CELLS = 3_600  # up to 60 x 60 cells are drawn one by one, each with its tooltip
PANEL = 148  # side of an image under attention, in pixels
THUMBNAIL = 96  # side of an image in a gallery
ACROSS = 6  # images per row
ORANGE = "#e8590c"
NAME = "Attention weights"
SCALED = "Each map has its own scale, up to the largest weight printed beside it."
THINNED = "Thinned: each pixel shows the largest weight of its block."


def _cells(grid: np.ndarray, rows: Tokens, columns: Tokens, wide: float, tall: float) -> str:
    """The map, its corner at the origin: cells with tooltips and, where they fit, their weights."""
    (n, m), gap = grid.shape, (1.5 if min(wide, tall) >= 20 else 0.5)
    if grid.size > CELLS:  # an image has no cells to point at; transparent strips name each row's largest weight
        step, parts = -(-n // svg.SIDE), [svg.palette_image(grid, 0, 0, m * wide, n * tall, svg.SIDE)]
        for i in range(0, n, step):
            tip = escape(svg.peak(grid[i : i + step], rows[i : i + step], columns))
            parts.append(
                f'<path d="M0 {i * tall:.2f}h{m * wide:.0f}v{step * tall:.2f}H0z" fill="none" '
                f'pointer-events="all"><title>{tip}</title></path>'
            )
        return "".join(parts)
    levels, parts, box = svg.colour_levels(grid), [], f'width="{wide - gap:.4g}" height="{tall - gap:.4g}"'
    for (i, j), value in np.ndenumerate(grid):
        level, tip = int(levels[i, j]), escape(svg.pair_tip(rows[i], columns[j], value))
        parts.append(f'<rect x="{j * wide:g}" y="{i * tall:g}" {box} class="k{level}"><title>{tip}</title></rect>')
        if min(wide, tall) >= 30 and 4 <= level < svg.LEVELS and abs(value) < 10:
            kind = "cell" + " mid" * (level > 14) + " on" * (level > 20)  # black or white, at least 4.5 : 1
            x, y = (j + 0.5) * wide - gap / 2, (i + 0.5) * tall + 3
            parts.append(svg.label(x, y, f"{value:.2f}", kind, "middle"))
    return "".join(parts)


def heat_map(
    weights: Any, rows: Tokens, columns: Tokens, *, title: str = "", row_label: str = "", column_label: str = ""
) -> str:
    """One head or alignment [len(rows), len(columns)] as a labelled map with a colour scale."""
    grid = svg.as_array(weights, (len(rows), len(columns)))
    if not grid.size:
        return svg.empty_figure(title or NAME, "There are no tokens to show.")
    rows, columns = ([token_label(token, 400) for token in tokens] for tokens in (rows, columns))
    row_label, column_label = localize(row_label), localize(column_label)
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
        labels += svg.label(left - 8, top + (i + 0.5) * tall + 0.32 * size, label, anchor="end")
    for j, label in tops.items():
        x = left + (j + 0.5) * wide + size * (0.2 if turn == -45 else 0.34 if turn else 0)
        labels += svg.label(x, top - 7, label, anchor="" if turn else "middle", turn=turn)
    low, high = (svg.short_number(float(f"{end:.3g}")) for end in svg.weight_range(grid))
    notes = svg.notes_on(grid, THINNED if grid.size > CELLS and max(n, m) > svg.SIDE else "")
    body = (
        svg.label(left, 30 + 26 * bool(title), column_label, "mute")
        + svg.label(26, (top + bottom) / 2, row_label, "mute", "middle", -90)
        + f'<g style="font-size:{size:g}px">{labels}</g><g transform="translate({left:.1f} {top:.1f})">'
        + f"{_cells(grid, rows, columns, wide, tall)}</g>"
        + svg.colour_legend(left, bottom + 20, low, high, notes)
    )
    width = max(right + 16 + 0.72 * reach * (turn == -45), left + (420 if notes else 240))
    largest = localize(f"Largest weight {svg.peak(grid, rows, columns)}.")
    about = f"{localize(f'{n} rows by {m} columns.')} {largest} {' '.join(notes)}"
    return svg.frame(width, bottom + 48 + 20 * len(notes), title, about, body, name=NAME)


def _max(grid: np.ndarray) -> str:
    return localize(f"max {np.fmax.reduce(grid, None):.2f}")


def head_grid(weights: Any, rows: Tokens, columns: Tokens, *, title: str = "") -> str:
    """All heads [layers, heads, len(rows), len(columns)], or one layer [heads, ...], as small maps.

    Layers may be a list, each with its own number of heads, as pruning leaves them.
    """
    size = (len(rows), len(columns))
    if isinstance(weights, list | tuple) and all(getattr(layer, "ndim", 0) == 3 for layer in weights):
        layers = [svg.as_array(layer, size, (3,)) for layer in weights]
    else:
        stack = svg.as_array(weights, size, (3, 4))
        layers = [stack] if stack.ndim == 3 else list(stack)
    if not sum(layer.size for layer in layers):
        return svg.empty_figure(title or NAME, "There are no heads or no tokens to show.")
    rows, columns = ([token_label(token, 400) for token in tokens] for tokens in (rows, columns))
    heads, (n, m) = max(map(len, layers)), layers[0].shape[1:]
    side = min(svg.SIDE, max(12, math.isqrt(svg.SIDE * svg.SIDE // (len(layers) * heads))))
    wide = min(150.0, max(56.0, 800 / heads - 12))
    tall = wide * min(1.6, max(0.4, n / m))
    left, top = 80, 44 + 26 * bool(title)
    parts = [
        svg.label(left + head * (wide + 12) + wide / 2, top - 10, localize(f"head {head}"), "mute", "middle")
        for head in range(heads)
    ]
    for layer, maps in enumerate(layers):
        y = top + layer * (tall + 30)
        parts.append(svg.label(16, y + tall / 2 + 4, localize(f"layer {layer}"), "mute"))
        for head, grid in enumerate(maps):
            x = left + head * (wide + 12)
            tip = localize(f"layer {layer}, head {head}: largest weight {svg.peak(grid, rows, columns)}")
            parts.append(
                f"<g><title>{escape(tip)}</title>{svg.palette_image(grid, x, y, wide, tall, side)}"
                f'<path class="rule" d="M{x:.1f} {y:.1f}h{wide:.1f}v{tall:.1f}h-{wide:.1f}z"/>'
                + svg.label(x + wide, y + tall + 14, _max(grid), "mute small", "end")
                + "</g>"
            )
    about = f"{len(layers)} layers of up to {heads} heads, {n} rows by {m} columns each."
    width, bottom = left + heads * (wide + 12) + 4, top + len(layers) * (tall + 30) + 4
    return _scaled_maps(np.concatenate(layers), width, left, bottom, title, about, parts, side < max(n, m))


def _scaled_maps(
    stack: np.ndarray, width: float, left: float, bottom: float, title: str, about: str, parts: list[str], thinned: bool
) -> str:
    """The frame of several maps, each with its own scale, and the legend below them."""
    notes = svg.notes_on(stack, SCALED, THINNED if thinned else "")
    ends = localize("smallest") if svg.weight_range(stack)[0] else "0", localize("largest")
    legend = svg.colour_legend(left, bottom, *ends, notes)
    about = f"{localize(about)} {' '.join(notes)}"
    body = "".join([*parts, legend])
    return svg.frame(max(width, left + 480), bottom + 28 + 20 * len(notes), title, about, body, name=NAME)


def head_panels(weights: Any, rows: Tokens, columns: Tokens, names: Sequence[str], *, title: str = "") -> str:
    """The maps [len(names), rows, columns] with a name above each and a label at every row and column."""
    stack = svg.as_array(weights, (len(rows), len(columns)), (3,))
    rows, columns = ([token_label(token) for token in tokens] for tokens in (rows, columns))
    n, m = stack.shape[1:]
    cell = max(6.0, min(24.0, 300.0 // max(n, m)))
    size = min(12.0, max(9.0, cell - 1))
    sides = {i: token_label(rows[i], 110) for i in range(0, n, math.ceil((size + 0.5) / cell))}
    tops = {j: token_label(columns[j], 110) for j in range(0, m, math.ceil((size + 0.5) / cell))}
    rise = max(text_width(label, size) for label in tops.values()) + 12
    left = 24 + max(text_width(label, size) for label in sides.values())
    captions = [f"{localize(name)}, {_max(grid)}" for name, grid in zip(names, stack, strict=True)]
    widest = max(map(text_width, captions)) + 14  # a map with few columns is narrower than its caption
    step = max(m * cell + 26, widest)
    across = min(len(names), max(1, int((WIDTH - left) // step)))
    top, tall = 24 + 26 * bool(title), 22 + rise + n * cell + 26
    parts = []
    for index, caption in enumerate(captions):
        x, y = left + index % across * step, top + index // across * tall
        parts.append(svg.label(x, y + 14, caption, "mute"))
        labels = ""
        for i, label in sides.items() if index % across == 0 else ():
            labels += svg.label(x - 6, y + 22 + rise + (i + 0.5) * cell + 0.34 * size, label, anchor="end")
        for j, label in tops.items():
            labels += svg.label(x + (j + 0.5) * cell + 0.34 * size, y + 16 + rise, label, turn=-90)
        parts.append(f'<g style="font-size:{size:g}px">{labels}</g>')
        cells = _cells(stack[index], rows, columns, cell, cell)
        parts.append(f'<g transform="translate({x:.1f} {y + 22 + rise:.1f})">{cells}</g>')
    bottom = top + math.ceil(len(names) / across) * tall
    about = f"{len(names)} maps of {n} rows by {m} columns."
    return _scaled_maps(stack, left + across * step, left, bottom, title, about, parts, False)


def image_panels(
    image: Any, down: int, across: int, weights: Any, names: Tokens, *, title: str = "", columns: int | None = None
) -> str:
    """One panel for each row of weights [len(names), down · across] over an image [channels, height, width], 0 to 1."""
    stack, name = svg.as_array(weights, (len(names), down * across)), "Attention over the image"
    grey = _image(image, PANEL, grey=True)
    mark = f"image-{zlib.crc32(grey.encode()):08x}"  # a page may hold several figures, each with its image
    frame = f'<path class="rule" d="M0 0h{PANEL}v{PANEL}H0z"/>'
    panels = [] if columns else [(_image(image, PANEL) + frame, [localize("the image")])]
    for label, row in zip(names, stack, strict=True):
        overlay = f'<use href="#{mark}"/>{_overlay(row, down, across, label)}{frame}'
        panels.append((overlay, [token_label(label, PANEL), _max(row)]))
    parts, width, bottom = _in_rows(panels, columns or ACROSS, PANEL, 14, 24 + 26 * bool(title))
    parts.append(f'<defs><g id="{mark}">{grey}</g></defs>')
    notes = svg.notes_on(stack, "Orange: attention, each panel up to its own largest weight.")
    parts += [svg.label(16, bottom + 18 + 20 * i, note, "mute") for i, note in enumerate(notes)]
    about = localize(f"{len(names)} panels over an image of {down} by {across} patches.") + f" {' '.join(notes)}"
    return svg.frame(max(width, 440), bottom + 10 + 20 * len(notes), title, about, "".join(parts), name=name)


def _in_rows(
    panels: Sequence[tuple[str, Sequence[str]]], across: int, side: int, gap: int, top: int
) -> tuple[list[str], int, int]:
    """Panels (content, lines of the caption below it), `across` per row; and the width and the end of all rows."""
    lines = max((len(caption) for _, caption in panels), default=0)
    step, tall, parts = side + gap, side + 18 + 17 * lines, []
    for index, (content, caption) in enumerate(panels):
        x, y = 16 + index % across * step, top + index // across * tall
        parts.append(f'<g transform="translate({x} {y})">{content}</g>')
        parts += [svg.label(x, y + side + 16 + 17 * at, text, "mute" * (at > 0)) for at, text in enumerate(caption)]
    return parts, 32 + min(len(panels), across) * step, top + math.ceil(len(panels) / across) * tall


def _overlay(row: np.ndarray, down: int, across: int, name: str) -> str:
    """The patches of one panel; a weight that is not finite is drawn in sand."""
    high, wide, tall, parts = svg.weight_range(row)[1], PANEL / across, PANEL / down, []
    for patch, value in enumerate(row):
        i, j = divmod(patch, across)
        fill = f'fill="{ORANGE}" fill-opacity="{0.8 * max(value, 0.0) / high:.3f}"'
        fill = f'class="k{svg.LEVELS}"' if math.isnan(value) else fill
        tip = escape(svg.pair_tip(token_label(name), f"{i},{j}", value))
        box = f'x="{j * wide:.2f}" y="{i * tall:.2f}" width="{wide:.2f}" height="{tall:.2f}"'
        parts.append(f"<rect {box} {fill}><title>{tip}</title></rect>")
    return "".join(parts)


def _image(pixels: Any, side: int, *, grey: bool = False) -> str:
    """An <image> of [channels, height, width] between 0 and 1: in colour, or its luminance by Rec. 709."""
    pixels = np.clip(np.nan_to_num(np.asarray(pixels, dtype=np.float64)), 0, 1)
    coloured = len(pixels) in (3, 4)
    if grey or not coloured:
        mean = np.tensordot((0.2126, 0.7152, 0.0722), pixels[:3], 1) if coloured else pixels.mean(axis=0)
        pixels = np.repeat(mean[None], 3, axis=0)
    data = svg.png_uri(np.rint(pixels[:3] * 255).astype(np.uint8).transpose(1, 2, 0))
    return f'<image width="{side}" height="{side}" preserveAspectRatio="none" href="{data}"/>'


def gallery(images: Any, captions: Sequence[str], *, title: str = "Images") -> str:
    """Images [n, channels, height, width] between 0 and 1 in rows, with the lines of its caption below each."""
    panels = []
    for image, caption in zip(images, captions, strict=True):
        panels.append((_image(image, THUMBNAIL), [token_label(text, THUMBNAIL + 34) for text in caption.splitlines()]))
    parts, width, bottom = _in_rows(panels, ACROSS, THUMBNAIL, 40, 16)
    named = "; ".join(caption.replace("\n", " ") for caption in captions if caption)
    about = f"{localize(f'{len(captions)} images.')} {named}"
    return svg.frame(width, bottom, "", about, "".join(parts), name=title)
