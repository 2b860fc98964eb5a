"""Maps of heads: a cell per head, coloured by how much the loss rises without it and labelled with its pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

import regard
from regard.explore.figures import TITLES
from regard.explore.heads import HeadMetrics
from regard.explore.html import (
    Section,
    attention_note,
    escape,
    figure,
    page,
    paragraph,
    table,
    text_width,
    token_label,
)
from regard.explore.svg import (
    LEVELS,
    colour_legend,
    colour_levels,
    empty_figure,
    short_number,
    svg_frame,
    svg_size,
    svg_text,
    weight_range,
)

FRACTIONS = ("previous", "next", "self", "first", "last", "punctuation", "alignment", "positional")
LEGEND = (
    "Score: the fraction of its attention that follows the pattern. Entropy in nats. Fractions: how much attention the "
    "head pays to these keys. Off: change of the loss in nats per token when the head alone is switched off. Gradient: "
    "mean |dL/dgate| (Michel et al. 2019). Redundant heads all seem unimportant when they are switched off one by one."
)


def head_map(metrics: Sequence[HeadMetrics], part: str) -> str:
    """One part: layers down, heads across."""
    rows: dict[int, list[HeadMetrics]] = {}
    for one in metrics:
        if one.part == part:
            rows.setdefault(one.layer, []).append(one)
    values = [[_value(one) for one in row] for row in rows.values()]
    labels = [[f"{one.pattern[0]} {one.pattern[1]:.2f}" for one in row] for row in rows.values()]
    measured = all(one.loss_change is not None for one in metrics)
    what = "change of the loss when the head is off" if measured else "gradient of the loss at the head's gate"
    return label_map(values, labels, title=TITLES[part], note=f"Colour and number: {what}. Label: its pattern.")


def _value(one: HeadMetrics) -> float:
    return next((value for value in (one.loss_change, one.gradient) if value is not None), float("nan"))


def label_map(values: Any, texts: Sequence[Sequence[str]], *, title: str = "", note: str = "") -> str:
    """Numbers [layers, heads] as colours, with a label in every cell; layers may differ in their number of heads."""
    rows = [list(map(float, row)) for row in values]
    name, most = title or "Heads", max(map(len, rows), default=0)
    if not most:
        return empty_figure(name, "There are no heads to show.")
    table = np.full((len(rows), most), np.nan)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    levels, wide, tall, left, top = colour_levels(table), 112, 46, 76, 40 + 26 * bool(title)
    parts = [svg_text(16, 30, title, "head")]
    parts += [svg_text(left + (j + 0.5) * wide, top - 8, f"head {j}", "mute", "middle") for j in range(most)]
    for i, row in enumerate(rows):
        parts.append(svg_text(16, top + (i + 0.5) * tall + 4, f"layer {i}", "mute"))
        for j, value in enumerate(row):
            level, x, y = int(levels[i, j]), left + j * wide, top + i * tall
            kind = "" if level == LEVELS else "mid" * (level > 14) + " on" * (level > 20)
            tip = escape(f"layer {i}, head {j}: {texts[i][j]}, {value:.4f}")
            box = f'x="{x}" y="{y}" width="{wide - 2}" height="{tall - 2}" class="k{level}"'
            parts.append(f"<rect {box}><title>{tip}</title></rect>")
            parts.append(
                svg_text(x + wide / 2 - 1, y + 18, token_label(texts[i][j], wide + 34), f"cell {kind}", "middle")
            )
            parts.append(svg_text(x + wide / 2 - 1, y + 34, f"{value:+.4f}", f"cell {kind}", "middle"))
    bottom = top + len(rows) * tall
    low, high = (short_number(float(f"{end:.2g}")) for end in weight_range(table))
    parts.append(colour_legend(left, bottom + 14, low, high, [note] if note else []))
    width = max(left + most * wide + 14, left + 300, 32 + text_width(title, 15), left + 16 + text_width(note))
    about = f"{len(rows)} layers of up to {most} heads. {note}"
    return svg_frame(width, bottom + 44 + 20 * bool(note), name, about, "".join(parts))


def head_maps(metrics: Sequence[HeadMetrics]) -> str:
    """All parts in one figure, one below the other."""
    figures = [head_map(metrics, part) for part in dict.fromkeys(one.part for one in metrics)]
    body, wide, top = "", 0.0, 0.0
    for svg in figures:
        width, height = svg_size(svg)
        body += f'<g transform="translate(0 {top:.0f})">{svg}</g>'
        wide, top = max(wide, width), top + height
    return svg_frame(wide, top, "Heads", "One map for each part.", body)


def head_page(facts: Mapping[str, Any], metrics: Sequence[HeadMetrics]) -> str:
    """The maps and a table of all metrics, as an HTML page."""
    summary = [("model", str(facts["model"])), ("heads", f"{len(metrics)}"), ("examples", f"{facts['examples']:,}")]
    if facts["loss"] is not None:
        summary.append(("loss", f"{facts['loss']:.4f}"))
    sections = []
    for part in dict.fromkeys(one.part for one in metrics):
        sections.append(Section(TITLES[part], figure(head_map(metrics, part), "Each cell is a head.")))
    headers = ["head", "pattern", "score", "entropy", "distance", *FRACTIONS, "off", "gradient"]
    rows: list[list[object]] = []
    for one in metrics:
        pattern, score = one.pattern
        numbers = [score, one.entropy, one.distance, *(one.fractions.get(name) for name in FRACTIONS)]
        rounded = [None if number is None else round(number, 3) for number in numbers]
        rows.append([one.name, pattern, *rounded, one.loss_change, one.gradient])
    sections.append(Section("All metrics", table(headers, rows) + paragraph(LEGEND) + attention_note()))
    return page("Attention heads", summary, sections, created=datetime.now(), version=regard.__version__)
