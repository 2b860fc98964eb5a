"""Quality against cost: mean ± standard deviation over log parameters or log training FLOPs, a point per row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from regard.explore import svg
from regard.explore.chart import make_axis
from regard.explore.html import escape, text_width, token_label
from regard.study import formats
from regard.study.labels import LABEL, label_boxes
from regard.study.marks import KINDS, WIDE, arrow, kind_of, marker, reach
from regard.study.table import RowResult, StudyTable
from regard.terminal import count

TOP = 84.0  # of the points


def against(table: StudyTable, cost: str, width: int = WIDE) -> str:
    """Quality against "parameters" or "flops"; the axis of the cost is logarithmic."""
    what = {"parameters": "parameters", "flops": "training FLOPs"}[cost]
    title = f"{formats.capital(table.metric)} against {what}"
    rows = [
        row for row in table.rows if row.mean is not None and math.isfinite(row.mean) and (getattr(row, cost) or 0) > 0
    ]
    if not rows:
        return svg.empty_figure(title, f"No row has a score and its {what}.")
    plot = Scatter(table, rows, [float(getattr(row, cost)) for row in rows], width)
    parts = [svg.label(16, 62, f"{formats.metric_name(table)}, mean ± standard deviation over seeds", "mute")]
    parts += [*plot.axes(f"{what}, logarithmic"), plot.legend(), *plot.points(what)]
    height = plot.bottom + 84
    without = [formats.one_line(row.name) for row in table.rows if row not in rows]
    if without:
        height += 24
        parts.append(svg.label(16, height - 12, token_label(f"Not drawn: {', '.join(without)}.", width - 32), "mute"))
    about = " ".join(f"{row.name}: {formats.score(table, row)}." for row in rows)
    return svg.frame(width, height, title, about, "".join(parts), name="Quality and cost")


class Scatter:
    """The layout: rows that have a score, and their costs."""

    def __init__(self, table: StudyTable, rows: list[RowResult], costs: list[float], width: int) -> None:
        self.table, self.rows, self.costs, self.width = table, rows, costs, width
        factor = formats.scale(table)
        self.means = [factor * float(row.mean or 0.0) for row in rows]
        self.spread = [factor * (row.sd or 0.0) for row in rows]
        centre = self.means[0] if rows[0] is table.rows[0] else float(np.median(self.means))
        bars = [*zip(self.means, self.spread, strict=True)]
        limit = reach(abs(mean - centre) + sd for mean, sd in bars) or 1.0
        least = 0.0 if min(self.means) >= 0 else -math.inf  # no bar reaches a score that there cannot be
        ends = [max(least, mean + way * sd) for mean, sd in bars for way in (-1, 1)]
        inside = [max(centre - limit, min(centre + limit, end)) for end in ends]
        self.y0, self.y1, self.up = make_axis(np.array(inside), snap=True)
        self.x0, self.x1, self.across = log_axis(costs)
        self.marks = [formats.minus(svg.short_number(round(tick, 10))) for tick in self.up]
        self.left, self.right = 30 + max(map(text_width, self.marks)), width - 28.0
        self.bottom = TOP + max(300, 20 * len(rows))

    def x(self, logarithm: float) -> float:
        return self.left + (logarithm - self.x0) * ((self.right - self.left) / (self.x1 - self.x0))

    def y(self, value: float) -> float:
        unit = (self.bottom - TOP) / (self.y1 - self.y0)
        return self.bottom - (min(max(value, self.y0), self.y1) - self.y0) * unit

    def axes(self, below: str) -> list[str]:
        parts = []
        for tick, mark in zip(self.up, self.marks, strict=True):
            parts.append(f'<path class="rule" d="M{self.left:.1f} {self.y(tick):.1f}H{self.right}"/>')
            parts.append(svg.label(self.left - 10, self.y(tick) + 4.5, mark, "mute", "end"))
        parts += [svg.label(self.x(tick), self.bottom + 24, mark, "mute", "middle") for tick, mark in self.across]
        return [*parts, svg.label(self.right, self.bottom + 46, below, "mute", "end")]

    def legend(self) -> str:
        """The signs that occur, with their meanings."""
        signs, x, y = "", 16.0, self.bottom + 66
        for kind, word in (("base", "base"), *((kind, word) for word, kind in KINDS.items())):
            if any(kind_of(row, self.table) == kind for row in self.rows):
                signs += f'<g class="{kind}">{marker(x + 6, y, kind)}</g>' + svg.label(x + 18, y + 4, word, "mute")
                x += 40 + text_width(word)
        return signs

    def points(self, what: str) -> list[str]:
        """Every row, the base on top."""
        points = [(self.x(math.log10(cost)), self.y(mean)) for cost, mean in zip(self.costs, self.means, strict=True)]
        bars = [(self.y(mean + sd), self.y(mean - sd)) for mean, sd in zip(self.means, self.spread, strict=True)]
        slack = 1e-9 * (self.y1 - self.y0)
        far = [not self.y0 - slack <= mean <= self.y1 + slack for mean in self.means]
        texts = []
        for row, is_far in zip(self.rows, far, strict=True):
            value = f" ({formats.minus(formats.number(self.table, row.mean))})" if is_far else ""
            room = max(90.0, 0.22 * self.width - text_width(value))
            texts.append(token_label(formats.one_line(row.name), room) + value)
        boxes = label_boxes(points, bars, texts, (self.left, TOP, self.right, self.bottom))
        parts = []
        for at in sorted(range(len(boxes)), key=lambda at: self.rows[at] is self.table.rows[0]):
            row, (x, y), kind = self.rows[at], points[at], kind_of(self.rows[at], self.table)
            if far[at]:
                down = self.means[at] < self.y0
                drawn = arrow(x, self.bottom - 1 if down else TOP + 1, 0, 1 if down else -1)
            else:
                bar = f'<path class="bar thin" d="M{x:.1f} {bars[at][0]:.1f}V{bars[at][1]:.1f}"/>'
                drawn = bar * (self.spread[at] > 0) + marker(x, y, kind)
            words = f"{row.name}: {formats.score(self.table, row)}, {self.costs[at]:,.4g} {what}"
            drawn = _named(drawn, x, y, boxes[at], texts[at])
            parts.append(f'<g class="row {kind}"><title>{escape(words)}</title>{drawn}</g>')
        return parts


def _named(drawn: str, x: float, y: float, box: tuple[float, float, float, float], text: str) -> str:
    """A point with its label, and a line between them if they are far apart."""
    near = box[0] if box[0] > x else box[2]  # the side of the label that the point is on
    middle = (box[1] + box[3]) / 2
    if math.hypot(near - x, middle - y) > LABEL:
        start = x + math.copysign(5, near - x)
        drawn = f'<path class="leader" d="M{start:.1f} {y:.1f}L{near:.1f} {middle:.1f}"/>' + drawn
    return drawn + svg.label(near, middle + 4.5, text, "", "start" if near > x else "end")


def log_axis(values: Sequence[float]) -> tuple[float, float, list[tuple[float, str]]]:
    """Ends (log10) and ticks with their labels: 1, 2, 5, 10 …, or round numbers between them."""
    low, high = min(values), max(values)
    if high <= low * (1 + 1e-9):
        return math.log10(low) - 0.5, math.log10(low) + 0.5, [(math.log10(low), _short(low))]
    room = 0.04 * math.log10(high / low)
    first, last = math.log10(low) - room, math.log10(high) + room
    ticks = make_axis(np.array([first, last]), log=True)[2]
    if len(ticks) < 3:
        ticks = [math.log10(tick) for tick in make_axis(np.array([low, high]))[2] if tick > 0]
    return first, last, [(tick, _short(10**tick)) for tick in ticks if first <= tick <= last]


def _short(value: float) -> str:
    """12.00 M as 12 M"""
    text, _, unit = count(float(f"{value:.4g}")).partition(" ")
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}".rstrip()
