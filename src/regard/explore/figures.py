"""Figures of a look: which map, drawn how, with what said beside it.

    one head                      heat map, a label at every row and column
    one layer                     a labelled map for each of its heads
    grid                          all heads of all layers, small
    a picture was read            where each word (or head) looked, over the picture
    one query of one head         its stages: q·k, scaled, masked, softmax, weighted values

Left open, a figure shows the mean of the last layer's heads: of a translation the alignment (Bahdanau et al. 2015,
figure 3). `report_of` puts everything on one page, with the output before and after the changes and the sentence
that belongs beside attention (Jain & Wallace 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import torch
from torch import Tensor

import regard
from regard.errors import UserError
from regard.explore.changes import PARTS, PartName
from regard.explore.inside import Look, Part
from regard.explore.output import Choice, Output, difference
from regard.explore.panels import head_panels, picture_panels, stage_panel
from regard.explore.report import Section, attention_note, figure, page, paragraph, table
from regard.explore.svg import head_grid, heat_map

LABELLED = 60  # tokens a side up to which every head of a layer gets its labels
TITLES = {
    "encoder": "Encoder self attention",
    "decoder": "Decoder self attention",
    "cross": "Cross attention",
}
SIDES = {
    "encoder": ("token", "looks at"),
    "decoder": ("token", "looks back at"),
    "cross": ("writes", "looks at"),
}


def main_part(look: Look, name: str | None = None) -> Part:
    """The part asked for, or the one that says most: cross attention where there is one."""
    if name is None:
        return look.parts[next(part for part in reversed(PARTS) if part in look.parts)]
    look.inside.anatomy.path(name, 0)  # type: ignore[arg-type]  # refuses a part that is not there
    return look.parts[name]  # type: ignore[index]


def draw(
    look: Look,
    *,
    part: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    grid: bool = False,
    query: str | int | None = None,
) -> str:
    """One figure as SVG: `layer` and `head` choose, `grid` shows all, `query` the stages of one place."""
    own = main_part(look, part)
    if grid and (layer is not None or head is not None):
        raise UserError("grid: it shows every layer and head; leave layer and head out, or leave grid out")
    if head is not None and layer is None:
        raise UserError(f"head = {head}: say of which layer, such as layer = 0")
    if layer is not None:
        look.inside.anatomy.path(own.name, layer, head)
    if over_picture(look, own):
        at = None if query is None else find_query(own, query)
        return _draw_picture(look, own, layer, head, grid, at)
    if query is not None:
        if layer is None or head is None:
            raise UserError(f"query = {query!r}: its stages are those of one head; say which, as layer = 0, head = 0")
        return _draw_stages(look, own, layer, head, find_query(own, query))
    return _draw_map(own, layer, head, grid)


def over_picture(look: Look, part: Part) -> bool:
    """Whether the keys of a part are squares of a picture."""
    return look.reading.grid is not None and part.name != "decoder"


def find_query(part: Part, query: str | int) -> int:
    """The place that a number, or a label that occurs once, means."""
    if isinstance(query, int) or query.isdecimal():
        at = int(query)
        if not 0 <= at < len(part.rows):
            raise UserError(f"query = {query}: {part.name} attention has queries 0 to {len(part.rows) - 1}")
        return at
    found = [at for at, label in enumerate(part.rows) if query in (label, label.removeprefix("▁"))]
    if len(found) != 1:
        places = f"places {', '.join(map(str, found))}" if found else f"none of {' '.join(part.rows[:40])}"
        raise UserError(f"query = {query!r} is {places}; give the number of one place, from 0 on")
    return found[0]


def _draw_map(part: Part, layer: int | None, head: int | None, grid: bool) -> str:
    row_label, column_label = SIDES[part.name]
    if grid:
        return head_grid(part.weights, part.rows, part.columns, title=f"{TITLES[part.name]}, every layer and head")
    if layer is not None and head is None:
        weights, title = part.weights[layer], f"{TITLES[part.name]}, layer {layer}"
        if max(len(part.rows), len(part.columns)) > LABELLED:
            return head_grid(weights, part.rows, part.columns, title=title)
        names = [f"head {index}" for index in range(len(weights))]
        return head_panels(weights, part.rows, part.columns, names, title=title)
    if layer is not None and head is not None:
        weights, where = part.weights[layer][head], f"layer {layer}, head {head}"
    else:
        weights, where = part.weights[-1].mean(dim=0), f"layer {part.layers - 1}, mean of its heads"
    title = f"{TITLES[part.name]}, {where}"
    return heat_map(weights, part.rows, part.columns, title=title, row_label=row_label, column_label=column_label)


def _draw_picture(look: Look, part: Part, layer: int | None, head: int | None, grid: bool, query: int | None) -> str:
    reading, last = look.reading, part.layers - 1
    assert reading.grid is not None and reading.picture is not None
    size, first = (reading.grid.down, reading.grid.across), reading.grid.first
    if part.name == "cross" and not grid and query is None:  # a panel for each word
        chosen = part.weights[last if layer is None else layer]  # [heads, words, squares]
        weights = chosen.mean(dim=0) if head is None else chosen[head]
        whose = f"layer {last if layer is None else layer}, " + ("mean of heads" if head is None else f"head {head}")
        return picture_panels(reading.picture, *size, weights, part.rows, title=f"{TITLES['cross']}, {whose}")
    rows, names = [], []  # a panel for each head
    layers = list(range(part.layers)) if grid else [last if layer is None else layer]
    for at in layers:
        maps = part.weights[at]  # [heads, queries, keys]
        looks = maps[:, query] if query is not None else maps[:, 0] if first else maps.mean(dim=1)
        for index in range(len(maps)) if head is None else [head]:
            rows.append(looks[index, first:])
            names.append(f"layer {at}, head {index}")
    whose = f"“{part.rows[query]}”" if query is not None else "[CLS]" if first else "all places, mean"
    wide = max(map(len, part.weights)) if grid else None
    title = f"{TITLES[part.name]} of {whose}"
    return picture_panels(reading.picture, *size, torch.stack(rows), names, title=title, columns=wide)


def _draw_stages(look: Look, part: Part, layer: int, head: int, query: int) -> str:
    steps = look.steps(part.name, layer, head, query)
    stages = [
        ("q · k", steps.scores),
        (f"· {steps.scale:.3g}" + (" + bias" if _biased(steps) else ""), steps.scaled),
        ("masked", steps.masked),
        ("softmax", steps.weights),
        ("|weight · v|", steps.values.norm(dim=-1)),
    ]
    title = f"“{part.rows[query]}” (place {query}), {TITLES[part.name].lower()}, layer {layer}, head {head}"
    note = f"The head's output is the sum of the weighted values: length {steps.output.norm():.3f}."
    return stage_panel(stages, part.columns, title=title, note=note)


def _biased(steps: Any) -> bool:
    return not torch.allclose(steps.scores * steps.scale, steps.scaled, rtol=1e-3, atol=1e-4)


def sections_of(look: Look, before: Look | None = None) -> list[Section]:
    """Everything a look shows: the output, the main figure, every head of every part."""
    parts = [main_part(look)]
    parts += [part for part in look.parts.values() if part is not parts[0]]
    sections = [Section("What it says", output_table(look.output, None if before is None else before.output))]
    for part in parts:
        caption = f"Rows: {len(part.rows)} queries. Columns: {len(part.columns)} keys."
        shown = figure(draw(look, part=part.name), caption)
        if part.layers * max(len(weights) for weights in part.weights) > 1:
            shown += figure(draw(look, part=part.name, grid=True), "Every layer and head, each with its own scale.")
        sections.append(Section(TITLES[part.name], shown + (attention_note() if part is parts[0] else "")))
    return sections


def output_table(after: Output, before: Output | None = None) -> str:
    """What is said at every place; with `before`, both."""
    if after.kind == "vector":
        apart = "" if before is None else paragraph(f"1 - cosine to the unchanged vector: {_mean(before, after):.4f}")
        return paragraph(f"A vector of {after.logits.shape[-1]:,} numbers.") + apart
    told = []
    if after.answer is not None:
        told.append(paragraph(f"It writes: {after.answer}"))
        if before is not None and before.answer is not None:
            told.insert(0, paragraph(f"Unchanged, it writes: {before.answer}"))
    if after.loss is not None:
        was = "" if before is None or before.loss is None else f" (unchanged: {before.loss:.4f})"
        told.append(paragraph(f"Loss: {after.loss:.4f} nats a token{was}."))
    headers = ["place", "after reading", "stands there", "likeliest"]
    rows = [_row(place) for place in after.places]
    if before is not None:
        headers.append("unchanged")
        rows = [[*row, _choices(place.top[:3])] for row, place in zip(rows, before.places, strict=True)]
    classes = ["number", "token", "token", "", ""][: len(headers)]
    return "".join(told) + table(headers, rows, classes=classes)


def _row(place: Any) -> list[object]:
    stands = None if place.expected is None else f"{place.expected.label} {place.expected.probability:.3f}"
    return [place.at, place.read, stands, _choices(place.top[:3])]


def _choices(top: Sequence[Choice]) -> str:
    return " · ".join(f"{choice.label} {choice.probability:.3f}" for choice in top)


def _mean(before: Output, after: Output) -> float:
    apart = difference(before, after).divergence
    return sum(apart) / max(1, len(apart))


def report_of(look: Look, before: Look | None = None) -> str:
    """A page of its own, as HTML that needs nothing else."""
    title = look.reading.text if look.reading.text is not None else "A picture"
    heads = sum(len(weights) for part in look.parts.values() for weights in part.weights)
    summary = [("model", look.inside.name), ("heads", f"{heads}"), ("places", f"{len(look.reading.source_labels)}")]
    sections = sections_of(look, before)
    if look.changes:
        sections.insert(0, Section("What was changed", paragraph(str(look.changes))))
    return page(title, summary, sections, created=datetime.now(), version=regard.__version__)


def numbers_of(look: Look, parts: Sequence[PartName] | None = None, digits: int = 6) -> dict[str, Any]:
    """Everything as plain values for JSON: labels, all weights, the output."""
    names = parts or list(look.parts)
    return {
        "model": look.inside.name,
        "text": look.reading.text,
        "changes": look.changes.to_dict(),
        "parts": {
            name: {
                "rows": list(look.parts[name].rows),
                "columns": list(look.parts[name].columns),
                "weights": [_rounded(weights, digits) for weights in look.parts[name].weights],
            }
            for name in names
        },
        "output": look.output.to_dict(),
    }


def _rounded(weights: Tensor, digits: int) -> Any:
    """[heads, queries, keys] as lists; a number that is not finite becomes None, which JSON has."""
    values = weights.double().round(decimals=digits)
    if bool(values.isfinite().all()):
        return values.tolist()
    return [[[value if math.isfinite(value) else None for value in row] for row in head] for head in values.tolist()]
