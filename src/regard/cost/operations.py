"""Parameters, the weights that training learns, and FLOPs.

A linear layer from m to n features has m·n weights and n biases. With width d, H heads of size D (Dv for values),
G key/value heads and feed-forward width f, the parameters are

    attention     d·(H·D + G·(D + Dv)) + H·Dv·d      4·d² when H·D = d, G = H     cross-attention: the same
    feed-forward  2·d·f                              3·d·f with a gate (swiglu, geglu); times experts
    norm          2·d (layer), d (rms)               one per sub-layer; qk_norm: 2·D per attention layer
    embeddings    vocab_size·d, max_length·d         a tied output layer adds nothing

The base model of Vaswani et al. 2017: 37000·512 + 6·(4·512² + 2·512·2048) + 6·(8·512² + 2·512·2048) = 63.0 M, and
0.1 M for biases and norms.

A matmul [m, k] x [k, n] takes m·n·k multiplications and as many additions, 2·m·n·k FLOPs in all. Everything else
(norms, softmax, activations) takes a few FLOPs per element and is not counted, as in PyTorch's FlopCounterMode. With B
rows and N queries over M keys, one block takes:

    attention     2·B·(N·d·H·D + M·d·G·(D + Dv) + N·H·Dv·d)    the projections Q, K, V, O; 8·B·N·d² if H·D = d, G = H
    scores        2·B·H·N·M·(D + Dv)                           4·B·N²·d: Q Kᵀ and weights · V, the part with N²
    feed-forward  4·B·N·d·f, with a gate 6·B·N·d·f             times experts_per_token, + 2·B·N·d·experts
    output layer  2·B·N·d·vocab_size                           once

N·M counts every query-key pair. "reference" and "fused" are counted so, although a causal mask excludes almost half
of the pairs (`masked_operations`). "flex" skips masked pairs, and "fused" those of a layer with a window, from 512
tokens on; of these only the visible pairs count (blocks: a little more):

    causal  N·(N + 1) / 2        window w, causal  w·(w + 1) / 2 + (N - w)·w

Layers with another mixer than softmax attention have a part of their own, "mixing" (`regard.cost.mixers`).

Backward. The gradients of y = x W are two matmuls of the same size, one for x and one for W, so training is
3 · forward. The input of the model needs no gradient. Fused and flex attention recompute the scores instead of
storing them (Dao et al. 2022). Each parameter of a matmul costs 2 FLOPs forward and 4 backward per token: the rule of
thumb 6·parameters (Kaplan et al. 2020), which leaves out the N² part.
"""

from __future__ import annotations

from regard.cost import mixers, recurrent
from regard.cost.shapes import StackShape, patch_matmuls, stack_shapes, tile_pairs
from regard.models.config import ModelConfig


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by part; parts without parameters are omitted."""
    if config.architecture == "recurrent":
        return recurrent.count_parameters(config)
    features = _linear(config.feature_dim, config.dim)
    parts = {"embedding": _embeddings(config), "source": 0, "target": 0, "positions": 0}
    if config.input == "patches":
        matmuls = sum(_linear(matmul.inputs, matmul.outputs) for matmul in patch_matmuls(config))
        parts["source"] = matmuls + 2 * sum(config.stem_widths) + config.dim * config.has_cls
    elif config.input == "features":
        parts["source"] = features
    if config.output_head == "values":
        parts["target"] = features
    for stack in stack_shapes(config):
        parts["positions"] += _positions(config)
        for part in ("attention", "cross") if stack.memory else ("attention",):
            parts[f"{stack.name}.{part}"] = sum(
                _layer_parameters(config, f"{stack.name}.{layer}.{part}", layer) for layer in range(stack.layers)
            )
        experts = config.experts * (feedforward_parameters(config) + config.dim)  # the router: dim per expert
        parts[f"{stack.name}.feedforward"] = stack.layers * (experts or feedforward_parameters(config))
        norms = stack.layers * stack.sublayers + config.embed_norm + config.ends_with_norm
        parts[f"{stack.name}.norms"] = norms * config.dim * {"layer": 2, "rms": 1, "none": 0}[config.norm]
        parts[f"{stack.name}.embedding"] = _linear(config.dim, config.dim) * config.embed_projection
    parts["head"] = _head_parameters(config)
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
    up = _linear(config.dim, _gates(config) * config.ff_dim, config.bias)
    return up + _linear(config.ff_dim, config.dim, config.bias)


def _gates(config: ModelConfig) -> int:
    """How many matrices of a feed-forward layer read its input."""
    return 2 if config.activation in ("swiglu", "geglu") else 1


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + outputs * bias


def _embeddings(config: ModelConfig) -> int:
    rows = 0
    if config.input == "tokens":
        rows = (config.vocab_size or 0) + (config.token_types if config.architecture != "decoder" else 0)
    if config.architecture == "encoder-decoder" and config.output_head == "tokens":
        rows += 0 if config.share_embeddings and config.input == "tokens" else config.target_size
    return rows * config.dim


def _positions(config: ModelConfig) -> int:
    sizes = {
        "learned": config.max_length * config.dim,
        "relative": (2 * config.position_distance + 1) * config.key_dim,
        "t5": config.position_buckets * config.heads,
    }
    return sizes.get(config.position, 0)


def _layer_parameters(config: ModelConfig, name: str, layer: int) -> int:
    """Of the mixer of a layer, or of its cross-attention."""
    kind = "full" if name.endswith("cross") else config.mixer_of(layer)
    if kind == "fourier":
        return 0
    return _attention(config, config.kept_heads(name)) + mixers.extra_parameters(config, kind)


def _attention(config: ModelConfig, kept: tuple[int, ...]) -> int:
    heads, size = len(kept), config.key_dim
    key_heads = len({head * config.key_heads // config.heads for head in kept})
    inner = heads * size + key_heads * (size + config.val_dim)
    score = {"dot": 0, "multiplicative": size**2}.get(config.attention_score, 2 * size**2 + size)
    out = _linear(heads * config.val_dim, config.dim, config.bias)
    return _linear(config.dim, inner, config.bias) + out + 2 * size * config.qk_norm + heads * score


def _head_parameters(config: ModelConfig) -> int:
    dim, size = config.dim, output_size(config)
    pooler = _linear(dim, dim) if config.pooler and config.architecture == "encoder" else 0
    if config.output_head not in ("tokens", "values"):
        return pooler + _linear(dim, size) * (size > 0)
    values = config.output_head == "values"
    layer = _linear(dim, dim) + 2 * dim if config.head_layer else 0
    weight = 0 if config.tie_embeddings and not values else dim * size
    return pooler + layer + weight + size * (config.logit_bias or values)


def forward_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> dict[str, int]:
    """FLOPs of one forward pass, by part; parts without matmuls are omitted."""
    if config.architecture == "recurrent":
        return recurrent.forward_operations(config, stacks, batch)
    parts = {"source": sum(source_operations(config, batch, stacks[0].length)), "target": 0}
    if config.output_head == "values":
        parts["target"] = 2 * batch * stacks[-1].length * config.feature_dim * config.dim
    for stack in stacks:
        name, layers, n, m = stack.name, stack.layers, stack.length, stack.memory
        softmax, others = mixers.softmax_layers(config, layers), mixers.other_layers(config, layers)
        parts[f"{name}.attention"] = (layers - others.count("fourier")) * _projections(config, batch, n, n)
        learned = _score_projections(config, batch, n, n) + _relative(config, batch, n)
        parts[f"{name}.scores"] = computed_pairs(config, stack) * _per_pair(config, batch) + len(softmax) * learned
        if layered := mixers.global_layers(config, layers):  # once more for the global tokens
            first = min(n, config.global_tokens)
            parts[f"{name}.attention"] += layered * 2 * batch * n * config.dim * mixers.projected_size(config)
            parts[f"{name}.scores"] += layered * first * n * _per_pair(config, batch)
        causal = stack.causal and config.causal
        mixing = sum(mixers.mixing_operations(config, kind, batch, n, causal) for kind in others)
        parts[f"{name}.mixing"] = mixing
        parts[f"{name}.embedding"] = 2 * batch * n * config.dim**2 * config.embed_projection
        if m:
            parts[f"{name}.cross"] = layers * _projections(config, batch, n, m)
            cross = n * m * _per_pair(config, batch) + _score_projections(config, batch, n, m)
            parts[f"{name}.cross_scores"] = layers * cross
        parts[f"{name}.feedforward"] = layers * _feedforward(config, batch * n)
    parts["head"] = _head(config, batch, stacks[-1].length)
    return {name: count for name, count in parts.items() if count}


def masked_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> int:
    """What the forward pass computes for masked pairs; 0 where they are skipped."""
    if config.architecture == "recurrent":
        return 0
    pairs = sum(computed_pairs(config, stack) - visible_pairs(config, stack) for stack in stacks)
    return pairs * _per_pair(config, batch)


def recomputed_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> int:
    """q · k again in the backward pass, where attention does not store its weights."""
    if config.architecture == "recurrent":
        return 0
    kinds = [(kind, stack) for stack in stacks for kind in mixers.other_layers(config, stack.layers)]
    total = sum(mixers.recomputed_operations(config, kind, batch, stack.length, stack.causal) for kind, stack in kinds)
    if config.attention == "reference":
        return total
    pairs = sum(computed_pairs(config, stack) + stack.layers * stack.length * stack.memory for stack in stacks)
    return total + 2 * batch * config.heads * pairs * config.key_dim


def constant_operations(config: ModelConfig, stacks: list[StackShape], batch: int) -> int:
    """Matmuls in layers with a factor that needs no gradient."""
    kinds = [(kind, stack) for stack in stacks for kind in mixers.other_layers(config, stack.layers)]
    return sum(mixers.feature_operations(config, kind, batch, stack.length, stack.causal) for kind, stack in kinds)


def step_operations(config: ModelConfig, stack: StackShape, batch: int) -> int:
    """One more token per row with `stack.length` - 1 in the cache; 0 for a model that does not generate."""
    if not stack.causal:
        return 0
    if config.architecture == "recurrent":
        return recurrent.step_operations(config, stack, batch)
    keys, m = stack.length, stack.memory
    softmax, others = mixers.softmax_layers(config, stack.layers), mixers.other_layers(config, stack.layers)
    scores = _score_projections(config, batch, 1, keys) + _relative(config, batch, 1)
    reached = (min(keys, _step_reach(config, layer) or keys) for layer in softmax)
    total = len(softmax) * scores + sum(reached) * _per_pair(config, batch)
    total += sum(mixers.step_operations(config, kind, batch) for kind in others)
    block = _projections(config, batch, 1, 1) + _feedforward(config, batch)
    if m:  # the keys and values of the memory are cached
        block += _projections(config, batch, 1, 0) + _score_projections(config, batch, 1, m)
        block += m * _per_pair(config, batch)
    return total + stack.layers * block + _head(config, batch, 1)


def _step_reach(config: ModelConfig, layer: int) -> int | None:
    """How many keys one more token is compared with; None: all. A cache that rolls holds no others."""
    return config.window_of(layer) if config.attention == "flex" else config.reach_of(layer)


def computed_pairs(config: ModelConfig, stack: StackShape) -> int:
    """Query-key pairs of all layers whose scores are computed."""
    if config.attention == "flex":
        return visible_pairs(config, stack)
    n, causal = stack.length, stack.causal and config.causal
    layers = mixers.softmax_layers(config, stack.layers)
    return sum(_layer_pairs(config, one, n, causal) if mixers.is_banded(config, one, n) else n * n for one in layers)


def visible_pairs(config: ModelConfig, stack: StackShape) -> int:
    """Query-key pairs of all layers that are not masked: all, those in the past, in the window, in the same tile."""
    n = stack.length
    if config.shifted_window is not None and not stack.causal:
        return tile_pairs(config, stack.layers)
    causal = stack.causal and config.causal
    return sum(_layer_pairs(config, layer, n, causal) for layer in mixers.softmax_layers(config, stack.layers))


def _layer_pairs(config: ModelConfig, layer: int, n: int, causal: bool) -> int:
    """Of one layer; random blocks are counted as if they did not overlap with the rest."""
    window, step = config.window_of(layer), 1
    first = min(n, config.global_tokens) if window is not None else 0  # global tokens
    if config.mixer_of(layer) == "window":
        step = config.dilation
    rest = n - first
    count = -(-rest // step) if window is None else min(window, -(-rest // step))
    past = count * rest - step * count * (count - 1) // 2  # a query attends to itself and count - 1 before it
    pairs = past if causal else 2 * past - rest
    pairs += first * n - first * (first - 1) // 2 if causal else n * n - rest * rest
    if config.mixer_of(layer) == "bigbird":
        pairs = min(pairs + n * config.random_blocks * config.block_size, n * (n + 1) // 2 if causal else n * n)
    return pairs


def _projections(config: ModelConfig, batch: int, queries: int, keys: int) -> int:
    size = config.key_dim + config.val_dim  # of queries and output, or of keys and values
    return 2 * batch * config.dim * size * (queries * config.heads + keys * config.key_heads)


def _per_pair(config: ModelConfig, batch: int) -> int:
    """Of one query and one key in all heads: their score, and the weighted value."""
    size = config.key_dim
    score = size * (2 * size + 1) if config.attention_score == "concat" else size
    return 2 * batch * config.heads * (score + config.val_dim)


def _score_projections(config: ModelConfig, batch: int, queries: int, keys: int) -> int:
    """W q and W k of a learned score."""
    vectors = {"multiplicative": queries, "additive": queries + keys}.get(config.attention_score, 0)
    return 2 * batch * config.heads * vectors * config.key_dim**2


def _relative(config: ModelConfig, batch: int, queries: int) -> int:
    distances = 2 * config.position_distance + 1 if config.position == "relative" else 0
    return 2 * batch * config.heads * queries * config.key_dim * distances


def _feedforward(config: ModelConfig, tokens: int) -> int:
    dense = 2 * tokens * config.dim * config.ff_dim * (_gates(config) + 1)
    return config.experts_per_token * dense + 2 * tokens * config.dim * config.experts if config.experts else dense


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
    dim, size = config.dim, output_size(config)
    if config.per_token:
        return 2 * batch * length * dim * (size + dim * (config.head_layer and config.output_head != "classes"))
    return 0 if config.output_head == "none" else 2 * batch * dim * (size + dim * config.pooler)
