"""The figures of a study as SVG: differences with their intervals, learning curves, quality against cost.

    differences   a forest plot: for every row the mean difference to the base and its 95 % interval, best row first.
                  An interval that crosses zero shows at a glance what the seeds do not decide  (Lewis and Clarke 2001)
    curves        a panel per row: the mean over seeds, a band from the lowest to the highest seed, the base dashed
    against       mean ± standard deviation over log parameters or log training FLOPs, every point with its name

No figure depends on colour: better is a triangle that points up, worse one that points down, not decided a circle, and
the forest plot has the words as well. A row far from all others would press these into one line, so it is drawn at the
edge as an arrow, with its number as text (`reach`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from regard.explore import svg
from regard.explore.chart import make_axis
from regard.explore.html import escape, text_width, token_label
from regard.study import formats
from regard.study.table import RowResult, StudyTable
from regard.terminal import count

WIDTH = 864  # of every figure
FAR = 3.0  # a row more than this many times farther away than most is drawn as an arrow
LINE = 26  # height of a row of the forest plot
ACROSS = 4  # panels side by side, of more than six
LABEL = 16.0  # height of a label beside a point
CLUSTER = 14.0  # points that are nearer than this share a column of labels
KINDS = {"better": "better", "worse": "worse", "not decided": "undecided"}
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


def figures(table: StudyTable) -> dict[str, str]:
    """All figures of a study by the name of their file."""
    return {
        "differences": differences(table),
        "curves": curves(table),
        "parameters": against(table, "parameters"),
        "flops": against(table, "flops"),
    }


def reach(extents: Iterable[float]) -> float:
    """How far an axis reaches: to the farthest row within FAR times the distance that two thirds of the rows keep."""
    ordered = sorted(extents)
    common = ordered[math.ceil(len(ordered) * 2 / 3) - 1]
    return max(one for one in ordered if one <= FAR * common) if common > 0 else ordered[-1]


def kind_of(row: RowResult, table: StudyTable) -> str:
    return "base" if row is table.rows[0] else KINDS.get(row.verdict, "undecided")


def marker(x: float, y: float, kind: str, size: float = 5.5) -> str:
    """The sign of a verdict."""
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


def differences(table: StudyTable) -> str:
    """The forest plot."""
    factor, side = formats.scale(table), 1 if table.higher else -1
    title = f"Difference to {formats.one_line(table.rows[0].name)}, {formats.metric_name(table)}"
    known = [row for row in table.rows[1:] if row.difference is not None and math.isfinite(row.difference.mean)]
    known.sort(key=lambda row: -side * row.difference.mean)  # type: ignore[union-attr]
    unknown = [row for row in table.rows[1:] if row not in known]
    if not known:
        return svg.empty_figure(
            token_label(title, 600), "There is no difference to draw: no row has a score beside the base."
        )
    ends = {}
    for row in known:
        found = row.difference
        assert found is not None
        low, high = (found.mean if one is None else one for one in formats.ends(row))
        ends[row.name] = (factor * low, factor * found.mean, factor * high)
    limit = reach(max(map(abs, one)) for one in ends.values())
    inside = [max(-limit, min(limit, end)) for one in ends.values() for end in one]
    first, last, ticks = make_axis(np.array([0.0, *inside]), snap=True)

    names = [token_label(formats.one_line(row.name), 220) for row in (*known, *unknown)]
    numbers = [formats.minus(formats.difference(table, row)) for row in known]
    left = 32 + max(map(text_width, (*names, "row")))
    words = WIDTH - 16 - text_width("not decided") - 20  # the verdict
    right = words - 44 - max(text_width(text, 14) for text in (*numbers, "difference [95 %]"))
    top, bottom = 80, 80 + LINE * len(names)
    unit = (right - left) / (last - first)

    def place(value: float) -> float:
        return left + (min(max(value, first), last) - first) * unit

    parts = [svg.label(16, 62, "row", "mute"), svg.label(right + 24, 62, "difference [95 %]", "mute")]
    parts.append(svg.label(words, 62, "verdict", "mute"))
    for tick in ticks:
        kind = "zero" if abs(tick) < 1e-9 * (last - first) else "rule"
        parts.append(f'<path class="{kind}" d="M{place(tick):.1f} {top - 6}V{bottom + 4}"/>')
        text = formats.minus(svg.short_number(round(tick, 10)))
        parts.append(svg.label(place(tick), bottom + 22, text, "mute", "middle"))
    worse, better = ("← worse", "better →") if table.higher else ("← better", "worse →")
    parts += [svg.label(left, 62, worse, "mute"), svg.label(right, 62, better, "mute", "end")]
    outside = False
    for at, (row, name) in enumerate(zip((*known, *unknown), names, strict=True)):
        y = top + LINE * (at + 0.5)
        parts.append(svg.label(16, y + 4.5, name))
        if row not in known:
            parts.append(svg.label(right + 24, y + 4.5, formats.missing(row) or formats.NO_SCORE, "mute"))
            continue
        low, mean, high = ends[row.name]
        kind, said = kind_of(row, table), formats.verdict(table, row)
        tip = f"{row.name}: {formats.difference(table, row)}, {said}"
        drawn = f'<path class="bar" d="M{place(low):.1f} {y}H{place(high):.1f}"/>' if high > low else ""
        slack = 1e-9 * (last - first)
        drawn += arrow(left, y, -1) if low < first - slack else ""
        drawn += arrow(right, y, 1) if high > last + slack else ""
        if first - slack <= mean <= last + slack:
            drawn += marker(place(mean), y, kind)
        else:
            outside = True
        drawn += marker(words + 6, y, kind) + svg.label(words + 20, y + 4.5, said)
        drawn += svg.label(right + 24, y + 4.5, numbers[at])
        parts.append(f'<g class="row {kind}"><title>{escape(tip)}</title>{drawn}</g>')
    height = bottom + 40
    if outside:
        height += 24
        parts.append(svg.label(16, height - 14, "A row outside the axis is drawn as an arrow alone.", "mute"))
    about = " ".join(f"{row.name}: {formats.difference(table, row)}, {row.verdict}." for row in known)
    return svg.frame(WIDTH, height, token_label(title, 700), about, "".join(parts), name="Differences")


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


def curves(table: StudyTable) -> str:
    """A panel per row, all with the same axes."""
    metric = formats.one_line(table.curve.replace("valid_", "validation ").replace("_", " "))
    title = f"{_capital(metric)} by row"
    means = {at: line for at, row in enumerate(table.rows) if len(line := averaged(row))}
    if not means:
        return svg.empty_figure(title, "There are no curves to draw: no run has logged this metric.")
    every = np.concatenate([*means.values()])
    log = ("loss" in table.curve or "perplexity" in table.curve) and bool(every[:, 1:].min() > 0)
    if log:
        every[:, 1:] = np.log10(every[:, 1:])
        means = {at: np.concatenate([line[:, :1], np.log10(line[:, 1:])], axis=1) for at, line in means.items()}
    start = float(every[0, 1])  # where the first row begins
    extents = {at: float(np.abs(line[:, 1:] - start).max()) for at, line in means.items()}
    limit = reach(extents.values())
    near = np.concatenate([line for at, line in means.items() if extents[at] <= limit])
    (x0, x1, across), (y0, y1, up) = make_axis(every[:, 0]), make_axis(near[:, 1:], log, snap=not log)
    if len(up) < 2:  # less than a decade's step
        y0, y1, up = make_axis(near[:, 1:], log, snap=True)
    means = {at: line.clip([-np.inf, y0, y0, y0], [np.inf, y1, y1, y1]) for at, line in means.items()}
    marks = [svg.short_number(10**tick if log else round(tick, 10)) for tick in up]
    first = 28 + max(map(text_width, marks))
    gap, tall, top = 22, 132, 96
    across_panels = ACROSS if len(means) > 6 else 3
    columns = min(across_panels, len(means))
    wide = (WIDTH - 16 - first - gap * (across_panels - 1)) / across_panels
    unit = np.array([wide / (x1 - x0), -tall / (y1 - y0)])
    has_base = 0 in means
    parts = [_legend(has_base and len(means) > 1)]
    for slot, (at, line) in enumerate(means.items()):
        down, right = divmod(slot, columns)
        x, y = first + right * (wide + gap), top + down * (tall + 62)
        parts.append(svg.label(x, y - 10, token_label(formats.one_line(table.rows[at].name), wide - 8)))
        for tick, mark in zip(up, marks, strict=True):
            height = y + tall + (tick - y0) * unit[1]
            parts.append(f'<path class="rule" d="M{x:.1f} {height:.1f}h{wide:.1f}"/>')
            parts.append(svg.label(x - 8, height + 4.5, mark, "mute", "end") if right == 0 else "")
        for tick in (across[0], across[-1]):
            anchor = "end" if tick == across[-1] else "start"
            parts.append(svg.label(x + (tick - x0) * unit[0], y + tall + 18, svg.short_number(tick), "mute", anchor))
        placed = [(line[:, (0, column)] - (x0, y0)) * unit + (x, y + tall) for column in (1, 2, 3)]
        words = f"{table.rows[at].name}: {len(table.rows[at].curves)} seeds, {len(line)} points"
        drawn = ""
        if at and has_base:
            base = (means[0][:, (0, 1)] - (x0, y0)) * unit + (x, y + tall)
            drawn += f'<polyline class="curve s5" stroke-dasharray="4 3" points="{_points(base)}"/>'
        if len(table.rows[at].curves) > 1:
            drawn += f'<polygon class="band s0" points="{_points(np.concatenate([placed[1], placed[2][::-1]]))}"/>'
        drawn += f'<polyline class="curve s0" points="{_points(placed[0])}"/>'
        if len(line) == 1:
            drawn += f'<circle class="dot s0" cx="{placed[0][0, 0]:.1f}" cy="{placed[0][0, 1]:.1f}" r="2.5"/>'
        parts.append(f"<g><title>{escape(words)}</title>{drawn}</g>")
    height = top + math.ceil(len(means) / columns) * (tall + 62) - 30.0
    lacking = [formats.one_line(row.name) for at, row in enumerate(table.rows) if at not in means]
    notes = [
        f"x: step; y: {metric}"
        + ", logarithmic" * log
        + "; far values are cut off at the edge" * (len(near) < len(every))
    ]
    notes += [f"Without a curve: {', '.join(lacking)}."] if lacking else []
    for note in notes:
        height += 24
        parts.append(svg.label(16, height - 6, token_label(note, WIDTH - 40), "mute"))
    width = first + columns * (wide + gap) - gap + 16
    return svg.frame(max(width, 480), height + 10, title, f"{len(means)} rows.", "".join(parts), name="Learning curves")


def _capital(text: str) -> str:
    return text[:1].upper() + formats.one_line(text[1:])


def _legend(base: bool) -> str:
    text = "mean over seeds; band: lowest to highest seed"
    line = '<polyline class="curve s0" points="16,54 42,54"/>' + svg.label(50, 58, text, "mute")
    x = 50 + text_width(text) + 20
    dashed = f'<polyline class="curve s5" stroke-dasharray="4 3" points="{x:.0f},54 {x + 26:.0f},54"/>'
    return line + (dashed + svg.label(x + 34, 58, "base", "mute") if base else "")


def _points(points: np.ndarray) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def against(table: StudyTable, cost: str) -> str:
    """Quality against "parameters" or "flops"; the axis of the cost is logarithmic."""
    what = {"parameters": "parameters", "flops": "training FLOPs"}[cost]
    title = f"{_capital(table.metric)} against {what}"
    factor = formats.scale(table)
    rows = [
        row for row in table.rows if row.mean is not None and math.isfinite(row.mean) and (getattr(row, cost) or 0) > 0
    ]
    if not rows:
        return svg.empty_figure(title, f"There is nothing to draw: no row has both a score and its {what}.")
    means = [factor * float(row.mean or 0.0) for row in rows]
    spread = [factor * (row.sd or 0.0) for row in rows]
    centre = means[0] if rows[0] is table.rows[0] else float(np.median(means))
    limit = reach(abs(mean - centre) + sd for mean, sd in zip(means, spread, strict=True)) or 1.0
    ends = [mean + way * sd for mean, sd in zip(means, spread, strict=True) for way in (-1, 1)]
    y0, y1, up = make_axis(np.array([max(centre - limit, min(centre + limit, end)) for end in ends]), snap=True)
    x0, x1, across = _log_axis([float(getattr(row, cost)) for row in rows])
    marks = [formats.minus(svg.short_number(round(tick, 10))) for tick in up]
    left, right, top = 30 + max(map(text_width, marks)), WIDTH - 28.0, 84.0
    bottom = top + min(620, max(300, 20 * len(rows)))
    across_unit, up_unit = (right - left) / (x1 - x0), (bottom - top) / (y1 - y0)

    def height(value: float) -> float:
        return bottom - (min(max(value, y0), y1) - y0) * up_unit

    parts = [svg.label(16, 62, f"{formats.metric_name(table)}, mean ± standard deviation over seeds", "mute")]
    for tick, mark in zip(up, marks, strict=True):
        parts.append(f'<path class="rule" d="M{left:.1f} {height(tick):.1f}H{right}"/>')
        parts.append(svg.label(left - 10, height(tick) + 4.5, mark, "mute", "end"))
    for tick, mark in across:
        parts.append(svg.label(left + (tick - x0) * across_unit, bottom + 24, mark, "mute", "middle"))
    parts.append(svg.label(right, bottom + 46, f"{what}, logarithmic", "mute", "end"))

    slack = 1e-9 * (y1 - y0)
    places = [left + (math.log10(getattr(row, cost)) - x0) * across_unit for row in rows]
    points = [(x, height(mean)) for x, mean in zip(places, means, strict=True)]
    bars = [(height(mean + sd), height(mean - sd)) for mean, sd in zip(means, spread, strict=True)]
    far = [not y0 - slack <= mean <= y1 + slack for mean in means]
    texts = []
    for row, out in zip(rows, far, strict=True):
        value = f" ({formats.minus(formats.number(table, row.mean))})" if out else ""
        texts.append(token_label(formats.one_line(row.name), 190 - text_width(value)) + value)
    boxes = _labels(points, bars, texts, (left, top, right, bottom))
    for at, box in sorted(enumerate(boxes), key=lambda one: rows[one[0]] is table.rows[0]):  # the base on top
        row, (x, y), kind = rows[at], points[at], kind_of(rows[at], table)
        words = f"{row.name}: {formats.score(table, row)}, {getattr(row, cost):,.4g} {what}"
        if far[at]:
            down = means[at] < y0
            drawn = arrow(x, bottom - 1 if down else top + 1, 0, 1 if down else -1)
        else:
            drawn = f'<path class="bar thin" d="M{x:.1f} {bars[at][0]:.1f}V{bars[at][1]:.1f}"/>' * (spread[at] > 0)
            drawn += marker(x, y, kind)
        near = box[0] if box[0] > x else box[2]  # the side of the label that the point is on
        middle = (box[1] + box[3]) / 2
        if math.hypot(near - x, middle - y) > LABEL:
            start = x + math.copysign(5, near - x)
            drawn = f'<path class="leader" d="M{start:.1f} {y:.1f}L{near:.1f} {middle:.1f}"/>' + drawn
        drawn += svg.label(near, middle + 4.5, texts[at], "", "start" if near > x else "end")
        parts.append(f'<g class="row {kind}"><title>{escape(words)}</title>{drawn}</g>')
    tall = bottom + 60
    signs, x = "", 16.0
    for kind, word in (("base", "base"), *((kind, word) for word, kind in KINDS.items())):
        if any(kind_of(row, table) == kind for row in rows):
            signs += f'<g class="{kind}">{marker(x + 6, bottom + 42, kind)}</g>' + svg.label(
                x + 18, bottom + 46, word, "mute"
            )
            x += 40 + text_width(word)
    parts.append(signs)
    without = [formats.one_line(row.name) for row in table.rows if row not in rows]
    if without:
        tall += 24
        parts.append(svg.label(16, tall - 12, token_label(f"Not drawn: {', '.join(without)}.", WIDTH - 40), "mute"))
    about = " ".join(f"{row.name}: {formats.score(table, row)}." for row in rows)
    return svg.frame(WIDTH, tall, title, about, "".join(parts), name="Quality and cost")


def _log_axis(values: Sequence[float]) -> tuple[float, float, list[tuple[float, str]]]:
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


def _labels(points: Sequence[Point], bars: Sequence[Point], texts: Sequence[str], area: Box) -> list[Box]:
    """A free box for the label of every point; points, bars and labels do not overlap.

    Points one above the other, such as rows with as many parameters, get a column of labels in the same order, so that
    the lines between them do not cross; many get one on both sides. Every other label is as near as there is room.
    """
    taken = [(x - 6, min(y, top) - 1, x + 6, max(y, low) + 1) for (x, y), (top, low) in zip(points, bars, strict=True)]
    widths = [text_width(text) + 4 for text in texts]
    boxes: dict[int, Box] = {}
    clusters: list[list[int]] = []
    for at in sorted(range(len(points)), key=lambda at: points[at][0]):
        if clusters and points[at][0] - points[clusters[-1][-1]][0] < CLUSTER:
            clusters[-1].append(at)
        else:
            clusters.append([at])
    for cluster in sorted(clusters, key=len, reverse=True):
        members = sorted(cluster, key=lambda at: points[at][1])
        sides = [members] if len(members) <= 8 else [members[::2], members[1::2]]
        for side in sides if len(members) > 1 else []:
            if column := _column([points[at] for at in side], [widths[at] for at in side], taken, area):
                boxes |= zip(side, column, strict=True)
                taken += column
        for at in members:
            if at not in boxes:
                boxes[at] = _beside(points[at], widths[at], taken, area)
                taken.append(boxes[at])
    return [boxes[at] for at in range(len(points))]


def _column(points: Sequence[Point], widths: Sequence[float], taken: Sequence[Box], area: Box) -> list[Box] | None:
    """Labels one below the other beside points that are sorted by height; None where there is no room."""
    heights = _spread([y for _, y in points], LABEL + 1, area[1] + LABEL / 2, area[3] - LABEL / 2)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    for gap, on_right in itertools.product((12.0, 24.0, 40.0, 64.0, 96.0, 140.0), (True, False)):
        column = []
        for y, wide in zip(heights, widths, strict=True):
            left = last + gap if on_right else first - gap - wide
            column.append((left, y - LABEL / 2, left + wide, y + LABEL / 2))
        if all(_free(box, taken, area) for box in column):
            return column
    return None


def _spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The nearest heights, in the mean square, at least `gap` apart: isotonic regression of y_i - i·gap."""
    pools: list[tuple[float, int]] = []  # mean, size
    for at, height in enumerate(heights):
        mean, size = height - at * gap, 1
        while pools and pools[-1][0] >= mean:
            before, many = pools.pop()
            mean, size = (before * many + mean * size) / (many + size), many + size
        pools.append((mean, size))
    level = [max(low, min(high - (len(heights) - 1) * gap, mean)) for mean, size in pools for _ in range(size)]
    return [one + at * gap for at, one in enumerate(level)]


def _beside(point: Point, wide: float, taken: Sequence[Box], area: Box) -> Box:
    """The nearest free box, to the right if it can be; in a figure without room one that is not free."""
    x, y = point
    places = [
        (math.hypot(dx, dy) + 3 * (left < x), left, y + dy)
        for dy in (way * step * LABEL / 2 for step in range(60) for way in (1, -1))
        for dx in (10.0, 34.0, 70.0, 120.0, 180.0)
        for left in (x + dx, x - dx - wide)
    ]
    boxes = [(left, middle - LABEL / 2, left + wide, middle + LABEL / 2) for _, left, middle in sorted(places)]
    return next((box for box in boxes if _free(box, taken, area)), boxes[0])


def _free(box: Box, taken: Sequence[Box], area: Box) -> bool:
    within = area[0] <= box[0] and box[2] <= area[2] and area[1] <= box[1] and box[3] <= area[3]
    return within and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken)
