"""Attend: for every token the keys with the largest weights, as rows of text.

A mean over heads hides what single heads do (it is flat where each of them is sharp), so the title names what the
weights are a mean of. Equal weights come in the order of their keys.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.figures import TITLES
from regard.explore.html import token_label
from regard.explore.inside import Look, Part


@dataclass(frozen=True)
class Attended:
    """The keys that the queries of one map attend to: (position, label, weight) of the largest weights of each."""

    part: str
    layer: int | None  # None: mean of all layers
    head: int | None  # None: mean of the heads
    rows: tuple[tuple[str, tuple[tuple[int, str, float], ...]], ...]

    @property
    def title(self) -> str:
        layers = "mean of all layers and heads" if self.layer is None else f"layer {self.layer}, "
        heads = "" if self.layer is None else "mean of its heads" if self.head is None else f"head {self.head}"
        return f"{TITLES[self.part]}, {layers}{heads}"

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"token": label, "at": at, "attends_to": [{"at": k, "token": key, "weight": w} for k, key, w in keys]}
            for at, (label, keys) in enumerate(self.rows)
        ]
        return {"part": self.part, "layer": self.layer, "head": self.head, "tokens": rows}


def attended(look: Look, part: Part, *, layer: int | None, head: int | None, top: int, each: bool) -> list[Attended]:
    """One map: of a head, or the mean of a layer or of all layers; or (`each`) all of their heads."""
    if top < 1:
        raise UserError(f"top = {top}: must be 1 or more")
    look.inside.anatomy.check(part.name, layer, head)
    heads = [one for name, *one in look.inside.anatomy.heads if name == part.name]
    chosen = [(at, index) for at, index in heads if layer in (None, at) and head in (None, index)]
    if each:
        return [_rows(part, at, index, part.weights[at][index], top) for at, index in chosen]
    mean = torch.stack([part.weights[at][index] for at, index in chosen]).mean(dim=0)
    return [_rows(part, layer, head, mean, top)]


def _rows(part: Part, layer: int | None, head: int | None, weights: Tensor, top: int) -> Attended:
    values, keys = weights.sort(dim=-1, descending=True, stable=True)
    rows = []
    for label, largest, indices in zip(part.rows, values[:, :top].tolist(), keys[:, :top].tolist(), strict=True):
        rows.append((label, tuple((at, part.columns[at], w) for at, w in zip(indices, largest, strict=True) if w > 0)))
    return Attended(part.name, layer, head, tuple(rows))


def as_text(attended: Attended) -> str:
    """A line per token: the token, then what it attends to."""
    positions: dict[str, set[int]] = {}  # of each key; one with several positions is printed with its position
    for _, keys in attended.rows:
        for at, key, _ in keys:
            positions.setdefault(key, set()).add(at)
    rows = []
    for label, keys in attended.rows:
        texts = [f"{token_label(key)}{f'[{at}]' * (len(positions[key]) > 1)} {weight:.2f}" for at, key, weight in keys]
        rows.append([f"  {token_label(label)}", "   ".join(texts)])
    return "\n".join([attended.title, *lines_of(rows, [False, False])])


def screen_width(text: str) -> int:
    """Terminal columns of a text: two per wide character, none for marks."""
    visible = (char for char in text if unicodedata.category(char) not in ("Mn", "Me", "Cf"))
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in visible)


def lines_of(rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Rows of cells as lines with aligned columns; `right` marks those aligned to the right."""
    widths = [max(map(screen_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        gaps = [" " * (width - screen_width(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [gap + cell if side else cell + gap for cell, gap, side in zip(row, gaps, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
