"""FLOPs: a matmul [m, k] x [k, n] takes m·n·k multiplications and as many additions, 2·m·n·k in all.

Everything else (norms, softmax, activations) takes a few FLOPs per element and is not counted, as in PyTorch's
FlopCounterMode. With B rows, N queries over M keys, width d, H heads of size D (Dv for values), G key/value heads
and feed-forward width f, one block takes:

    attention     2·B·(N·d·H·D + M·d·G·(D + Dv) + N·H·Dv·d)    the projections Q, K, V, O; 8·B·N·d² if H·D = d, G = H
    scores        2·B·H·N·M·(D + Dv)                           4·B·N²·d: Q Kᵀ and weights · V, the part with N²
    feed-forward  4·B·N·d·f, with a gate 6·B·N·d·f             times experts_per_token, + 2·B·N·d·experts
    output layer  2·B·N·d·vocab_size                           once

N·M counts every query-key pair. "reference" and "fused" are counted so, although a causal mask excludes almost half
of the pairs (`masked_operations`). "flex" skips masked pairs, so only the others count:

    causal  N·(N + 1) / 2        window w, causal  w·(w + 1) / 2 + (N - w)·w        (blocks of 128: a little more)

Backward. The gradients of y = x W are two matmuls of the same size, one for x and one for W, so training is
3 · forward. The input of the model needs no gradient. Fused and flex attention recompute the scores instead of
storing them (Dao et al. 2022). Each parameter of a matmul costs 2 FLOPs forward and 4 backward per token: the rule of
thumb 6·parameters (Kaplan et al. 2020), which leaves out the N² part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.cost import recurrent
from regard.cost.parameters import output_size
from regard.cost.patches import patch_matmuls, tile_pairs
from regard.cost.sequences import StackShape

if TYPE_CHECKING:
    from regard.models.config import ModelConfig


def forward_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> dict[str, int]:
    """One forward pass, by part; parts without matmuls are omitted."""
    if config.architecture == "recurrent":
        return recurrent.forward_operations(config, stacks, batch)
    parts = {"source": sum(source_operations(config, batch, stacks[0].length)), "target": 0}
    if config.output_head == "values":
        parts["target"] = 2 * batch * stacks[-1].length * config.feature_dim * config.dim
    for stack in stacks:
        name, layers, n, m = stack.name, stack.layers, stack.length, stack.memory
        pairs = visible_pairs(config, stack) if config.attention == "flex" else layers * n * n
        parts[f"{name}.attention"] = layers * _projections(config, batch, n, n)
        learned = _score_projections(config, batch, n, n) + _relative(config, batch, n)
        parts[f"{name}.scores"] = pairs * _per_pair(config, batch) + layers * learned
        if m:
            parts[f"{name}.cross"] = layers * _projections(config, batch, n, m)
            parts[f"{name}.cross_scores"] = layers * _scores(config, batch, n, m, n * m)
        parts[f"{name}.feedforward"] = layers * _feedforward(config, batch * n)
    parts["head"] = _head(config, batch, stacks[-1].length)
    return {name: count for name, count in parts.items() if count}


def masked_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> int:
    """What the forward pass computes for masked pairs; 0 where they are skipped."""
    if config.attention == "flex" or config.architecture == "recurrent":
        return 0
    pairs = sum(stack.layers * stack.length**2 - visible_pairs(config, stack) for stack in stacks)
    return pairs * _per_pair(config, batch)


def recomputed_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> int:
    """q · k again in the backward pass, where attention does not store its weights."""
    if config.attention == "reference" or config.architecture == "recurrent":
        return 0
    pairs = 0
    for stack in stacks:
        own = visible_pairs(config, stack) if config.attention == "flex" else stack.layers * stack.length**2
        pairs += own + stack.layers * stack.length * stack.memory
    return 2 * batch * config.heads * pairs * config.key_dim


def step_operations(config: ModelConfig, stack: StackShape, batch: int) -> int:
    """One more token per row with `stack.length` - 1 in the cache; 0 for a model that does not generate."""
    if not stack.causal:
        return 0
    if config.architecture == "recurrent":
        return recurrent.step_operations(config, stack, batch)
    keys, m = stack.length, stack.memory
    pairs = min(keys, config.window or keys) if config.attention == "flex" else keys
    block = _projections(config, batch, 1, 1) + _scores(config, batch, 1, keys, pairs) + _relative(config, batch, 1)
    if m:  # the keys and values of the memory are cached
        block += _projections(config, batch, 1, 0) + _scores(config, batch, 1, m, m)
    return stack.layers * (block + _feedforward(config, batch)) + _head(config, batch, 1)


def visible_pairs(config: ModelConfig, stack: StackShape) -> int:
    """Query-key pairs of all layers that are not masked: all, those in the past, in the window, in the same tile."""
    n = stack.length
    if config.shifted_window is not None and not stack.causal:
        return tile_pairs(config, stack.layers)
    reach = min(n, config.window or n)
    past = reach * (reach + 1) // 2 + (n - reach) * reach  # a query attends to itself and reach - 1 before it
    return stack.layers * (past if stack.causal else 2 * past - n)


def _projections(config: ModelConfig, batch: int, queries: int, keys: int) -> int:
    own = config.heads * (config.key_dim + config.val_dim)  # queries and output
    return 2 * batch * config.dim * (queries * own + keys * config.key_heads * (config.key_dim + config.val_dim))


def _per_pair(config: ModelConfig, batch: int) -> int:
    """Of one query and one key in all heads: their score, and the weighted value."""
    size = config.key_dim
    score = size * (2 * size + 1) if config.attention_score == "concat" else size
    return 2 * batch * config.heads * (score + config.val_dim)


def _scores(config: ModelConfig, batch: int, queries: int, keys: int, pairs: int) -> int:
    return pairs * _per_pair(config, batch) + _score_projections(config, batch, queries, keys)


def _score_projections(config: ModelConfig, batch: int, queries: int, keys: int) -> int:
    """W q and W k of a learned score."""
    vectors = {"multiplicative": queries, "additive": queries + keys}.get(config.attention_score, 0)
    return 2 * batch * config.heads * vectors * config.key_dim**2


def _relative(config: ModelConfig, batch: int, queries: int) -> int:
    if config.position != "relative":
        return 0
    return 2 * batch * config.heads * queries * config.key_dim * (2 * config.position_distance + 1)


def _feedforward(config: ModelConfig, tokens: int) -> int:
    matrices = 3 if config.activation in ("swiglu", "geglu") else 2
    dense = 2 * tokens * config.dim * config.ff_dim * matrices
    if not config.experts:
        return dense
    return config.experts_per_token * dense + 2 * tokens * config.dim * config.experts


def source_operations(config: ModelConfig, batch: int, length: int) -> list[int]:
    """Of each matmul that embeds the source; the input of the first needs no gradient."""
    match config.input:
        case "tokens":
            return [0]
        case "patches":
            return [2 * batch * one.positions * one.inputs * one.outputs for one in patch_matmuls(config)]
        case "features":
            return [2 * batch * length * config.feature_dim * config.dim]


def _head(config: ModelConfig, batch: int, length: int) -> int:
    dim = config.dim
    if config.output_head in ("tokens", "values"):
        return 2 * batch * length * dim * (output_size(config) + dim * config.head_layer)
    if config.output_head == "none":
        return 0
    return 2 * batch * dim * (output_size(config) + dim * config.pooler)
