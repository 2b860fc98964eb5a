"""Responses of the page's server: what a `Look` holds, with the names that the page knows.

The page shows the unchanged and the changed model side by side, so the output holds both probabilities of every token
that is among the most probable of either. Maps are sent whole up to 4 million weights; a longer text sends reduced
ones, and the page requests single maps as they are opened.

A response with numbers is a frame: one string of bytes, a JSON header and then the arrays that it names.

    "RGRD"  length of the header (uint32)  header (UTF-8)  padding to a multiple of 8  array  padding  array  …

The browser views the bytes as typed arrays, so a map is never converted to text and back. A weight w lies between 0
and 1, so 16 bits of fixed point hold it, n = round(65535 w), with an error of at most 1 / 131070 = 8e-6: half the size
of float32, and equally exact near 1, where float16 is coarsest.

    12 layers · 12 heads · 128 · 128 weights · 2 bytes = 4.7 MB
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UserError
from regard.explore.changes import PartName
from regard.explore.flow import Flow
from regard.explore.forward import Choice, Output, difference
from regard.explore.inside import Look, Steps
from regard.explore.server.inputs import unlike

WHOLE = 4_000_000  # weights that are sent at once
SIDE = 64  # cells per side of a reduced map
ONE = 65535  # the integer for a weight of 1
WIDEST = 8  # hypotheses that still make a readable tree


def pack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """A frame; `header` gets a field `arrays` with the name, type, shape and offset of each one."""
    listed, chunks, offset = [], [], 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
        listed.append({"name": name, "type": array.dtype.str[1:], "shape": list(array.shape), "offset": offset})
        chunks.append(data + bytes(-len(data) % 8))
        offset += len(chunks[-1])
    # JSON has no NaN: raise here instead of sending something else
    text = json.dumps({**header, "arrays": listed}, ensure_ascii=True, allow_nan=False).encode()
    return b"".join((b"RGRD", len(text).to_bytes(4, "little"), text, bytes(-(8 + len(text)) % 8), *chunks))


def fixed(weights: Tensor, where: str) -> np.ndarray:
    """Weights between 0 and 1 as 16-bit fixed point; `where` names them in the error message for NaN."""
    if not bool(torch.isfinite(weights).all()):
        raise UserError(
            f"{where}: the attention weights are not numbers (NaN), so there is nothing to show: the model's "
            "parameters are damaged, or training has diverged; choose an earlier checkpoint"
        )
    scaled: np.ndarray = (weights.clamp(0, 1) * ONE).round().numpy().astype(np.uint16)
    return scaled


def look_response(run: str, plain: Look, changed: Look) -> bytes:
    """Labels, maps and output of `changed`; `plain` is the same look without changes."""
    input, inside = changed.input, changed.inside
    whole = sum(layer.numel() for part in changed.parts.values() for layer in part.weights) <= WHOLE
    parts: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for name, part in changed.parts.items():
        own = "read" if name == "decoder" and input.target is not None else "source"
        rows, columns = ("written", "source") if name == "cross" else (own, own)
        sides = {"rows": rows, "columns": columns, "causal": name == "decoder", "whole": whole}
        for layer, weights in ((layer, weights) for layer, weights in enumerate(part.weights) if len(weights)):
            parts.append({"part": name, "layer": layer, "heads": len(weights), **sides})
            if not whole:  # each cell the largest weight of its block
                weights = F.adaptive_max_pool2d(weights, [min(side, SIDE) for side in weights.shape[1:]])
            arrays[f"{name}.{layer}"] = fixed(weights, f"{run}, {name} layer {layer}")
    header = {
        "run": run,
        "architecture": inside.config.architecture,
        "parameters": sum(parameter.numel() for parameter in inside.model.parameters()),
        "shuffles": inside.anatomy.reads is not None,
        "labels": {"source": input.source_labels, "read": input.read, "written": input.written},
        "parts": parts,
        "output": output_of(plain.output, changed.output, inside.reader.decode),
        "grid": None if input.grid is None else asdict(input.grid),
        "size": inside.config.image_size if inside.config.input == "patches" else None,
        "mask": inside.reader.mask,
        "unlike": unlike(inside, input),
    }
    return pack(header, arrays)


def output_of(before: Output, after: Output, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """The output with the probabilities of both states. Tokens that may follow the whole text come with their text, so
    that the page can append it."""
    change = difference(before, after)
    if not all(np.isfinite(change.divergence)):
        raise UserError("the model's output is not a number (NaN) under these changes; undo one of them")
    if after.kind == "values":
        numbers = {"before": before.logits.tolist(), "after": after.logits.tolist()}
        summaries = {"before": _summary(before), "after": _summary(after)}
        return {"kind": "values", **summaries, "positions": [], "apart": change.divergence, "values": numbers}
    p, q = (one.logits.softmax(dim=-1).numpy() for one in (before, after))

    def both(at: int, choice: Choice) -> dict[str, Any]:
        return {"label": choice.label, "before": float(p[at, choice.id]), "after": float(q[at, choice.id])}

    positions = []
    for at, (old, new) in enumerate(zip(before.positions, after.positions, strict=True)):
        kept = (*new.top, *old.top, *([] if old.expected is None else [old.expected]))
        choices = {choice.id: both(at, choice) for choice in kept}
        if after.kind == "next" and at == len(after.positions) - 1:
            for id, choice in choices.items():
                choice["text"] = decode([id])
        positions.append(
            {
                "read": old.read,
                "expected": None if old.expected is None else both(at, old.expected),
                "choices": sorted(choices.values(), key=lambda choice: -choice["after"]),
                "divergence": change.divergence[at],
                "flipped": at in change.flipped,
            }
        )
    apart = change.divergence if after.kind == "vector" else ()
    both_states = {"before": _summary(before), "after": _summary(after)}
    return {"kind": after.kind, **both_states, "positions": positions, "apart": apart}


def _summary(output: Output) -> dict[str, Any]:
    hypotheses = [{"text": text, "score": score} for text, score in output.hypotheses]
    return {"loss": output.loss, "generated": output.generated, "hypotheses": hypotheses}


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


def flow_response(flow: Flow) -> bytes:
    """The description of the model, and of every activation its shape, `n:NAME` and `v:NAME`: lengths and a vector."""
    arrays: dict[str, np.ndarray] = {}
    for name, stage in flow.stages.items():
        if stage.norms.numel():
            arrays[f"n:{name}"] = stage.norms.numpy().astype(np.float32)
        if name != "logits":  # the largest ones are in `output`
            arrays[f"v:{name}"] = stage.vector.numpy().astype(np.float32)
    arrays |= {f"p:{name}": value.numpy() for name, value in flow.parameters.items()}
    shapes = {name: stage.shape for name, stage in flow.stages.items()}
    header = {"at": dict(flow.at), "stacks": list(flow.stacks), "output": flow.output, "shapes": shapes}
    return pack(header, arrays)


@torch.inference_mode()
def search_tree(look: Look, width: int) -> dict[str, Any]:
    """Every hypothesis that a beam search for the input of `look` scores, under its changes, and which ones it keeps.

        root <s>  ->  the most probable first tokens  ->  their continuations  ->  …  ->  </s>

    A node is one token after the prefix that leads to it, with p(token | prefix) and the sum of the log-probabilities
    up to it; `kept` ones are extended, `ended` ones are finished, `best` ones form the best hypothesis. At each step
    the search ranks the 2 · width best extensions of all hypotheses together; the first `width` that do not end are
    kept, and those among the first `width` that end are finished. The search is that of `regard.predict.beam`, observed
    through `watch`.
    """
    inside = look.inside
    if not inside.reader.writes:
        raise UserError(f"search: architecture = {inside.config.architecture!r} generates no text, so there is none")
    if not 1 <= width <= WIDEST:
        raise UserError(f"beam = {width}: must be from 1 to {WIDEST}")
    eos = inside.bundle.target_frame[1]
    nodes: list[dict[str, Any]] = []
    children: dict[tuple[int | None, int], dict[str, Any]] = {}  # by (parent, token id)
    live: list[int | None] = [None]  # the node that each row of the search extends

    def add_step(totals: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Add the candidates of one step, [1, 2 · width] each, best first."""
        extended: list[int | None] = []
        candidates = zip(totals[0].tolist(), tokens[0].tolist(), rows[0].tolist(), strict=True)
        for rank, (total, token, row) in enumerate(candidates):
            if total == -math.inf:
                continue
            parent, ends = live[row], token == eos
            before = 0.0 if parent is None else nodes[parent]["total"]
            node = {"id": len(nodes), "parent": parent, "token": inside.reader.label(token)}
            node |= {"probability": math.exp(total - before), "total": total}
            node |= {"kept": not ends and len(extended) < width, "ended": ends and rank < width, "best": False}
            if node["kept"]:
                extended.append(len(nodes))
            nodes.append(node)
            children[parent, token] = node
        live[:] = extended

    config = replace(inside.search, beam=width, n_best=width)
    hypotheses = inside.generate(look.input, look.changes, config, add_step)
    at: int | None = None
    for token in [*hypotheses[0].tokens, *([eos] if hypotheses[0].finished else [])]:
        children[at, token]["best"] = True
        at = children[at, token]["id"]
    texts = [
        {"text": inside.reader.decode(one.tokens), "score": one.score, "log_probability": one.log_probability}
        for one in hypotheses
    ]
    return {"nodes": nodes, "found": texts}
