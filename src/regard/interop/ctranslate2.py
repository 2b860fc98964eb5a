"""Models for CTranslate2, a C++ engine for inference on CPUs and GPUs (Klein et al. 2020).

    export_ctranslate2(bundle, "out")               model.bin, config.json, vocabularies, and our recipe and tokenizers
    export_ctranslate2(bundle, "out", int8=True)    weights of 8 bits

The engine computes an encoder-decoder or a decoder exactly as Regard does where `refuse` finds nothing; what it would
compute differently, or not at all, is refused by name. Positions are written as tables, so a sinusoidal model ends at
POSITIONS there.

int8: every row of a matrix is rounded to integers, w ≈ q · max|w| / L. L is 63 and not 127: a CPU without VNNI adds
pairs of products of 8 bits in 16 bits (vpmaddubsw), where 2 · 255 · 127 overflows and 2 · 255 · 63 does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import MissingExtra, UserError
from regard.files import name_some
from regard.models.config import ModelConfig
from regard.models.folder import TOKENIZERS
from regard.models.recipe import RECIPE
from regard.models.transformer import Decoder, EncoderDecoder
from regard.nn.block import Block, Stack
from regard.nn.feedforward import FeedForward
from regard.nn.multihead import MultiHead
from regard.nn.position import T5, Learned, Relative
from regard.predict.bundle import Bundle
from regard.predict.ctranslate2_search import POSITIONS
from regard.settings import to_dict, write_toml
from regard.text.tokenizer import Tokenizer

LEVELS = 63  # of int8 weights, see above
ACTIVATIONS = {
    "relu": "RELU", "gelu": "GELU", "gelu-tanh": "GELUTanh", "silu": "SWISH", "swiglu": "SWISH", "geglu": "GELUTanh"
}  # fmt: skip


def refuse(config: ModelConfig) -> str:
    """What CTranslate2 would not compute as Regard does, or nothing."""
    is_decoder = config.architecture == "decoder"
    reasons = {
        f"architecture = {config.architecture!r}": config.architecture not in ("encoder-decoder", "decoder"),
        f"input = {config.input!r}": config.input != "tokens",
        f"output_head = {config.output_head!r}": config.output_head != "tokens",
        "head_layer = true": config.head_layer,
        "embed_projection = true": config.embed_projection,
        f"attention_score = {config.attention_score!r}": config.attention_score != "dot",
        f"experts = {config.experts}": config.experts > 0,
        f"mixer = {config.mixer!r}": config.mixer != "" and not config.all_full,
        f"window = {config.window}": config.window is not None,
        f"value_dim = {config.value_dim}": config.val_dim != config.key_dim,
        f"norm = {config.norm!r}": config.norm == "none",
        "residual = false": not config.residual,
        "causal = false": not config.causal,
        "final_norm that does not follow from norm_order": config.ends_with_norm != (config.norm_order == "pre"),
        "pruned heads": bool(config.pruned),
        "position = 'alibi' in an encoder-decoder": config.position == "alibi" and not is_decoder,
        "qk_norm = true in an encoder-decoder": config.qk_norm and not is_decoder,
    }
    return name_some([reason for reason, holds in reasons.items() if holds])


def export_ctranslate2(bundle: Bundle, folder: str | Path, *, int8: bool = False) -> None:
    """Write the model of `bundle` into an existing folder."""
    if reasons := refuse(bundle.config):
        raise UserError(
            f"{bundle.name}: cannot be exported to CTranslate2: {reasons}; the engine does not compute this as Regard "
            "does"
        )
    try:
        spec = make_spec(bundle)
    except ImportError:
        raise MissingExtra("ctranslate2", "ctranslate2", "export to CTranslate2") from None
    spec.validate()
    spec.optimize(quantization=None)  # equal tensors are stored once
    if int8:
        quantize(spec)
    spec.save(str(folder))
    write_toml(Path(folder) / RECIPE, {**bundle.recipe, "model": to_dict(bundle.config)})
    for name in TOKENIZERS:
        if name in bundle.tokenizers:
            bundle.tokenizers[name].save(Path(folder) / f"{name}.json")


def make_spec(bundle: Bundle) -> Any:
    """CTranslate2's description of the model, with the weights in it."""
    from ctranslate2.specs import TransformerDecoderModelSpec, TransformerSpec
    from ctranslate2.specs.transformer_spec import TransformerDecoderSpec, TransformerEncoderSpec

    model: Any = bundle.model
    config, (begin, end) = model.config, bundle.target_frame if bundle.target.bos is not None else (None, None)
    shared = stack_options(config)
    if isinstance(model, Decoder):
        decoder = TransformerDecoderSpec(
            config.layers, config.heads, with_encoder_attention=False, alibi=config.position == "alibi",
            qk_norm=config.qk_norm, **shared,
        )  # fmt: skip
        set_stack(decoder, model.decoder)
        set_embedding(decoder.embeddings, model.embedding.tokens, decoder, config)
        spec = TransformerDecoderModelSpec(decoder)
        names = vocabulary(bundle.tokenizer, config.vocab_size or 0)
        spec.register_vocabulary(names)
        tokenizer = bundle.tokenizer
        begin, end = tokenizer.bos, tokenizer.eos
    else:
        assert isinstance(model, EncoderDecoder)
        layers = config.layers if config.decoder_layers is None else config.decoder_layers
        encoder = TransformerEncoderSpec(config.layers, config.heads, **shared)
        decoder = TransformerDecoderSpec(layers, config.heads, **shared)
        for part, stack in ((encoder, model.encoder), (decoder, model.decoder)):
            set_stack(part, stack)
        set_embedding(encoder.embeddings[0], model.source_embedding.tokens, encoder, config)
        set_embedding(decoder.embeddings, model.target_embedding.tokens, decoder, config)
        spec = TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(vocabulary(bundle.source, config.vocab_size or 0))
        names = vocabulary(bundle.target, config.target_size)
        spec.register_target_vocabulary(names)
        spec.config.decoder_start_token = names[begin or 0]
        tokenizer = bundle.target
    decoder.projection.weight = array(model.output_head.project.weight) * np.float32(config.logit_scale)
    if model.output_head.bias is not None:
        decoder.projection.bias = array(model.output_head.bias)
    for role, id in (("bos_token", begin), ("eos_token", end), ("unk_token", tokenizer.unk)):
        if id is not None:
            setattr(spec.config, role, names[id])
    spec.config.layer_norm_epsilon = config.norm_eps
    return spec


def stack_options(config: ModelConfig) -> dict[str, Any]:
    """What an encoder and a decoder have in common."""
    from ctranslate2.specs.common_spec import Activation

    options: dict[str, Any] = {
        "pre_norm": config.norm_order == "pre",
        "activation": Activation[ACTIVATIONS[config.activation]],
        "layernorm_embedding": config.embed_norm,
        "relative_position": config.position == "relative",
        "relative_attention_bias": config.position == "t5",
        "ffn_glu": config.activation in ("swiglu", "geglu"),
        "rms_norm": config.norm == "rms",
        "num_heads_kv": None if config.key_heads == config.heads else config.key_heads,
        "head_dim": None if config.key_dim * config.heads == config.dim else config.key_dim,
    }
    if config.position == "rope":
        options |= {
            "rotary_dim": config.key_dim,
            "rotary_interleave": config.pairs == "interleaved",
            "rotary_base": config.rope_base,
        }
    return options


def set_stack(spec: Any, stack: Stack) -> None:
    position, config = stack.position, stack.config
    if hasattr(spec, "position_encodings"):
        count = config.max_length if isinstance(position, Learned) else POSITIONS
        table = position.embed(torch.arange(count)[None].to(next(stack.parameters()).device))
        spec.position_encodings.encodings = np.zeros((1, config.dim), np.float32).repeat(count, 0)
        if table is not None:
            spec.position_encodings.encodings = array(table[0])
    if config.embed_norm:
        set_norm(spec.layernorm_embedding, stack.embed_norm)
    if config.ends_with_norm:
        set_norm(spec.layer_norm, stack.norm)
    for part, block in zip(spec.layer, stack.blocks, strict=True):
        assert isinstance(block, Block) and isinstance(block.feedforward, FeedForward)
        assert isinstance(block.attention, MultiHead)
        set_attention(part.self_attention, block.attention, block.attention_norm)
        if isinstance(position, Relative):
            part.self_attention.relative_position_keys = array(position.embedding.weight)
            part.self_attention.relative_position_values = np.zeros_like(array(position.embedding.weight))
        if isinstance(position, T5):
            part.self_attention.relative_attention_bias = array(position.embedding.weight)
            part.self_attention.relative_attention_max_distance = np.int32(config.position_distance)
        if block.cross is not None and block.cross_norm is not None:
            set_attention(part.attention, block.cross, block.cross_norm)
        set_feedforward(part.ffn, block.feedforward, block.feedforward_norm)


def set_attention(spec: Any, attention: MultiHead, norm: nn.Module) -> None:
    layers = (attention.q, attention.kv, attention.out) if attention.cross else (attention.qkv, attention.out)
    for part, layer in zip(spec.linear, layers, strict=True):
        set_linear(part, layer)
    spec.queries_scale = np.float32(attention.config.scale)
    if attention.q_norm is not None and attention.k_norm is not None:
        spec.q_norm.gamma, spec.k_norm.gamma = array(attention.q_norm.weight), array(attention.k_norm.weight)
    set_norm(spec.layer_norm, norm)


def set_feedforward(spec: Any, feedforward: FeedForward, norm: nn.Module) -> None:
    set_norm(spec.layer_norm, norm)
    set_linear(spec.linear_1, feedforward.down)
    up = feedforward.up
    if feedforward.activation not in ("swiglu", "geglu"):
        set_linear(spec.linear_0, up)
        return
    for part, number in ((spec.linear_0, 0), (spec.linear_0_noact, 1)):  # the gate, then the value
        part.weight = array(up.weight.chunk(2)[number])
        if up.bias is not None:
            part.bias = array(up.bias.chunk(2)[number])


def set_embedding(spec: Any, embedding: Any, stack: Any, config: ModelConfig) -> None:
    spec.weight = array(embedding.weight)
    stack.scale_embeddings = config.embed_scale


def set_linear(spec: Any, layer: nn.Module) -> None:
    assert isinstance(layer, nn.Linear)
    spec.weight = array(layer.weight)
    if layer.bias is not None:
        spec.bias = array(layer.bias)


def set_norm(spec: Any, norm: nn.Module) -> None:
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor)
    spec.gamma = array(weight)
    if hasattr(spec, "beta"):
        spec.beta = np.zeros_like(spec.gamma) if bias is None else array(bias)


def array(tensor: Any) -> Any:
    """As float32 in the memory of this machine."""
    return tensor.detach().float().cpu().contiguous().numpy()


def vocabulary(tokenizer: Tokenizer, size: int) -> list[str]:
    """The names of all tokens by id; rows that pad a vocabulary have names of their own."""
    return [tokenizer.name(id) if id < len(tokenizer) else f"<unused{id}>" for id in range(size)]


def quantize(spec: Any) -> None:
    """Round matrices to integers from -LEVELS to LEVELS, row by row, in place."""
    from ctranslate2.specs.model_spec import NumpyVariable, Variable

    def visit(part: Any, name: str, value: Any) -> None:
        key = name.rpartition("/")[2]
        if not isinstance(value, Variable) or value.is_scalar() or not hasattr(part, f"{key}_scale"):
            return
        weights: Sequence[Any] | Any = value.to("float32").numpy()
        largest = np.abs(weights).max(axis=1, keepdims=True)
        scale = np.float32(LEVELS) / np.where(largest == 0, np.float32(LEVELS), largest)
        setattr(part, key, NumpyVariable(np.rint(weights * scale).astype(np.int8)))
        setattr(part, f"{key}_scale", NumpyVariable(scale[:, 0].astype(np.float32)))

    spec._visit(visit)
