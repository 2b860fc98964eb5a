"""ViT (Dosovitskiy et al. 2021): an encoder over patches of a picture, pre-LN, [CLS] in front.

embeddings.patch_embeddings.projection, cls_token         source.project, source.cls
embeddings.position_embeddings  [1, N, dim]               encoder.position.embedding  [N, dim]
encoder.layer.N.attention.attention.query, key, value     encoder.blocks.N.attention.qkv
encoder.layer.N.attention.output.dense                    attention.out
encoder.layer.N.layernorm_before, layernorm_after         attention_norm, feedforward_norm
encoder.layer.N.intermediate.dense, output.dense          feedforward.up, down
layernorm, pooler.dense, classifier                       encoder.norm, pooler, classifier
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.errors import UserError
from regard.interop.family import Family, Json, Key, count_labels, label_names, read_architecture
from regard.interop.rules import Rule, Tensors, batch, linear, norm, same
from regard.models.config import ModelConfig


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from linear("embedding.project", "embeddings.patch_embeddings.projection")
    yield same("embedding.cls", "embeddings.cls_token")
    yield batch("encoder.position.embedding.weight", "embeddings.position_embeddings", config.source_length)
    for layer in range(config.layers):
        ours, theirs = f"encoder.blocks.{layer}", f"encoder.layer.{layer}"
        yield from norm(f"{ours}.attention_norm", f"{theirs}.layernorm_before")
        q_k_v = (f"{theirs}.attention.attention.{part}" for part in ("query", "key", "value"))
        yield from linear(f"{ours}.attention.qkv", *q_k_v)
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from norm(f"{ours}.feedforward_norm", f"{theirs}.layernorm_after")
        yield from linear(f"{ours}.feedforward.up", f"{theirs}.intermediate.dense")
        yield from linear(f"{ours}.feedforward.down", f"{theirs}.output.dense")
    yield from norm("encoder.norm", "layernorm")
    if config.pooler:
        yield from linear("pooler", "pooler.dense")
    if config.output_head == "classes":
        yield from linear("classifier", "classifier")


def open_fields(hf: Json, tensors: Tensors | None) -> Json:
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
        raise UserError(f"config.json: {key} = {value!r} is not supported; only squares are, such as {default}")
    return int(sides[0])


def doubts(config: ModelConfig) -> list[str]:
    found = [] if config.pooling == "cls" else [f"pooling = {config.pooling!r} (ViT has 'cls')"]
    if config.output_head == "classes" and config.pooler:
        found.append("pooler = True (ViT has False with output_head = 'classes')")
    if config.output_head == "pooled" and not config.pooler:
        found.append("pooler = False (ViT has True with output_head = 'pooled')")
    return found


def extend(config: ModelConfig) -> Json:
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
    kind="vit",
    title="ViT",
    architectures=("ViTModel", "ViTForImageClassification"),
    keys=(
        Key("dim", "hidden_size", 768),
        Key("layers", "num_hidden_layers", 12),
        Key("heads", "num_attention_heads", 12),
        Key("ff_dim", "intermediate_size", 3072),
        Key("channels", "num_channels", 3),
        Key("activation", "hidden_act", "gelu"),
        Key("norm_eps", "layer_norm_eps", 1e-12),
        Key("dropout", "hidden_dropout_prob", 0.0),
        Key("embed_dropout", "hidden_dropout_prob", 0.0),
        Key("attention_dropout", "attention_probs_dropout_prob", 0.0),
    ),
    fixed=FIXED,
    rules=rules,
    only={"qkv_bias": True},
    prefix="vit.",
    outside=("classifier.",),
    unused=r"embeddings\.mask_token|pooler\.dense\..*",  # of masked pictures; of a classifier that does not use it
    open=open_fields,
    doubts=doubts,
    extend=extend,
)
