"""Configs and weights, there and back, for every family.

    config_from_hf   config.json  -> ModelConfig          config_to_hf    ModelConfig -> config.json
    weights_from_hf  their tensors -> ours                weights_to_hf   our tensors -> theirs

The family of a config follows from its values: the one that can hold it. Where none can, the error lists what
stands in the way of the nearest. Dropout is carried over for further training; it has no part in the answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError, suggest
from regard.interop.bart import BART
from regard.interop.bert import BERT
from regard.interop.family import Family, Json, drop_copies, read_config, reasons, write_config
from regard.interop.gpt2 import GPT2
from regard.interop.marian import MARIAN
from regard.interop.rules import Tensors, read, write
from regard.interop.t5 import T5
from regard.interop.vit import VIT
from regard.models.config import ModelConfig
from regard.models.folder import weights_of
from regard.models.transformer import build

FAMILIES = {family.kind: family for family in (GPT2, BERT, VIT, MARIAN, BART, T5)}

# What config.json says beyond the architecture and generation needs: kept in a recipe's table [hf], written back.
NOTES = (
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "id2label",
)  # fmt: skip


def family_in(hf: Json) -> Family:
    """The family that config.json names."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(f"config.json: model_type = {kind!r} is not supported; {suggest(str(kind), FAMILIES)}")
    return FAMILIES[kind]


def family_of(config: ModelConfig) -> Family:
    """The family that can hold such a model."""
    against = {family.kind: reasons(family, config) for family in FAMILIES.values()}
    near = min(FAMILIES.values(), key=lambda family: (_other_kind(family, config), len(against[family.kind])))
    if against[near.kind]:
        raise UserError(
            f"no Hugging Face family can hold this model. The nearest, {near.title}, differs in "
            f"{'; '.join(against[near.kind])}: train a model with those values, or use this one with Regard"
        )
    return near


def _other_kind(family: Family, config: ModelConfig) -> int:
    return 2 * (family.fixed["architecture"] != config.architecture) + (family.fixed["input"] != config.input)


def config_from_hf(hf: Json, tensors: Mapping[str, Tensor] | None = None) -> ModelConfig:
    """Our config; `tensors` settle what config.json leaves open, such as whether there is a pooler."""
    family = family_in(hf)
    return read_config(family, hf, None if tensors is None else _bare(family, tensors))


def weights_from_hf(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors of our model, each once, from theirs."""
    return read_weights_from_hf(config, tensors)[0]


def read_weights_from_hf(config: ModelConfig, tensors: Mapping[str, Tensor]) -> tuple[Tensors, list[str]]:
    """The tensors of our model, and the names of theirs that carry nothing for it."""
    family = family_of(config)
    bare = _bare(family, tensors)
    family.inspect(config, bare)
    with torch.device("meta"):
        shapes = weights_of(build(config))
    return read(family.rules(config), drop_copies(family, config, bare), shapes, family.unused)


def _bare(family: Family, tensors: Mapping[str, Tensor]) -> Tensors:
    """Names without the family's prefix; TensorFlow's `gamma` and `beta` of a norm are weight and bias."""
    bare: Tensors = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(family.prefix)
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            short = short.removesuffix(old) + new if short.endswith(old) else short
        if short in bare:
            raise UserError(f"the weights hold {short} twice, with and without {family.prefix!r} or by an old name")
        bare[short] = tensor
    return bare


def config_to_hf(config: ModelConfig, notes: Mapping[str, Any] | None = None) -> Json:
    """The content of config.json; `notes` are values it takes over as they stand (see `NOTES`)."""
    hf = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if config.architecture == "encoder-decoder":
        hf["forced_eos_token_id"] = None
    hf.update(write_config(family_of(config), config))
    given = {name: value for name, value in (notes or {}).items() if name in NOTES}
    if "id2label" in given:
        _check_labels(given["id2label"], config)
        given["label2id"] = {name: int(index) for index, name in given["id2label"].items()}
    return {**hf, **given}


def _check_labels(labels: Any, config: ModelConfig) -> None:
    if not isinstance(labels, dict) or sorted(labels) != sorted(str(index) for index in range(config.classes or 0)):
        raise UserError(f"hf.id2label = {labels!r}: the model has classes = {config.classes}, so name those from 0 on")


def weights_to_hf(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Tensors:
    """Their tensors, named as in the architecture that `config_to_hf` writes."""
    family = family_of(config)
    ours = family.arrange(config, dict(tensors))
    bare = write(family.rules(config), ours)
    example = next(iter(bare.values()))
    bare.update({name: example.new_zeros(shape) for name, shape in family.zeros(config).items()})
    bare.update({copy: bare[original].clone() for copy, original in family.repeats(config).items()})
    headless = config.output_head in ("none", "pooled")
    prefix = "" if headless else family.prefix
    return {name if name.startswith(family.outside) else prefix + name: tensor for name, tensor in bare.items()}
