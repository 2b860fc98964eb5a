"""T5 (Raffel et al. 2020): an encoder-decoder, pre-RMSNorm, no biases, unscaled scores, bucketed distances.

    shared                                       source_embedding.tokens, target_embedding.tokens
    encoder.block.N.layer.0.SelfAttention.q, k, v, o         encoder.blocks.N.attention.qkv, out
    decoder.block.N.layer.1.EncDecAttention.q, k, v, o       decoder.blocks.N.cross.q, kv, out
    …layer.M.layer_norm                          the norm around that sub-layer
    …layer.last.DenseReluDense.wi, wo            feedforward.up, down; gated: wi_0 (gate) and wi_1 in one product
    …block.0.layer.0.SelfAttention.relative_attention_bias   position.embedding of the stack: all its layers use it
    …final_layer_norm, lm_head                   norm of the stack, output_head.project

Version 1.0 has ReLU and one table for everything, its logits divided by sqrt(dim); version 1.1 has gated GELU
and an output layer of its own, not divided.
"""

from __future__ import annotations

from collections.abc import Iterator

from regard.errors import UserError
from regard.interop.bart import copies, open_tables
from regard.interop.family import ACTIVATION_NAMES, Family, Json, Key, read_activation, read_architecture
from regard.interop.rules import Rule, Tensors, linear, norm, same
from regard.models.config import ModelConfig

# of ours, gated; "gated-gelu" means the tanh form
GATED = {"gated-gelu": "geglu", "gated-gelu_new": "geglu", "gated-silu": "swiglu"}
GATED_NAMES = {"geglu": "gated-gelu", "swiglu": "gated-silu"}


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield same("source_embedding.tokens.weight", "shared.weight")
    if not config.tie_embeddings:
        yield same("output_head.project.weight", "lm_head.weight")
    for stack, count in (("encoder", config.layers), ("decoder", config.decoder_layers or config.layers)):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        yield same(f"{stack}.position.embedding.weight", f"{first}.relative_attention_bias.weight")
        for layer in range(count):
            ours, theirs = f"{stack}.blocks.{layer}", f"{stack}.block.{layer}.layer"
            yield from block_rules(config, ours, theirs, memory=stack == "decoder")
        yield from norm(f"{stack}.norm", f"{stack}.final_layer_norm", bias=False)


def block_rules(config: ModelConfig, ours: str, theirs: str, memory: bool) -> Iterator[Rule]:
    q_k_v = (f"{theirs}.0.SelfAttention.{part}" for part in "qkv")
    yield from linear(f"{ours}.attention.qkv", *q_k_v, bias=False)
    yield from linear(f"{ours}.attention.out", f"{theirs}.0.SelfAttention.o", bias=False)
    yield from norm(f"{ours}.attention_norm", f"{theirs}.0.layer_norm", bias=False)
    if memory:
        cross = f"{theirs}.1.EncDecAttention"
        yield from linear(f"{ours}.cross.q", f"{cross}.q", bias=False)
        yield from linear(f"{ours}.cross.kv", f"{cross}.k", f"{cross}.v", bias=False)
        yield from linear(f"{ours}.cross.out", f"{cross}.o", bias=False)
        yield from norm(f"{ours}.cross_norm", f"{theirs}.1.layer_norm", bias=False)
    last = f"{theirs}.{2 if memory else 1}"
    wide = ("wi_0", "wi_1") if config.activation in GATED_NAMES else ("wi",)
    yield from linear(f"{ours}.feedforward.up", *(f"{last}.DenseReluDense.{part}" for part in wide), bias=False)
    yield from linear(f"{ours}.feedforward.down", f"{last}.DenseReluDense.wo", bias=False)
    yield from norm(f"{ours}.feedforward_norm", f"{last}.layer_norm", bias=False)


def open_fields(hf: Json, tensors: Tensors | None) -> Json:
    read_architecture(T5, hf)
    tables = open_tables(hf, tensors)
    if not tables["share_embeddings"]:
        raise UserError("encoder.embed_tokens and decoder.embed_tokens differ; only a T5 that shares them is supported")
    name = hf.get("feed_forward_proj") or "relu"
    gated = isinstance(name, str) and name.startswith("gated-")
    if gated and name not in GATED:
        raise UserError(
            f"config.json: feed_forward_proj = {name!r} is not supported; of the gated, only {', '.join(GATED)} are"
        )
    # Version 1.1 is known by tie_word_embeddings = false, or in newer files by a key of its own.
    divided = hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings", True) is not False)
    dim = hf.get("d_model", 512)
    return {
        **tables,
        "activation": GATED[name] if gated else read_activation("feed_forward_proj", name),
        "decoder_layers": hf.get("num_decoder_layers"),
        "logit_scale": dim**-0.5 if divided and isinstance(dim, int) and dim > 0 else 1.0,
    }


def doubts(config: ModelConfig) -> list[str]:
    found = []
    names = (*GATED_NAMES, *ACTIVATION_NAMES)
    if config.activation not in names:
        found.append(f"activation = {config.activation!r} (T5 has one of {', '.join(names)})")
    scales = (1.0, config.dim**-0.5) if config.tie_embeddings else (1.0,)
    if config.logit_scale not in scales:
        want = "1.0 or 1 / sqrt(dim)" if config.tie_embeddings else "1.0 with tie_embeddings = False"
        found.append(f"logit_scale = {config.logit_scale} (T5 has {want})")
    return found


def extend(config: ModelConfig) -> Json:
    divided = config.logit_scale != 1.0
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "feed_forward_proj": {**ACTIVATION_NAMES, **GATED_NAMES}[config.activation],
        "num_decoder_layers": config.decoder_layers or config.layers,
        "d_kv": config.key_dim,
        "tie_word_embeddings": divided,
        "scale_decoder_outputs": divided,
        "is_encoder_decoder": True,
    }


def repeats(config: ModelConfig) -> dict[str, str]:
    """A tied output layer that is not divided has to be in the file: config.json has no other word for it."""
    return {"lm_head.weight": "shared.weight"} if config.tie_embeddings and config.logit_scale == 1.0 else {}


FIXED: Json = {
    "architecture": "encoder-decoder", "input": "tokens", "position": "t5", "norm": "rms", "norm_order": "pre",
    "final_norm": True, "embed_norm": False, "bias": False, "attention_scale": 1.0, "embed_scale": False,
    "share_embeddings": True, "token_types": 0, "head_layer": False, "logit_bias": False,
}  # fmt: skip

T5 = Family(
    kind="t5",
    title="T5",
    architectures=("T5ForConditionalGeneration",),
    keys=(
        Key("dim", "d_model", 512),
        Key("head_dim", "d_kv", 64),
        Key("ff_dim", "d_ff", 2048),
        Key("layers", "num_layers", 6),
        Key("heads", "num_heads", 8),
        Key("vocab_size", "vocab_size", 32128),
        Key("max_length", "n_positions", 512),
        Key("position_buckets", "relative_attention_num_buckets", 32),
        Key("position_distance", "relative_attention_max_distance", 128),
        Key("norm_eps", "layer_norm_epsilon", 1e-6),
        Key("dropout", "dropout_rate", 0.1),
        Key("embed_dropout", "dropout_rate", 0.1),
        Key("attention_dropout", "dropout_rate", 0.1),
    ),
    fixed=FIXED,
    rules=rules,
    only={"is_encoder_decoder": True, "is_decoder": False},
    free=("head_dim", "attention_scale"),
    # once stored for a table that cross attention never reads
    unused=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    open=open_fields,
    doubts=doubts,
    extend=extend,
    copies=copies,
    repeats=repeats,
)
