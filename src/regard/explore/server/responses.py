"""Responses of the page's server: the content of a `Look`, with the names that the page knows.

The page shows the unchanged and the changed model side by side, so the output holds both probabilities of every token
that is among the most probable of either. Maps are sent whole up to 4 million weights; a longer text sends reduced
ones, and the page requests single maps as they are opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from regard.errors import UserError
from regard.explore.changes import PartName
from regard.explore.inside import Look, Steps
from regard.explore.output import Output, difference
from regard.explore.server.frame import fixed, overview, pack

WHOLE = 4_000_000  # weights that are sent at once
SIDE = 64  # cells per side of a reduced map


def look_response(run: str, plain: Look, changed: Look) -> bytes:
    """Labels, maps and output of `changed`; `plain` is the same look without changes."""
    input, inside = changed.input, changed.inside
    count = sum(layer.numel() for part in changed.parts.values() for layer in part.weights)
    parts: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for name, part in changed.parts.items():
        rows, columns = sides(name, input.target is not None)
        for layer, weights in enumerate(part.weights):
            parts.append(
                {
                    "part": name,
                    "layer": layer,
                    "heads": weights.shape[0],
                    "rows": rows,
                    "columns": columns,
                    "causal": name == "decoder",
                    "whole": count <= WHOLE,
                }
            )
            maps = weights if count <= WHOLE else overview(weights, SIDE)
            arrays[f"{name}.{layer}"] = fixed(maps, f"{run}, {name} layer {layer}")
    grid = input.grid
    header = {
        "run": run,
        "architecture": inside.config.architecture,
        "parameters": sum(parameter.numel() for parameter in inside.model.parameters()),
        "shuffles": inside.anatomy.reads is not None,
        "labels": {"source": input.source_labels, "read": input.read, "written": input.written},
        "parts": parts,
        "output": output_of(plain.output, changed.output, inside.reader.decode),
        "grid": None if grid is None else {"down": grid.down, "across": grid.across, "first": grid.first},
        "size": inside.config.image_size if inside.config.input == "patches" else None,
    }
    return pack(header, arrays)


def sides(part: PartName, writes: bool) -> tuple[str, str]:
    """Which labels the rows and the columns of a map have."""
    if part == "cross":
        return "written", "source"
    return ("read", "read") if part == "decoder" and writes else ("source", "source")


def output_of(before: Output, after: Output, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """The output with the probabilities of both states. Tokens that may follow the whole text come with their text, so
    that the page can append it."""
    change = difference(before, after)
    if not all(np.isfinite(change.divergence)):
        raise UserError("the model's output is not a number (NaN) under these changes; undo one of them")
    output: dict[str, Any] = {
        "kind": after.kind,
        "before": {"loss": before.loss, "answer": before.generated, "answers": _answers(before)},
        "after": {"loss": after.loss, "answer": after.generated, "answers": _answers(after)},
        "positions": [],
        "apart": list(change.divergence) if after.kind == "vector" else [],
    }
    if after.kind == "vector":
        return output
    p, q = before.logits.softmax(dim=-1), after.logits.softmax(dim=-1)
    flipped = set(change.flipped)
    for at, (old, new) in enumerate(zip(before.positions, after.positions, strict=True)):
        labels = {choice.id: choice.label for choice in (*new.top, *old.top)}
        ids = torch.tensor(list(labels))
        choices = [
            _choice(label, old_p, new_p)
            for label, old_p, new_p in zip(labels.values(), p[at, ids].tolist(), q[at, ids].tolist(), strict=True)
        ]
        if after.kind == "next" and at == len(after.positions) - 1:
            for choice, id in zip(choices, labels, strict=True):
                choice["text"] = decode([id])
        expected = None
        if old.expected is not None and new.expected is not None:
            expected = _choice(old.expected.label, old.expected.probability, new.expected.probability)
        output["positions"].append(
            {
                "read": old.read,
                "expected": expected,
                "choices": sorted(choices, key=lambda choice: -choice["after"]),
                "divergence": change.divergence[at],
                "flipped": at in flipped,
            }
        )
    return output


def _choice(label: str, before: float, after: float) -> dict[str, Any]:
    return {"label": label, "before": before, "after": after}


def _answers(output: Output) -> list[dict[str, Any]]:
    return [{"text": text, "score": score} for text, score in output.hypotheses]


def maps_response(look: Look, part: PartName, layer: int, heads: Sequence[int]) -> bytes:
    """Whole maps of some heads of one layer, [heads, queries, keys]."""
    for head in heads:
        look.inside.anatomy.path(part, layer, head)  # raises for a head that the model does not have
    weights = look.parts[part].weights[layer][list(heads)]
    return pack({}, {"maps": fixed(weights, f"{part} layer {layer}")})


def steps_response(steps: Steps) -> bytes:
    """The stages of one query as float32; masked keys are -inf."""
    names = ("q", "k", "v", "scores", "scaled", "masked", "weights", "output")
    arrays = {name: getattr(steps, name).numpy().astype(np.float32) for name in names}
    return pack({"scale": steps.scale}, arrays)
