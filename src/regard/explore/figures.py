"""One look at a model as a figure, as text, and as a table of its output.

    one head                      heat map, a label at every row and column
    one layer                     a labelled map for each of its heads
    grid                          all heads of all layers, small
    the input is an image         the patches that each word (or head) attends to, over the image
    one query of one head         its stages: q·k, scaled, masked, softmax, weighted values

By default a figure shows the mean of the last layer's heads: of a translation the alignment (Bahdanau et al. 2015,
figure 3). As text, every token comes with the keys that have the largest weights; equal weights come in the order of
their keys. A mean over heads hides what single heads do (it is flat where each of them is sharp), so the title names
what the weights are a mean of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore import svg
from regard.explore.changes import PARTS
from regard.explore.forward import Choice, Output, difference
from regard.explore.heatmap import head_grid, head_panels, heat_map, image_panels
from regard.explore.html import paragraph, table, text_width, token_label
from regard.explore.svg import Tokens
from regard.messages import localize

if TYPE_CHECKING:
    from regard.explore.inside import Look, Part

MOST_LABELS = 60  # tokens per side up to which every head of a layer gets labels
TITLES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}


def main_part(look: Look, name: str | None = None) -> Part:
    """The part of that name; by default cross attention where there is some, else self attention."""
    if name is None:
        return look.parts[next(part for part in reversed(PARTS) if part in look.parts)]
    if name not in look.parts:
        look.inside.anatomy.path(name, 0)  # type: ignore[arg-type]  # raises
    return look.parts[name]  # type: ignore[index]


def map_title(part: str, layer: int | None, head: int | None) -> str:
    """What a map shows; None is a mean."""
    heads = "mean of its heads" if head is None else f"head {head}"
    return f"{TITLES[part]}, " + ("mean of all layers and heads" if layer is None else f"layer {layer}, {heads}")


def draw(
    look: Look,
    *,
    part: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    grid: bool = False,
    query: str | int | None = None,
) -> str:
    """One figure as SVG: of a `layer`, of one `head`, a `grid` of all heads, or the stages of one `query`."""
    own = main_part(look, part)
    if grid and (layer is not None or head is not None):
        raise UserError("grid: shows every layer and head; remove layer and head, or remove grid")
    look.inside.anatomy.check(own.name, layer, head)
    if over_image(look, own):
        return _draw_image(look, own, layer, head, grid, None if query is None else own.position(query))
    if query is not None:
        if layer is None or head is None:
            raise UserError(f"query = {query!r}: the stages are those of one head; name it, as in layer = 0, head = 0")
        return _draw_stages(look, own, layer, head, own.position(query))
    tokens = (own.rows, own.columns)
    if grid:
        return head_grid(own.weights, *tokens, title=f"{TITLES[own.name]}, every layer and head")
    if layer is not None and head is None:
        heads, title = own.weights[layer], f"{TITLES[own.name]}, layer {layer}"
        if max(map(len, tokens)) > MOST_LABELS:
            return head_grid(heads, *tokens, title=title)
        return head_panels(heads, *tokens, [f"head {index}" for index in range(len(heads))], title=title)
    title, weights = _one_map(own, layer, head)
    row_label, column_label = ("output", "source") if own.name == "cross" else ("query", "key")
    return heat_map(weights, *tokens, title=title, row_label=row_label, column_label=column_label)


def over_image(look: Look, part: Part) -> bool:
    """Whether the keys of a part are patches of an image."""
    return look.input.grid is not None and part.name != "decoder"


def _one_map(part: Part, layer: int | None, head: int | None) -> tuple[str, Tensor]:
    """The title and the weights of a head, or of the mean of a layer's heads: by default the last one's."""
    layer = _last(part) if layer is None else layer
    weights = part.weights[layer].mean(dim=0) if head is None else part.weights[layer][head]
    return map_title(part.name, layer, head), weights


def _last(part: Part) -> int:
    """The last layer that has attention weights."""
    return max(layer for layer, weights in enumerate(part.weights) if len(weights))


def _draw_image(look: Look, part: Part, layer: int | None, head: int | None, grid: bool, query: int | None) -> str:
    image, patches = look.input.image, look.input.grid
    assert image is not None and patches is not None
    size, first = (patches.down, patches.across), patches.first
    if part.name == "cross" and not grid and query is None:  # a panel for each word
        title, weights = _one_map(part, layer, head)
        return image_panels(image, *size, weights, part.rows, title=title)
    rows, names = [], []  # a panel for each head
    for at in range(len(part.weights)) if grid else [_last(part) if layer is None else layer]:
        maps = part.weights[at]  # [heads, queries, keys]
        weights = maps[:, query] if query is not None else maps[:, 0] if first else maps.mean(dim=1)
        for index in range(len(maps)) if head is None else [head]:
            rows.append(weights[index, first:])
            names.append(localize(f"layer {at}, head {index}"))
    whose = f"“{part.rows[query]}”" if query is not None else "[CLS]" if first else "all patches, mean"
    wide = max(map(len, part.weights)) if grid else None
    title = f"{TITLES[part.name]} of {whose}"
    return image_panels(image, *size, torch.stack(rows), names, title=title, columns=wide)


def _draw_stages(look: Look, part: Part, layer: int, head: int, query: int) -> str:
    steps = look.steps(part.name, layer, head, query)
    biased = not torch.allclose(steps.scores * steps.scale, steps.scaled, rtol=1e-3, atol=1e-4)
    stages = [
        ("q · k", steps.scores),
        (f"· {steps.scale:.3g}" + " + bias" * biased, steps.scaled),
        ("masked", steps.masked),
        ("softmax", steps.weights),
        ("|weight · v|", steps.values.norm(dim=-1)),
    ]
    title = f"“{part.rows[query]}” (position {query}), {TITLES[part.name].lower()}, layer {layer}, head {head}"
    note = localize(f"The head's output is the sum of the weighted values: length {steps.output.norm():.3f}.")
    return stage_panel(stages, part.columns, title=title, note=note)


def stage_panel(stages: Sequence[tuple[str, Any]], columns: Tokens, *, title: str, note: str) -> str:
    """A line per key: each stage is (name, numbers [len(columns)]), drawn as bars with numbers; -inf is masked."""
    labels = [token_label(token, 150) for token in columns]
    left, step, tall, bar, top = 28 + max(map(text_width, labels)), 150, 21, 82, 88
    bottom = top + len(labels) * tall
    parts = [svg.label(left - 10, top + i * tall + 15, label, anchor="end") for i, label in enumerate(labels)]
    for at, (stage, numbers) in enumerate(stages):
        values = np.asarray(numbers, dtype=np.float64)
        finite = values[np.isfinite(values)]
        low, high = min(0.0, finite.min(initial=0.0)), max(0.0, finite.max(initial=0.0))
        unit = bar / ((high - low) or 1.0)
        x = left + at * step
        parts.append(svg.label(x, top - 10, localize(stage), "mute"))
        parts.append(f'<path class="rule" d="M{x - low * unit:.1f} {top}v{bottom - top}"/>')
        for y, value in zip(range(top, bottom, tall), values, strict=True):
            if not math.isfinite(value):
                text = localize("masked" if value < 0 else "not a number")
                parts.append(svg.label(x - low * unit + 6, y + 15, text, "mute small"))
                continue
            start, level = x + (min(value, 0) - low) * unit, 22 if value >= 0 else 10
            parts.append(
                f'<rect x="{start:.1f}" y="{y + 4}" width="{max(abs(value) * unit, 0.5):.1f}" height="{tall - 8}" '
                f'class="k{level}"/>' + svg.label(x + bar + 6, y + 15, f"{value:.3f}", "mute small")
            )
    parts.append(svg.label(16, bottom + 26, note, "mute"))
    width = max(left + len(stages) * step, 32 + text_width(note))
    about = f"{len(labels)} keys, stages: {', '.join(stage for stage, _ in stages)}. {note}"
    return svg.frame(width, bottom + 44, title, about, "".join(parts))


def output_table(after: Output, before: Output | None = None) -> str:
    """The prediction at every position; with `before`, also without the changes."""
    texts = []
    if after.kind == "vector":
        texts.append(f"A vector of {after.logits.shape[-1]:,} numbers.")
        if before is not None:
            change = difference(before, after).mean_divergence
            texts.append(f"1 - cosine to the unchanged vector: {change:.4f}")
        return "".join(map(paragraph, texts))
    if after.generated is not None:
        if before is not None and before.generated is not None:
            texts.append(f"Generated, unchanged: {before.generated}")
        texts.append(f"Generated: {after.generated}")
    if after.loss is not None:
        was = "" if before is None or before.loss is None else f" (unchanged: {before.loss:.4f})"
        texts.append(f"Loss: {after.loss:.4f} nats per token{was}.")
    headers, classes = ["position", "after", "expected", "most probable"], ["number", "token", "token", ""]
    rows: list[list[object]] = []
    for position in after.positions:
        expected = position.expected and f"{position.expected.label} {position.expected.probability:.3f}"
        rows.append([position.at, position.read, expected, _choices(position.top)])
    if before is not None:
        headers, classes = [*headers, "unchanged"], [*classes, ""]
        rows = [[*row, _choices(old.top)] for row, old in zip(rows, before.positions, strict=True)]
    return "".join(map(paragraph, texts)) + table([*map(localize, headers)], rows, classes=classes)


def _choices(top: Sequence[Choice]) -> str:
    return " · ".join(f"{choice.label} {choice.probability:.3f}" for choice in top[:3])


def attended(
    look: Look, part: Part, *, layer: int | None, head: int | None, top: int, each: bool
) -> list[dict[str, Any]]:
    """The `top` keys of every query in one map: of a head, or the mean of a layer or of all layers; or (`each`) in the
    maps of all of their heads. Plain values: part, layer, head (None: a mean) and tokens."""
    if top < 1:
        raise UserError(f"top = {top}: must be 1 or more")
    look.inside.anatomy.check(part.name, layer, head)
    heads = [one for name, *one in look.inside.anatomy.heads if name == part.name]
    maps = {
        (at, index): part.weights[at][index] for at, index in heads if layer in (None, at) and head in (None, index)
    }
    chosen: dict[tuple[int | None, int | None], Tensor] = {(layer, head): torch.stack([*maps.values()]).mean(dim=0)}
    return [
        {"part": part.name, "layer": at, "head": index, "tokens": _largest(part, weights, top)}
        for (at, index), weights in (maps if each else chosen).items()
    ]


def _largest(part: Part, weights: Tensor, top: int) -> list[dict[str, Any]]:
    """For each query token, at and attends_to: token, at and weight of its largest weights."""
    values, keys = (side[:, :top].tolist() for side in weights.sort(dim=-1, descending=True, stable=True))
    tokens = []
    for query, label in enumerate(part.rows):
        pairs = zip(keys[query], values[query], strict=True)
        largest = [{"at": at, "token": part.columns[at], "weight": weight} for at, weight in pairs if weight > 0]
        tokens.append({"token": label, "at": query, "attends_to": largest})
    return tokens
