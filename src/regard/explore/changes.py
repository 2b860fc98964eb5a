"""Changes: interventions in a model during a forward pass.

An attention map raises a question; an intervention answers it. Each field of `Changes` is one:

    heads         switch these heads off: their outputs become 0                         (part, layer, head)
    layers        skip these blocks: they pass on their input                            (stack, layer)
    feedforward   switch these feed-forward layers off: their output becomes 0, or at    (stack, layer, "zero" | "mean")
                  every position its mean over the positions of the unchanged input
    future        remove the causal mask, so that a decoder sees the tokens to come
    temperature   weights = softmax(scores / temperature): below 1 sharper, above 1 flatter
    shuffle       permute the positions of the tokens, by this seed; masks keep the real ones
    rows          replace the weights of one query of one head: (part, layer, head, query, weights)

`part` is "encoder" (self-attention in both directions), "decoder" (causal self-attention) or "cross" (attention of the
decoder to the encoder's output). A change is a value: it can be written as JSON (`to_dict`, `from_dict`), put into a
link and compared. `edits` turns it into interventions of `regard.nn.trace`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from regard.errors import UserError, suggest
from regard.models.transformer import Model
from regard.nn.mask import causal
from regard.nn.multihead import MultiHead
from regard.nn.trace import Edit, drop, replace, zero_heads
from regard.settings import check_fields, from_dict, to_dict

PartName = Literal["encoder", "decoder", "cross"]
PARTS: tuple[PartName, ...] = get_args(PartName)
Head = tuple[PartName, int, int]  # part, layer, head
Row = tuple[PartName, int, int, int, tuple[float, ...]]  # part, layer, head, query, a weight per key
FeedForwardOff = tuple[PartName, int, Literal["zero", "mean"]]  # stack, layer, what its output becomes


@dataclass(frozen=True)
class Changes:
    """Interventions in one forward pass."""

    heads: tuple[Head, ...] = ()
    layers: tuple[tuple[PartName, int], ...] = ()  # "encoder" or "decoder"
    future: bool = False
    temperature: float = 1.0
    shuffle: int | None = None
    rows: tuple[Row, ...] = ()  # the weights of a row are scaled to sum to 1, unless all are 0
    feedforward: tuple[FeedForwardOff, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    def __bool__(self) -> bool:
        return self != Changes()

    def __str__(self) -> str:
        texts = [f"head {part}.{layer}.{head} off" for part, layer, head in self.heads]
        texts += [f"layer {stack}.{layer} skipped" for stack, layer in self.layers]
        texts += [f"feed-forward {stack}.{layer} off ({how})" for stack, layer, how in self.feedforward]
        texts += ["causal mask off"] * self.future
        texts += [f"attention at temperature {self.temperature:g}"] * (self.temperature != 1.0)
        texts += [f"positions shuffled (seed {self.shuffle})"] * (self.shuffle is not None)
        texts += [f"row {query} of head {part}.{layer}.{head} rewritten" for part, layer, head, query, _ in self.rows]
        return ", ".join(texts) or "nothing changed"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, only those that change something."""
        default = to_dict(Changes())
        return {name: value for name, value in to_dict(self).items() if value != default.get(name)}

    @classmethod
    def from_dict(cls, values: Any) -> Changes:
        """From the result of `to_dict`, or a request: everything is checked."""
        if not isinstance(values, dict):
            raise UserError(f"changes: give an object such as {{}}, not {type(values).__name__}")
        return from_dict(cls, values, "changes.")


@dataclass(frozen=True)
class Anatomy:
    """The attention of a model: for each part the path of every layer in a trace and its number of heads.

    A layer whose mixer computes no attention weights has 0 heads, and a part of such layers alone is not in `parts`.
    """

    parts: Mapping[PartName, tuple[tuple[str, int], ...]]  # part -> (trace path, heads) of each layer
    reads: str | None  # the stack whose positions can be shuffled
    mixers: Mapping[str, str] = field(default_factory=dict)  # path -> mixer, of layers without attention weights

    @classmethod
    def of(cls, model: Model) -> Anatomy:
        """Where the attention of a model is, in the order of computation."""
        parts: dict[PartName, list[tuple[str, int]]] = {}
        mixers: dict[str, str] = {}
        for name, module in model.named_modules():
            path = name.replace("blocks.", "")
            if isinstance(module, MultiHead):
                part = "cross" if module.cross else cast(PartName, path.partition(".")[0])
                parts.setdefault(part, []).append((path, module.heads))
            elif re.fullmatch(r"\w+\.\d+\.attention", path):
                parts.setdefault(cast(PartName, path.partition(".")[0]), []).append((path, 0))
                mixers[path] = model.config.mixer_of(int(path.split(".")[1]))
            elif path == "decoder.cross":  # the recurrent model's
                parts["cross"] = [(path, 1)]
        architecture = model.config.architecture
        positioned = architecture != "recurrent" and model.config.position != "none"
        reads = ("decoder" if architecture == "decoder" else "encoder") if positioned else None
        weighted = {name: tuple(parts[name]) for name in PARTS if any(heads for _, heads in parts.get(name, ()))}
        return cls(weighted, reads, mixers)

    def check_weights(self) -> None:
        """Raise for a model without any attention weights."""
        if not self.parts:
            kinds = " and ".join(dict.fromkeys(f"'{kind}'" for kind in self.mixers.values()))
            raise UserError(
                f"mixer = {kinds}: the layers of this model compute no attention weights, so there is nothing to show; "
                "regard.trace reads its other activations, such as the output of each layer"
            )

    @property
    def heads(self) -> list[Head]:
        """Every head, in the order of computation."""
        layers = ((part, layer, heads) for part, some in self.parts.items() for layer, (_, heads) in enumerate(some))
        return [(part, layer, head) for part, layer, heads in layers for head in range(heads)]

    def path(self, part: PartName, layer: int, head: int | None = None) -> str:
        """The path of that attention in a trace."""
        if (kind := self.mixers.get(f"{part}.{layer}.attention")) is not None:
            raise UserError(
                f"layer = {layer}: this layer of the {part} has mixer = '{kind}', which computes no attention weights"
            )
        if part not in self.parts:
            raise UserError(f"part = {part!r}: this model does not have it; {suggest(part, self.parts)}")
        layers = self.parts[part]
        if not 0 <= layer < len(layers):
            raise UserError(f"layer = {layer}: {part} attention has layers 0 to {len(layers) - 1}")
        path, heads = layers[layer]
        if head is not None and not 0 <= head < heads:
            raise UserError(f"head = {head}: layer {layer} of the {part} attention has heads 0 to {heads - 1}")
        return path

    def check(self, part: PartName, layer: int | None, head: int | None) -> None:
        """Raise for a layer or head that the model does not have; None means all of them."""
        if layer is not None:
            self.path(part, layer, head)
        elif head is not None:
            raise UserError(f"head = {head}: name its layer too, such as layer = 0")


def edits(changes: Changes, anatomy: Anatomy, means: Mapping[str, Tensor] | None = None) -> dict[str, Edit]:
    """The interventions that make these changes, for one pass or one generation.

    `means`: the mean output [dim] of the feed-forward layers that are switched off by their mean, by stage.
    """
    by_stage: dict[str, Edit] = {}

    def add(stage: str, edit: Edit) -> None:
        """After the edits that the stage already has."""
        first = by_stage.get(stage, lambda value: value)
        by_stage[stage] = lambda value: edit(first(value))

    off: dict[str, list[int]] = {}
    for part, layer, head in changes.heads:
        off.setdefault(anatomy.path(part, layer, head), []).append(head)
    for path, heads in off.items():
        add(f"{path}.heads", zero_heads(*heads))
    for stack, layer in sorted(set(changes.layers)):
        _skip(add, stack, layer, anatomy)
    for stack, layer, how in changes.feedforward:
        stage = feedforward_stage(anatomy, stack, layer)
        if how == "mean" and stage not in (means or {}):
            raise UserError(f"feedforward: {stack}.{layer} has no mean without an input; use Inside.edits, or 'zero'")
        add(stage, replace((means or {})[stage] if how == "mean" else torch.zeros(())))
    for row in changes.rows:
        add(f"{anatomy.path(*row[:3])}.weights", _Rewrite(row))
    if changes.future and (other := next((path for path in anatomy.mixers if path.startswith("decoder")), None)):
        raise UserError(f"future: {other} has mixer = '{anatomy.mixers[other]}', which cannot see the future")
    if changes.future and "decoder" in anatomy.parts:
        add("decoder.*.attention.mask", drop(causal))
    if changes.temperature != 1.0:
        if not changes.temperature > 0:
            raise UserError(f"temperature = {changes.temperature}: must be greater than 0")
        anatomy.check_weights()
        add("*.masked", lambda scores: scores / changes.temperature)
    if (seed := changes.shuffle) is not None:
        if anatomy.reads is None:
            raise UserError("shuffle: this model has no position information that could be shuffled")
        add(f"{anatomy.reads}.positions", lambda pos: _shuffled(pos, seed))
    return by_stage


def feedforward_stage(anatomy: Anatomy, stack: PartName, layer: int) -> str:
    """The output of a feed-forward layer in a trace."""
    check_layer(anatomy, stack, layer, "feedforward")
    return f"{stack}.{layer}.feedforward.output"


def check_layer(anatomy: Anatomy, stack: PartName, layer: int, field: str) -> None:
    """Raise for a layer that the model does not have."""
    if stack == "cross":
        raise UserError(f"{field}: 'cross' is part of the decoder's layers; name 'decoder', or switch its heads off")
    if f"{stack}.{layer}.attention" not in anatomy.mixers:
        anatomy.path(stack, layer)


def _skip(add: Callable[[str, Edit], None], stack: PartName, layer: int, anatomy: Anatomy) -> None:
    """Block `layer` returns its input x, kept from the stage before it."""
    check_layer(anatomy, stack, layer, "layers")
    kept: list[Tensor] = []

    def remember(value: Tensor) -> Tensor:
        kept[:] = [value]
        return value

    add(f"{stack}.{layer - 1}.output" if layer else f"{stack}.embedded", remember)
    add(f"{stack}.{layer}.output", lambda value: kept[0])


class _Rewrite:
    """Replaces one row of weights.

    A decoder that generates with a cache has one query per call, so its position must be counted: in self-attention by
    the keys, in cross-attention by the calls. There, the hypotheses of a sentence are queries of the same call, all at
    the same step.
    """

    def __init__(self, row: Row) -> None:
        part, _, self.head, self.query, self.weights = row
        self.back = part == "decoder"
        self.calls, self.whole = 0, False

    def __call__(self, weights: Tensor) -> Tensor:
        queries, keys = weights.shape[-2:]
        if self.calls == 0:
            self.whole = queries > 1  # the first step of a generation reads <s> alone
        at = self.query - (keys - queries if self.back else 0)
        own = slice(at, at + 1) if self.back or self.whole else slice(None)
        is_here = 0 <= at < queries if self.back or self.whole else self.calls == self.query
        self.calls += 1
        if not is_here:
            return weights
        wanted = torch.tensor(self.weights[:keys], dtype=weights.dtype, device=weights.device)
        total = wanted.sum()
        changed = weights.clone()
        changed[:, self.head, own] = 0  # a generation may have more keys than the row has weights
        changed[:, self.head, own, : len(wanted)] = wanted / total if total > 0 else wanted
        return changed


def _shuffled(pos: Tensor, seed: int) -> Tensor:
    """The same positions [B|1, N] in another order."""
    order = torch.randperm(pos.shape[-1], generator=torch.Generator().manual_seed(seed % 2**63))
    return pos[:, order.to(pos.device)]
