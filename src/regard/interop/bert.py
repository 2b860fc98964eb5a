"""BERT (Devlin et al. 2018): an encoder with post-LN, learned positions, token types and an embedding norm."""

from __future__ import annotations

from collections.abc import Iterator

from regard.errors import UserError
from regard.interop.family import ENCODER_KEYS, Family, Json, Key, count_labels, is_tied, label_names, read_architecture
from regard.interop.rules import Rule, Tensors, layer, linear, same
from regard.models.config import ModelConfig

EMBEDDING, OUTPUT = "embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
BIAS, OUTPUT_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"  # equal if tied; otherwise the second counts
LAYER = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "feedforward.up": ("intermediate.dense",),
    "feedforward.down": ("output.dense",),
    "feedforward_norm": ("output.LayerNorm",),
}


def rules(config: ModelConfig) -> Iterator[Rule]:
    yield same("embedding.tokens.weight", EMBEDDING)
    yield same("encoder.position.embedding.weight", "embeddings.position_embeddings.weight")
    if config.token_types:
        yield same("embedding.token_types.weight", "embeddings.token_type_embeddings.weight")
    yield from linear("encoder.embed_norm", "embeddings.LayerNorm")
    for number in range(config.layers):
        yield from layer(f"encoder.blocks.{number}", f"encoder.layer.{number}", LAYER)
    if config.pooler:
        yield from linear("pooler", "pooler.dense")
    if config.output_head == "classes":
        yield from linear("classifier", "classifier")
    if config.output_head == "tokens":
        yield from linear("output_head.layer", "cls.predictions.transform.dense")
        yield from linear("output_head.norm", "cls.predictions.transform.LayerNorm")
        if config.logit_bias:
            yield same("output_head.bias", BIAS if config.tie_embeddings else OUTPUT_BIAS)
        if not config.tie_embeddings:
            yield same("output_head.project.weight", OUTPUT)


def infer(hf: Json, tensors: Tensors | None) -> Json:
    match read_architecture(BERT, hf):
        case "BertForSequenceClassification":
            return {"output_head": "classes", "pooler": True, "classes": count_labels(hf)}
        case "BertModel":
            pooler = tensors is None or "pooler.dense.weight" in tensors
            return {"output_head": "pooled" if pooler else "none", "pooler": pooler}
    if hf.get("hidden_act") not in (None, "gelu", "gelu_python"):
        raise UserError(
            f"config.json: hidden_act = {hf['hidden_act']!r} is not supported for a masked language model, "
            "whose output head has a GELU; only 'gelu' is"
        )
    return {
        "output_head": "tokens",
        "head_layer": True,
        "logit_bias": True,
        "tie_embeddings": is_tied(hf, tensors, OUTPUT, EMBEDDING),
    }


def mismatches(config: ModelConfig) -> list[str]:
    differences = []
    if config.output_head == "tokens":
        if not config.head_layer:
            differences.append("head_layer = False (BERT's masked LM has True)")
        if config.activation != "gelu":
            differences.append(f"activation = {config.activation!r} (BERT's masked LM has 'gelu')")
        if config.pooler:
            differences.append("pooler = True (BERT's masked LM has False)")
        if config.logit_scale != 1.0:
            differences.append(f"logit_scale = {config.logit_scale} (BERT has 1.0)")
    if config.output_head in ("classes", "pooled"):
        if config.pooling != "cls":
            differences.append(f"pooling = {config.pooling!r} (BERT has 'cls')")
        if not config.pooler:
            differences.append(f"pooler = False (BERT has True with output_head = {config.output_head!r})")
    return differences


def to_config(config: ModelConfig) -> Json:
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
    return {OUTPUT: EMBEDDING, OUTPUT_BIAS: BIAS} if config.tie_embeddings else {BIAS: OUTPUT_BIAS}


def written_copies(config: ModelConfig) -> dict[str, str]:
    return {BIAS: OUTPUT_BIAS} if config.output_head == "tokens" and not config.tie_embeddings else {}


def zeros(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if not config.token_types:
        shapes["embeddings.token_type_embeddings.weight"] = (1, config.dim)
    if config.output_head == "tokens" and not config.logit_bias:
        shapes[BIAS if config.tie_embeddings else OUTPUT_BIAS] = (config.vocab_size or 0,)
    return shapes


FIXED: Json = {
    "architecture": "encoder", "input": "tokens", "position": "learned", "norm": "layer", "norm_order": "post",
    "final_norm": False, "embed_norm": True, "bias": True, "embed_scale": False,
}  # fmt: skip

BERT = Family(
    model_type="bert",
    name="BERT",
    architectures=("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"),
    keys=(
        *ENCODER_KEYS,
        Key("vocab_size", "vocab_size", 30522),
        Key("max_length", "max_position_embeddings", 512),
        Key("token_types", "type_vocab_size", 2),
        Key("dropout", "hidden_dropout_prob", 0.1),
        Key("embed_dropout", "hidden_dropout_prob", 0.1),
        Key("attention_dropout", "attention_probs_dropout_prob", 0.1),
    ),
    fixed=FIXED,
    rules=rules,
    supported={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    prefix="bert.",
    unprefixed=("cls.", "classifier."),
    # the ids 0, 1, 2, …, a buffer of old versions; and what only next-sentence prediction uses
    unused=r"embeddings\.position_ids|pooler\.dense\..*|cls\.seq_relationship\..*|cls\.predictions\.bias",
    infer=infer,
    mismatches=mismatches,
    to_config=to_config,
    copies=copies,
    written_copies=written_copies,
    zeros=zeros,
)
