"""Curves as SVG: a loss over the steps, a measurement over the length.

On two logarithmic axes a power y = c·x^a is a line of slope a, so a chart of costs shows at a glance what grows with
the length and what with its square. Thin lines (`theory`) have the colour of the curve with the same name.

A value that cannot be drawn (not finite, or not positive on a logarithmic axis) leaves a gap and is counted. A
long curve is thinned to about as many points as it has pixels: of every block the lowest, the highest and one
gap stay, so that no spike is lost.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from regard.explore import svg
from regard.explore.html import escape, text_width, token_label
from regard.messages import localize

POINTS = 1_000  # a curve is thinned to about as many points as it has pixels
LOG_2 = math.log10(2)
LARGEST = 308.25  # log10 of the largest number; the ends of an axis may be beyond it
Points = Sequence[tuple[float, float]]
DASHES = ("none", "7 4", "2 4", "12 4 2 4", "4 2")


def make_axis(values: np.ndarray, log: bool = False, snap: bool = False) -> tuple[float, float, list[float]]:
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


def _doublings(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic x axis, as log10: powers of two, at most ten of them."""
    first, last = math.ceil(low / LOG_2 - 1e-9), math.floor(high / LOG_2 + 1e-9)
    return [power * LOG_2 for power in range(first, last + 1, 1 + (last - first) // 10)]


def _logarithms(points: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """[n, 2] with these columns as log10; a row with a value that cannot be drawn is NaN."""
    for axis in axes:
        values = points[:, axis]
        points[:, axis] = np.log10(values, where=values > 0, out=np.full(len(points), np.nan))
    points[np.isnan(points).any(axis=1)] = np.nan
    return points


def line_chart(
    series: Mapping[str, Points],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log_y: bool = False,
    log_x: bool = False,
    theory: Mapping[str, Points] = MappingProxyType({}),
    marks: Sequence[tuple[float, float, str]] = (),
) -> str:
    """Curves of (x, y) points, such as the loss over the steps; gaps where a value cannot be drawn.

    `theory` has a thin line for some of the series; `marks` are circles at (x, y) with a line down to the axis
    and a label.
    """
    curves, lost, legend, about = {}, 0, [], []
    logs = (*(0,) * log_x, *(1,) * log_y)
    for name, points in series.items():
        line = svg.as_array(points, (len(points), 2), field=f"series {name!r}")
        curves[name] = line = _logarithms(line, logs)
        lost += int(np.isnan(line[:, 1]).sum())
    drawn = np.concatenate([np.zeros((0, 2)), *curves.values()])
    drawn = drawn[~np.isnan(drawn[:, 1])]
    why = "not finite or not positive" if logs else "not finite"
    note = localize(f"Gaps: {lost:,} {'value' if lost == 1 else 'values'} {why}.") if lost else ""
    if not len(drawn):
        return svg.empty_figure(title or "Chart", "There are no points to draw.", note)
    (x0, x1, across), (y0, y1, up) = make_axis(drawn[:, 0], log_x), make_axis(drawn[:, 1], log_y, snap=True)
    across = _doublings(x0, x1) if log_x else across
    names = [svg.short_number(10 ** min(tick, LARGEST) if log_y else tick) for tick in up]
    left, right, x, y = 30 + max(text_width(tick, 20) for tick in names), 664.0, 16.0, 40 + 24 * bool(title)
    for i, (name, line) in enumerate(curves.items()):
        label, last = token_label(name, 260), line[~np.isnan(line[:, 1]), 1][-1:]
        if x > 16 and x + 50 + text_width(label, 19) > right:
            x, y = 16.0, y + 26
        legend.append(_curve(np.array([[x, y - 4], [x + 26, y - 4]]), i) + svg.label(x + 34, y, label))
        x += 66 + text_width(label, 19)
        end = "".join(f", last {10**value if log_y else value:.4g}" for value in last)
        about.append(f"{name}: " + localize(f"{len(line):,} points{end}."))
    top, bottom = y + 56, y + 316
    flip = np.array([(right - left) / (x1 - x0), (top - bottom) / (y1 - y0)])
    parts = [*legend, svg.label(16, top - 18, localize(y_label), "mute")]
    parts += [svg.label(right, bottom + 52, localize(x_label), "mute", "end"), svg.label(16, bottom + 80, note, "mute")]
    for tick, label in zip(up, names, strict=True):
        height = bottom + (tick - y0) * flip[1]
        parts.append(f'<path class="rule" d="M{left:.1f} {height:.1f}H{right}"/>')
        parts.append(svg.label(left - 10, height + 4.5, label, "mute", "end"))
    for tick in across:
        number = svg.short_number(round(10**tick) if log_x else tick)
        parts.append(svg.label(left + (tick - x0) * flip[0], bottom + 26, number, "mute", "middle"))
    for i, name in enumerate(curves):
        thin = theory.get(name, ())
        line = _logarithms(svg.as_array(thin, (len(thin), 2), field=f"theory {name!r}"), logs)
        line = (line[(y0 <= line[:, 1]) & (line[:, 1] <= y1)] - (x0, y0)) * flip + (left, bottom)
        if len(line):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
            parts.append(f'<polyline class="curve thin s{i % 6}" points="{path}"/>')
    for i, (line, words) in enumerate(zip(curves.values(), about, strict=True)):
        line = (_thin(line) - (x0, y0)) * flip + (left, bottom)
        parts.append(f"<g><title>{escape(words)}</title>{_curve(line, i)}</g>")
    spots = _logarithms(svg.as_array([mark[:2] for mark in marks], (len(marks), 2), field="marks"), logs)
    for i, ((x, y), (*_, label)) in enumerate(zip((spots - (x0, y0)) * flip + (left, bottom), marks, strict=True)):
        foot = bottom - 8 - 16 * (len(marks) - 1 - i)  # labels in rows, the leftmost mark's on top
        before = x + 6 + text_width(label, 11) > right
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" class="ring"/>')
        parts.append(f'<path class="ring" stroke-dasharray="1 3" d="M{x:.1f} {y + 4.5:.1f}V{bottom:.1f}"/>')
        parts.append(svg.label(x - 6 if before else x + 6, foot, label, "small halo", "end" if before else "start"))
        about.append(f"{label}.")
    height, text = bottom + 68 + 28 * bool(note), " ".join([*about, note])
    return svg.frame(696, height, title, text, "".join(parts), name="Chart", fluid=True)


def stack_charts(charts: Sequence[str], title: str) -> str:
    """Several figures one below the other, as one."""
    sizes, y, parts = [svg.figure_size(chart) for chart in charts], 0.0, []
    for chart, (_, height) in zip(charts, sizes, strict=True):
        # a nested <svg> must not follow the width of the page by itself
        inner = re.sub(r' style="[^"]*"', f' y="{y:.0f}"', chart, count=1)
        parts.append(inner)
        y += height
    about = localize(f"{len(charts)} charts, one below the other.")
    return svg.frame(max(width for width, _ in sizes), y, "", about, "".join(parts), name=title, fluid=True)
