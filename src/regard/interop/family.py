"""A family: one Hugging Face architecture, described by the values of `ModelConfig` that it fixes or leaves free.

    keys        values that both sides have, under two names: dim <-> n_embd
    fixed       our values that the architecture implies: GPT-2 is pre-LN and has learned positions
    supported   keys of config.json of which only these values are supported
    rules       the weight map
    infer, mismatches, to_config   what needs code: output heads, shared embeddings

Importing checks `supported` and fills in `fixed` and `keys`; exporting checks `fixed` and fills in `keys`. A model that
can be exported is therefore imported again as the same model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.interop.rules import Rule, Tensors
from regard.models.config import ModelConfig

Json = dict[str, Any]

# their name -> ours; gelu_new, gelu_fast and gelu_pytorch_tanh are three implementations of one formula
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "silu": "silu",
    "swish": "silu",
}
ACTIVATION_NAMES = {"relu": "relu", "gelu": "gelu", "gelu-tanh": "gelu_new", "silu": "silu"}

# Our fields that have this value in every family
COMMON: Json = {
    "attention_score": "dot", "window": None, "experts": 0, "residual": True, "pruned": None, "position_axes": 1,
    "qk_norm": False, "shifted_window": None, "stem": "linear", "pixel_mean": (0.0,), "pixel_std": (1.0,),
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    ours: str
    theirs: str
    default: Any  # the default of transformers if config.json omits the key


@dataclass(frozen=True)
class Family:
    model_type: str  # in config.json
    name: str
    architectures: tuple[str, ...]
    keys: tuple[Key, ...]
    fixed: Json
    rules: Callable[[ModelConfig], Iterable[Rule]]
    supported: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()  # which of attention_scale and head_dim may be set
    prefix: str = ""  # of all tensors except those in `unprefixed`, in models with an output head
    unprefixed: tuple[str, ...] = ()
    unused: str = "(?!)"  # pattern of tensors that the model does not use
    # our values that need code: (config.json, the tensors if known) -> fields
    infer: Callable[[Json, Tensors | None], Json] = lambda hf, tensors: {}
    # differences, beyond `fixed`, that prevent an export
    mismatches: Callable[[ModelConfig], list[str]] = lambda config: []
    # their values that need code, including `architectures`
    to_config: Callable[[ModelConfig], Json] = lambda config: {}
    # tensors of theirs that are copies of others: {copy: original}
    copies: Callable[[ModelConfig], dict[str, str]] = lambda config: {}
    # copies that an exported file must contain: {copy: original}
    written_copies: Callable[[ModelConfig], dict[str, str]] = lambda config: {}
    # tensors that only theirs has, which are zero: {name: shape}
    zeros: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = lambda config: {}
    # checks before importing, changes before exporting
    check: Callable[[ModelConfig, Tensors], None] = lambda config, tensors: None
    reorder: Callable[[ModelConfig, Tensors], Tensors] = lambda config, tensors: tensors


def read_config(family: Family, hf: Json, tensors: Tensors | None) -> ModelConfig:
    """Our config from the content of config.json; `tensors` determine what it leaves open."""
    for name, supported in family.supported.items():
        if hf.get(name, supported) not in (supported, None):
            raise UserError(
                f"config.json: {name} = {hf[name]!r} is not supported for {family.name}; only {supported!r} is"
            )
    values = dict(family.fixed)
    for key in family.keys:
        value = hf.get(key.theirs)
        value = key.default if value is None else value
        values[key.ours] = read_activation(key.theirs, value) if key.ours == "activation" else value
    values.update(family.infer(hf, tensors))
    try:
        return ModelConfig(init="normal", **values)
    except UserError as error:
        raise UserError(f"config.json describes an invalid {family.name}: {error}") from None


def read_activation(key: str, name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UserError(f"config.json: {key} = {name!r} is not supported; only {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]


def read_architecture(family: Family, hf: Json) -> str:
    names = hf.get("architectures") or [None]
    name = names[0] if isinstance(names, list) else names
    if name not in family.architectures:
        raise UserError(
            f"config.json: architectures = {names!r} is not supported for {family.name}; "
            f"only {', '.join(family.architectures)} are"
        )
    return str(name)


def write_config(family: Family, config: ModelConfig) -> Json:
    """The content of config.json."""
    hf: Json = {"model_type": family.model_type}
    for key in family.keys:
        value = getattr(config, key.ours)
        value = ACTIVATION_NAMES[value] if key.ours == "activation" else value
        hf.setdefault(key.theirs, value)  # of two fields with the same key, the first counts
    return {**hf, **family.to_config(config)}


def find_mismatches(family: Family, config: ModelConfig) -> list[str]:
    """Why this family cannot represent such a model, field by field; empty if it can."""
    differences = [
        f"{name} = {_actual(config, name)!r} ({family.name} has {value!r})"
        for name, value in {**COMMON, **family.fixed}.items()
        if _actual(config, name) != value
    ]
    if "activation" in {key.ours for key in family.keys} and config.activation not in ACTIVATION_NAMES:
        names = ", ".join(ACTIVATION_NAMES)
        differences.append(f"activation = {config.activation!r} ({family.name} has one of {names})")
    if config.key_heads != config.heads:
        differences.append(f"kv_heads = {config.kv_heads} ({family.name} has as many as heads)")
    if config.val_dim != config.key_dim:
        differences.append(f"value_dim = {config.value_dim} ({family.name} has the size of head_dim)")
    if "head_dim" not in family.free and config.key_dim * config.heads != config.dim:
        differences.append(f"head_dim = {config.head_dim} ({family.name} has dim / heads)")
    if "attention_scale" not in family.free and not math.isclose(config.scale, config.key_dim**-0.5):
        differences.append(f"attention_scale = {config.attention_scale} ({family.name} has 1 / sqrt(head_dim))")
    return differences + family.mismatches(config)


def _actual(config: ModelConfig, name: str) -> Any:
    """The value of a field, with defaults resolved."""
    return getattr(config, {"final_norm": "ends_with_norm", "attention_scale": "scale"}.get(name, name))


# --- used by several families

# keys of BERT and ViT
ENCODER_KEYS = (
    Key("dim", "hidden_size", 768),
    Key("layers", "num_hidden_layers", 12),
    Key("heads", "num_attention_heads", 12),
    Key("ff_dim", "intermediate_size", 3072),
    Key("activation", "hidden_act", "gelu"),
    Key("norm_eps", "layer_norm_eps", 1e-12),
)


def is_tied(hf: Json, tensors: Tensors | None, output: str, embedding: str) -> bool:
    """Whether the output layer is the embedding matrix: config.json says so and the weights do not contradict."""
    if hf.get("tie_word_embeddings", True) is False:
        return False
    return tensors is None or equal(tensors, output, embedding)


def equal(tensors: Tensors, one: str, other: str) -> bool:
    """Whether both tensors are equal, or one of them is missing."""
    first, second = tensors.get(one), tensors.get(other)
    return first is None or second is None or (first.shape == second.shape and torch.equal(first, second))


def count_labels(hf: Json) -> int:
    labels = hf.get("id2label")
    count = len(labels) if isinstance(labels, dict) and labels else hf.get("num_labels", 2)
    if not isinstance(count, int) or count < 2:
        raise UserError(f"config.json: num_labels = {count!r} is not supported; a classifier has 2 or more classes")
    return count


def label_names(count: int) -> Json:
    """The entries of config.json for classes without names."""
    names = [f"LABEL_{index}" for index in range(count)]
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def drop_copies(family: Family, config: ModelConfig, tensors: Tensors) -> Tensors:
    """Each tensor once, under the name of the original; a copy that differs is an error, unless it is unused."""
    kept = dict(tensors)
    for copy, original in family.copies(config).items():
        differs = not equal(kept, copy, original)
        if copy not in kept or (differs and re.fullmatch(family.unused, copy)):
            continue
        if differs:
            raise UserError(
                f"{copy} differs from {original}, although config.json says that they are tied; "
                "set tie_word_embeddings to false there"
            )
        tensor: Tensor = kept.pop(copy)
        kept.setdefault(original, tensor)
    return kept
