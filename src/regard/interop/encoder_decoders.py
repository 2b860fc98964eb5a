"""BART, Marian and T5, encoder-decoders whose embeddings and output layer may be one matrix.

    BART (Lewis et al. 2019)            post-LN, learned positions and a norm after the embeddings
    Marian (Junczys-Dowmunt et al. 2018; Opus-MT)   the Transformer of 2017: post-LN, sinusoidal positions
    T5 (Raffel et al. 2020)             pre-RMSNorm, no biases, unscaled scores and bucketed distances

The layers of Marian are BART's; positions are computed and not stored. In Marian the sines fill the first half of a
position vector and the cosines the second (pairs = "halves"); in the paper they alternate ("interleaved"). A model with
interleaved pairs is exported exactly by permuting its residual stream: P x = (x₀, x₂, …, x₁, x₃, …). Everything that
reads from or writes to the stream is permuted with it,

    E Pᵀ,   W_in Pᵀ,   P W_out,   P b_out,   P g, P b of a norm (mean and variance do not depend on the order),

so each layer computes P times its original output, and the logits (E Pᵀ)(P x) = E x are unchanged.

T5 1.0 has ReLU and one shared embedding matrix, with logits scaled by sqrt(dim); T5 1.1 has gated GELU and a separate
output layer without that scaling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from regard.errors import UserError
from regard.interop.family import ACTIVATIONS, Additions, Family, Json, equal, is_tied, unsupported
from regard.interop.rules import Rule, Tensors, layer, linear, rows, same, squeeze
from regard.models.config import ModelConfig
from regard.nn.position import Sinusoidal

SHARED, OUTPUT, BIAS = "shared.weight", "lm_head.weight", "final_logits_bias"
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"

LAYER = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.out_proj",),
    "attention_norm": ("self_attn_layer_norm",),
    "feedforward.up": ("fc1",),
    "feedforward.down": ("fc2",),
    "feedforward_norm": ("final_layer_norm",),
}
CROSS = {
    "cross.q": ("encoder_attn.q_proj",),
    "cross.kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross.out": ("encoder_attn.out_proj",),
    "cross_norm": ("encoder_attn_layer_norm",),
}
# The axis of a tensor that corresponds to the residual stream, by the end of its name
STREAM = {
    ".tokens.weight": 1, ".project.weight": 1, ".qkv.weight": 1, ".q.weight": 1, ".kv.weight": 1, ".up.weight": 1,
    ".out.weight": 0, ".out.bias": 0, ".down.weight": 0, ".down.bias": 0, "norm.weight": 0, "norm.bias": 0,
}  # fmt: skip


class EncoderDecoderFamily(Family):
    """Which of three matrices (source and target embedding, output layer) are shared."""

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield same("source_embedding.tokens.weight", SHARED if config.share_embeddings else SOURCE)
        if not config.share_embeddings:
            yield same("target_embedding.tokens.weight", TARGET)
        if not config.tie_embeddings:
            yield same("output_head.project.weight", OUTPUT)

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        share = hf.get("share_encoder_decoder_embeddings", True)
        if tensors is None:
            return {"share_embeddings": share, "tie_embeddings": is_tied(hf, tensors, OUTPUT, SHARED)}
        source, target = (name if name in tensors else SHARED for name in (SOURCE, TARGET))
        share = share and equal(tensors, source, target)
        return {"share_embeddings": share, "tie_embeddings": is_tied(hf, tensors, OUTPUT, target)}

    def copies(self, config: ModelConfig) -> dict[str, str]:
        shared = {SOURCE: SHARED, TARGET: SHARED} if config.share_embeddings else {}
        return {**shared, OUTPUT: SHARED if config.share_embeddings else TARGET} if config.tie_embeddings else shared


class BART(EncoderDecoderFamily):
    model_type = "bart"
    name = "BART"
    architectures: ClassVar[tuple[str, ...]] = ("BartForConditionalGeneration", "BartModel")
    keys: ClassVar[tuple[tuple[str, str, Any], ...]] = (
        ("dim", "d_model", 1024),
        ("layers", "encoder_layers", 12),
        ("decoder_layers", "decoder_layers", 12),
        ("heads", "encoder_attention_heads", 16),
        ("ff_dim", "encoder_ffn_dim", 4096),
        ("vocab_size", "vocab_size", 50265),
        ("activation", "activation_function", "gelu"),
        ("max_length", "max_position_embeddings", 1024),
        ("embed_scale", "scale_embedding", False),
        ("dropout embed_dropout", "dropout", 0.1),
        ("attention_dropout", "attention_dropout", 0.0),
    )
    fixed: ClassVar[Json] = {
        "architecture": "encoder-decoder", "input": "tokens", "norm": "layer", "norm_order": "post",
        "final_norm": False, "norm_eps": 1e-5, "bias": True, "token_types": 0, "head_layer": False, "logit_scale": 1.0,
        "position": "learned", "embed_norm": True,
    }  # fmt: skip
    supported: ClassVar[Json] = {
        "is_encoder_decoder": True, "is_decoder": False, "normalize_before": False, "add_final_layer_norm": False,
        "normalize_embedding": True, "static_position_embeddings": False,
    }  # fmt: skip
    prefix = "model."
    unprefixed = (OUTPUT, BIAS)
    unused = SHARED  # if the source and target embeddings differ from it

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from super().rules(config)
        if config.logit_bias:
            yield squeeze("output_head.bias", BIAS)
        for stack, count in (("encoder", config.layers), ("decoder", config.decoder_layers or config.layers)):
            if config.position == "learned":
                yield rows(f"{stack}.position.embedding.weight", f"{stack}.embed_positions.weight", offset=2)
                yield from linear(f"{stack}.embed_norm", f"{stack}.layernorm_embedding")
            modules = {**LAYER, **CROSS} if stack == "decoder" else LAYER
            for number in range(count):
                yield from layer(f"{stack}.blocks.{number}", f"{stack}.layers.{number}", modules)

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        for part, default in (("ffn_dim", 4096), ("attention_heads", 16)):
            encoder, decoder = (hf.get(f"{stack}_{part}", default) for stack in ("encoder", "decoder"))
            if encoder != decoder:
                raise unsupported(f"decoder_{part}", decoder, f"only that of the encoder, {encoder!r}, is")
        bias = architecture == self.architectures[0] and (tensors is None or BIAS in tensors)
        return {**super().infer(hf, tensors, architecture), "logit_bias": bias}

    def implied(self, config: ModelConfig) -> Json:
        shared = {"share_embeddings": True} if config.tie_embeddings else {}
        return {**shared, "target_vocab_size": config.vocab_size}

    def to_config(self, config: ModelConfig) -> Json:
        return {
            "decoder_layers": config.decoder_layers or config.layers,
            "decoder_ffn_dim": config.ff_dim,
            "decoder_attention_heads": config.heads,
            "tie_word_embeddings": config.tie_embeddings,
            "is_encoder_decoder": True,
        }

    def additions(self, config: ModelConfig) -> Additions:
        """Without tying, transformers reads each matrix from the file, so a shared one is saved three times."""
        added: Additions = {} if config.logit_bias else {BIAS: (1, config.target_size)}
        if config.tie_embeddings:
            return added
        return {**added, **({SOURCE: SHARED, TARGET: SHARED} if config.share_embeddings else {SHARED: SOURCE})}


class Marian(BART):
    model_type = "marian"
    name = "Marian"
    architectures = ("MarianMTModel",)
    keys = (*BART.keys, ("vocab_size", "vocab_size", 58101))
    fixed: ClassVar[Json] = {**BART.fixed, "position": "sinusoidal", "embed_norm": False}
    supported: ClassVar[Json] = {**BART.supported, "normalize_embedding": False, "static_position_embeddings": True}
    unused = rf"{SHARED}|(encoder|decoder)\.embed_positions\.weight"

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        fields = {**super().infer(hf, tensors, architecture), "pairs": "halves"}
        return fields if fields["share_embeddings"] else {**fields, "target_vocab_size": hf.get("decoder_vocab_size")}

    def implied(self, config: ModelConfig) -> Json:
        return {}

    def to_config(self, config: ModelConfig) -> Json:
        return {
            **super().to_config(config),
            "share_encoder_decoder_embeddings": config.share_embeddings,
            "decoder_vocab_size": config.target_size,
            "decoder_start_token_id": 0,  # required; a tokenizer or the metadata replaces it
        }

    def additions(self, config: ModelConfig) -> Additions:
        return {name: content for name, content in super().additions(config).items() if name != SHARED}

    def prepare(self, config: ModelConfig, tensors: Tensors) -> Tensors:
        """Stored position embeddings must be the sinusoidal ones that we compute."""
        for name in ("encoder.embed_positions.weight", "decoder.embed_positions.weight"):
            if name in tensors:
                stored = tensors[name].double()
                computed = Sinusoidal(config).embed(torch.arange(len(stored))[None])[0]
                # perhaps in half precision
                if stored.shape != computed.shape or (stored - computed).abs().max() > 2e-3:
                    raise UserError(f"{name}: not the sinusoidal embeddings of a Marian model; it cannot be imported")
        return super().prepare(config, tensors)

    def reorder(self, config: ModelConfig, tensors: Tensors) -> Tensors:
        """Our tensors with the residual stream in the order of pairs = "halves"."""
        if config.pairs == "halves":
            return tensors
        order = torch.cat((torch.arange(0, config.dim, 2), torch.arange(1, config.dim, 2)))

        def permute(name: str) -> torch.Tensor:
            axis = next((axis for end, axis in STREAM.items() if name.endswith(end)), None)
            return tensors[name] if axis is None else tensors[name].index_select(axis, order.to(tensors[name].device))

        return {name: permute(name) for name in tensors}


GATED = {"gated-gelu": "geglu", "gated-gelu_new": "geglu", "gated-silu": "swiglu"}  # "gated-gelu": its tanh form
SELF_ATTENTION = {
    "attention.qkv": ("0.SelfAttention.q", "0.SelfAttention.k", "0.SelfAttention.v"),
    "attention.out": ("0.SelfAttention.o",),
    "attention_norm": ("0.layer_norm",),
}
CROSS_ATTENTION = {
    "cross.q": ("1.EncDecAttention.q",),
    "cross.kv": ("1.EncDecAttention.k", "1.EncDecAttention.v"),
    "cross.out": ("1.EncDecAttention.o",),
    "cross_norm": ("1.layer_norm",),
}


class T5(EncoderDecoderFamily):
    model_type = "t5"
    name = "T5"
    architectures = ("T5ForConditionalGeneration",)
    keys = (
        ("dim", "d_model", 512),
        ("head_dim", "d_kv", 64),
        ("ff_dim", "d_ff", 2048),
        ("activation", "feed_forward_proj", "relu"),
        ("layers", "num_layers", 6),
        ("heads", "num_heads", 8),
        ("vocab_size", "vocab_size", 32128),
        ("max_length", "n_positions", 512),
        ("position_buckets", "relative_attention_num_buckets", 32),
        ("position_distance", "relative_attention_max_distance", 128),
        ("norm_eps", "layer_norm_epsilon", 1e-6),
        ("dropout embed_dropout attention_dropout", "dropout_rate", 0.1),
    )
    fixed: ClassVar[Json] = {
        "architecture": "encoder-decoder", "input": "tokens", "position": "t5", "norm": "rms", "norm_order": "pre",
        "final_norm": True, "embed_norm": False, "bias": False, "attention_scale": 1.0, "embed_scale": False,
        "share_embeddings": True, "token_types": 0, "head_layer": False, "logit_bias": False,
    }  # fmt: skip
    supported: ClassVar[Json] = {"is_encoder_decoder": True, "is_decoder": False}
    activations: ClassVar[dict[str, str]] = {**ACTIVATIONS, **GATED}
    free = ("head_dim", "attention_scale")
    # cross-attention does not use it; in files of old versions
    unused = r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from super().rules(config)
        up = ("wi_0", "wi_1") if config.activation in GATED.values() else ("wi",)
        for stack, count in (("encoder", config.layers), ("decoder", config.decoder_layers or config.layers)):
            first = f"{stack}.block.0.layer.0.SelfAttention"
            yield same(f"{stack}.position.embedding.weight", f"{first}.relative_attention_bias.weight")
            last = 2 if stack == "decoder" else 1
            modules = {
                **SELF_ATTENTION,
                **(CROSS_ATTENTION if stack == "decoder" else {}),
                "feedforward.up": tuple(f"{last}.DenseReluDense.{part}" for part in up),
                "feedforward.down": (f"{last}.DenseReluDense.wo",),
                "feedforward_norm": (f"{last}.layer_norm",),
            }
            for number in range(count):
                yield from layer(f"{stack}.blocks.{number}", f"{stack}.block.{number}.layer", modules, bias=False)
            yield from linear(f"{stack}.norm", f"{stack}.final_layer_norm", bias=False)

    def infer(self, hf: Json, tensors: Tensors | None, architecture: str) -> Json:
        sharing = super().infer(hf, tensors, architecture)
        if not sharing["share_embeddings"]:
            raise UserError(f"{SOURCE} and {TARGET} differ; only a T5 that shares them is supported")
        # Version 1.1 has tie_word_embeddings = false, or, in newer files, its own key.
        scaled = hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings", True) is not False)
        dim = hf.get("d_model", 512)
        return {
            **sharing,
            "decoder_layers": hf.get("num_decoder_layers"),
            "logit_scale": dim**-0.5 if scaled and isinstance(dim, int) and dim > 0 else 1.0,
        }

    def mismatches(self, config: ModelConfig) -> Iterator[tuple[str, str]]:
        yield from super().mismatches(config)
        scales = (1.0, config.dim**-0.5) if config.tie_embeddings else (1.0,)
        if config.logit_scale not in scales:
            yield "logit_scale", "1.0 or 1 / sqrt(dim)" if config.tie_embeddings else "1.0 with tie_embeddings = False"

    def to_config(self, config: ModelConfig) -> Json:
        scaled = config.logit_scale != 1.0
        return {
            "num_decoder_layers": config.decoder_layers or config.layers,
            "tie_word_embeddings": scaled,
            "scale_decoder_outputs": scaled,
            "is_encoder_decoder": True,
        }

    def additions(self, config: ModelConfig) -> Additions:
        """A tied output layer without scaling must be in the file, since config.json cannot express it."""
        return {OUTPUT: SHARED} if config.tie_embeddings and config.logit_scale == 1.0 else {}
