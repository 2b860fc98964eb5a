"""Responses about heads and training: roles of heads over examples, every head off once, the curve of a run.

roles      pattern, score and importance of every head, over the run's own examples or else over this input
off        `regard.explore.heads_off` of one layer: the page asks layer by layer, so that a large model fills the map
           row by row, and can be left at any time
training   the loss of a run by step, and the steps of its snapshots
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.explore.ablation import heads_off
from regard.explore.changes import PartName
from regard.explore.examples import examples_of, in_batches
from regard.explore.heads import measure
from regard.explore.importance import gradients, losses_when_off
from regard.explore.inside import Look
from regard.explore.server.responses import pack
from regard.training.history import read_metrics
from regard.training.snapshots import saved_steps

EXAMPLES = 32  # of the run, on which roles are measured
MOST = 1e11  # heads x tokens x parameters up to which each head is switched off over the examples: seconds
POINTS = 400  # of a curve


def roles_response(look: Look, pairs: Sequence[tuple[str, str | None]]) -> dict[str, Any]:
    """The metrics of `regard heads`; over `pairs` (text, target), or if there are none over the input of `look`."""
    inside, own = look.inside, bool(pairs)
    target = look.output.generated
    if look.input.target is None:
        target = look.output.positions[0].top[0].label if look.output.kind == "classes" else None
    examples = examples_of(inside, pairs[:EXAMPLES] if own else [(look.input.text or "", target)])
    batches = in_batches(examples, inside.device)
    tokens = sum((batch.source if batch.target is None else batch.target).numel() for batch in batches)
    cost = len(inside.anatomy.heads) * tokens * sum(parameter.numel() for parameter in inside.model.parameters())
    off = losses_when_off(inside, batches) if cost <= MOST else {}
    metrics = measure(inside, batches, loss_changes=off, gradients=gradients(inside, batches))
    return {"examples": len(examples), "own": own, "heads": [_finite(one.to_dict()) for one in metrics]}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def off_response(look: Look, part: PartName, layer: int) -> bytes:
    """The heads of one layer, each off once: changes and flips [heads, positions], and the tokens they are about."""
    _, heads = look.inside.anatomy.parts[part][layer] if look.inside.anatomy.path(part, layer) else ("", 0)
    off = heads_off(look, [(part, layer, head) for head in range(heads)])
    header = {"heads": [head for _, _, head in off.heads], "labels": off.labels}
    changes = np.nan_to_num(off.changes.numpy().astype(np.float32), posinf=1e9, neginf=-1e9)
    return pack(header, {"changes": changes, "flipped": off.flipped.numpy().astype(np.uint8)})


def training_response(folder: Path) -> dict[str, Any]:
    """The curves of a run, thinned, and the steps of its snapshots."""
    curves: dict[str, list[list[float]]] = {"loss": [], "valid_loss": []}
    for line in read_metrics(folder):
        for name, points in curves.items():
            if isinstance(line.get(name), int | float) and math.isfinite(line[name]):
                points.append([line["step"], line[name]])
    thinned = {name: points[:: math.ceil(len(points) / POINTS) or 1] for name, points in curves.items()}
    return {"snapshots": saved_steps(folder), "curves": thinned}
