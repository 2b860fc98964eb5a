"""A family: one architecture of Hugging Face, told as the values of our config that it fixes or leaves free.

    keys        values that both sides have, under two names: dim <-> n_embd
    fixed       values of ours that the architecture implies: GPT-2 is pre-LN and has learned positions
    only        keys of config.json of which just these values are supported
    rules       the weight map
    open, doubts, extend   what takes a line of code: heads of a model, shared tables

Reading config.json checks `only` and fills `fixed` and `keys`; writing checks `fixed` and fills `keys`. So a
model that goes out is one that would come in the same.
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

# their name -> ours; gelu_new, gelu_fast and gelu_pytorch_tanh write one formula in three ways
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

# Fields of ours that no family has anything but this for.
PLAIN: Json = {
    "attention_score": "dot", "window": None, "experts": 0, "residual": True, "pruned": None, "position_axes": 1,
    "qk_norm": False, "shifted_window": None, "stem": "linear", "pixel_mean": (0.0,), "pixel_std": (1.0,),
}  # fmt: skip


@dataclass(frozen=True)
class Key:
    ours: str
    theirs: str
    default: Any  # what transformers takes when config.json leaves the key out


@dataclass(frozen=True)
class Family:
    kind: str  # `model_type` in config.json
    title: str
    architectures: tuple[str, ...]
    keys: tuple[Key, ...]
    fixed: Json
    rules: Callable[[ModelConfig], Iterable[Rule]]
    only: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()  # of attention_scale and head_dim, those that may be set
    prefix: str = ""  # in front of every tensor but those of `outside`, in models with a head
    outside: tuple[str, ...] = ()
    unused: str = "(?!)"  # pattern of tensors that carry nothing
    # values of ours that need code: (config.json, the tensors if known) -> fields
    open: Callable[[Json, Tensors | None], Json] = lambda hf, tensors: {}
    # reasons, beyond `fixed`, why a config cannot be written
    doubts: Callable[[ModelConfig], list[str]] = lambda config: []
    # their values that need code, `architectures` among them
    extend: Callable[[ModelConfig], Json] = lambda config: {}
    # names of theirs that repeat another tensor: {copy: original}
    copies: Callable[[ModelConfig], dict[str, str]] = lambda config: {}
    # the same when writing: {copy: original} for copies that must be in the file
    repeats: Callable[[ModelConfig], dict[str, str]] = lambda config: {}
    # tensors of theirs that we have not and that are zero: {name: shape}
    zeros: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = lambda config: {}
    # checks before reading, changes before writing
    inspect: Callable[[ModelConfig, Tensors], None] = lambda config, tensors: None
    arrange: Callable[[ModelConfig, Tensors], Tensors] = lambda config, tensors: tensors


def read_config(family: Family, hf: Json, tensors: Tensors | None) -> ModelConfig:
    """Our config from the content of config.json; `tensors` settle what it leaves open."""
    for name, only in family.only.items():
        if hf.get(name, only) not in (only, None):
            raise UserError(f"config.json: {name} = {hf[name]!r} is not supported for {family.title}; only {only!r} is")
    values = dict(family.fixed)
    for key in family.keys:
        value = hf.get(key.theirs)
        value = key.default if value is None else value
        values[key.ours] = read_activation(key.theirs, value) if key.ours == "activation" else value
    values.update(family.open(hf, tensors))
    try:
        return ModelConfig(init="normal", **values)
    except UserError as error:
        raise UserError(f"config.json describes a {family.title} that cannot be built: {error}") from None


def read_activation(key: str, name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UserError(f"config.json: {key} = {name!r} is not supported; only {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]


def read_architecture(family: Family, hf: Json) -> str:
    names = hf.get("architectures") or [None]
    name = names[0] if isinstance(names, list) else names
    if name not in family.architectures:
        raise UserError(
            f"config.json: architectures = {names!r} is not supported for {family.title}; "
            f"only {', '.join(family.architectures)} are"
        )
    return str(name)


def write_config(family: Family, config: ModelConfig) -> Json:
    """The content of config.json."""
    hf: Json = {"model_type": family.kind}
    for key in family.keys:
        value = getattr(config, key.ours)
        value = ACTIVATION_NAMES[value] if key.ours == "activation" else value
        hf.setdefault(key.theirs, value)  # of two fields with one key, the first counts
    return {**hf, **family.extend(config)}


def reasons(family: Family, config: ModelConfig) -> list[str]:
    """Why this family cannot hold such a model, field by field; empty when it can."""
    want = {**PLAIN, **family.fixed}
    found = [
        f"{name} = {_actual(config, name)!r} ({family.title} has {value!r})"
        for name, value in want.items()
        if _actual(config, name) != value
    ]
    if "activation" in {key.ours for key in family.keys} and config.activation not in ACTIVATION_NAMES:
        found.append(f"activation = {config.activation!r} ({family.title} has one of {', '.join(ACTIVATION_NAMES)})")
    if config.key_heads != config.heads:
        found.append(f"kv_heads = {config.kv_heads} ({family.title} has as many as heads)")
    if config.val_dim != config.key_dim:
        found.append(f"value_dim = {config.value_dim} ({family.title} has the size of head_dim)")
    if "head_dim" not in family.free and config.key_dim * config.heads != config.dim:
        found.append(f"head_dim = {config.head_dim} ({family.title} has dim / heads)")
    if "attention_scale" not in family.free and not math.isclose(config.scale, config.key_dim**-0.5):
        found.append(f"attention_scale = {config.attention_scale} ({family.title} has 1 / sqrt(head_dim))")
    return found + family.doubts(config)


def _actual(config: ModelConfig, name: str) -> Any:
    match name:
        case "final_norm":
            return config.ends_with_norm
        case "attention_scale":
            return config.scale
    return getattr(config, name)


# --- pieces that several families use


def tied(hf: Json, tensors: Tensors | None, output: str, table: str) -> bool:
    """Whether the output layer is the table: config.json says so and the weights do not contradict."""
    if hf.get("tie_word_embeddings", True) is False:
        return False
    return tensors is None or equal(tensors, output, table)


def equal(tensors: Tensors, one: str, other: str) -> bool:
    """Both are the same, or one of them is not there."""
    first, second = tensors.get(one), tensors.get(other)
    return first is None or second is None or (first.shape == second.shape and torch.equal(first, second))


def count_labels(hf: Json) -> int:
    labels = hf.get("id2label")
    count = len(labels) if isinstance(labels, dict) and labels else hf.get("num_labels", 2)
    if not isinstance(count, int) or count < 2:
        raise UserError(f"config.json: num_labels = {count!r} is not supported; a classifier has 2 or more classes")
    return count


def label_names(count: int) -> Json:
    """What config.json says about classes that have no names."""
    names = [f"LABEL_{index}" for index in range(count)]
    return {"id2label": {str(i): name for i, name in enumerate(names)}, "label2id": {n: i for i, n in enumerate(names)}}


def drop_copies(family: Family, config: ModelConfig, tensors: Tensors) -> Tensors:
    """Each table once, under its own name; a copy that differs is an error, unless nothing reads it."""
    kept = dict(tensors)
    for copy, original in family.copies(config).items():
        differs = not equal(kept, copy, original)
        if copy not in kept or (differs and re.fullmatch(family.unused, copy)):
            continue
        if differs:
            raise UserError(
                f"{copy} differs from {original}, although config.json says that they are one: "
                "set tie_word_embeddings to false there"
            )
        tensor: Tensor = kept.pop(copy)
        kept.setdefault(original, tensor)
    return kept
