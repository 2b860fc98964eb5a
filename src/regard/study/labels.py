"""Where the labels of points go, so that none overlaps another label, a point or an error bar.

Points one above the other, such as rows with as many parameters, get a column of labels in the same order, so that the
lines between points and labels do not cross. The labels of a column are moved apart as little as possible: heights h_i
that minimise Σ (h_i - y_i)² with h_(i+1) - h_i ≥ gap. For h_i - i·gap that is isotonic regression, which pooling
adjacent violators solves (Barlow et al. 1972). Every other label takes the nearest free box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from regard.explore.html import text_width

LABEL = 16.0  # height of a label
CLUSTER = 14.0  # points that are nearer than this share a column of labels
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, right, bottom


def label_boxes(points: Sequence[Point], bars: Sequence[Point], texts: Sequence[str], area: Box) -> list[Box]:
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
    heights = spread([y for _, y in points], LABEL + 1, area[1] + LABEL / 2, area[3] - LABEL / 2)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    for gap, on_right in itertools.product((12.0, 24.0, 40.0, 64.0, 96.0, 140.0), (True, False)):
        column = []
        for y, wide in zip(heights, widths, strict=True):
            left = last + gap if on_right else first - gap - wide
            column.append((left, y - LABEL / 2, left + wide, y + LABEL / 2))
        if all(_free(box, taken, area) for box in column):
            return column
    return None


def spread(heights: Sequence[float], gap: float, low: float, high: float) -> list[float]:
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
