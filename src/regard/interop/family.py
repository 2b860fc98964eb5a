"""A family: one Hugging Face architecture, described by the values of `ModelConfig` that it fixes or leaves free.

    keys        values that both sides have, under two names: dim <-> n_embd
    fixed       our values that the architecture implies: GPT-2 is pre-LN and has learned positions
    supported   keys of config.json of which only these values are supported
    rules       the weight map
    infer, implied, to_config   what needs code: output heads, shared embeddings

`convert` checks `supported` and fills in `fixed` and `keys` to import; to export it checks `fixed` and fills in `keys`.
A model that can be exported is therefore imported again as the same model.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from regard.errors import UserError
from regard.interop.rules import Rule, Tensors
from regard.models.config import ModelConfig

Json = dict[str, Any]
Additions = dict[str, str | tuple[int, ...]]

# their name -> ours; gelu_new, gelu_fast and gelu_pytorch_tanh are three implementations of one formula.
# Of several names, the first is exported.
ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu-tanh", "gelu_fast": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh", "silu": "silu", "swish": "silu",
}  # fmt: skip

# Our fields that have this value in every family
COMMON: Json = {
    "attention_score": "dot", "window": None, "experts": 0, "residual": True, "pruned": None, "position_axes": 1,
    "mixer": "full", "global_projections": False, "embed_projection": False, "qk_norm": False, "shifted_window": None,
    "stem": "linear", "causal": True,
}  # fmt: skip


class Family(ABC):
    model_type: ClassVar[str]  # in config.json
    name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]  # the first one is exported
    keys: ClassVar[tuple[tuple[str, str, Any], ...]]  # (ours: one or several, theirs, the default of transformers)
    fixed: ClassVar[Json]
    supported: ClassVar[Json]
    activations: ClassVar[dict[str, str]] = ACTIVATIONS
    free: tuple[str, ...] = ()  # which of attention_scale and head_dim may be set
    prefix = ""  # of all tensors except those in `unprefixed`, in models with an output head
    unprefixed: tuple[str, ...] = ()
    unused = "(?!)"  # pattern of tensors that the model does not use

    @abstractmethod
    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        """The weight map of a model."""

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        """Our values that need code; `tensors` if they are known."""
        return {}

    def implied(self, config: ModelConfig) -> Json:
        """As `fixed`, but dependent on other values."""
        return {}

    def to_config(self, config: ModelConfig) -> Json:
        """Their values that need code."""
        return {}

    def copies(self, config: ModelConfig) -> dict[str, str]:
        """Tensors of theirs that are copies of others: {copy: original}."""
        return {}

    def additions(self, config: ModelConfig) -> Additions:
        """Tensors that an exported file must contain besides: the copy of another, or zeros of a shape."""
        return {}

    def reorder(self, config: ModelConfig, tensors: Tensors) -> Tensors:
        """Change our tensors before exporting."""
        return tensors

    def count_positions(self, hf: Json, tensors: Tensors) -> tuple[Json, Tensors]:
        """Adapt config.json and their tensors to `pad_token_id`, where positions are counted from it."""
        return hf, tensors

    def mismatches(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        """Why this family cannot represent such a model: each field, and what the family has instead."""
        for name, value in {**COMMON, **self.fixed, **self.implied(config)}.items():
            if actual_value(config, name) != value and not (name == "bias" and value):  # none: exported as zeros
                yield name, repr(value)
        if config.activation not in self.activations.values():
            yield "activation", f"one of {', '.join(dict.fromkeys(self.activations.values()))}"
        if config.key_heads != config.heads:
            yield "kv_heads", "as many as heads"
        if config.val_dim != config.key_dim:
            yield "value_dim", "the size of head_dim"
        if "head_dim" not in self.free and config.key_dim * config.heads != config.dim:
            yield "head_dim", "dim / heads"
        if "attention_scale" not in self.free and not math.isclose(config.scale, config.key_dim**-0.5):
            yield "attention_scale", "1 / sqrt(head_dim)"

    def prepare(self, config: ModelConfig, tensors: Tensors) -> Tensors:
        """Each tensor once, under the name of the original; a copy that differs is an error, unless it is unused."""
        kept = dict(tensors)
        for copy, original in self.copies(config).items():
            differs = not equal(kept, copy, original)
            if copy not in kept or (differs and re.fullmatch(self.unused, copy)):
                continue
            if differs:
                raise UserError(
                    f"{copy} differs from {original}, although config.json says that they are tied; "
                    "set tie_word_embeddings to false there"
                )
            tensor = kept.pop(copy)
            kept.setdefault(original, tensor)
        return kept


def actual_value(config: ModelConfig, name: str) -> Any:
    """The value of a field, with defaults resolved."""
    if name == "mixer":  # "" may be a window, which is a field of its own
        return "full" if config.all_full else config.mixer or "full"
    resolved = {
        "final_norm": "ends_with_norm", "attention_scale": "scale", "target_vocab_size": "target_size",
        "head_dim": "key_dim",
    }  # fmt: skip
    return getattr(config, resolved.get(name, name))


def unsupported(key: str, value: Any, supported: str) -> UserError:
    return UserError(f"config.json: {key} = {value!r} is not supported; {supported}")


def is_tied(hf: Json, tensors: Tensors | None, output: str, embedding: str) -> bool:
    """Whether the output layer is the embedding matrix: config.json says so and the weights do not contradict."""
    if hf.get("tie_word_embeddings", True) is False:
        return False
    return tensors is None or equal(tensors, output, embedding)


def equal(tensors: Tensors, one: str, other: str) -> bool:
    """Whether both tensors are equal, or one of them is missing."""
    first, second = tensors.get(one), tensors.get(other)
    return first is None or second is None or (first.shape == second.shape and torch.equal(first, second))
