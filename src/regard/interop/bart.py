"""BART (Lewis et al. 2019): an encoder-decoder with post-LN, learned positions and a norm after the embeddings.

Marian has the same layers and uses this module too.
"""

from __future__ import annotations

from collections.abc import Iterator

from regard.errors import UserError
from regard.interop.family import Family, Json, Key, equal, is_tied, read_architecture
from regard.interop.rules import Rule, Tensors, layer, linear, rows, same, squeeze
from regard.models.config import ModelConfig

SHARED, OUTPUT, BIAS = "shared.weight", "lm_head.weight", "final_logits_bias"
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"


def embeddings(config: ModelConfig) -> Iterator[Rule]:
    yield same("source_embedding.tokens.weight", SHARED if config.share_embeddings else SOURCE)
    if not config.share_embeddings:
        yield same("target_embedding.tokens.weight", TARGET)
    if not config.tie_embeddings:
        yield same("output_head.project.weight", OUTPUT)
    if config.logit_bias:
        yield squeeze("output_head.bias", BIAS)


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


def layers(config: ModelConfig) -> Iterator[Rule]:
    for number in range(config.layers):
        yield from layer(f"encoder.blocks.{number}", f"encoder.layers.{number}", LAYER)
    for number in range(config.decoder_layers or config.layers):
        yield from layer(f"decoder.blocks.{number}", f"decoder.layers.{number}", {**LAYER, **CROSS})


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from embeddings(config)
    for stack in ("encoder", "decoder"):
        yield rows(f"{stack}.position.embedding.weight", f"{stack}.embed_positions.weight", offset=2)
        yield from linear(f"{stack}.embed_norm", f"{stack}.layernorm_embedding")
    yield from layers(config)


def infer_sharing(hf: Json, tensors: Tensors | None) -> Json:
    """Which of the three matrices (source and target embedding, output layer) are shared."""
    share = hf.get("share_encoder_decoder_embeddings", True)
    if tensors is None:
        return {"share_embeddings": share, "tie_embeddings": is_tied(hf, tensors, OUTPUT, SHARED)}
    source, target = (name if name in tensors else SHARED for name in (SOURCE, TARGET))
    share = share and equal(tensors, source, target)
    return {"share_embeddings": share, "tie_embeddings": is_tied(hf, tensors, OUTPUT, target)}


def check_symmetry(hf: Json) -> None:
    for part, default in (("ffn_dim", 4096), ("attention_heads", 16)):
        encoder, decoder = (hf.get(f"{stack}_{part}", default) for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise UserError(
                f"config.json: decoder_{part} = {decoder!r} is not supported; only that of the encoder, {encoder!r}, is"
            )


def infer(hf: Json, tensors: Tensors | None) -> Json:
    headless = read_architecture(BART, hf) == "BartModel"
    check_symmetry(hf)
    bias = not headless and (tensors is None or BIAS in tensors)
    return {**infer_sharing(hf, tensors), "logit_bias": bias}


def common_mismatches(name: str, config: ModelConfig) -> list[str]:
    fixed = {"norm_eps": 1e-5, "logit_scale": 1.0}
    return [
        f"{field} = {getattr(config, field)} ({name} has {value})"
        for field, value in fixed.items()
        if getattr(config, field) != value
    ]


def mismatches(config: ModelConfig) -> list[str]:
    differences = common_mismatches("BART", config)
    if not config.share_embeddings and config.tie_embeddings:
        differences.append("share_embeddings = False (BART has True with tie_embeddings = True)")
    if config.target_size != config.vocab_size:
        differences.append(f"target_vocab_size = {config.target_vocab_size} (BART has one vocabulary)")
    return differences


def sizes(config: ModelConfig) -> Json:
    return {
        "decoder_layers": config.decoder_layers or config.layers,
        "decoder_ffn_dim": config.ff_dim,
        "decoder_attention_heads": config.heads,
        "tie_word_embeddings": config.tie_embeddings,
        "is_encoder_decoder": True,
    }


def copies(config: ModelConfig) -> dict[str, str]:
    shared = {SOURCE: SHARED, TARGET: SHARED} if config.share_embeddings else {}
    return {**shared, OUTPUT: SHARED if config.share_embeddings else TARGET} if config.tie_embeddings else shared


def written_copies(config: ModelConfig) -> dict[str, str]:
    """Without tying, transformers reads each matrix from the file, so a shared one is saved three times."""
    if config.tie_embeddings:
        return {}
    return {SOURCE: SHARED, TARGET: SHARED} if config.share_embeddings else {SHARED: SOURCE}


def zeros(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {} if config.logit_bias else {BIAS: (1, config.target_size)}


KEYS = (
    Key("dim", "d_model", 1024),
    Key("layers", "encoder_layers", 12),
    Key("decoder_layers", "decoder_layers", 12),
    Key("heads", "encoder_attention_heads", 16),
    Key("ff_dim", "encoder_ffn_dim", 4096),
    Key("activation", "activation_function", "gelu"),
    Key("max_length", "max_position_embeddings", 1024),
    Key("embed_scale", "scale_embedding", False),
    Key("dropout", "dropout", 0.1),
    Key("embed_dropout", "dropout", 0.1),
    Key("attention_dropout", "attention_dropout", 0.0),
)

FIXED: Json = {
    "architecture": "encoder-decoder", "input": "tokens", "norm": "layer", "norm_order": "post", "final_norm": False,
    "bias": True, "token_types": 0, "head_layer": False,
}  # fmt: skip

SUPPORTED: Json = {
    "is_encoder_decoder": True, "is_decoder": False, "normalize_before": False, "add_final_layer_norm": False,
}  # fmt: skip

BART = Family(
    model_type="bart",
    name="BART",
    architectures=("BartForConditionalGeneration", "BartModel"),
    keys=(*KEYS, Key("vocab_size", "vocab_size", 50265)),
    fixed={**FIXED, "position": "learned", "embed_norm": True},
    rules=rules,
    supported={**SUPPORTED, "normalize_embedding": True, "static_position_embeddings": False},
    prefix="model.",
    unprefixed=("lm_head.", BIAS),
    unused=r"shared\.weight",  # if the source and target embeddings differ from it
    infer=infer,
    mismatches=mismatches,
    to_config=lambda config: {**sizes(config), "architectures": ["BartForConditionalGeneration"]},
    copies=copies,
    written_copies=written_copies,
    zeros=zeros,
)
