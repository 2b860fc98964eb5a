"""Flow: what one token becomes on its way through a model, from its embedding to the output.

    flow = Flow.of(inside.look("March 3rd, 2021"), target=3)
    flow.stages["decoder.0.attention.before"].vector         the residual stream x of that token, [dim]
    flow.stages["decoder.0.attention.before"].norms          |x| = sqrt(Σ x_i²) of every token, [N]
    flow.stages["decoder.0.attention.weights"].vector        what it attends to, [heads, keys]

The names are those of `regard.nn.trace`. One forward pass is made, and of every activation only the lengths of all
vectors and the vector of the token are kept: for GPT-2 with 512 tokens 1 MB instead of 1 GB. `stacks` describes what
is computed in which order, so that a picture of it needs no other source:

    pre-LN    x + f(norm(x))                 post-LN   norm(x + f(x))
    cache     2 · kv_heads · head_dim · bytes per token and layer, which a decoder keeps while it generates
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.block import Block, Stack
from regard.nn.config import SOFTMAX
from regard.nn.feedforward import Experts
from regard.nn.trace import Trace

if TYPE_CHECKING:
    from regard.explore.inside import Look

PAIRS = ("scores", "scaled", "weights")  # a number for each pair of query and key
SKIPPED = ("mask", "masked", "after")  # not numbers, or equal to another stage
BEST = 10  # outputs with the largest logits


@dataclass(frozen=True)
class Stage:
    """One activation: its shape without the batch, |x| at every position [N], and x of the followed one.

    `norms` of heads is [H, N]; of scores and weights there is only the row of the followed query, [H, keys].
    """

    shape: tuple[int, ...]
    norms: Tensor
    vector: Tensor


@dataclass(frozen=True)
class Flow:
    """The way of one token (of an encoder-decoder: one of the source, one of the target) through a model."""

    look: Look
    at: Mapping[str, int]  # the followed position of each stack
    stages: Mapping[str, Stage]
    stacks: tuple[dict[str, Any], ...]
    output: dict[str, Any]
    parameters: Mapping[str, Tensor]  # gain and bias of each norm, by the name of its stage

    @classmethod
    @torch.inference_mode()
    def of(cls, look: Look, source: int | None = None, target: int | None = None) -> Flow:
        """x of these positions at every stage, and |x| = sqrt(Σ x_i²) of all, from one pass.

        By default the last token that a decoder reads, else the first.
        """
        inside, input = look.inside, look.input
        model, config = inside.model, inside.config
        ends = {"encoder": len(input.source_labels), "decoder": len(input.read or input.source_labels)}
        alone = config.architecture == "decoder"
        asked = {"encoder": source, "decoder": source if alone else target}
        usual = {"encoder": 0, "decoder": ends["decoder"] - 1}
        at = {}
        for stack in ("encoder", "decoder"):
            if hasattr(model, stack):
                place = asked[stack]
                at[stack] = usual[stack] if place is None else place
                if not 0 <= at[stack] < ends[stack]:
                    raise UserError(f"position = {place}: the {stack} reads positions 0 to {ends[stack] - 1}")
        follow = _Follow(model, inside.edits(look.changes, input), at=at)
        with inside.lock, follow:
            inside.forward(input)
        stages = follow.stages()
        finite = (bool(one.norms.isfinite().all()) for one in stages.values())
        if not all(finite):
            raise UserError("the model's activations are not numbers (NaN) under these changes; undo one of them")
        stacks = tuple(describe_stack(model, name, input.target is not None) for name in at)
        parameters: dict[str, Tensor] = {}
        for name in at:
            parameters.update(norm_parameters(getattr(model, name), name))
        output = _describe_output(look, at.get("decoder", at.get("encoder", 0)))
        return cls(look, at, stages, stacks, output, parameters)

    def _repr_html_(self) -> str:
        from regard.explore.html import table

        rows = [
            (name, " × ".join(map(str, stage.shape)), f"{float(stage.vector.norm()):.4g}")
            for name, stage in self.stages.items()
            if name.rpartition(".")[2] not in PAIRS
        ]
        return table(("activation", "shape", "length of the vector"), rows)


class _Follow(Trace):
    """Keeps of every activation what a `Stage` holds."""

    def __init__(self, model: nn.Module, edits: Mapping[str, Any], *, at: Mapping[str, int]) -> None:
        super().__init__(model, edits)
        self.at = at
        self.shapes: dict[str, tuple[int, ...]] = {}

    def record(self, name: str, value: Any) -> None:
        stage = name.rpartition(".")[2]
        if stage in SKIPPED or not isinstance(value, Tensor) or ".experts." in name:
            return
        value = (value[0] if stage != "router" else value).detach().float()  # a batch of one
        place = self._place(name, stage)
        if stage in PAIRS:
            row = value[:, min(place, value.shape[1] - 1)].cpu()
            norms = row.new_zeros(0)
        elif value.dim() == 3:  # [H, N, D]
            row, norms = value[:, min(place, value.shape[1] - 1)].cpu(), value.norm(dim=-1).cpu()
        elif value.dim() == 2:  # [N, dim]
            row, norms = value[min(place, len(value) - 1)].cpu(), value.norm(dim=-1).cpu()
        else:  # positions [N], or one vector of the whole input
            row, norms = value.cpu(), value.norm()[None].cpu()
        self.shapes[name] = tuple(value.shape)
        self._seen.setdefault(name, []).append((row, norms))

    def _place(self, name: str, stage: str) -> int:
        """The position of the vector that is kept: keys and values of cross-attention are the encoder's."""
        stack = name.partition(".")[0]
        if ".cross." in name and stage in ("k", "v"):
            return self.at.get("encoder", 0)
        return self.at.get(stack, self.at.get("decoder", self.at.get("encoder", 0)))

    @contextmanager
    def joined(self, names: list[str], dim: int) -> Iterator[None]:
        yield  # `stages` joins what a loop over time has recorded

    def stages(self) -> dict[str, Stage]:
        made = {}
        for name, pieces in self._seen.items():
            shape, place = self.shapes[name], self._place(name, name.rpartition(".")[2])
            row = pieces[min(place, len(pieces) - 1)][0]
            norms = torch.cat([norms for _, norms in pieces], dim=-1)
            if len(pieces) > 1:  # the recurrent decoder: one query at a time
                shape = (shape[0], len(pieces), *shape[2:])
            made[name] = Stage(shape, norms, row)
        return made


def describe_stack(model: Any, name: str, writes: bool) -> dict[str, Any]:
    """What a stack computes, in the order of computation, as plain values for the page."""
    config, stack = model.config, getattr(model, name)
    side = "read" if writes and name == "decoder" else "source"
    about: dict[str, Any] = {"name": name, "side": side, "dim": config.dim, "input": "tokens"}
    if name != "decoder":
        about["input"] = config.input
    elif config.output_head == "values":
        about["input"] = "features"
    about["embed_scale"] = math.sqrt(config.token_dim) if config.embed_scale and about["input"] == "tokens" else 1.0
    about["types"] = about["input"] == "tokens" and side == "source" and config.token_types > 0
    about["cls"] = about["input"] == "patches" and config.has_cls
    if not isinstance(stack, Stack):
        layers = config.decoder_layers or config.layers if name == "decoder" else config.layers
        count = {"cell": config.cell, "count": layers, "score": config.attention_score, "scale": stack_scale(stack)}
        return {**about, "kind": "recurrent", "cross": config.cross_attention, **count, "layers": []}
    size = next(stack.parameters()).element_size()
    about |= {
        "kind": "transformer",
        "norm": config.norm,
        "norm_order": config.norm_order,
        "eps": config.norm_eps,
        "residual": config.residual,
        "position": config.position,
        "embed_norm": config.embed_norm,
        "final_norm": stack.config.ends_with_norm and config.norm != "none",
        "causal": stack.causal,
        "activation": config.activation,
        "ff_dim": config.ff_dim,
        "key_dim": config.key_dim,
        "scale": config.scale,
        "score": config.attention_score,
        "bias": config.bias,
        "qk_norm": config.qk_norm,
    }
    return {**about, "layers": [_layer(stack, layer, size) for layer in range(len(stack.blocks))]}


def _layer(stack: Stack, layer: int, size: int) -> dict[str, Any]:
    block, config = stack.blocks[layer], stack.config
    assert isinstance(block, Block)
    mixer = config.mixer_of(layer)
    heads = int(getattr(block.attention, "heads", 0))
    kv_heads = int(getattr(block.attention, "key_heads", 0))
    grows = stack.causal and mixer in SOFTMAX
    return {
        "mixer": mixer,
        "heads": heads,
        "cross": 0 if block.cross is None else block.cross.heads,
        "experts": config.experts if isinstance(block.feedforward, Experts) else 0,
        "cache": kv_heads * (config.key_dim + config.val_dim) * size if grows else 0,  # bytes per token
        "reach": config.window_of(layer) if mixer == "window" else None,
        "kv_heads": kv_heads,
    }


def stack_scale(stack: nn.Module) -> float:
    """The factor of the scores of the recurrent model's attention."""
    return float(getattr(getattr(stack, "cross", None), "scale", 1.0))


def norm_parameters(stack: nn.Module, name: str) -> dict[str, Tensor]:
    """Gain and bias of the norms of a stack: `decoder.0.attention.norm.gain`."""
    norms: dict[str, nn.Module] = {}
    if isinstance(stack, Stack):
        norms = {f"{name}.embedded": stack.embed_norm, f"{name}.output": stack.norm}
        for layer, block in enumerate(stack.blocks):
            for part in ("attention", "cross", "feedforward"):
                if isinstance(norm := getattr(block, f"{part}_norm"), nn.Module):
                    norms[f"{name}.{layer}.{part}.norm"] = norm
    made = {}
    for path, norm in norms.items():
        for field, value in (("gain", getattr(norm, "weight", None)), ("bias", getattr(norm, "bias", None))):
            if isinstance(value, Tensor):
                made[f"{path}.{field}"] = value.detach().float().cpu()
    return made


def _describe_output(look: Look, at: int) -> dict[str, Any]:
    """The largest logits at the followed position, and what softmax makes of them."""
    config, reader = look.inside.config, look.inside.reader
    about: dict[str, Any] = {"kind": look.output.kind, "head": config.output_head, "pooling": config.pooling}
    about |= {"pooler": config.pooler, "head_layer": config.head_layer, "tied": config.tie_embeddings, "best": []}
    about |= {"bias": config.output_head == "classes" or config.logit_bias, "scale": config.logit_scale}
    if look.output.kind == "values":
        about["values"] = look.output.logits[min(at, len(look.output.logits) - 1)].tolist()  # as they are predicted
    if look.output.kind in ("vector", "values"):
        return about
    logits = look.output.logits[min(at, len(look.output.logits) - 1)].double()
    values, ids = logits.topk(min(BEST, len(logits)))
    total = float(logits.logsumexp(dim=-1))
    about |= {"size": len(logits), "max": float(logits.max()), "log_sum": total}
    about["best"] = [
        {"label": reader.label(id), "logit": value, "probability": math.exp(value - total)}
        for id, value in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return about
