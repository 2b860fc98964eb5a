"""Activations: tensors of the forward pass that are stored because the backward pass needs them.

A matmul needs its input; an activation function its input or its output; a norm its input and one or two statistics
per token; dropout a mask of one byte per element. With T = B·N tokens, s bytes per element, w = max(4, s), width d
and feed-forward width f, one block stores

    each sub-layer    T·(d·s + 2·w)         the input of the norm, its mean and standard deviation (rms: no mean)
                      T·d·s                 the input of the matmul, which is the output of the norm
                      T·d                   the dropout mask, if there is dropout
    attention         T·(H·D + G·(D + Dv) + H·Dv)·s + 4·T·H     q, k, v, output, the logarithm of the softmax sum
    with reference    B·H·N²·(w + s)        and the weights: the output of softmax, and the input of the matmul
    feed-forward      T·f·s                 relu; gelu and silu twice that, with a gate four times

s ≠ w is mixed precision with torch.autocast: matmuls and the residual stream in 16 bits; softmax, the statistics of
the norms and the loss in 32; and a copy of each matrix in 16 bits ("half_weights", which `total` adds).

These are the tensors of PyTorch's CUDA kernels, which never store the [B, H, N, N] weights of fused attention. Where
no kernel supports the inputs (on a CPU: attention dropout, learned biases, value_dim ≠ head_dim; on a GPU: fp32 with
fewer key/value heads than heads), PyTorch computes the formula step by step, and "reference" is the better estimate.
In 16 bits on a CPU, attention over short sequences also stores its tensors in 32 bits (`regard.nn.sdpa`); not counted.

The backward pass frees memory as it proceeds. Its peak is at its start, with the gradients of the loss: (w + s) bytes
for each of the T·vocab_size logits (with label smoothing; a little less without). Not counted: workspaces of libraries
(tens of MiB) and the rounding of the allocator.
"""

from __future__ import annotations

from regard.cost import mixers, recurrent
from regard.cost.operations import output_size
from regard.cost.recurrent import INDEX
from regard.cost.shapes import StackShape, patch_matmuls
from regard.models.config import ModelConfig


def activation_bytes(config: ModelConfig, stacks: list[StackShape], batch: int, size: int) -> dict[str, int]:
    """Bytes stored after one forward pass with loss, by kind; empty kinds are omitted."""
    if config.architecture == "recurrent":
        return recurrent.activation_bytes(config, stacks, batch, size)
    wide = max(4, size)
    kept = dict.fromkeys(("source", "norms", "attention", "scores", "feedforward", "dropout", "head", "loss"), 0)
    kept["source"] = _source(config, batch, stacks, size)
    for stack in stacks:
        tokens, layers = batch * stack.length, stack.layers
        norms = layers * stack.sublayers + config.ends_with_norm
        kept["norms"] += tokens * (norms * _norm(config, size) + config.embed_norm * _norm(config, wide))
        rope = config.position == "rope"
        softmax, others = mixers.softmax_layers(config, layers), mixers.other_layers(config, layers)
        kept["attention"] += len(softmax) * _attention(config, batch, stack.length, stack.length, size, rope)
        kept["source"] += tokens * config.dim * wide * config.embed_projection
        # q, k and v of the global tokens, and the output with their rows
        projections = tokens * (mixers.projected_size(config) + config.heads * config.val_dim) * size
        kept["attention"] += mixers.global_layers(config, layers) * projections
        causal, length = stack.causal and config.causal, stack.length
        kept["attention"] += sum(mixers.activation_bytes(config, one, batch, length, causal, size) for one in others)
        kept["attention"] += layers * rope * 4 * stack.length * config.key_dim * size  # cos and sin, for q and for k
        kept["scores"] += _scores(config, stack, batch, size)
        kept["feedforward"] += layers * tokens * _feedforward(config, size)
        masks = layers * stack.sublayers * (config.dropout > 0) + (config.embed_dropout > 0)
        kept["dropout"] += masks * tokens * config.dim
        if stack.memory:  # all layers read the same encoder output
            kept["attention"] += layers * _attention(config, batch, stack.length, stack.memory, size, False)
            kept["attention"] += batch * stack.memory * config.dim * size
    last = stacks[-1]
    kept["head"] = _head(config, batch, last.length, size)
    kept["loss"] = _loss(config, batch, last.length, size)
    return {name: count for name, count in kept.items() if count}


def loss_gradient_bytes(config: ModelConfig, stacks: list[StackShape], batch: int, size: int) -> int:
    """The peak of the backward pass, at its start: the gradients of log-probabilities and logits."""
    return _outputs(config, batch, stacks[-1].length) * (max(4, size) + size)


def _source(config: ModelConfig, batch: int, stacks: list[StackShape], size: int) -> int:
    """Token ids, pixels or features."""
    kept = 0
    if len(stacks) == 2:
        kept = (INDEX if config.output_head == "tokens" else config.feature_dim * size) * batch * stacks[-1].length
    match config.input:
        case "tokens":
            typed = config.token_types > 0 and config.architecture != "decoder"
            return kept + INDEX * batch * stacks[0].length * (2 if typed else 1)
        case "patches":
            return kept + batch * config.channels * config.image_size**2 * size + _stem(config, batch, size)
        case "features":
            return kept + batch * stacks[0].length * config.feature_dim * size


def _stem(config: ModelConfig, batch: int, size: int) -> int:
    """What is stored of the convolutions of a stem, besides the pixels."""
    wide, kept = max(4, size), 0
    for matmul in patch_matmuls(config)[:-1]:
        elements = batch * matmul.outputs * matmul.positions
        # the input of the norm; its mean and standard deviation; the output of relu, which the next matmul reads
        kept += elements * size + 2 * batch * wide + elements * size
        kept += elements * (wide + size) if size < wide else 0  # autocast: the norm in 32 bits, then 16 again
    return kept


def _norm(config: ModelConfig, size: int) -> int:
    """Of one token: the input, and in 32 bits the mean and 1 / standard deviation (rms: only 1 / rms)."""
    if config.norm == "none":
        return 0
    return config.dim * size + {"layer": 2, "rms": 1}[config.norm] * max(4, size)


def _attention(config: ModelConfig, batch: int, queries: int, keys: int, size: int, rotated: bool) -> int:
    """One layer, for this many queries and keys per row: the input, q, k, v and the output."""
    queries, keys, wide = batch * queries, batch * keys, max(4, size)
    q, k = config.heads * config.key_dim, config.key_heads * config.key_dim
    projected = size * (queries * q + keys * (k + config.key_heads * config.val_dim))
    kept = queries * size * (config.dim + config.heads * config.val_dim)
    if config.qk_norm:  # 1 / rms of every q and k
        kept += wide * (queries * config.heads + keys * config.key_heads)
    if config.attention != "reference":
        kept += projected + wide * queries * config.heads
        # rotated or normalised q and k are new tensors; v keeps the projection of all three alive
        return kept + size * (queries * q + keys * k) * (rotated or config.qk_norm)
    # q, k and v as the matmuls of the reference implementation read them, k and v once per head
    own, other = {"dot": (1, 1), "multiplicative": (2, 1), "additive": (1, 1), "concat": (0, 0)}[config.attention_score]
    kept += size * (queries * own * q + keys * config.heads * (other * config.key_dim + config.val_dim))
    # the matrices of a learned score, expanded to the rows of the batch
    matrices = {"multiplicative": 1, "additive": 2}.get(config.attention_score, 0) if batch > 1 else 0
    return kept + projected * config.qk_norm + matrices * batch * config.heads * config.key_dim**2 * size


def _scores(config: ModelConfig, stack: StackShape, batch: int, size: int) -> int:
    """All layers: what grows with N²."""
    tiles = config.shifted_window is not None and not stack.causal
    layers = mixers.softmax_layers(config, stack.layers)
    dense = [layer for layer in layers if not mixers.is_banded(config, layer, stack.length)]
    windows = sum(tiles or config.window_of(layer) is not None for layer in dense)
    pairs, masked = stack.length**2, (stack.causal and config.causal) or windows > 0
    kept = len(dense) * _bias(config, stack, batch, size, config.attention, masked)
    kept += (len(layers) - len(dense)) * _bias(config, stack, batch, size, "flex", masked)  # no pairs, as there
    if config.position == "t5" and config.attention != "flex" and dense:
        kept += INDEX * pairs  # the bucket of each distance, once
    if config.attention == "fused":
        if config.position in ("t5", "alibi"):
            # one bias for all layers, unless each layer masks it or converts its dtype
            copies = len(dense) if masked or size != 4 else min(1, len(dense))
            kept += copies * config.heads * pairs * size
        elif config.position != "relative":
            kept += windows * pairs * size  # the additive mask
    if config.attention == "reference":
        kept += len(layers) * (_weights(config, batch, pairs, size) + batch * config.heads * stack.length)
        kept += len(layers) * (pairs if masked else stack.length)
        if cross := stack.length * stack.memory:
            masks = batch * config.heads * stack.length + stack.memory
            kept += stack.layers * (_weights(config, batch, cross, size) + masks)
    return kept


def _bias(config: ModelConfig, stack: StackShape, batch: int, size: int, path: str, masked: bool) -> int:
    """One layer: what a learned bias stores besides its embedding."""
    pairs = stack.length**2
    mask = pairs if masked and path == "fused" else 0  # one byte per pair
    if config.position == "t5":
        return mask
    if config.position != "relative":
        return 0
    rows = batch * config.heads * stack.length
    queries = rows * config.key_dim * size
    match path:
        case "fused":
            return queries + INDEX * pairs + mask + batch * config.heads * pairs * size
        case "reference":
            return queries + INDEX * pairs
        case _:
            return queries + rows * (2 * config.position_distance + 1) * size


def _weights(config: ModelConfig, batch: int, pairs: int, size: int) -> int:
    """One layer: attention weights twice, the dropout mask, and the hidden layer of a learned score."""
    hidden = {"additive": 1 if batch == 1 else 2, "concat": 3}.get(config.attention_score, 0) * config.key_dim * size
    return batch * config.heads * pairs * (max(4, size) + size + (config.attention_dropout > 0) + hidden)


def _feedforward(config: ModelConfig, size: int) -> int:
    """Of one token: the input and the hidden layer."""
    hidden = {"relu": 1, "swiglu": 4, "geglu": 4}.get(config.activation, 2) * config.ff_dim * size
    if not config.experts:
        return config.dim * size + hidden
    top = config.experts_per_token
    expert = hidden + 3 * config.dim * size + size + 2 * INDEX  # input, output, weighted output, weight, indices
    router = config.dim * size + 4 * config.experts + top * (4 + INDEX) + 4
    return router + top * expert


def _head(config: ModelConfig, batch: int, length: int, size: int) -> int:
    dim, tokens, wide = config.dim, batch * length, max(4, size)
    if config.per_token:
        layer = 2 * dim * size + (dim + 2) * wide if config.head_layer and config.output_head != "classes" else 0
        return tokens * (dim * size + layer)
    if config.output_head == "none" or not (config.pooler or config.output_head == "classes"):
        return 0
    rows = tokens if config.pooling == "cls" else batch  # the first state is a view, which keeps all states alive
    return size * dim * (rows + batch * config.pooler)


def _loss(config: ModelConfig, batch: int, length: int, size: int) -> int:
    """Cross-entropy: log-probabilities, the 16-bit logits and the labels. Squared error: predictions and labels."""
    outputs = _outputs(config, batch, length)
    if config.output_head == "values":
        return outputs * (size + max(4, size))
    rows = outputs // (output_size(config) or 1)
    return outputs * (size if size >= 4 else size + 4) + INDEX * rows


def _outputs(config: ModelConfig, batch: int, length: int) -> int:
    """The number of logits of a batch."""
    return output_size(config) * batch * (length if config.per_token else 1)
