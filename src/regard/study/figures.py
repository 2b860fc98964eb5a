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

import math
from collections.abc import Iterable, Sequence

import numpy as np

from regard.explore import svg
from regard.explore.chart import make_axis
from regard.explore.html import escape, text_width, token_label
from regard.study import formats
from regard.study.labels import LABEL, label_boxes
from regard.study.table import RowResult, StudyTable
from regard.terminal import count

WIDE, NARROW = 864, 440  # the width of a figure on a page, and on a phone
FAR = 4.0  # a row more than this many times farther away than most is drawn as an arrow
LINE = 26  # height of a row of the forest plot; on a phone the name has a line of its own
KINDS = {"better": "better", "worse": "worse", "not decided": "undecided"}


def figures(table: StudyTable, width: int = WIDE) -> dict[str, str]:
    """All figures of a study by the name of their file; WIDE or NARROW."""
    return {
        "differences": differences(table, width),
        "curves": curves(table, width),
        "parameters": against(table, "parameters", width),
        "flops": against(table, "flops", width),
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


def differences(table: StudyTable, width: int = WIDE) -> str:
    """The forest plot."""
    factor, side, narrow = formats.scale(table), 1 if table.higher else -1, width < WIDE
    title = f"Difference to {formats.one_line(table.rows[0].name)}: {formats.metric_name(table)}"
    title = token_label(title, 0.8 * width)
    known = [row for row in table.rows[1:] if row.difference is not None and math.isfinite(row.difference.mean)]
    known.sort(key=lambda row: -side * row.difference.mean)  # type: ignore[union-attr]
    rows = [*known, *(row for row in table.rows[1:] if row not in known)]
    if not known:
        return svg.empty_figure(title, "There is no difference to draw.")
    ends = {}
    for row in known:
        found = row.difference
        assert found is not None
        low, high = (found.mean if one is None else one for one in formats.ends(row))
        ends[row.name] = (factor * low, factor * found.mean, factor * high)
    limit = reach(max(map(abs, one)) for one in ends.values())
    inside = [max(-limit, min(limit, end)) for one in ends.values() for end in one]
    first, last, ticks = make_axis(np.array([0.0, *inside]), snap=True)

    numbers = [formats.minus(formats.difference(table, row)) for row in known]
    words = width - 16 - text_width("not decided") - 20  # where the verdict begins
    said = [formats.verdict(table, row) if row in known else formats.missing(row) or formats.NO_SCORE for row in rows]
    room = width - 48 - max(map(text_width, said)) if narrow else 220
    names = [token_label(formats.one_line(row.name), room) for row in rows]
    if narrow:
        left, right, step, below = 28.0, width - 28.0, 2 * LINE - 6, 0.72
    else:
        left = 32 + max(map(text_width, (*names, "row")))
        right = words - 44 - max(text_width(text, 14) for text in (*numbers, "difference [95 %]"))
        step, below = LINE, 0.5  # a row's height, and where in it the interval is drawn
    top, bottom = 80, 80 + step * len(names)
    unit, slack = (right - left) / (last - first), 1e-9 * (last - first)

    def place(value: float) -> float:
        return left + (min(max(value, first), last) - first) * unit

    worse, better = ("← worse", "better →") if table.higher else ("← better", "worse →")
    parts = [svg.label(left, 62, worse, "mute"), svg.label(right, 62, better, "mute", "end")]
    if not narrow:
        parts += [svg.label(16, 62, "row", "mute"), svg.label(right + 24, 62, "difference [95 %]", "mute")]
        parts.append(svg.label(words, 62, "verdict", "mute"))
    for tick in ticks:
        kind = "zero" if abs(tick) <= slack else "rule"
        bands = (
            [(top + step * (at + below) - 9, 18) for at in range(len(known))]
            if narrow
            else [(top - 6, bottom - top + 10)]
        )
        line = "".join(f"M{place(tick):.1f} {start:.1f}v{tall:.1f}" for start, tall in bands)
        parts.append(f'<path class="{kind}" d="{line}"/>')
        text = formats.minus(svg.short_number(round(tick, 10)))
        parts.append(svg.label(place(tick), bottom + 22, text, "mute", "middle"))
    outside = False
    for at, (row, name) in enumerate(zip(rows, names, strict=True)):
        y, text_y = top + step * (at + below), top + LINE * 0.5 + 4.5 + step * at
        parts.append(svg.label(16, text_y, name))
        if at >= len(known):
            x, anchor = (width - 16.0, "end") if narrow else (right + 24, "")
            parts.append(svg.label(x, text_y, said[at], "mute", anchor))
            continue
        low, mean, high = ends[row.name]
        kind, tip = kind_of(row, table), f"{row.name}: {formats.difference(table, row)}, {said[at]}"
        drawn = f'<path class="bar" d="M{place(low):.1f} {y:.1f}H{place(high):.1f}"/>' if high > low else ""
        drawn += arrow(left, y, -1) if low < first - slack else ""
        drawn += arrow(right, y, 1) if high > last + slack else ""
        if first - slack <= mean <= last + slack:
            drawn += marker(place(mean), y, kind)
        else:
            outside = True
            if narrow:
                x, anchor = (left + 12, "start") if mean < first else (right - 12, "end")
                drawn += svg.label(x, y + 4.5, numbers[at].partition(" ")[0], "mute", anchor)
        if narrow:
            drawn += svg.label(width - 16, text_y, said[at], "", "end")
        else:
            drawn += marker(words + 6, y, kind) + svg.label(words + 20, text_y, said[at])
            drawn += svg.label(right + 24, text_y, numbers[at])
        parts.append(f'<g class="row {kind}"><title>{escape(tip)}</title>{drawn}</g>')
    height = bottom + 40
    if outside:
        height += 24
        parts.append(svg.label(16, height - 14, "A row outside the axis is drawn as an arrow alone.", "mute"))
    about = " ".join(f"{row.name}: {formats.difference(table, row)}, {row.verdict}." for row in known)
    return svg.frame(width, height, title, about, "".join(parts), name="Differences")


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
    title = f"{_capital(metric)} by row"
    means = {at: line for at, row in enumerate(table.rows) if len(line := averaged(row))}
    if not means:
        return svg.empty_figure(title, "No run has logged this metric.")
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
    if log and len(up) < 3:  # not enough of 1, 2, 5, 10
        ticks = make_axis(10 ** near[:, 1:])[2]
        up = [math.log10(tick) for tick in ticks if tick > 0 and y0 <= math.log10(tick) <= y1]
    means = {at: line.clip([-np.inf, y0, y0, y0], [np.inf, y1, y1, y1]) for at, line in means.items()}
    marks = [svg.short_number(10**tick if log else round(tick, 10)) for tick in up]
    first = 28 + max(map(text_width, marks))
    gap, tall, top = 22, 132, 96
    most = 2 if width < WIDE else 4 if len(means) > 6 else 3
    columns = min(most, len(means))
    wide = (width - 16 - first - gap * (most - 1)) / most
    unit = np.array([wide / (x1 - x0), -tall / (y1 - y0)])
    has_base = 0 in means
    parts = [_legend(has_base and len(means) > 1, width)]
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
    notes = [f"x: step; y: {metric}" + ", logarithmic" * log]
    notes += ["Values far from those of other rows are cut off."] if len(near) < len(every) else []
    notes += [f"Without a curve: {', '.join(lacking)}."] if lacking else []
    for note in notes:
        height += 24
        parts.append(svg.label(16, height - 6, token_label(note, width - 32), "mute"))
    own = max(first + columns * (wide + gap) - gap + 16, min(width, 520))
    return svg.frame(own, height + 10, title, f"{len(means)} rows.", "".join(parts), name="Learning curves")


def _capital(text: str) -> str:
    return text[:1].upper() + formats.one_line(text[1:])


def _legend(base: bool, width: int) -> str:
    text = (
        "mean over seeds; band: lowest to highest" if width < WIDE else "mean over seeds; band: lowest to highest seed"
    )
    line = '<polyline class="curve s0" points="16,54 42,54"/>' + svg.label(50, 58, text, "mute")
    x = 50 + 0.92 * text_width(text) + 14
    dashed = f'<polyline class="curve s5" stroke-dasharray="4 3" points="{x:.0f},54 {x + 20:.0f},54"/>'
    return line + (dashed + svg.label(x + 26, 58, "base", "mute") if base else "")


def _points(points: np.ndarray) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def against(table: StudyTable, cost: str, width: int = WIDE) -> str:
    """Quality against "parameters" or "flops"; the axis of the cost is logarithmic."""
    what = {"parameters": "parameters", "flops": "training FLOPs"}[cost]
    title = f"{_capital(table.metric)} against {what}"
    factor = formats.scale(table)
    rows = [
        row for row in table.rows if row.mean is not None and math.isfinite(row.mean) and (getattr(row, cost) or 0) > 0
    ]
    if not rows:
        return svg.empty_figure(title, f"No row has a score and its {what}.")
    means = [factor * float(row.mean or 0.0) for row in rows]
    spread = [factor * (row.sd or 0.0) for row in rows]
    centre = means[0] if rows[0] is table.rows[0] else float(np.median(means))
    limit = reach(abs(mean - centre) + sd for mean, sd in zip(means, spread, strict=True)) or 1.0
    least = 0.0 if min(means) >= 0 else -math.inf  # no bar reaches a score that there cannot be
    ends = [max(least, mean + way * sd) for mean, sd in zip(means, spread, strict=True) for way in (-1, 1)]
    y0, y1, up = make_axis(np.array([max(centre - limit, min(centre + limit, end)) for end in ends]), snap=True)
    x0, x1, across = _log_axis([float(getattr(row, cost)) for row in rows])
    marks = [formats.minus(svg.short_number(round(tick, 10))) for tick in up]
    left, right, top = 30 + max(map(text_width, marks)), width - 28.0, 84.0
    bottom = top + max(300, 20 * len(rows))
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
    signs, x = "", 16.0
    for kind, word in (("base", "base"), *((kind, word) for word, kind in KINDS.items())):
        if any(kind_of(row, table) == kind for row in rows):
            signs += f'<g class="{kind}">{marker(x + 6, bottom + 66, kind)}</g>'
            signs += svg.label(x + 18, bottom + 70, word, "mute")
            x += 40 + text_width(word)
    parts.append(signs)

    slack = 1e-9 * (y1 - y0)
    places = [left + (math.log10(getattr(row, cost)) - x0) * across_unit for row in rows]
    points = [(x, height(mean)) for x, mean in zip(places, means, strict=True)]
    bars = [(height(mean + sd), height(mean - sd)) for mean, sd in zip(means, spread, strict=True)]
    far = [not y0 - slack <= mean <= y1 + slack for mean in means]
    texts = []
    for row, out in zip(rows, far, strict=True):
        value = f" ({formats.minus(formats.number(table, row.mean))})" if out else ""
        texts.append(token_label(formats.one_line(row.name), max(90.0, 0.22 * width - text_width(value))) + value)
    boxes = label_boxes(points, bars, texts, (left, top, right, bottom))
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
    tall = bottom + 84
    without = [formats.one_line(row.name) for row in table.rows if row not in rows]
    if without:
        tall += 24
        parts.append(svg.label(16, tall - 12, token_label(f"Not drawn: {', '.join(without)}.", width - 32), "mute"))
    about = " ".join(f"{row.name}: {formats.score(table, row)}." for row in rows)
    return svg.frame(width, tall, title, about, "".join(parts), name="Quality and cost")


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
