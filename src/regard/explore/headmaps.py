"""Maps of heads: a cell for each, its colour how much the model loses without it, its words what it looks at."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import regard
from regard.explore.draw import svg_frame
from regard.explore.heads import HeadFigures
from regard.explore.panels import label_map
from regard.explore.report import Section, attention_note, figure, page, paragraph, table

SHARES = ("previous", "next", "self", "first", "last", "punctuation", "alignment", "positional")
TITLES = {"encoder": "Encoder self attention", "decoder": "Decoder self attention", "cross": "Cross attention"}


def head_map(found: Sequence[HeadFigures], part: str) -> str:
    """One part: layers down, heads across."""
    rows: dict[int, list[HeadFigures]] = {}
    for one in found:
        if one.part == part:
            rows.setdefault(one.layer, []).append(one)
    measured = all(one.loss is not None for one in found)
    values = [[_value(one) for one in row] for row in rows.values()]
    texts = [[f"{one.pattern[0]} {one.pattern[1]:.2f}" for one in row] for row in rows.values()]
    what = "change of the loss when the head is off" if measured else "slope of the loss at the head's gate"
    return label_map(values, texts, title=TITLES[part], note=f"Colour and number: {what}. Words: what it looks at.")


def _value(one: HeadFigures) -> float:
    return next((value for value in (one.loss, one.gradient) if value is not None), float("nan"))


def head_maps(found: Sequence[HeadFigures]) -> str:
    """All parts in one figure, one below the other."""
    figures = [head_map(found, part) for part in dict.fromkeys(one.part for one in found)]
    sizes = [[float(number) for number in re.findall(r'(?:width|height)="([\d.]+)"', svg)[:2]] for svg in figures]
    body, top = "", 0.0
    for svg, (_, height) in zip(figures, sizes, strict=True):
        body += (
            f'<g transform="translate(0 {top:.0f})">{re.sub(r"<svg.*?</style>|</svg>", "", svg, flags=re.DOTALL)}</g>'
        )
        top += height
    return svg_frame(max(width for width, _ in sizes), top, "What the heads do", "One map for each part.", body)


def head_page(told: Mapping[str, Any], found: Sequence[HeadFigures]) -> str:
    """Maps and the table of all figures, as a page of its own."""
    summary = [("model", str(told["model"])), ("heads", f"{len(found)}"), ("examples", f"{told['examples']:,}")]
    if told["loss"] is not None:
        summary.append(("loss", f"{told['loss']:.4f}"))
    sections = []
    for part in dict.fromkeys(one.part for one in found):
        sections.append(Section(TITLES[part], figure(head_map(found, part), "Each cell is a head.")))
    headers = ["head", "pattern", "score", "entropy", "distance", *SHARES, "off", "slope"]
    rows: list[list[object]] = []
    for one in found:
        pattern, score = one.pattern
        numbers = [score, one.entropy, one.distance, *(one.shares.get(name) for name in SHARES)]
        short = [None if number is None else round(number, 3) for number in numbers]
        rows.append([one.name, pattern, *short, one.loss, one.gradient])
    legend = paragraph(
        "Score: the share of its attention that makes the pattern. Entropy in nats. Shares: how much attention goes "
        "there. Off: change of the loss in nats a token when the head alone is switched off. Slope: mean |dL/dgate| "
        "(Michel et al. 2019). Heads that stand in for each other all look idle when they are switched off one by one."
    )
    sections.append(Section("All figures", table(headers, rows) + legend + attention_note()))
    return page("What the heads do", summary, sections, created=datetime.now(), version=regard.__version__)
