"""What the figures of a study share: the signs of a verdict, and how far an axis reaches.

No figure depends on colour: better is a triangle that points up, worse one that points down, not decided a circle. A
row far from all others would press these into one line, so it is drawn at the edge as an arrow, with its number as text
(`reach`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from regard.study.table import RowResult, StudyTable

WIDE, NARROW = 864, 440  # the width of a figure on a page, and on a phone
FAR = 4.0  # a row more than this many times farther away than most is drawn as an arrow
KINDS = {"better": "better", "worse": "worse", "not decided": "undecided"}


def reach(extents: Iterable[float]) -> float:
    """How far an axis reaches: to the farthest row within FAR times the distance that two thirds of the rows keep."""
    ordered = sorted(extents)
    common = ordered[math.ceil(len(ordered) * 2 / 3) - 1]
    return max(one for one in ordered if one <= FAR * common) if common > 0 else ordered[-1]


def kind_of(row: RowResult, table: StudyTable) -> str:
    return "base" if row is table.rows[0] else KINDS.get(row.verdict, "undecided")


def marker(x: float, y: float, kind: str) -> str:
    """The sign of a verdict."""
    size = 5.5  # half its width
    match kind:
        case "better":
            shape = f"M{x - size:.1f} {y + size * 0.8:.1f}h{2 * size:.1f}L{x:.1f} {y - size:.1f}z"
        case "worse":
            shape = f"M{x - size:.1f} {y - size * 0.8:.1f}h{2 * size:.1f}L{x:.1f} {y + size:.1f}z"
        case "base":
            shape = f"M{x - size:.1f} {y:.1f}L{x:.1f} {y - size:.1f}L{x + size:.1f} {y:.1f}L{x:.1f} {y + size:.1f}z"
        case _:
            return f'<circle class="mark hollow" cx="{x:.1f}" cy="{y:.1f}" r="{size - 1:.1f}"/>'
    return f'<path class="mark" d="{shape}"/>'


def arrow(x: float, y: float, dx: float, dy: float = 0.0) -> str:
    """The tip of an arrow that points off the axis: in x or in y."""
    a, b = (x - 7 * dx - 5 * dy, y - 7 * dy - 5 * dx), (x - 7 * dx + 5 * dy, y - 7 * dy + 5 * dx)
    return f'<path class="bar" d="M{a[0]:.1f} {a[1]:.1f}L{x:.1f} {y:.1f}L{b[0]:.1f} {b[1]:.1f}"/>'
