"""Conversion of configs and weights in both directions, for every family.

    config_from_hf   config.json  -> ModelConfig          config_to_hf    ModelConfig -> config.json
    weights_from_hf  their tensors -> ours                weights_to_hf   our tensors -> theirs

A config is exported as the family that can represent it. If none can, the error lists how the most similar one differs.
Dropout rates are converted for further training; they do not affect predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.interop import rules
from regard.interop.encoder_decoders import BART, T5, Marian
from regard.interop.encoders import BERT, ViT
from regard.interop.family import Family, Json, actual_value, unsupported
from regard.interop.gpt2 import GPT2
from regard.interop.long_encoders import BigBird, FNet, Longformer
from regard.interop.rules import Tensors
from regard.models.config import ModelConfig
from regard.models.folder import weights_of
from regard.models.transformer import build

FAMILIES: dict[str, Family] = {
    kind.model_type: kind() for kind in (GPT2, BERT, ViT, Marian, BART, T5, Longformer, FNet)
}
IMPORTED: dict[str, Family] = {**FAMILIES, BigBird.model_type: BigBird()}  # which is a BERT, unless it was imported

# Keys of config.json beyond the architecture that prediction needs: kept in the recipe's table [hf] and exported again
METADATA = (
    "model_type", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "id2label",
)  # fmt: skip


def family_in(hf: Json) -> Family:
    """The family that config.json names."""
    name = hf.get("model_type")
    if not isinstance(name, str) or name not in IMPORTED:
        raise UserError(f"config.json: model_type = {name!r} is not supported yet; supported are {', '.join(IMPORTED)}")
    return IMPORTED[name]


def family_of(config: ModelConfig, imported: object = None) -> Family:
    """The family that can represent such a model: the one whose model_type was `imported`, if it still can."""
    family = IMPORTED.get(imported) if isinstance(imported, str) else None
    if family is not None and not dict(family.mismatches(config)):
        return family
    nearest, differences = nearest_family(config)
    if differences:
        raise UserError(
            f"no Hugging Face family can represent this model. The most similar one, {nearest.name}, differs in "
            f"{'; '.join(differences)}: train a model with those values, or use this one with Regard"
        )
    return nearest


def nearest_family(config: ModelConfig) -> tuple[Family, list[str]]:
    """The most similar family, and how a model differs from it: not at all if it can be exported."""
    mismatches = {name: dict(family.mismatches(config)) for name, family in FAMILIES.items()}

    def distance(family: Family) -> tuple[int, int]:
        other = 2 * (family.fixed["architecture"] != config.architecture) + (family.fixed["input"] != config.input)
        return other, len(mismatches[family.model_type])

    nearest = min(FAMILIES.values(), key=distance)
    return nearest, [
        f"{field} = {actual_value(config, field)!r} ({nearest.name} has {expected})"
        for field, expected in mismatches[nearest.model_type].items()
    ]


def config_from_hf(hf: Json, tensors: Mapping[str, Tensor] | None = None) -> ModelConfig:
    """Our config; `tensors` determine what config.json leaves open, such as whether there is a pooler."""
    family = family_in(hf)
    for name, supported in family.supported.items():
        if hf.get(name, supported) not in (supported, None):
            raise unsupported(name, hf[name], f"for {family.name} only {supported!r} is")
    names = hf.get("architectures") or [None]
    architecture = names[0] if isinstance(names, list) else names
    if architecture not in family.architectures:
        raise unsupported("architectures", names, f"for {family.name} only {', '.join(family.architectures)} are")
    values = dict(family.fixed)
    for fields, theirs, default in family.keys:
        value = default if hf.get(theirs) is None else hf[theirs]
        if fields == "activation":
            if not isinstance(value, str) or value not in family.activations:
                raise unsupported(theirs, value, f"only {', '.join(family.activations)} are")
            value = family.activations[value]
        values.update(dict.fromkeys(fields.split(), value))
    values.update(family.infer(hf, None if tensors is None else _without_prefix(family, tensors), architecture))
    try:
        return ModelConfig(init="normal", **values)
    except UserError as error:
        raise UserError(f"config.json describes an invalid {family.name}: {error}") from None


def weights_from_hf(
    config: ModelConfig, tensors: Mapping[str, Tensor], family: Family | None = None
) -> tuple[Tensors, list[str]]:
    """The tensors of our model, each once, and the names of theirs that it does not use."""
    family = family or family_of(config)
    theirs = family.prepare(config, _without_prefix(family, tensors))
    with torch.device("meta"):
        shapes = weights_of(build(config))
    return rules.from_hf(family.rules(config), theirs, shapes, family.unused)


def _without_prefix(family: Family, tensors: Mapping[str, Tensor]) -> Tensors:
    """Names without the family's prefix; TensorFlow's `gamma` and `beta` of a norm become weight and bias."""
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(family.prefix)
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            short = short.removesuffix(old) + new if short.endswith(old) else short
        if short in renamed:
            raise UserError(f"the weights contain {short} twice, with and without {family.prefix!r} or by an old name")
        renamed[short] = tensor
    return renamed


def config_to_hf(config: ModelConfig, metadata: Mapping[str, Any] | None = None) -> Json:
    """The content of config.json; `metadata` are values that are copied unchanged (see `METADATA`)."""
    metadata = dict(metadata or {})
    family = family_of(config, metadata.pop("model_type", None))
    hf: Json = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if config.architecture == "encoder-decoder":
        hf["forced_eos_token_id"] = None
    hf.update({"model_type": family.model_type, "architectures": [family.architectures[0]]})
    for fields, theirs, _ in family.keys:
        hf[theirs] = actual_value(config, fields.split()[0])
        if fields == "activation":
            hf[theirs] = next(name for name, ours in family.activations.items() if ours == hf[theirs])
    hf.update(family.to_config(config))
    copied = {name: value for name, value in metadata.items() if name in METADATA}
    if "id2label" in copied:
        labels = copied["id2label"]
        if not isinstance(labels, dict) or sorted(labels) != sorted(str(i) for i in range(config.classes or 0)):
            raise UserError(
                f"hf.id2label = {labels!r}: the model has classes = {config.classes}; name each of them, from 0"
            )
        copied["label2id"] = {name: int(index) for index, name in labels.items()}
    return {**hf, **copied}


def weights_to_hf(config: ModelConfig, tensors: Mapping[str, Tensor], imported: object = None) -> Tensors:
    """Their tensors, named as in the architecture that `config_to_hf` returns; `imported` as of `family_of`."""
    family = family_of(config, imported)
    if family.fixed["bias"] and not config.bias:  # zeros instead of no biases
        with torch.device("meta"):
            shapes = weights_of(build(replace(config, bias=True)))
        like = next(iter(tensors.values()))
        tensors = {name: tensors.get(name, like.new_zeros(meta.shape)) for name, meta in shapes.items()}
    theirs = rules.to_hf(family.rules(config), family.reorder(config, dict(tensors)))
    example = next(iter(theirs.values()))
    for name, content in family.additions(config).items():
        theirs[name] = theirs[content].clone() if isinstance(content, str) else example.new_zeros(content)
    prefix = "" if config.output_head in ("none", "pooled") else family.prefix
    return {name if name.startswith(family.unprefixed) else prefix + name: tensor for name, tensor in theirs.items()}
