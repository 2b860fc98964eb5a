"""BERT and ViT, encoders with an output head for classes, a pooled vector, or (BERT) masked tokens or tags.

BERT (Devlin et al. 2018)         post-LN, learned positions, token types and a norm after the embeddings
ViT (Dosovitskiy et al. 2021)     pre-LN over the patches of an image, with a [CLS] token in front

transformers opens every image in colour. A grayscale model is exported as one that reads RGB and makes it gray itself:
a pixel is Y = Σ_c l_c x_c with Σ_c l_c = 1 (LUMA), so with W_c = l_c W the projection of a patch is the same,

    Σ_c W_c (x_c - m) / s = W (Y - m) / s,

and for a gray image in RGB, where all x_c are equal, it is that of the gray image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from regard.data.images import LUMA
from regard.interop.family import Additions, Family, Json, is_tied, unsupported
from regard.interop.rules import Rule, Tensors, layer, linear, same, squeeze
from regard.models.config import ModelConfig


class EncoderFamily(Family):
    """What BERT and ViT have in common; `architectures`: without an output head, with a classifier, others."""

    encoder_keys = (
        ("dim", "hidden_size", 768),
        ("layers", "num_hidden_layers", 12),
        ("heads", "num_attention_heads", 12),
        ("ff_dim", "intermediate_size", 3072),
        ("activation", "hidden_act", "gelu"),
        ("norm_eps", "layer_norm_eps", 1e-12),
    )
    layer: ClassVar[Mapping[str, tuple[str, ...]]]  # {module of ours: modules of theirs} in a block

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        for number in range(config.layers):
            yield from layer(f"encoder.blocks.{number}", f"encoder.layer.{number}", self.layer)
        if config.pooler:
            yield from linear("pooler", "pooler.dense")
        if config.output_head == "classes":
            yield from linear("classifier", "classifier")

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        if architecture == self.architectures[0]:
            pooler = tensors is None or "pooler.dense.weight" in tensors
            return {"output_head": "pooled" if pooler else "none", "pooler": pooler}
        labels = hf.get("id2label")
        count = len(labels) if isinstance(labels, dict) and labels else hf.get("num_labels", 2)
        if not isinstance(count, int) or count < 2:
            raise unsupported("num_labels", count, "a classifier has 2 or more classes")
        per_token = architecture.endswith("ForTokenClassification")
        return {"output_head": "classes", "classes": count, **({"pooling": "none"} if per_token else {})}

    def to_config(self, config: ModelConfig) -> Json:
        if config.output_head != "classes":
            return {}
        names = [f"LABEL_{index}" for index in range(config.classes or 0)]  # the classes have no names here
        return {
            "architectures": [self.architectures[1]],
            "id2label": {str(index): name for index, name in enumerate(names)},
            "label2id": {name: index for index, name in enumerate(names)},
        }


GELU = ("gelu", "gelu-tanh")
EMBEDDING, OUTPUT = "embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
BIAS, OUTPUT_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"  # equal if tied; otherwise the second counts


class BERT(EncoderFamily):
    model_type = "bert"
    name = "BERT"
    architectures: ClassVar[tuple[str, ...]] = (
        "BertModel", "BertForSequenceClassification", "BertForMaskedLM", "BertForPreTraining",
        "BertForTokenClassification",
    )  # fmt: skip
    keys: ClassVar[tuple[tuple[str, str, Any], ...]] = (
        *EncoderFamily.encoder_keys,
        ("vocab_size", "vocab_size", 30522),
        ("max_length", "max_position_embeddings", 512),
        ("token_types", "type_vocab_size", 2),
        ("dropout embed_dropout", "hidden_dropout_prob", 0.1),
        ("attention_dropout", "attention_probs_dropout_prob", 0.1),
    )
    fixed: ClassVar[Json] = {
        "architecture": "encoder", "input": "tokens", "position": "learned", "norm": "layer", "norm_order": "post",
        "final_norm": False, "embed_norm": True, "bias": True, "embed_scale": False,
    }  # fmt: skip
    supported: ClassVar[Json] = {
        "position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False,
    }  # fmt: skip
    prefix = "bert."
    unprefixed = ("cls.", "classifier.")
    # the ids 0, 1, 2, …, a buffer of old versions; and what only next-sentence prediction uses
    unused = r"embeddings\.position_ids|pooler\.dense\..*|cls\.seq_relationship\..*|cls\.predictions\.bias"
    layer: ClassVar = {
        "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.out": ("attention.output.dense",),
        "attention_norm": ("attention.output.LayerNorm",),
        "feedforward.up": ("intermediate.dense",),
        "feedforward.down": ("output.dense",),
        "feedforward_norm": ("output.LayerNorm",),
    }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield same("embedding.tokens.weight", EMBEDDING)
        yield same("encoder.position.embedding.weight", "embeddings.position_embeddings.weight")
        if config.token_types:
            yield same("embedding.token_types.weight", "embeddings.token_type_embeddings.weight")
        yield from linear("encoder.embed_norm", "embeddings.LayerNorm")
        yield from super().rules(config)
        if config.output_head == "tokens":
            yield from linear("output_head.layer", "cls.predictions.transform.dense")
            yield from linear("output_head.norm", "cls.predictions.transform.LayerNorm")
            if config.logit_bias:
                yield same("output_head.bias", BIAS if config.tie_embeddings else OUTPUT_BIAS)
            if not config.tie_embeddings:
                yield same("output_head.project.weight", OUTPUT)

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        if architecture.endswith("ForSequenceClassification"):
            return {**super().infer(hf, tensors, architecture), "pooler": True}
        if architecture == self.architectures[0] or architecture.endswith("ForTokenClassification"):
            return super().infer(hf, tensors, architecture)
        if self.activations.get(hf.get("hidden_act") or "gelu") not in GELU:
            only = "only 'gelu' and 'gelu_new' are for a masked language model, whose output head has a GELU"
            raise unsupported("hidden_act", hf["hidden_act"], only)
        tied = is_tied(hf, tensors, OUTPUT, EMBEDDING)
        return {"output_head": "tokens", "head_layer": True, "logit_bias": True, "tie_embeddings": tied}

    def implied(self, config: ModelConfig) -> Json:
        if config.output_head == "tokens":
            activation = config.activation if config.activation in GELU else "gelu"
            return {"head_layer": True, "activation": activation, "pooler": False, "logit_scale": 1.0}
        if config.output_head == "none" or config.per_token:
            return {}
        return {"pooling": "cls", "pooler": True}

    def to_config(self, config: ModelConfig) -> Json:
        hf: Json = {"type_vocab_size": max(1, config.token_types), "tie_word_embeddings": config.tie_embeddings}
        kind = self.architectures[0].removesuffix("Model")
        named = {"tokens": f"{kind}ForMaskedLM", "classes": f"{kind}ForTokenClassification"} if config.per_token else {}
        per_token = {"architectures": [named[config.output_head]]} if named else {}
        return {**hf, **super().to_config(config), **per_token}

    def copies(self, config: ModelConfig) -> dict[str, str]:
        return {OUTPUT: EMBEDDING, OUTPUT_BIAS: BIAS} if config.tie_embeddings else {BIAS: OUTPUT_BIAS}

    def additions(self, config: ModelConfig) -> Additions:
        added: Additions = {}
        if not config.token_types:
            added["embeddings.token_type_embeddings.weight"] = (1, config.dim)
        if config.output_head == "tokens" and not config.logit_bias:
            added[BIAS if config.tie_embeddings else OUTPUT_BIAS] = (config.vocab_size or 0,)
        if config.output_head == "tokens" and not config.tie_embeddings:
            added[BIAS] = OUTPUT_BIAS
        return added


class ViT(EncoderFamily):
    model_type = "vit"
    name = "ViT"
    architectures = ("ViTModel", "ViTForImageClassification")
    keys = (
        *EncoderFamily.encoder_keys,
        ("channels", "num_channels", 3),
        ("dropout embed_dropout", "hidden_dropout_prob", 0.0),
        ("attention_dropout", "attention_probs_dropout_prob", 0.0),
    )
    fixed: ClassVar[Json] = {
        "architecture": "encoder", "input": "patches", "position": "learned", "norm": "layer", "norm_order": "pre",
        "final_norm": True, "embed_norm": False, "bias": True, "pooling": "cls",
    }  # fmt: skip
    supported: ClassVar[Json] = {"qkv_bias": True}
    prefix = "vit."
    unprefixed = ("classifier.",)
    unused = r"embeddings\.mask_token|pooler\.dense\..*"  # of masked image modelling; unused by a classifier
    layer: ClassVar = {
        "attention_norm": ("layernorm_before",),
        "attention.qkv": ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        "attention.out": ("attention.output.dense",),
        "feedforward_norm": ("layernorm_after",),
        "feedforward.up": ("intermediate.dense",),
        "feedforward.down": ("output.dense",),
    }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from linear("embedding.project", "embeddings.patch_embeddings.projection")
        yield same("embedding.cls", "embeddings.cls_token")
        yield squeeze("encoder.position.embedding.weight", "embeddings.position_embeddings", config.source_length)
        yield from super().rules(config)
        yield from linear("encoder.norm", "layernorm")

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        image, patch = _side(hf, "image_size", 224), _side(hf, "patch_size", 16)
        size = {"image_size": image, "patch_size": patch, "max_length": (image // patch) ** 2 + 1}
        head = super().infer(hf, tensors, architecture)
        if head["output_head"] == "pooled":
            for key, only in (("pooler_act", "tanh"), ("pooler_output_size", hf.get("hidden_size", 768))):
                if hf.get(key) not in (None, only):
                    hint = "hidden_size" if key == "pooler_output_size" else repr(only)
                    raise unsupported(key, hf[key], f"only {hint} is")
        return {**size, **head}

    def implied(self, config: ModelConfig) -> Json:
        return {} if config.output_head == "none" else {"pooler": config.output_head == "pooled"}

    def to_config(self, config: ModelConfig) -> Json:
        channels = {"num_channels": len(LUMA)} if config.channels == 1 else {}
        sizes = {"image_size": config.image_size, "patch_size": config.patch_size}
        return {**channels, **sizes, **super().to_config(config)}

    def reorder(self, config: ModelConfig, tensors: Tensors) -> Tensors:
        """The projection of RGB for a grayscale model."""
        if config.channels != 1:
            return tensors
        name = "embedding.project.weight"  # [dim, 1, patch, patch]
        luma = torch.tensor(LUMA, dtype=torch.float64, device=tensors[name].device)[:, None, None]
        return {**tensors, name: (tensors[name] * luma).to(tensors[name].dtype)}


def _side(hf: Json, key: str, default: int) -> int:
    value: Any = hf.get(key, default)
    sides = value if isinstance(value, list) else [value]
    if not all(isinstance(side, int) and side > 0 for side in sides) or len(set(sides)) != 1:
        raise unsupported(key, value, f"only square images are, such as {default}")
    return int(sides[0])
