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

from typing import TYPE_CHECKING

from regard.cost.sequences import StackShape, stack_shapes

if TYPE_CHECKING:
    from regard.models.config import ModelConfig

GATES = {"gru": 3, "lstm": 4}
INDEX = 8  # bytes of an int64


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; parts without parameters are omitted."""
    dim, width, bias = config.dim, config.token_dim, config.bias
    encoder, decoder = stack_shapes(config)
    biases = 2 * GATES[config.cell] * dim * bias
    rows = (config.vocab_size or 0) + (0 if config.share_embeddings else config.target_size)
    cross = {"dot": 0, "multiplicative": 2 * dim**2}.get(config.attention_score, 3 * dim**2 + dim)
    parts = {
        "embedding": rows * width,
        "encoder.cells": 2 * (_encoder_cells(config) + encoder.layers * biases),
        "decoder.first": decoder.layers * dim * (dim + bias),
        "decoder.cross": cross,
        "decoder.cells": _decoder_cells(config, decoder) + decoder.layers * biases,
        "decoder.readout": 2 * width * (3 * dim + width + bias),
        "head": config.target_size * (config.logit_bias + (0 if config.tie_embeddings else width)),
    }
    return {name: count for name, count in parts.items() if count}


def forward_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> dict[str, int]:
    """One forward pass, by part; parts without matmuls are omitted."""
    encoder, decoder = stacks
    pairs = decoder.length * encoder.length
    parts = {
        "encoder.cells": 4 * batch * encoder.length * _encoder_cells(config),
        "decoder.first": 2 * batch * decoder.layers * config.dim**2,
        "decoder.cross": 2 * batch * (encoder.length * _keys(config) + decoder.length * _query(config)),
        "decoder.cross_scores": 2 * batch * pairs * 3 * config.dim,
        "decoder.cells": 2 * batch * decoder.length * _decoder_cells(config, decoder),
        "decoder.readout": 2 * batch * decoder.length * _readout(config),
        "head": 2 * batch * decoder.length * config.token_dim * config.target_size,
    }
    return {name: count for name, count in parts.items() if count}


def first_step_operations(config: ModelConfig, batch: int) -> int:
    """Matmuls with the initial states of the encoder, which are zero and need no gradient."""
    return 4 * batch * config.layers * GATES[config.cell] * config.dim**2


def step_operations(config: ModelConfig, stack: StackShape, batch: int) -> int:
    """One more token per row, however many came before."""
    cells = _decoder_cells(config, stack) + _query(config) + 3 * config.dim * stack.memory
    return 2 * batch * (cells + _readout(config) + config.token_dim * config.target_size)


def activation_bytes(config: ModelConfig, stacks: list[StackShape], batch: int, size: int) -> dict[str, int]:
    """Bytes stored after one forward pass with loss, by kind; empty kinds are omitted."""
    encoder, decoder = stacks
    source, target = batch * encoder.length, batch * decoder.length
    dim, width, wide = config.dim, config.token_dim, max(4, size)
    kept_by_cell = {"gru": 5, "lstm": 6}[config.cell] * dim  # gates; h, or h and the memory cell
    inputs = width + 2 * dim + (decoder.layers - 1) * dim
    tanh = dim if config.attention_score == "additive" else 0
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


def _encoder_cells(config: ModelConfig) -> int:
    """Weights of one direction."""
    inputs = config.token_dim + (config.layers - 1) * 2 * config.dim
    return GATES[config.cell] * config.dim * (inputs + config.layers * config.dim)


def _decoder_cells(config: ModelConfig, stack: StackShape) -> int:
    inputs = config.token_dim + 2 * config.dim + (stack.layers - 1) * config.dim
    return GATES[config.cell] * config.dim * (inputs + stack.layers * config.dim)


def _keys(config: ModelConfig) -> int:
    return 0 if config.attention_score == "dot" else 2 * config.dim**2


def _query(config: ModelConfig) -> int:
    return config.dim**2 if config.attention_score == "additive" else 0


def _readout(config: ModelConfig) -> int:
    return 2 * config.token_dim * (3 * config.dim + config.token_dim)
