"""T5 (Raffel et al. 2020): an encoder-decoder with pre-RMSNorm, no biases, unscaled scores and bucketed distances.

Version 1.0 has ReLU and one shared embedding matrix, with logits scaled by sqrt(dim); version 1.1 has gated GELU and a
separate output layer without that scaling.
"""

from __future__ import annotations

from collections.abc import Iterator

from regard.errors import UserError
from regard.interop.bart import copies, infer_sharing
from regard.interop.family import ACTIVATION_NAMES, Family, Json, Key, read_activation, read_architecture
from regard.interop.rules import Rule, Tensors, layer, linear, same
from regard.models.config import ModelConfig

# gated activations; "gated-gelu" means the tanh form
GATED = {"gated-gelu": "geglu", "gated-gelu_new": "geglu", "gated-silu": "swiglu"}
GATED_NAMES = {"geglu": "gated-gelu", "swiglu": "gated-silu"}


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield same("source_embedding.tokens.weight", "shared.weight")
    if not config.tie_embeddings:
        yield same("output_head.project.weight", "lm_head.weight")
    for stack, count in (("encoder", config.layers), ("decoder", config.decoder_layers or config.layers)):
        first = f"{stack}.block.0.layer.0.SelfAttention"
        yield same(f"{stack}.position.embedding.weight", f"{first}.relative_attention_bias.weight")
        modules = block(config, decoder=stack == "decoder")
        for number in range(count):
            yield from layer(f"{stack}.blocks.{number}", f"{stack}.block.{number}.layer", modules, bias=False)
        yield from linear(f"{stack}.norm", f"{stack}.final_layer_norm", bias=False)


def block(config: ModelConfig, decoder: bool) -> dict[str, tuple[str, ...]]:
    """{module of ours: modules of theirs} of one block."""
    last = f"{2 if decoder else 1}.DenseReluDense"
    up = ("wi_0", "wi_1") if config.activation in GATED_NAMES else ("wi",)
    modules = {
        "attention.qkv": ("0.SelfAttention.q", "0.SelfAttention.k", "0.SelfAttention.v"),
        "attention.out": ("0.SelfAttention.o",),
        "attention_norm": ("0.layer_norm",),
        "feedforward.up": tuple(f"{last}.{part}" for part in up),
        "feedforward.down": (f"{last}.wo",),
        "feedforward_norm": (f"{2 if decoder else 1}.layer_norm",),
    }
    cross = {
        "cross.q": ("1.EncDecAttention.q",),
        "cross.kv": ("1.EncDecAttention.k", "1.EncDecAttention.v"),
        "cross.out": ("1.EncDecAttention.o",),
        "cross_norm": ("1.layer_norm",),
    }
    return {**modules, **cross} if decoder else modules


def infer(hf: Json, tensors: Tensors | None) -> Json:
    read_architecture(T5, hf)
    sharing = infer_sharing(hf, tensors)
    if not sharing["share_embeddings"]:
        raise UserError("encoder.embed_tokens and decoder.embed_tokens differ; only a T5 that shares them is supported")
    name = hf.get("feed_forward_proj") or "relu"
    gated = isinstance(name, str) and name.startswith("gated-")
    if gated and name not in GATED:
        raise UserError(
            f"config.json: feed_forward_proj = {name!r} is not supported; gated, only {', '.join(GATED)} are"
        )
    # Version 1.1 has tie_word_embeddings = false, or, in newer files, its own key.
    scaled = hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings", True) is not False)
    dim = hf.get("d_model", 512)
    return {
        **sharing,
        "activation": GATED[name] if gated else read_activation("feed_forward_proj", name),
        "decoder_layers": hf.get("num_decoder_layers"),
        "logit_scale": dim**-0.5 if scaled and isinstance(dim, int) and dim > 0 else 1.0,
    }


def mismatches(config: ModelConfig) -> list[str]:
    differences = []
    names = (*GATED_NAMES, *ACTIVATION_NAMES)
    if config.activation not in names:
        differences.append(f"activation = {config.activation!r} (T5 has one of {', '.join(names)})")
    scales = (1.0, config.dim**-0.5) if config.tie_embeddings else (1.0,)
    if config.logit_scale not in scales:
        expected = "1.0 or 1 / sqrt(dim)" if config.tie_embeddings else "1.0 with tie_embeddings = False"
        differences.append(f"logit_scale = {config.logit_scale} (T5 has {expected})")
    return differences


def to_config(config: ModelConfig) -> Json:
    scaled = config.logit_scale != 1.0
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "feed_forward_proj": {**ACTIVATION_NAMES, **GATED_NAMES}[config.activation],
        "num_decoder_layers": config.decoder_layers or config.layers,
        "d_kv": config.key_dim,
        "tie_word_embeddings": scaled,
        "scale_decoder_outputs": scaled,
        "is_encoder_decoder": True,
    }


def written_copies(config: ModelConfig) -> dict[str, str]:
    """A tied output layer without scaling must be in the file, since config.json cannot express it."""
    return {"lm_head.weight": "shared.weight"} if config.tie_embeddings and config.logit_scale == 1.0 else {}


FIXED: Json = {
    "architecture": "encoder-decoder", "input": "tokens", "position": "t5", "norm": "rms", "norm_order": "pre",
    "final_norm": True, "embed_norm": False, "bias": False, "attention_scale": 1.0, "embed_scale": False,
    "share_embeddings": True, "token_types": 0, "head_layer": False, "logit_bias": False,
}  # fmt: skip

T5 = Family(
    model_type="t5",
    name="T5",
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
    supported={"is_encoder_decoder": True, "is_decoder": False},
    free=("head_dim", "attention_scale"),
    # cross-attention does not use it; in files of old versions
    unused=r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    infer=infer,
    mismatches=mismatches,
    to_config=to_config,
    copies=copies,
    written_copies=written_copies,
)
