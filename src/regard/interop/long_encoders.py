"""Encoders for long inputs, which are BERT with another mixer.

FNet (Lee-Thorp et al. 2021)         Fourier mixing instead of attention, a linear layer after the embeddings
Longformer (Beltagy et al. 2020)     windows, and a global first token with projections of its own; positions from 2
BigBird (Zaheer et al. 2020)         with full attention

transformers has no global tokens in a Longformer unless it gets a `global_attention_mask`, except for classifiers, in
which the first token is global. Here the first token always is, as its authors recommend. Which blocks a BigBird of
transformers skips depends on the length, so it is imported as the BERT that it is without skipping, and exported so
(`attention_type = "original_full"`, which transformers chooses for up to (5 + 2 · random blocks) · block size tokens).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from regard.interop.encoders import BERT, EMBEDDING
from regard.interop.family import Additions, Json, actual_value, unsupported
from regard.interop.rules import Rule, Tensors, linear, rows, same
from regard.models.config import ModelConfig

PADDING = 1  # of Longformer, as of RoBERTa: positions are counted from the id of padding + 1
POSITIONS = "embeddings.position_embeddings.weight"


class FNet(BERT):
    model_type = "fnet"
    name = "FNet"
    architectures = (
        "FNetModel", "FNetForSequenceClassification", "FNetForMaskedLM", "FNetForPreTraining",
        "FNetForTokenClassification",
    )  # fmt: skip
    keys: ClassVar[tuple[tuple[str, str, Any], ...]] = tuple(
        (ours, theirs, {"activation": "gelu_new", "vocab_size": 32000, "token_types": 4}.get(ours, default))
        for ours, theirs, default in BERT.keys
        if ours not in ("heads", "attention_dropout")
    )
    fixed: ClassVar[Json] = {**BERT.fixed, "mixer": "fourier", "embed_projection": True}
    supported: ClassVar[Json] = {}
    prefix = "fnet."
    layer: ClassVar = {
        "attention_norm": ("fourier.output.LayerNorm",),
        "feedforward.up": ("intermediate.dense",),
        "feedforward.down": ("output.dense",),
        "feedforward_norm": ("output.LayerNorm",),
    }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from linear("encoder.embed_projection", "embeddings.projection")
        yield from super().rules(config)

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        return {"heads": 1, **super().infer({"hidden_act": "gelu_new", **hf}, tensors, architecture)}


class BigBird(BERT):
    model_type = "big_bird"
    name = "BigBird"
    architectures = ("BigBirdModel", "BigBirdForMaskedLM", "BigBirdForPreTraining", "BigBirdForTokenClassification")
    keys: ClassVar[tuple[tuple[str, str, Any], ...]] = tuple(
        (ours, theirs, {"activation": "gelu_new", "vocab_size": 50358, "max_length": 4096}.get(ours, default))
        for ours, theirs, default in BERT.keys
    )
    supported: ClassVar[Json] = {
        "is_decoder": False, "add_cross_attention": False, "rescale_embeddings": False, "use_bias": True,
    }  # fmt: skip

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        for rule in super().rules(config):
            theirs = tuple(name.replace("pooler.dense.", "pooler.") for name in rule.theirs)
            yield Rule(rule.ours, theirs, rule.from_hf, rule.to_hf)

    unused = BERT.unused + r"|pooler\.(weight|bias)"

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        known = (
            None
            if tensors is None
            else {name.replace("pooler.", "pooler.dense."): one for name, one in tensors.items()}
        )
        return super().infer({"hidden_act": "gelu_new", **hf}, known, architecture)

    def mismatches(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        yield from super().mismatches(config)
        if config.output_head == "classes" and not config.per_token:
            yield "output_head", "no classifier of whole texts"

    def to_config(self, config: ModelConfig) -> Json:
        return {**super().to_config(config), "attention_type": "original_full"}


OUTPUT, BIAS, OUTPUT_BIAS = "lm_head.decoder.weight", "lm_head.bias", "lm_head.decoder.bias"


class Longformer(BERT):
    model_type = "longformer"
    name = "Longformer"
    architectures = (
        "LongformerModel", "LongformerForSequenceClassification", "LongformerForMaskedLM",
        "LongformerForTokenClassification",
    )  # fmt: skip
    keys: ClassVar[tuple[tuple[str, str, Any], ...]] = tuple(key for key in BERT.keys if key[0] != "max_length")
    fixed: ClassVar[Json] = {**BERT.fixed, "global_tokens": 1, "global_projections": True, "dilation": 1}
    supported: ClassVar[Json] = {"onnx_export": False}
    prefix = "longformer."
    unprefixed = ("lm_head.", "classifier.")
    unused = r"embeddings\.position_ids|pooler\.dense\..*|lm_head\.bias"
    layer: ClassVar = {
        **BERT.layer,
        "attention.global_qkv": (
            "attention.self.query_global",
            "attention.self.key_global",
            "attention.self.value_global",
        ),
    }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        renamed = {"cls.predictions.transform.dense": "lm_head.dense", "cls.predictions.bias": BIAS,
                   "cls.predictions.transform.LayerNorm": "lm_head.layer_norm"}  # fmt: skip
        for rule in super().rules(config):
            theirs = rule.theirs
            for old, new in {**renamed, "cls.predictions.decoder": "lm_head.decoder"}.items():
                theirs = tuple(name.replace(old, new) for name in theirs)
            if rule.ours == "encoder.position.embedding.weight":
                yield rows(rule.ours, theirs[0], PADDING + 1)
            elif config.output_head == "classes" and not config.per_token and rule.ours.startswith("pooler."):
                yield same(rule.ours, theirs[0].replace("pooler.dense", "classifier.dense"))
            elif config.output_head == "classes" and not config.per_token and rule.ours.startswith("classifier."):
                yield same(rule.ours, theirs[0].replace("classifier.", "classifier.out_proj."))
            else:
                yield Rule(rule.ours, theirs, rule.from_hf, rule.to_hf)

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        sizes = hf.get("attention_window", 512)
        sizes = sizes if isinstance(sizes, list) else [sizes] * hf.get("num_hidden_layers", 12)
        if not sizes or not all(isinstance(size, int) and size > 0 and size % 2 == 0 for size in sizes):
            raise unsupported("attention_window", hf.get("attention_window"), "only even numbers above 0 are")
        windows = [size // 2 + 1 for size in sizes]  # a window of w attends to w / 2 tokens on each side
        same_size = len(set(windows)) == 1
        own = {"window": windows[0]} if same_size else {"mixer": ", ".join(f"window({size})" for size in windows)}
        padding = hf.get("pad_token_id")
        length = hf.get("max_position_embeddings", 512) - (PADDING if padding is None else padding) - 1
        return {**own, "max_length": length, **super().infer(hf, tensors, architecture)}

    def implied(self, config: ModelConfig) -> Json:
        # any window, as long as every layer has one
        free = {"window": config.window, "mixer": actual_value(config, "mixer")}
        activation = {"activation": "gelu"} if config.output_head == "tokens" else {}  # that of its output head
        return {**super().implied(config), **free, **activation}

    def mismatches(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        yield from super().mismatches(config)
        if any(kind != "window" or (size or 0) < 2 for kind, size in config.pattern):
            yield "mixer", "a window of 2 or more in every layer"

    def to_config(self, config: ModelConfig) -> Json:
        sizes = [2 * ((config.window_of(layer) or 0) - 1) for layer in range(config.layers)]
        length = config.max_length + PADDING + 1
        own: Json = {"attention_window": sizes, "max_position_embeddings": length, "pad_token_id": PADDING}
        return {**super().to_config(config), **own}

    def prepare(self, config: ModelConfig, tensors: Tensors) -> Tensors:
        if POSITIONS in tensors:
            table = tensors[POSITIONS][-config.max_length :]
            tensors = {**tensors, POSITIONS: torch.cat((table.new_zeros(PADDING + 1, config.dim), table))}
        return super().prepare(config, tensors)

    def count_positions(self, hf: Json, tensors: Tensors) -> tuple[Json, Tensors]:
        name = next(name for name in tensors if name.endswith(POSITIONS))
        table = tensors[name][PADDING + 1 :]
        before = hf["pad_token_id"] + 1  # of a tokenizer of Regard: 1
        table = torch.cat((table.new_zeros(before, table.shape[1]), table))
        return {**hf, "max_position_embeddings": len(table)}, {**tensors, name: table}

    def copies(self, config: ModelConfig) -> dict[str, str]:
        return {OUTPUT: EMBEDDING, OUTPUT_BIAS: BIAS} if config.tie_embeddings else {BIAS: OUTPUT_BIAS}

    def additions(self, config: ModelConfig) -> Additions:
        renamed = {"cls.predictions.bias": BIAS, "cls.predictions.decoder.bias": OUTPUT_BIAS}
        added = super().additions(config)
        return {
            renamed.get(name, name): renamed.get(one, one) if isinstance(one, str) else one
            for name, one in added.items()
        }
