"""Cells: a labelled table of numbers as SVG, with a colour and optionally a text in every cell.

For maps of layers by positions or heads, whose values may be negative: blue is above zero, orange below, and the
opacity is |value| over the largest one. (`regard.explore.heatmap` draws attention, which is never negative.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.explore import svg
from regard.explore.heatmap import ORANGE
from regard.explore.html import escape, text_width, token_label
from regard.explore.svg import Tokens

BLUE = "#2f6fca"
TALL, NARROW, WIDE = 26.0, 22.0, 96.0  # height of a cell, and its width at least and at most


def cell_map(
    values: Any,
    rows: Tokens,
    columns: Tokens,
    *,
    texts: Sequence[Tokens] | None = None,
    title: str = "",
) -> str:
    """values [len(rows), len(columns)] as coloured cells; `texts` are written in them, by default the numbers."""
    grid = svg.as_array(values, (len(rows), len(columns)), field="values")
    if not grid.size:
        return svg.empty_figure(title or "Values", "There is nothing to show.")
    rows, columns = ([token_label(token) for token in tokens] for tokens in (rows, columns))
    most = float(np.nanmax(np.abs(grid), initial=0.0)) or 1.0
    shown = [[f"{value:.2f}" for value in row] for row in grid]
    if texts is not None:
        shown = [[str(text) for text in row] for row in texts]
    longest = max(text_width(text, 11) for row in shown for text in row) + 10
    wide = max(NARROW, min(WIDE, longest))
    reach = max(text_width(label, 11) for label in columns)
    turn = 0 if reach <= wide - 4 else -45
    left = 28 + max(text_width(label, 12) for label in rows)
    top = 18 + 26 * bool(title) + (14.0 if not turn else 0.72 * reach + 14)
    parts = []
    for j, label in enumerate(columns):
        x = left + (j + 0.5) * wide + (2 if turn else 0)
        parts.append(svg.label(x, top - 7, label, "small", "" if turn else "middle", turn))
    for i, label in enumerate(rows):
        y = top + i * TALL
        parts.append(svg.label(left - 8, y + 17, label, anchor="end"))
        for j, value in enumerate(grid[i]):
            parts.append(_cell(left + j * wide, y, wide, value, most, shown[i][j], f"{label}, {columns[j]}"))
    bottom = top + len(rows) * TALL + 22
    low = float(np.nanmin(grid, initial=0.0))
    largest = f"Largest value {svg.short_number(float(f'{most:.3g}'))}"
    notes = svg.notes_on(grid, largest + ("; orange is below zero." if low < 0 else "."))
    parts += [svg.label(left, bottom + 18 * i, text, "mute") for i, text in enumerate(notes)]
    width = max(left + len(columns) * wide + 16 + 0.72 * reach * bool(turn), left + 16 + max(map(text_width, notes)))
    about = f"{len(rows)} rows by {len(columns)} columns. {' '.join(notes)}"
    return svg.frame(width, bottom + 18 * len(notes), title, about, "".join(parts), name="Values")


def _cell(x: float, y: float, wide: float, value: float, most: float, text: str, name: str) -> str:
    tip = escape(f"{name}: {text}" + (f" ({value:.4g})" if math.isfinite(value) else ""))
    opacity = 0.0 if math.isnan(value) else 0.55 * abs(value) / most  # at most 0.55: the text stays legible on it
    fill = f'fill="{ORANGE if value < 0 else BLUE}" fill-opacity="{opacity:.3f}"'
    box = f'x="{x:.1f}" y="{y:.1f}" width="{wide - 1.5:.1f}" height="{TALL - 1.5:.1f}"'
    label = svg.label(x + wide / 2, y + 17, token_label(text, wide - 4), "small", "middle")
    return f'<g><title>{tip}</title><rect {box} stroke="#8a94a3" stroke-opacity="0.3" {fill}/>{label}</g>'
