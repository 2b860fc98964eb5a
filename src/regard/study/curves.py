"""Learning curves: a panel per row, with the mean over seeds, a band from lowest to highest, and the base dashed."""

from __future__ import annotations

import math

import numpy as np

from regard.explore import svg
from regard.explore.chart import make_axis
from regard.explore.html import escape, text_width, token_label
from regard.study import formats
from regard.study.marks import WIDE, reach
from regard.study.table import RowResult, StudyTable

GAP, TALL, TOP = 22, 132, 96  # between panels, their height, and where the first begins
BELOW = 62  # a panel: its ticks and the name of the next


def averaged(row: RowResult) -> np.ndarray:
    """[points, 4]: step, mean, lowest and highest over seeds, where at least half of the seeds have a value."""
    values: dict[int, list[float]] = {}
    for points in row.curves.values():
        for step, value in points:
            if math.isfinite(value):
                values.setdefault(step, []).append(value)
    least = len([points for points in row.curves.values() if points]) / 2
    rows = [(step, sum(v) / len(v), min(v), max(v)) for step, v in sorted(values.items()) if len(v) >= least]
    return np.array(rows[:: max(1, len(rows) // 200)], dtype=np.float64).reshape(-1, 4)


def curves(table: StudyTable, width: int = WIDE) -> str:
    """A panel per row, all with the same axes."""
    logged = "training loss" if table.curve == "loss" else table.curve.replace("valid_", "validation ")
    metric = formats.one_line(logged.replace("_", " "))
    title = f"{formats.capital(metric)} by row"
    lines = {at: line for at, row in enumerate(table.rows) if len(line := averaged(row))}
    if not lines:
        return svg.empty_figure(title, "No run has logged this metric.")
    panels = Panels(table, lines, width)
    parts = [_legend(0 in lines and len(lines) > 1, width)]
    parts += [panels.draw(slot, at) for slot, at in enumerate(lines)]
    height = TOP + math.ceil(len(lines) / panels.columns) * (TALL + BELOW) - 30.0
    lacking = [formats.one_line(row.name) for at, row in enumerate(table.rows) if at not in lines]
    notes = [f"x: step; y: {metric}" + ", logarithmic" * panels.log]
    notes += ["Values far from those of other rows are cut off."] if panels.cut else []
    notes += [f"Without a curve: {', '.join(lacking)}."] if lacking else []
    for note in notes:
        height += 24
        parts.append(svg.label(16, height - 6, token_label(note, width - 32), "mute"))
    own = max(panels.first + panels.columns * (panels.wide + GAP) - GAP + 16, min(width, 520))
    return svg.frame(own, height + 10, title, f"{len(lines)} rows.", "".join(parts), name="Learning curves")


class Panels:
    """The axes of all panels, and where they are; `lines`: the curves of rows, by the number of the row."""

    def __init__(self, table: StudyTable, lines: dict[int, np.ndarray], width: int) -> None:
        self.table = table
        every = np.concatenate([*lines.values()])
        self.log = ("loss" in table.curve or "perplexity" in table.curve) and bool(every[:, 1:].min() > 0)
        if self.log:
            every[:, 1:] = np.log10(every[:, 1:])
            lines = {at: np.concatenate([line[:, :1], np.log10(line[:, 1:])], axis=1) for at, line in lines.items()}
        start = float(every[0, 1])  # where the first row begins
        extents = {at: float(np.abs(line[:, 1:] - start).max()) for at, line in lines.items()}
        limit = reach(extents.values())
        near = np.concatenate([line for at, line in lines.items() if extents[at] <= limit])
        self.cut = len(near) < len(every)
        self.x0, x1, self.across = make_axis(every[:, 0])
        self.y0, y1, self.up = make_axis(near[:, 1:], self.log, snap=not self.log)
        if self.log and len(self.up) < 3:  # not enough of 1, 2, 5, 10
            ticks = make_axis(10 ** near[:, 1:])[2]
            self.up = [math.log10(tick) for tick in ticks if tick > 0 and self.y0 <= math.log10(tick) <= y1]
        low, high = [-np.inf, *[self.y0] * 3], [np.inf, *[y1] * 3]
        self.lines = {at: line.clip(low, high) for at, line in lines.items()}
        self.marks = [svg.short_number(10**tick if self.log else round(tick, 10)) for tick in self.up]
        self.first = 28 + max(map(text_width, self.marks))
        most = 2 if width < WIDE else 4 if len(lines) > 6 else 3
        self.columns = min(most, len(lines))
        self.wide = (width - 16 - self.first - GAP * (most - 1)) / most
        self.unit = np.array([self.wide / (x1 - self.x0), -TALL / (y1 - self.y0)])

    def draw(self, slot: int, at: int) -> str:
        """The panel of row `at`."""
        row, line = self.table.rows[at], self.lines[at]
        down, right = divmod(slot, self.columns)
        x, y = self.first + right * (self.wide + GAP), float(TOP + down * (TALL + BELOW))
        parts = [svg.label(x, y - 10, token_label(formats.one_line(row.name), self.wide - 8))]
        for tick, mark in zip(self.up, self.marks, strict=True):
            height = y + TALL + (tick - self.y0) * self.unit[1]
            parts.append(f'<path class="rule" d="M{x:.1f} {height:.1f}h{self.wide:.1f}"/>')
            parts.append(svg.label(x - 8, height + 4.5, mark, "mute", "end") if right == 0 else "")
        for tick in (self.across[0], self.across[-1]):
            anchor, place = "end" if tick == self.across[-1] else "start", x + (tick - self.x0) * self.unit[0]
            parts.append(svg.label(place, y + TALL + 18, svg.short_number(tick), "mute", anchor))
        mean, lowest, highest = (self._placed(line, column, x, y) for column in (1, 2, 3))
        drawn = ""
        if at and 0 in self.lines:
            base = self._placed(self.lines[0], 1, x, y)
            drawn += f'<polyline class="curve s5" stroke-dasharray="4 3" points="{_points(base)}"/>'
        if len(row.curves) > 1:
            drawn += f'<polygon class="band s0" points="{_points(np.concatenate([lowest, highest[::-1]]))}"/>'
        drawn += f'<polyline class="curve s0" points="{_points(mean)}"/>'
        if len(line) == 1:
            drawn += f'<circle class="dot s0" cx="{mean[0, 0]:.1f}" cy="{mean[0, 1]:.1f}" r="2.5"/>'
        words = f"{row.name}: {len(row.curves)} seeds, {len(line)} points"
        return "".join(parts) + f"<g><title>{escape(words)}</title>{drawn}</g>"

    def _placed(self, line: np.ndarray, column: int, x: float, y: float) -> np.ndarray:
        """[points, 2]: a column over steps, in the panel at x, y."""
        return (line[:, (0, column)] - (self.x0, self.y0)) * self.unit + (x, y + TALL)


def _legend(base: bool, width: int) -> str:
    text = "mean over seeds; band: lowest to highest" + " seed" * (width >= WIDE)
    line = '<polyline class="curve s0" points="16,54 42,54"/>' + svg.label(50, 58, text, "mute")
    x = 50 + 0.92 * text_width(text) + 14
    dashed = f'<polyline class="curve s5" stroke-dasharray="4 3" points="{x:.0f},54 {x + 20:.0f},54"/>'
    return line + (dashed + svg.label(x + 26, 58, "base", "mute") if base else "")


def _points(points: np.ndarray) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
