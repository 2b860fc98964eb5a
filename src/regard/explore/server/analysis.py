"""Routes for what is computed from the activations of a question, each when its view is opened.

    POST  api/flow         every activation of the selected tokens, from the embedding to the output, as a frame
    POST  api/generate     the next tokens after a prefix, with their distributions and the size of the KV cache
    POST  api/lens         predictions after every layer, of some positions
    POST  api/attribution  the terms of one logit: heads, feed-forward layers, embeddings
    POST  api/saliency     attention, rollout and gradient × input of one output
    POST  api/scores       induction and copying scores of the heads
    POST  api/patching     what every patch from the question into the `other` text or image restores
    POST  api/patched      the output under one of these patches
    POST  api/neurons      the units of a feed-forward layer, and one of them
    POST  api/embeddings   the map of the token embeddings, as a frame
    POST  api/neighbours   the tokens nearest to one
    POST  api/position     the position encoding as a matrix

From api/lens on, the values are those of the functions of `regard.explore`, rounded to 6 digits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from fastapi.responses import Response
from pydantic import Field

from regard.errors import UserError
from regard.explore.server.models import Models
from regard.explore.server.questions import Asked, Frame, PartName

if TYPE_CHECKING:
    from regard.explore.embeddings import EmbeddingMap
    from regard.explore.inside import Inside, Look

POSITIONS = 128  # of one lens
UNITS = 24  # most active units that are listed
_maps: WeakKeyDictionary[Any, dict[str | None, Any]] = WeakKeyDictionary()  # of the models in memory


class AskedFlow(Asked):
    at: dict[Literal["source", "target"], int] = Field(default_factory=dict)


class AskedGeneration(Asked):
    prefix: list[int] = Field(default_factory=list, max_length=4096)
    count: int = 1
    sampling: dict[str, Any] = Field(default_factory=dict)  # temperature, top_k, top_p, seed


class AskedLens(Asked):
    first: int = 0
    count: int = Field(default=64, ge=1, le=POSITIONS)


class AskedOutput(Asked):
    at: int | None = None
    token: str | None = None
    minus: str | None = None


class AskedPair(Asked):
    other: str = ""
    other_image: str | None = None  # of a question with an image


class AskedPatch(AskedPair):
    stack: PartName
    layer: int  # of the residual stream: -1 is the embeddings
    head: int | None = None  # None: the residual stream at `position`
    position: int = 0


class AskedNeurons(Asked):
    stack: Literal["encoder", "decoder"] | None = None
    layer: int = 0
    unit: int | None = None


class AskedTokens(Asked):
    side: Literal["source", "target"] | None = None
    token: int | str | None = None


class AskedPosition(Asked):
    stack: Literal["encoder", "decoder"] | None = None
    length: int = Field(default=64, ge=1, le=1024)


def plain(content: Any) -> Response:
    """JSON with numbers rounded to 6 digits."""

    def rounded(value: Any) -> Any:
        match value:
            case float():
                return round(value, 6)
            case dict():
                return {name: rounded(one) for name, one in value.items()}
            case list() | tuple():
                return [rounded(one) for one in value]
        return value

    try:
        text = json.dumps(rounded(content), ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise UserError(
            "the values are not numbers (NaN), so there is nothing to show: the model's parameters are damaged, or a "
            "change is too strong; undo one"
        ) from None
    return Response(text.encode("utf-8", "replace"), media_type="application/json")


def flow(asked: AskedFlow, models: Models) -> Response:
    from regard.explore.flow import Flow
    from regard.explore.server.responses import flow_response

    return Frame(flow_response(Flow.of(asked.look(models), asked.at.get("source"), asked.at.get("target"))))


def generate(asked: AskedGeneration, models: Models) -> list[dict[str, Any]]:
    from regard.explore.generation import generate_steps
    from regard.predict.config import SearchConfig
    from regard.settings import from_dict

    config = from_dict(SearchConfig, {**asked.sampling, "sample": True})
    steps = generate_steps(asked.look(models), config, asked.prefix, asked.count, models.interrupt)
    return [asdict(step) for step in steps]


def lens(asked: AskedLens, models: Models) -> Response:
    from regard.explore.lens import logit_lens

    look = asked.look(models)
    total = len(look.output.positions)
    first = max(0, min(asked.first, total - asked.count))
    return plain({**logit_lens(look, range(first, min(total, first + asked.count))).to_dict(), "total": total})


def attribution(asked: AskedOutput, models: Models) -> Response:
    from regard.explore.attribution import direct_logit_attribution

    look = asked.look(models)
    return plain(direct_logit_attribution(look, asked.at, token=asked.token, minus=asked.minus).to_dict())


def saliency(asked: AskedOutput, models: Models) -> Response:
    from regard.explore.saliency import token_saliency

    return plain(token_saliency(asked.look(models), asked.at, token=asked.token).to_dict())


def scores(asked: Asked, models: Models) -> Response:
    from regard.explore.scores import head_scores

    return plain(head_scores(models.open(asked.run, asked.step)).to_dict())


def patching(asked: AskedPair, models: Models) -> Response:
    from regard.explore.patching import activation_patching

    return plain(activation_patching(*both_looks(asked, models)).to_dict())


def embeddings(asked: AskedTokens, models: Models) -> Response:
    from regard.explore.server.responses import pack

    mapped = embedding_map_of(models.open(asked.run, asked.step), asked.side)
    return Frame(pack({"labels": mapped.labels, "explained": mapped.explained}, {"points": mapped.points.numpy()}))


def neighbours(asked: AskedTokens, models: Models) -> Response:
    if asked.token is None:
        raise UserError("token: give a token of the vocabulary")
    mapped = embedding_map_of(models.open(asked.run, asked.step), asked.side)
    id = mapped.id(asked.token)
    return plain({"id": id, "label": mapped.labels[id], "neighbours": mapped.neighbours(id)})


def position(asked: AskedPosition, models: Models) -> Response:
    from regard.explore.embeddings import position_picture
    from regard.explore.server.responses import pack

    picture = position_picture(models.open(asked.run, asked.step), asked.stack, asked.length)
    first = int(picture.column_names[0]) if picture.columns == "distance" else 0
    header = {"kind": picture.kind, "rows": picture.rows, "columns": picture.columns, "first": first}
    return Frame(pack(header, {"values": picture.values.numpy()}))


def both_looks(asked: AskedPair, models: Models) -> tuple[Look, Look]:
    """The question, and the same with the other text or image; targets are what the model generates for each."""
    from regard.explore.changes import Changes

    changes = Changes.from_dict(asked.changes)
    sides = ((asked.text, asked.image), (asked.other or None, asked.other_image))
    first, last = (models.look((asked.run, text, None, image, asked.step), changes) for text, image in sides)
    return first, last


def patched(asked: AskedPatch, models: Models) -> Response:
    """The most probable tokens of the answer: of the clean and the corrupted run, and of the patched one."""
    from regard.explore.patching import make_pair, patch_output, run_logits

    pair = make_pair(*both_looks(asked, models))
    anatomy, stack = pair.inside.anatomy, "decoder" if asked.stack == "cross" else asked.stack
    if asked.head is not None:
        stage, index = f"{anatomy.path(asked.stack, asked.layer, asked.head)}.heads", asked.head
    else:
        stage, index = f"{stack}.embedded" if asked.layer < 0 else f"{stack}.{asked.layer}.output", asked.position
    runs = [run_logits(pair, pair.clean), run_logits(pair, pair.corrupted), patch_output(pair, stage, index)]
    p = [run.softmax(dim=-1) for run in runs]
    ids = list(dict.fromkeys(id for one in reversed(p) for id in one.topk(min(5, len(one))).indices.tolist()))
    label = pair.inside.reader.label
    choices = [
        {"label": label(id), "clean": float(p[0][id]), "corrupted": float(p[1][id]), "patched": float(p[2][id])}
        for id in ids
    ]
    return plain({"stage": stage, "choices": choices})


def neurons(asked: AskedNeurons, models: Models) -> Response:
    """The most active units of a layer, and one of them over the whole text."""
    from regard.explore.neurons import neuron_activations

    made = neuron_activations(asked.look(models), asked.layer, asked.stack)
    units = made.top_units(UNITS)
    unit = units[0][0] if asked.unit is None else made.check(asked.unit)
    content = {
        "stack": made.stack,
        "layer": made.layer,
        "units": made.activations.shape[1],
        "labels": made.labels,
        "top": units,
        "unit": unit,
        "activations": made.activations[:, unit].tolist(),
        "writes": made.writes(unit),
    }
    return plain(content)


def embedding_map_of(inside: Inside, side: str | None) -> EmbeddingMap:
    """Computed once for each model in memory."""
    from regard.explore.embeddings import embedding_map

    kept = _maps.setdefault(inside, {})
    if side not in kept:
        kept[side] = embedding_map(inside, side)
    return kept[side]


ANALYSIS: dict[str, tuple[type[Asked], Callable[..., Any]]] = {
    "flow": (AskedFlow, flow),
    "generate": (AskedGeneration, generate),
    "lens": (AskedLens, lens),
    "attribution": (AskedOutput, attribution),
    "saliency": (AskedOutput, saliency),
    "scores": (Asked, scores),
    "patching": (AskedPair, patching),
    "patched": (AskedPatch, patched),
    "neurons": (AskedNeurons, neurons),
    "embeddings": (AskedTokens, embeddings),
    "neighbours": (AskedTokens, neighbours),
    "position": (AskedPosition, position),
}
