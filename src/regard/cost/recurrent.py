"""The cost of the recurrent baseline: parameters, FLOPs, memory.

A cell with g gates (GRU 3, LSTM 4) from width m to width d has g·d·(m + d) weights and 2·g·d biases, and takes
2·g·d·(m + d) FLOPs per token. With d = dim, e = embed_dim and L layers:

    encoder   both directions: m = e in the first layer, 2·d above
    first     L·d² + L·d                          the first state of the decoder
    cross     3·d² + d additive, 2·d² multiplicative, 0 dot; the keys once per sentence
    scores    2·B·T·S·(d + 2·d)                   scores, and the weighted mean of 2·d values
    cells     m = e + 2·d in the first layer, d above
    readout   2·e·(3·d + e) + 2·e

Nothing grows with T² or S²; T·S is the attention. FLOPs do not show that the S + T steps of a layer are sequential,
unlike those of a Transformer.

Activations are an estimate of what the backward pass needs: gates and states of every step, and for the additive
score a tanh of d elements for every pair. Libraries store more: the GRU on a CPU about a quarter more, the LSTM on a
CPU (oneDNN) twice as much or more.
"""

from __future__ import annotations

from regard.cost.shapes import StackShape, stack_shapes
from regard.models.config import ModelConfig

GATES = {"gru": 3, "lstm": 4}
INDEX = 8  # bytes of an int64


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; parts without parameters are omitted."""
    dim, width, bias = config.dim, config.token_dim, config.bias
    encoder, decoder = stack_shapes(config)
    biases = 2 * GATES[config.cell] * dim * bias
    rows = (config.vocab_size or 0) + (0 if config.share_embeddings else config.target_size)
    weights, additive = _matrices(config), _score(config) == "additive"
    parts = {
        "embedding": rows * width,
        "encoder.cells": 2 * (weights["encoder"] + encoder.layers * biases),
        "decoder.first": decoder.layers * dim * (dim + bias),
        "decoder.cross": weights["keys"] + weights["query"] + dim * additive,
        "decoder.cells": weights["decoder"] + decoder.layers * biases,
        "decoder.readout": weights["readout"] + 2 * width * bias,
        "head": config.target_size * config.logit_bias + (0 if config.tie_embeddings else weights["head"]),
    }
    return {name: count for name, count in parts.items() if count}


def forward_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> dict[str, int]:
    """One forward pass, by part; parts without matmuls are omitted."""
    encoder, decoder = stacks
    source, target, weights = 2 * batch * encoder.length, 2 * batch * decoder.length, _matrices(config)
    parts = {
        "encoder.cells": 2 * source * weights["encoder"],
        "decoder.first": 2 * batch * decoder.layers * config.dim**2,
        "decoder.cross": source * weights["keys"] + target * weights["query"],
        "decoder.cross_scores": target * encoder.length * 3 * config.dim,
        "decoder.cells": target * weights["decoder"],
        "decoder.readout": target * weights["readout"],
        "head": target * weights["head"],
    }
    return {name: count for name, count in parts.items() if count}


def constant_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> int:
    """Matmuls with zeros, which need no gradient: the encoder's initial states and, without attention, the keys."""
    first = 4 * batch * config.layers * GATES[config.cell] * config.dim**2
    pairs = 0 if config.cross_attention else stacks[0].length * stacks[1].length
    return first + 2 * batch * pairs * config.dim


def step_operations(config: ModelConfig, stack: StackShape, batch: int) -> int:
    """One more token per row, however many came before."""
    weights = _matrices(config)
    matmuls = sum(weights[name] for name in ("query", "decoder", "readout", "head"))
    return 2 * batch * (matmuls + 3 * config.dim * stack.memory)


def activation_bytes(config: ModelConfig, stacks: list[StackShape], batch: int, size: int) -> dict[str, int]:
    """Bytes stored after one forward pass with loss, by kind; empty kinds are omitted."""
    encoder, decoder = stacks
    source, target = batch * encoder.length, batch * decoder.length
    dim, width, wide = config.dim, config.token_dim, max(4, size)
    kept_by_cell = {"gru": 5, "lstm": 6}[config.cell] * dim  # gates; h, or h and the memory cell
    inputs = width + 2 * dim + (decoder.layers - 1) * dim
    tanh = dim if _score(config) == "additive" else 0
    dropped = source * (width * (config.embed_dropout > 0) + 2 * dim * encoder.layers * (config.dropout > 0))
    dropped += target * (width * (config.embed_dropout > 0) + dim * decoder.layers * (config.dropout > 0))
    kept = {
        "source": INDEX * (source + target),
        "encoder": source * size * (width + encoder.layers * 2 * kept_by_cell + (encoder.layers - 1) * 2 * dim),
        "decoder": target * size * (inputs + decoder.layers * kept_by_cell + dim),
        "attention": size * (source * (2 + 1) * dim + target * dim),
        "scores": target * encoder.length * (wide + size + tanh * size + (config.attention_dropout > 0)),
        "dropout": dropped,
        "head": target * size * (3 * dim + width + 2 * width + width),
        "loss": target * (config.target_size * (size if size >= 4 else size + 4) + INDEX),
    }
    return {name: count for name, count in kept.items() if count}


def state_bytes(config: ModelConfig, stack: StackShape, batch: int, size: int) -> dict[str, int]:
    """The state of a generation: that of the layers, whatever the length of the text, and the keys of the source."""
    parts = {"gru": 1, "lstm": 2}[config.cell]
    return {
        "self": stack.layers * batch * parts * config.dim * size,
        "cross": batch * stack.memory * 3 * config.dim * size,
    }


def _score(config: ModelConfig) -> str:
    """Without attention, a weighted mean of equal vectors: the work of the dot product."""
    return config.attention_score if config.cross_attention else "dot"


def _matrices(config: ModelConfig) -> dict[str, int]:
    """Weights without biases: those that multiply one token; of the encoder, in one direction."""
    gates, dim, width = GATES[config.cell] * config.dim, config.dim, config.token_dim
    layers, decoder_layers = config.layers, config.decoder_layers or config.layers
    return {
        "encoder": gates * (width + (layers - 1) * 2 * dim + layers * dim),
        "keys": 0 if _score(config) == "dot" else 2 * dim**2,
        "query": dim**2 if _score(config) == "additive" else 0,
        "decoder": gates * (width + 2 * dim + (decoder_layers - 1) * dim + decoder_layers * dim),
        "readout": 2 * width * (3 * dim + width),
        "head": width * config.target_size,
    }
