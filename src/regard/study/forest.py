"""The forest plot of a study: for every row the mean difference to the base and its 95 % interval, best row first.

An interval that crosses zero shows at a glance what the seeds do not decide (Lewis and Clarke 2001). Beside each stand
its numbers and the verdict in words; on a phone the name and the verdict have a line of their own.
"""

from __future__ import annotations

import math

import numpy as np

from regard.explore import svg
from regard.explore.chart import make_axis
from regard.explore.html import escape, text_width, token_label
from regard.study import formats
from regard.study.marks import WIDE, arrow, kind_of, marker, reach
from regard.study.table import RowResult, StudyTable

LINE = 26  # height of a row; on a phone the name has a line of its own
TOP = 80  # of the rows


def differences(table: StudyTable, width: int = WIDE) -> str:
    """The forest plot."""
    side = 1 if table.higher else -1
    title = f"Difference to {formats.one_line(table.rows[0].name)}: {formats.metric_name(table)}"
    title = token_label(title, 0.8 * width)
    known = [row for row in table.rows[1:] if row.difference is not None and math.isfinite(row.difference.mean)]
    known.sort(key=lambda row: -side * row.difference.mean)  # type: ignore[union-attr]
    if not known:
        return svg.empty_figure(title, "There is no difference to draw.")
    plot = Forest(table, known, width)
    parts = [*plot.heading(), *plot.axis(), *(plot.row(at) for at in range(len(plot.rows)))]
    height = plot.bottom + 40
    if plot.has_outside:
        height += 24
        parts.append(svg.label(16, height - 14, "A row outside the axis is drawn as an arrow alone.", "mute"))
    about = " ".join(f"{row.name}: {formats.difference(table, row)}, {row.verdict}." for row in known)
    return svg.frame(width, height, title, about, "".join(parts), name="Differences")


class Forest:
    """The layout: `known` are the rows with a difference, which come first."""

    def __init__(self, table: StudyTable, known: list[RowResult], width: int) -> None:
        self.table, self.known, self.width, self.narrow = table, known, width, width < WIDE
        self.rows = [*known, *(row for row in table.rows[1:] if row not in known)]
        self.ends = [self._ends(row) for row in known]
        limit = reach(max(map(abs, one)) for one in self.ends)
        inside = [max(-limit, min(limit, end)) for one in self.ends for end in one]
        self.first, self.last, self.ticks = make_axis(np.array([0.0, *inside]), snap=True)
        self.slack = 1e-9 * (self.last - self.first)
        self.has_outside = not all(self.is_inside(mean) for _, mean, _ in self.ends)

        self.numbers = [formats.minus(formats.difference(table, row)) for row in known]
        self.words = width - 16 - text_width("not decided") - 20  # where the verdict begins
        verdicts = [formats.verdict(table, row) for row in known]
        self.said = verdicts + [formats.missing(row) or formats.NO_SCORE for row in self.rows[len(known) :]]
        room = width - 48 - max(map(text_width, self.said)) if self.narrow else 220
        self.names = [token_label(formats.one_line(row.name), room) for row in self.rows]
        if self.narrow:
            self.left, self.right, self.step, self.below = 28.0, width - 28.0, 2 * LINE - 6, 0.72
        else:
            self.left = 32 + max(map(text_width, (*self.names, "row")))
            self.right = self.words - 44 - max(text_width(text, 14) for text in (*self.numbers, "difference [95 %]"))
            self.step, self.below = LINE, 0.5  # a row's height, and where in it the interval is drawn
        self.bottom = TOP + self.step * len(self.names)

    def _ends(self, row: RowResult) -> tuple[float, float, float]:
        """The ends of the interval, with the mean between them."""
        assert row.difference is not None
        mean, factor = row.difference.mean, formats.scale(self.table)
        low, high = (mean if one is None else one for one in formats.ends(row))
        return factor * low, factor * mean, factor * high

    def is_inside(self, value: float) -> bool:
        return self.first - self.slack <= value <= self.last + self.slack

    def x(self, value: float) -> float:
        unit = (self.right - self.left) / (self.last - self.first)
        return self.left + (min(max(value, self.first), self.last) - self.first) * unit

    def heading(self) -> list[str]:
        worse, better = ("← worse", "better →") if self.table.higher else ("← better", "worse →")
        parts = [svg.label(self.left, 62, worse, "mute"), svg.label(self.right, 62, better, "mute", "end")]
        if not self.narrow:
            parts += [svg.label(16, 62, "row", "mute"), svg.label(self.right + 24, 62, "difference [95 %]", "mute")]
            parts.append(svg.label(self.words, 62, "verdict", "mute"))
        return parts

    def axis(self) -> list[str]:
        bands = [(TOP - 6.0, self.bottom - TOP + 10.0)]
        if self.narrow:  # between the lines of text
            bands = [(TOP + self.step * (at + self.below) - 9, 18.0) for at in range(len(self.known))]
        parts = []
        for tick in self.ticks:
            kind = "zero" if abs(tick) <= self.slack else "rule"
            line = "".join(f"M{self.x(tick):.1f} {start:.1f}v{tall:.1f}" for start, tall in bands)
            parts.append(f'<path class="{kind}" d="{line}"/>')
            text = formats.minus(svg.short_number(round(tick, 10)))
            parts.append(svg.label(self.x(tick), self.bottom + 22, text, "mute", "middle"))
        return parts

    def row(self, at: int) -> str:
        row, y = self.rows[at], TOP + LINE * 0.5 + 4.5 + self.step * at
        name = svg.label(16, y, self.names[at])
        if at >= len(self.known):
            x, anchor = (self.width - 16.0, "end") if self.narrow else (self.right + 24, "")
            return name + svg.label(x, y, self.said[at], "mute", anchor)
        kind, tip = kind_of(row, self.table), f"{row.name}: {formats.difference(self.table, row)}, {self.said[at]}"
        middle = TOP + self.step * (at + self.below)
        drawn = self._interval(at, middle, kind)
        if self.narrow:
            drawn += svg.label(self.width - 16, y, self.said[at], "", "end")
        else:
            drawn += marker(self.words + 6, middle, kind) + svg.label(self.words + 20, y, self.said[at])
            drawn += svg.label(self.right + 24, y, self.numbers[at])
        return f'{name}<g class="row {kind}"><title>{escape(tip)}</title>{drawn}</g>'

    def _interval(self, at: int, y: float, kind: str) -> str:
        low, mean, high = self.ends[at]
        drawn = f'<path class="bar" d="M{self.x(low):.1f} {y:.1f}H{self.x(high):.1f}"/>' if high > low else ""
        drawn += arrow(self.left, y, -1) if low < self.first - self.slack else ""
        drawn += arrow(self.right, y, 1) if high > self.last + self.slack else ""
        if self.is_inside(mean):
            return drawn + marker(self.x(mean), y, kind)
        if self.narrow:
            x, anchor = (self.left + 12, "start") if mean < self.first else (self.right - 12, "end")
            drawn += svg.label(x, y + 4.5, self.numbers[at].partition(" ")[0], "mute", anchor)
        return drawn
