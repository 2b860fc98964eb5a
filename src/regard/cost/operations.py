"""Operations: a product [m, k] x [k, n] takes m·n·k multiplications and as many additions, 2·m·n·k in all.

Everything else (norms, softmax, activations) is a few operations a number and is left out, as in PyTorch's
FlopCounterMode. With B rows, N queries over M keys, width d, H heads of size D (Dv for values), G key heads
and feed-forward width f, one block takes:

    attention     2·B·(N·d·H·D + M·d·G·(D + Dv) + N·H·Dv·d)    8·B·N·d² when H·D = d and G = H
    scores        2·B·H·N·M·(D + Dv)                           4·B·N²·d: the part that grows with N²
    feed-forward  4·B·N·d·f, with a gate 6·B·N·d·f             times experts_per_token, + 2·B·N·d·experts
    output layer  2·B·N·d·vocab_size                                once

N·M counts every pair. The reference and fused paths are counted at that, though the mask hides almost half
of it from a causal model (`hidden_operations`). Flex skips what is hidden, so there only visible pairs count:

    causal  N·(N + 1) / 2        window w, causal  w·(w + 1) / 2 + (N - w)·w        (blocks of 128: a little more)

Backward. The gradients of y = x W are two products of the same size, one for x and one for W, so training is
3 · forward. What enters the model needs no gradient. Fused and flex attention compute the scores a second time
instead of keeping them (Dao et al. 2022). Each parameter that multiplies costs 2 forward and 4 backward: the
rule of thumb 6·parameters a token (Kaplan et al. 2020), which leaves the N² part out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.cost import recurrent
from regard.cost.parameters import output_size
from regard.cost.pictures import patch_maps, tile_pairs
from regard.cost.sequences import StackShape

if TYPE_CHECKING:
    from regard.models.config import ModelConfig


def forward_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> dict[str, int]:
    """One forward pass, by part; parts without products are left out."""
    if config.architecture == "recurrent":
        return recurrent.forward_operations(config, stacks, batch)
    parts = {"source": sum(source_operations(config, batch, stacks[0].length)), "target": 0}
    if config.output_head == "values":
        parts["target"] = 2 * batch * stacks[-1].length * config.feature_dim * config.dim
    for stack in stacks:
        name, layers, n, m = stack.name, stack.layers, stack.length, stack.memory
        pairs = visible_pairs(config, stack) if config.attention == "flex" else layers * n * n
        parts[f"{name}.attention"] = layers * _projections(config, batch, n, n)
        learned = _mapped(config, batch, n, n) + _relative(config, batch, n)
        parts[f"{name}.scores"] = pairs * _per_pair(config, batch) + layers * learned
        if m:
            parts[f"{name}.cross"] = layers * _projections(config, batch, n, m)
            parts[f"{name}.cross_scores"] = layers * _scores(config, batch, n, m, n * m)
        parts[f"{name}.feedforward"] = layers * _feedforward(config, batch * n)
    parts["head"] = _head(config, batch, stacks[-1].length)
    return {name: count for name, count in parts.items() if count}


def hidden_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> int:
    """What the forward pass spends on pairs that the mask then hides: nothing where they are skipped."""
    if config.attention == "flex" or config.architecture == "recurrent":
        return 0
    pairs = sum(stack.layers * stack.length**2 - visible_pairs(config, stack) for stack in stacks)
    return pairs * _per_pair(config, batch)


def recomputed_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> int:
    """q · k once more in the backward pass, where attention does not keep its weights."""
    if config.attention == "reference" or config.architecture == "recurrent":
        return 0
    pairs = 0
    for stack in stacks:
        own = visible_pairs(config, stack) if config.attention == "flex" else stack.layers * stack.length**2
        pairs += own + stack.layers * stack.length * stack.memory
    return 2 * batch * config.heads * pairs * config.key_dim


def step_operations(config: ModelConfig, stack: StackShape, batch: int) -> int:
    """One more token a row when `stack.length` - 1 are in the cache; 0 for a model that does not generate."""
    if not stack.causal:
        return 0
    if config.architecture == "recurrent":
        return recurrent.step_operations(config, stack, batch)
    keys, m = stack.length, stack.memory
    pairs = min(keys, config.window or keys) if config.attention == "flex" else keys
    block = _projections(config, batch, 1, 1) + _scores(config, batch, 1, keys, pairs) + _relative(config, batch, 1)
    if m:  # the memory's keys and values are there already
        block += _projections(config, batch, 1, 0) + _scores(config, batch, 1, m, m)
    return stack.layers * (block + _feedforward(config, batch)) + _head(config, batch, 1)


def visible_pairs(config: ModelConfig, stack: StackShape) -> int:
    """Pairs (query, key) that all layers may see: all, those in the past, in the window, in the same square."""
    n = stack.length
    if config.shifted_window is not None and not stack.causal:
        return tile_pairs(config, stack.layers)
    reach = min(n, config.window or n)
    past = reach * (reach + 1) // 2 + (n - reach) * reach  # a query sees itself and reach - 1 before it
    return stack.layers * (past if stack.causal else 2 * past - n)


def _projections(config: ModelConfig, batch: int, queries: int, keys: int) -> int:
    own = config.heads * (config.key_dim + config.val_dim)  # queries and output
    return 2 * batch * config.dim * (queries * own + keys * config.key_heads * (config.key_dim + config.val_dim))


def _per_pair(config: ModelConfig, batch: int) -> int:
    """Of one query and one key in all heads: their score, and the share of the value."""
    size = config.key_dim
    score = size * (2 * size + 1) if config.attention_score == "concat" else size
    return 2 * batch * config.heads * (score + config.val_dim)


def _scores(config: ModelConfig, batch: int, queries: int, keys: int, pairs: int) -> int:
    return pairs * _per_pair(config, batch) + _mapped(config, batch, queries, keys)


def _mapped(config: ModelConfig, batch: int, queries: int, keys: int) -> int:
    """W q and W k before they meet, where a score is learned."""
    mapped = {"multiplicative": queries, "additive": queries + keys}.get(config.attention_score, 0)
    return 2 * batch * config.heads * mapped * config.key_dim**2


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
    """Of each product that makes vectors of what enters; the first one's input needs no gradient."""
    match config.input:
        case "tokens":
            return [0]
        case "patches":
            return [2 * batch * one.positions * one.inputs * one.outputs for one in patch_maps(config)]
        case "features":
            return [2 * batch * length * config.feature_dim * config.dim]


def _head(config: ModelConfig, batch: int, length: int) -> int:
    dim = config.dim
    if config.output_head in ("tokens", "values"):
        return 2 * batch * length * dim * (output_size(config) + dim * config.head_layer)
    if config.output_head == "none":
        return 0
    return 2 * batch * dim * (output_size(config) + dim * config.pooler)
