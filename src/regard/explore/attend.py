"""Attend: for every token the tokens that it looks at most, as rows of text.

    top_keys(weights [queries, keys], k)  ->  for each query the k largest weights with their keys, largest first

A mean over heads hides what single heads do (it is flat where each of them is sharp), so the rows say of what they
are a mean. Equal weights are told in the order of their keys.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.errors import UserError
from regard.explore.inside import Look, Part
from regard.explore.report import token_label


@dataclass(frozen=True)
class Attended:
    """Where the queries of one map look: (place, label, weight) of the largest weights of each."""

    part: str
    layer: int | None  # None: mean of all layers
    head: int | None  # None: mean of the heads
    rows: tuple[tuple[str, tuple[tuple[int, str, float], ...]], ...]

    @property
    def title(self) -> str:
        layers = "mean of all layers and heads" if self.layer is None else f"layer {self.layer}, "
        heads = "" if self.layer is None else "mean of its heads" if self.head is None else f"head {self.head}"
        return f"{self.part} attention, {layers}{heads}"

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"token": label, "at": at, "looks_at": [{"at": k, "token": key, "weight": w} for k, key, w in keys]}
            for at, (label, keys) in enumerate(self.rows)
        ]
        return {"part": self.part, "layer": self.layer, "head": self.head, "tokens": rows}


def attended(look: Look, part: Part, *, layer: int | None, head: int | None, top: int, each: bool) -> list[Attended]:
    """The maps asked for: one, the mean of those left open, or (`each`) every one of them."""
    if top < 1:
        raise UserError(f"top = {top}: must be 1 or more")
    if head is not None and layer is None:
        raise UserError(f"head = {head}: say of which layer, such as --layer 0")
    if layer is not None:
        look.inside.anatomy.path(part.name, layer, head)
    if not each:
        weights = part.mean() if layer is None else part.weights[layer].mean(dim=0)
        if layer is not None and head is not None:
            weights = part.weights[layer][head]
        return [_rows(part, layer, head, weights, top)]
    layers = range(part.layers) if layer is None else [layer]
    return [
        _rows(part, at, index, part.weights[at][index], top)
        for at in layers
        for index in (range(len(part.weights[at])) if head is None else [head])
    ]


def _rows(part: Part, layer: int | None, head: int | None, weights: Tensor, top: int) -> Attended:
    values, keys = weights.sort(dim=-1, descending=True, stable=True)
    rows = []
    for label, some, places in zip(part.rows, values[:, :top].tolist(), keys[:, :top].tolist(), strict=True):
        rows.append((label, tuple((at, part.columns[at], w) for at, w in zip(places, some, strict=True) if w > 0)))
    return Attended(part.name, layer, head, tuple(rows))


def as_text(found: Attended) -> str:
    """A line a token: the token, then what it looks at."""
    labels = [token_label(label) for label, _ in found.rows]
    wide = max(map(screen_width, labels), default=0)
    lines = [found.title]
    places: dict[str, set[int]] = {}  # where each key stands; one that stands in several places is told apart
    for _, keys in found.rows:
        for at, key, _ in keys:
            places.setdefault(key, set()).add(at)
    for label, (_, keys) in zip(labels, found.rows, strict=True):
        looks = "   ".join(
            f"{token_label(key)}{f'[{at}]' if len(places[key]) > 1 else ''} {weight:.2f}" for at, key, weight in keys
        )
        lines.append(f"  {pad(label, wide)}  {looks}".rstrip())
    return "\n".join(lines)


def screen_width(text: str) -> int:
    """Columns that a terminal gives a text: two for wide letters, none for marks."""
    drawn = (char for char in text if unicodedata.category(char) not in ("Mn", "Me", "Cf"))
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in drawn)


def pad(text: str, width: int) -> str:
    return text + " " * (width - screen_width(text))


def lines_of(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Rows of cells as lines with aligned columns; `right` says which are aligned right."""
    widths = [max(map(screen_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            " " * (width - screen_width(cell)) + cell if side else pad(cell, width)
            for cell, width, side in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
