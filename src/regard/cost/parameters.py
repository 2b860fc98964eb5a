"""Parameters: the weights that training learns.

A linear layer from m to n features has m·n weights and n biases. With width d, H heads of size D (Dv for values),
G key/value heads and feed-forward width f:

    attention     d·(H·D + G·(D + Dv)) + H·Dv·d      4·d² when H·D = d, G = H     cross-attention: the same
    feed-forward  2·d·f                              3·d·f with a gate (swiglu, geglu); times experts
    norm          2·d (layer), d (rms)               one per sub-layer; qk_norm: 2·D per attention layer
    embeddings    vocab_size·d, max_length·d         a tied output layer adds nothing

The base model of Vaswani et al. 2017: 37000·512 + 6·(4·512² + 2·512·2048) + 6·(8·512² + 2·512·2048) = 63.0 M, and
0.1 M for biases and norms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.cost import recurrent
from regard.cost.patches import patch_matmuls
from regard.cost.sequences import stack_shapes

if TYPE_CHECKING:
    from regard.models.config import ModelConfig


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; parts without parameters are omitted."""
    if config.architecture == "recurrent":
        return recurrent.count_parameters(config)
    parts = {"embedding": _embeddings(config), "source": _source(config), "target": _target(config), "positions": 0}
    for stack in stack_shapes(config):
        parts["positions"] += _positions(config)
        for part in ("attention", "cross") if stack.memory else ("attention",):
            names = (f"{stack.name}.{layer}.{part}" for layer in range(stack.layers))
            parts[f"{stack.name}.{part}"] = sum(_attention(config, config.kept_heads(name)) for name in names)
        experts = config.experts * (feedforward_parameters(config) + config.dim)  # the router: dim per expert
        parts[f"{stack.name}.feedforward"] = stack.layers * (experts or feedforward_parameters(config))
        norms = stack.layers * stack.sublayers + config.embed_norm + config.ends_with_norm
        parts[f"{stack.name}.norms"] = norms * config.dim * {"layer": 2, "rms": 1, "none": 0}[config.norm]
    parts["head"] = _head(config)
    return {name: count for name, count in parts.items() if count}


def output_size(config: ModelConfig) -> int:
    """The number of logits or values: tokens, classes, the size of an output vector, or 0 for states."""
    match config.output_head:
        case "tokens":
            two = config.architecture in ("encoder-decoder", "recurrent")
            return config.target_size if two else config.vocab_size or 0
        case "values":
            return config.feature_dim
        case "classes":
            return config.classes or 0
    return 0


def feedforward_parameters(config: ModelConfig) -> int:
    """Of one dense feed-forward layer, or of one expert."""
    matrices = 2 if config.activation in ("swiglu", "geglu") else 1
    up = _linear(config.dim, matrices * config.ff_dim, config.bias)
    return up + _linear(config.ff_dim, config.dim, config.bias)


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + outputs * bias


def _embeddings(config: ModelConfig) -> int:
    rows = 0
    if config.input == "tokens":
        rows = (config.vocab_size or 0) + (config.token_types if config.architecture != "decoder" else 0)
    if config.architecture == "encoder-decoder" and config.output_head == "tokens":
        rows += 0 if config.share_embeddings and config.input == "tokens" else config.target_size
    return rows * config.dim


def _source(config: ModelConfig) -> int:
    match config.input:
        case "tokens":
            return 0
        case "patches":
            matmuls = sum(_linear(matmul.inputs, matmul.outputs) for matmul in patch_matmuls(config))
            return matmuls + 2 * sum(config.stem_widths) + config.dim * config.has_cls
        case "features":
            return _linear(config.feature_dim, config.dim)


def _target(config: ModelConfig) -> int:
    return _linear(config.feature_dim, config.dim) if config.output_head == "values" else 0


def _positions(config: ModelConfig) -> int:
    match config.position:
        case "learned":
            return config.max_length * config.dim
        case "relative":
            return (2 * config.position_distance + 1) * config.key_dim
        case "t5":
            return config.position_buckets * config.heads
        case _:
            return 0


def _attention(config: ModelConfig, kept: tuple[int, ...]) -> int:
    heads, size = len(kept), config.key_dim
    key_heads = len({head * config.key_heads // config.heads for head in kept})
    inner = heads * size + key_heads * (size + config.val_dim)
    score = {"dot": 0, "multiplicative": size**2}.get(config.attention_score, 2 * size**2 + size)
    out = _linear(heads * config.val_dim, config.dim, config.bias)
    return _linear(config.dim, inner, config.bias) + out + 2 * size * config.qk_norm + heads * score


def _head(config: ModelConfig) -> int:
    dim, size = config.dim, output_size(config)
    pooler = _linear(dim, dim) if config.pooler and config.architecture == "encoder" else 0
    if config.output_head not in ("tokens", "values"):
        return pooler + (_linear(dim, size) if size else 0)
    values = config.output_head == "values"
    layer = _linear(dim, dim) + 2 * dim if config.head_layer else 0
    weight = 0 if config.tie_embeddings and not values else dim * size
    return pooler + layer + weight + size * (config.logit_bias or values)
