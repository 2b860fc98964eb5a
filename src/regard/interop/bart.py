"""BART (Lewis et al. 2019): an encoder-decoder, post-LN, learned positions, a norm on the embeddings.

    shared                                       source_embedding.tokens, target_embedding.tokens, output_head.project
    encoder.embed_positions[2:]                     encoder.position.embedding: the first two rows are never read
    encoder.layernorm_embedding                     encoder.embed_norm
    encoder.layers.N.self_attn.q_, k_, v_, out_proj encoder.blocks.N.attention.qkv, out
    decoder.layers.N.encoder_attn.…                 decoder.blocks.N.cross.q, kv, out
    …self_attn_, encoder_attn_, final_layer_norm    attention_norm, cross_norm, feedforward_norm
    …fc1, fc2                                       feedforward.up, down
    final_logits_bias  [1, vocab_size]                   output_head.bias  [vocab_size]

Marian has the same layers; `layers`, `tables` and what surrounds them serve both.
"""

from __future__ import annotations

from collections.abc import Iterator

from regard.errors import UserError
from regard.interop.family import Family, Json, Key, equal, read_architecture, tied
from regard.interop.rules import Rule, Tensors, batch, linear, norm, rows, same
from regard.models.config import ModelConfig

SHARED, OUTPUT, BIAS = "shared.weight", "lm_head.weight", "final_logits_bias"
SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"


def tables(config: ModelConfig) -> Iterator[Rule]:
    yield same("source_embedding.tokens.weight", SHARED if config.share_embeddings else SOURCE)
    if not config.share_embeddings:
        yield same("target_embedding.tokens.weight", TARGET)
    if not config.tie_embeddings:
        yield same("output_head.project.weight", OUTPUT)
    if config.logit_bias:
        yield batch("output_head.bias", BIAS)


def layers(config: ModelConfig) -> Iterator[Rule]:
    for stack, count in (("encoder", config.layers), ("decoder", config.decoder_layers or config.layers)):
        for layer in range(count):
            ours, theirs = f"{stack}.blocks.{layer}", f"{stack}.layers.{layer}"
            yield from linear(f"{ours}.attention.qkv", *(f"{theirs}.self_attn.{part}_proj" for part in "qkv"))
            yield from linear(f"{ours}.attention.out", f"{theirs}.self_attn.out_proj")
            yield from norm(f"{ours}.attention_norm", f"{theirs}.self_attn_layer_norm")
            if stack == "decoder":
                yield from linear(f"{ours}.cross.q", f"{theirs}.encoder_attn.q_proj")
                yield from linear(f"{ours}.cross.kv", *(f"{theirs}.encoder_attn.{part}_proj" for part in "kv"))
                yield from linear(f"{ours}.cross.out", f"{theirs}.encoder_attn.out_proj")
                yield from norm(f"{ours}.cross_norm", f"{theirs}.encoder_attn_layer_norm")
            yield from linear(f"{ours}.feedforward.up", f"{theirs}.fc1")
            yield from linear(f"{ours}.feedforward.down", f"{theirs}.fc2")
            yield from norm(f"{ours}.feedforward_norm", f"{theirs}.final_layer_norm")


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield from tables(config)
    for stack in ("encoder", "decoder"):
        yield rows(f"{stack}.position.embedding.weight", f"{stack}.embed_positions.weight", before=2)
        yield from norm(f"{stack}.embed_norm", f"{stack}.layernorm_embedding")
    yield from layers(config)


def open_tables(hf: Json, tensors: Tensors | None) -> Json:
    """Which of the three tables (source, target, output) are one."""
    share = hf.get("share_encoder_decoder_embeddings", True)
    if tensors is None:
        return {"share_embeddings": share, "tie_embeddings": tied(hf, tensors, OUTPUT, SHARED)}
    source, target = (name if name in tensors else SHARED for name in (SOURCE, TARGET))
    share = share and equal(tensors, source, target)
    return {"share_embeddings": share, "tie_embeddings": tied(hf, tensors, OUTPUT, target)}


def check_symmetry(hf: Json) -> None:
    for part, default in (("ffn_dim", 4096), ("attention_heads", 16)):
        encoder, decoder = (hf.get(f"{stack}_{part}", default) for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise UserError(
                f"config.json: decoder_{part} = {decoder!r} is not supported; only that of the encoder, {encoder!r}, is"
            )


def open_fields(hf: Json, tensors: Tensors | None) -> Json:
    headless = read_architecture(BART, hf) == "BartModel"
    check_symmetry(hf)
    bias = not headless and (tensors is None or BIAS in tensors)
    return {**open_tables(hf, tensors), "logit_bias": bias}


def common_doubts(title: str, config: ModelConfig) -> list[str]:
    fixed = {"norm_eps": 1e-5, "logit_scale": 1.0}
    return [
        f"{name} = {getattr(config, name)} ({title} has {value})"
        for name, value in fixed.items()
        if getattr(config, name) != value
    ]


def doubts(config: ModelConfig) -> list[str]:
    found = common_doubts("BART", config)
    if not config.share_embeddings and config.tie_embeddings:
        found.append("share_embeddings = False (BART has True with tie_embeddings = True)")
    if config.target_size != config.vocab_size:
        found.append(f"target_vocab_size = {config.target_vocab_size} (BART has one vocabulary)")
    return found


def sizes(config: ModelConfig) -> Json:
    return {
        "decoder_layers": config.decoder_layers or config.layers,
        "decoder_ffn_dim": config.ff_dim,
        "decoder_attention_heads": config.heads,
        "tie_word_embeddings": config.tie_embeddings,
        "is_encoder_decoder": True,
    }


def copies(config: ModelConfig) -> dict[str, str]:
    found = {SOURCE: SHARED, TARGET: SHARED} if config.share_embeddings else {}
    return {**found, OUTPUT: SHARED if config.share_embeddings else TARGET} if config.tie_embeddings else found


def repeats(config: ModelConfig) -> dict[str, str]:
    """Without tying, transformers reads each table from the file, so a shared one is written three times."""
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

ONLY: Json = {
    "is_encoder_decoder": True, "is_decoder": False, "normalize_before": False, "add_final_layer_norm": False,
}  # fmt: skip

BART = Family(
    kind="bart",
    title="BART",
    architectures=("BartForConditionalGeneration", "BartModel"),
    keys=(*KEYS, Key("vocab_size", "vocab_size", 50265)),
    fixed={**FIXED, "position": "learned", "embed_norm": True},
    rules=rules,
    only={**ONLY, "normalize_embedding": True, "static_position_embeddings": False},
    prefix="model.",
    outside=("lm_head.", BIAS),
    unused=r"shared\.weight",  # of models whose source and target tables differ from it
    open=open_fields,
    doubts=doubts,
    extend=lambda config: {**sizes(config), "architectures": ["BartForConditionalGeneration"]},
    copies=copies,
    repeats=repeats,
    zeros=zeros,
)
