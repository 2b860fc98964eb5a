"""BERT (Devlin et al. 2018): an encoder, post-LN, learned positions, segment types, a norm on the embeddings.

embeddings.word_, position_, token_type_embeddings  embedding.tokens, encoder.position.embedding, embedding.token_types
embeddings.LayerNorm                                  encoder.embed_norm
encoder.layer.N.attention.self.query, key, value      encoder.blocks.N.attention.qkv
encoder.layer.N.attention.output.dense, LayerNorm     attention.out, attention_norm
encoder.layer.N.intermediate.dense, output.dense      feedforward.up, down
pooler.dense, classifier                              pooler, classifier
cls.predictions.transform.dense, LayerNorm, bias      output_head.layer, output_head.norm, output_head.bias
"""

from __future__ import annotations

from collections.abc import Iterator

from regard.errors import UserError
from regard.interop.family import Family, Json, Key, count_labels, label_names, read_architecture, tied
from regard.interop.rules import Rule, Tensors, linear, norm, same
from regard.models.config import ModelConfig

TABLE, OUTPUT = "embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
BIAS, OUTPUT_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"  # one if tied; else the second is read


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield same("embedding.tokens.weight", TABLE)
    yield same("encoder.position.embedding.weight", "embeddings.position_embeddings.weight")
    if config.token_types:
        yield same("embedding.token_types.weight", "embeddings.token_type_embeddings.weight")
    yield from norm("encoder.embed_norm", "embeddings.LayerNorm")
    for layer in range(config.layers):
        ours, theirs = f"encoder.blocks.{layer}", f"encoder.layer.{layer}"
        q_k_v = (f"{theirs}.attention.self.{part}" for part in ("query", "key", "value"))
        yield from linear(f"{ours}.attention.qkv", *q_k_v)
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from norm(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from linear(f"{ours}.feedforward.up", f"{theirs}.intermediate.dense")
        yield from linear(f"{ours}.feedforward.down", f"{theirs}.output.dense")
        yield from norm(f"{ours}.feedforward_norm", f"{theirs}.output.LayerNorm")
    if config.pooler:
        yield from linear("pooler", "pooler.dense")
    if config.output_head == "classes":
        yield from linear("classifier", "classifier")
    if config.output_head == "tokens":
        yield from linear("output_head.layer", "cls.predictions.transform.dense")
        yield from norm("output_head.norm", "cls.predictions.transform.LayerNorm")
        if config.logit_bias:
            yield same("output_head.bias", BIAS if config.tie_embeddings else OUTPUT_BIAS)
        if not config.tie_embeddings:
            yield same("output_head.project.weight", OUTPUT)


def open_fields(hf: Json, tensors: Tensors | None) -> Json:
    match read_architecture(BERT, hf):
        case "BertForSequenceClassification":
            return {"output_head": "classes", "pooler": True, "classes": count_labels(hf)}
        case "BertModel":
            pooler = tensors is None or "pooler.dense.weight" in tensors
            return {"output_head": "pooled" if pooler else "none", "pooler": pooler}
    if hf.get("hidden_act") not in (None, "gelu", "gelu_python"):
        raise UserError(
            f"config.json: hidden_act = {hf['hidden_act']!r} is not supported for masked tokens, "
            "whose output layer has a GELU; only 'gelu' is"
        )
    return {
        "output_head": "tokens",
        "head_layer": True,
        "logit_bias": True,
        "tie_embeddings": tied(hf, tensors, OUTPUT, TABLE),
    }


def doubts(config: ModelConfig) -> list[str]:
    found = []
    if config.output_head == "tokens":
        if not config.head_layer:
            found.append("head_layer = False (BERT's masked LM has True)")
        if config.activation != "gelu":
            found.append(f"activation = {config.activation!r} (BERT's masked LM has 'gelu')")
        if config.pooler:
            found.append("pooler = True (BERT's masked LM has False)")
        if config.logit_scale != 1.0:
            found.append(f"logit_scale = {config.logit_scale} (BERT has 1.0)")
    if config.output_head in ("classes", "pooled"):
        if config.pooling != "cls":
            found.append(f"pooling = {config.pooling!r} (BERT has 'cls')")
        if not config.pooler:
            found.append(f"pooler = False (BERT has True with output_head = {config.output_head!r})")
    return found


def extend(config: ModelConfig) -> Json:
    hf: Json = {"type_vocab_size": max(1, config.token_types), "tie_word_embeddings": config.tie_embeddings}
    match config.output_head:
        case "tokens":
            return {**hf, "architectures": ["BertForMaskedLM"]}
        case "classes":
            assert config.classes is not None
            return {**hf, "architectures": ["BertForSequenceClassification"], **label_names(config.classes)}
        case _:
            return {**hf, "architectures": ["BertModel"]}


def copies(config: ModelConfig) -> dict[str, str]:
    return {OUTPUT: TABLE, OUTPUT_BIAS: BIAS} if config.tie_embeddings else {BIAS: OUTPUT_BIAS}


def repeats(config: ModelConfig) -> dict[str, str]:
    return {BIAS: OUTPUT_BIAS} if config.output_head == "tokens" and not config.tie_embeddings else {}


def zeros(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    types: dict[str, tuple[int, ...]] = {}
    if not config.token_types:
        types["embeddings.token_type_embeddings.weight"] = (1, config.dim)
    if config.output_head != "tokens" or config.logit_bias:
        return types
    return {**types, BIAS if config.tie_embeddings else OUTPUT_BIAS: (config.vocab_size or 0,)}


FIXED: Json = {
    "architecture": "encoder", "input": "tokens", "position": "learned", "norm": "layer", "norm_order": "post",
    "final_norm": False, "embed_norm": True, "bias": True, "embed_scale": False,
}  # fmt: skip

BERT = Family(
    kind="bert",
    title="BERT",
    architectures=("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"),
    keys=(
        Key("dim", "hidden_size", 768),
        Key("layers", "num_hidden_layers", 12),
        Key("heads", "num_attention_heads", 12),
        Key("ff_dim", "intermediate_size", 3072),
        Key("vocab_size", "vocab_size", 30522),
        Key("max_length", "max_position_embeddings", 512),
        Key("token_types", "type_vocab_size", 2),
        Key("activation", "hidden_act", "gelu"),
        Key("norm_eps", "layer_norm_eps", 1e-12),
        Key("dropout", "hidden_dropout_prob", 0.1),
        Key("embed_dropout", "hidden_dropout_prob", 0.1),
        Key("attention_dropout", "attention_probs_dropout_prob", 0.1),
    ),
    fixed=FIXED,
    rules=rules,
    only={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    prefix="bert.",
    outside=("cls.", "classifier."),
    # the ids 0, 1, 2, …, once stored as a buffer; beside masked tokens, what serves only next-sentence prediction
    unused=r"embeddings\.position_ids|pooler\.dense\..*|cls\.seq_relationship\..*|cls\.predictions\.bias",
    open=open_fields,
    doubts=doubts,
    extend=extend,
    copies=copies,
    repeats=repeats,
    zeros=zeros,
)
