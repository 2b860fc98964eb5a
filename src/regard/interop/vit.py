"""ViT (Dosovitskiy et al. 2021): an encoder over the patches of an image, with pre-LN and a [CLS] token in front."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.errors import UserError
from regard.interop.family import ENCODER_KEYS, Family, Json, Key, count_labels, label_names, read_architecture
from regard.interop.rules import Rule, Tensors, layer, linear, same, squeeze
from regard.models.config import ModelConfig

LAYER = {
    "attention_norm": ("layernorm_before",),
    "attention.qkv": ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    "attention.out": ("attention.output.dense",),
    "feedforward_norm": ("layernorm_after",),
    "feedforward.up": ("intermediate.dense",),
    "feedforward.down": ("output.dense",),
}


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from linear("embedding.project", "embeddings.patch_embeddings.projection")
    yield same("embedding.cls", "embeddings.cls_token")
    yield squeeze("encoder.position.embedding.weight", "embeddings.position_embeddings", config.source_length)
    for number in range(config.layers):
        yield from layer(f"encoder.blocks.{number}", f"encoder.layer.{number}", LAYER)
    yield from linear("encoder.norm", "layernorm")
    if config.pooler:
        yield from linear("pooler", "pooler.dense")
    if config.output_head == "classes":
        yield from linear("classifier", "classifier")


def infer(hf: Json, tensors: Tensors | None) -> Json:
    image, patch = _side(hf, "image_size", 224), _side(hf, "patch_size", 16)
    size = {"image_size": image, "patch_size": patch, "max_length": (image // patch) ** 2 + 1}
    if read_architecture(VIT, hf) == "ViTForImageClassification":
        return {**size, "output_head": "classes", "classes": count_labels(hf)}
    pooler = tensors is None or "pooler.dense.weight" in tensors
    if pooler and hf.get("pooler_act", "tanh") != "tanh":
        raise UserError(f"config.json: pooler_act = {hf['pooler_act']!r} is not supported; only 'tanh' is")
    if pooler and hf.get("pooler_output_size") not in (None, hf.get("hidden_size", 768)):
        raise UserError(
            f"config.json: pooler_output_size = {hf['pooler_output_size']!r} is not supported; only hidden_size is"
        )
    return {**size, "output_head": "pooled" if pooler else "none", "pooler": pooler}


def _side(hf: Json, key: str, default: int) -> int:
    value: Any = hf.get(key, default)
    sides = value if isinstance(value, list) else [value]
    if not all(isinstance(side, int) and side > 0 for side in sides) or len(set(sides)) != 1:
        raise UserError(f"config.json: {key} = {value!r} is not supported; only square images are, such as {default}")
    return int(sides[0])


def mismatches(config: ModelConfig) -> list[str]:
    differences = [] if config.pooling == "cls" else [f"pooling = {config.pooling!r} (ViT has 'cls')"]
    if config.output_head == "classes" and config.pooler:
        differences.append("pooler = True (ViT has False with output_head = 'classes')")
    if config.output_head == "pooled" and not config.pooler:
        differences.append("pooler = False (ViT has True with output_head = 'pooled')")
    return differences


def to_config(config: ModelConfig) -> Json:
    size: Json = {"image_size": config.image_size, "patch_size": config.patch_size}
    if config.output_head != "classes":
        return {**size, "architectures": ["ViTModel"]}
    assert config.classes is not None
    return {**size, "architectures": ["ViTForImageClassification"], **label_names(config.classes)}


FIXED: Json = {
    "architecture": "encoder", "input": "patches", "position": "learned", "norm": "layer", "norm_order": "pre",
    "final_norm": True, "embed_norm": False, "bias": True,
}  # fmt: skip

VIT = Family(
    model_type="vit",
    name="ViT",
    architectures=("ViTModel", "ViTForImageClassification"),
    keys=(
        *ENCODER_KEYS,
        Key("channels", "num_channels", 3),
        Key("dropout", "hidden_dropout_prob", 0.0),
        Key("embed_dropout", "hidden_dropout_prob", 0.0),
        Key("attention_dropout", "attention_probs_dropout_prob", 0.0),
    ),
    fixed=FIXED,
    rules=rules,
    supported={"qkv_bias": True},
    prefix="vit.",
    unprefixed=("classifier.",),
    unused=r"embeddings\.mask_token|pooler\.dense\..*",  # of masked image modelling; unused by a classifier
    infer=infer,
    mismatches=mismatches,
    to_config=to_config,
)
