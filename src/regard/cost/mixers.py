"""Layers that are not softmax attention: parameters, FLOPs and memory of each mixer.

With B rows of N tokens, width d, H heads of size D (Dv for values), G key/value heads, F features per head (linear and
gated-linear: D; performer: M) and E = Dv + 1 columns of the sums (gated-linear: Dv), a layer takes, besides the
projections Q, K, V and O,

    linear         2·B·N·(G + H)·F·E                        an encoder: S = Σ φ(k) vᵀ, and φ(q)ᵀ S
                   2·B·N'·(G·F·E + H·F·E + H·C·(F + E))     a decoder: chunks of C = 64 tokens, N' = N in whole chunks
    performer      + 2·B·N·(H + G)·D·M                      the random features, which are not learned
    gated-linear   + 2·B·N·(d·16 + 16·G·D + d·H·Dv)         the gates; the sums are those of a decoder
    linformer      2·B·N·L·G·(D + Dv) + 2·B·H·N·L·(D + Dv)  keys and values of length L, and attention to them
    fourier        0                                        no matmuls; the FFT takes about 5·N·d·log₂(N·d) FLOPs
    window         2·B·N·d·(H·D + G·(D + Dv)) + 2·B·H·n·N·(D + Dv)  with projections of its n global tokens

and one more token of a decoder what N = 1 takes, without the term of a chunk and whatever was read before: the state
has B·G·(F·E + 1) elements of 32 bits or more. Gates add 16·(d + G·D) + G·D + d·H·Dv + Dv parameters, Linformer
2·L·max_length; Fourier has none.

For the backward pass a decoder stores, per token, the features of queries and keys, the values, and the state
before each chunk (G·F·E / C): in 32 bits, like all sums. The weights of the chunks, 2·B·N'·H·C·F FLOPs, are computed
again. The chunks of gated-linear have C = 32 tokens; its gates store about five times the keys besides.
"""

from __future__ import annotations

from regard.models.config import ModelConfig
from regard.nn.config import LONG, RANK, SOFTMAX, chunk_size


def softmax_layers(config: ModelConfig, layers: int) -> list[int]:
    """The layers that are softmax attention."""
    return [layer for layer in range(layers) if config.mixer_of(layer) in SOFTMAX]


def other_layers(config: ModelConfig, layers: int) -> list[str]:
    """The kind of each layer that is not."""
    kinds = (config.mixer_of(layer) for layer in range(layers))
    return [kind for kind in kinds if kind not in SOFTMAX]


def is_banded(config: ModelConfig, layer: int, length: int) -> bool:
    """Whether fused attention skips the masked blocks of a layer, and has no mask of all pairs."""
    return config.attention == "fused" and config.window_of(layer) is not None and length >= LONG


def features_of(config: ModelConfig, kind: str) -> int:
    return config.feature_count if kind == "performer" else config.key_dim


def columns_of(config: ModelConfig, kind: str) -> int:
    return config.val_dim + (kind != "gated-linear")


def chunk_sizes(length: int, kind: str) -> tuple[int, int]:
    """(tokens of a chunk, tokens of all chunks)."""
    size = chunk_size(length, kind == "gated-linear")
    return size, -(-length // size) * size


def extra_parameters(config: ModelConfig, kind: str) -> int:
    """What a layer has besides the projections Q, K, V and O."""
    match kind:
        case "gated-linear":
            keys, values = config.key_heads * config.key_dim, config.heads * config.val_dim
            return RANK * (config.dim + keys) + keys + config.dim * values + config.val_dim
        case "linformer":
            return 2 * config.projected_length * config.max_length
        case "window" if config.global_projections:
            return (config.dim + config.bias) * projected_size(config)
    return 0


def projected_size(config: ModelConfig) -> int:
    """Of the queries, keys and values of a token, all heads."""
    return config.heads * config.key_dim + config.key_heads * (config.key_dim + config.val_dim)


def global_layers(config: ModelConfig, layers: int) -> int:
    """How many layers have projections for global tokens."""
    return sum(config.mixer_of(layer) == "window" for layer in range(layers)) * config.global_projections


def feature_operations(config: ModelConfig, kind: str, batch: int, length: int, causal: bool) -> int:
    """The random features of a Performer: matmuls with a matrix that has no gradient."""
    heads, tokens = config.heads + config.key_heads, chunk_sizes(length, kind)[1] if causal else length
    return 2 * batch * tokens * heads * config.key_dim * features_of(config, kind) * (kind == "performer")


def mixing_operations(config: ModelConfig, kind: str, batch: int, length: int, causal: bool) -> int:
    """FLOPs of one layer besides its projections Q, K, V and O."""
    heads, key_heads, dim = config.heads, config.key_heads, config.dim
    both = config.key_dim + config.val_dim
    if kind == "fourier":
        return 0
    if kind == "linformer":
        return 2 * batch * length * config.projected_length * (key_heads + heads) * both
    features, columns = features_of(config, kind), columns_of(config, kind)
    gated = kind == "gated-linear"
    size, tokens = chunk_sizes(length, kind)
    chunked = tokens * ((key_heads + heads) * features * columns + heads * size * (features + columns))
    sums = chunked if causal or gated else length * (key_heads + heads) * features * columns
    gates = length * (RANK * (dim + key_heads * config.key_dim) + dim * heads * config.val_dim) * gated
    return 2 * batch * (sums + gates) + feature_operations(config, kind, batch, length, causal)


def step_operations(config: ModelConfig, kind: str, batch: int) -> int:
    """One more token of a decoder: the recurrence, in which a chunk has no weights."""
    weights = 2 * batch * config.heads * (features_of(config, kind) + columns_of(config, kind))
    return mixing_operations(config, kind, batch, 1, True) - weights


def recomputed_operations(config: ModelConfig, kind: str, batch: int, length: int, causal: bool) -> int:
    """In the backward pass: the weights of the chunks, or those of Linformer where attention does not store them."""
    if kind == "linformer":
        fused = config.attention != "reference"
        return 2 * batch * config.heads * length * config.projected_length * config.key_dim * fused
    if kind == "fourier" or not (causal or kind == "gated-linear"):
        return 0
    size, tokens = chunk_sizes(length, kind)
    return 2 * batch * config.heads * tokens * size * features_of(config, kind)


def activation_bytes(config: ModelConfig, kind: str, batch: int, length: int, causal: bool, size: int) -> int:
    """What one layer stores for the backward pass, its input included."""
    tokens, wide = batch * length, max(4, size)
    q, k = config.heads * config.key_dim, config.key_heads * config.key_dim
    v, out = config.key_heads * config.val_dim, config.heads * config.val_dim
    kept = tokens * (config.dim + out) * size  # the inputs of the projections
    if kind == "fourier":
        return 0
    if kind == "linformer":
        return kept + _linformer_bytes(config, batch, length, size)
    separate = size < 4 or config.position == "rope"  # q and k are new tensors, not views of one projection
    if kind == "gated-linear":
        kept += tokens * ((RANK + 3 * k + 4 * out + config.heads) * wide + (k + out) * size)
        return kept + _chunked_bytes(config, kind, batch, length, wide)
    features, columns = features_of(config, kind), columns_of(config, kind)
    if kind == "performer":  # the lengths of keys, which are views of one projection or new tensors
        kept += tokens * (k * wide if separate or not causal else (q + k + v) * size)
    kept += tokens * wide * config.heads * columns  # the quotient and its denominators
    if causal:
        return kept + _chunked_bytes(config, kind, batch, length, wide)
    queries, keys, values = config.heads * features, config.key_heads * features, config.key_heads * columns
    states = batch * config.heads * features * columns
    return kept + wide * (tokens * (queries + keys + values) + states)


def _chunked_bytes(config: ModelConfig, kind: str, batch: int, length: int, wide: int) -> int:
    """The sums of a decoder: what the matmuls of chunks and states read."""
    size, padded = chunk_sizes(length, kind)
    features, columns = features_of(config, kind), columns_of(config, kind)
    elements = config.heads * features + config.key_heads * (features + columns)
    states = (padded // size + 1) * config.key_heads * features * columns
    return wide * batch * (padded * elements + states)


def _linformer_bytes(config: ModelConfig, batch: int, length: int, size: int) -> int:
    tokens, wide, shorter = batch * length, max(4, size), batch * config.projected_length
    q, keys = config.heads * config.key_dim, config.key_heads * (config.key_dim + config.val_dim)
    kept = tokens * (q + 2 * keys) * size
    if config.attention == "reference":
        both = config.heads * (config.key_dim + config.val_dim)
        pairs = tokens * config.heads * config.projected_length
        return tokens * (q + keys) * size + shorter * both * size + pairs * (wide + size) + tokens * config.heads
    return kept + shorter * keys * size + tokens * config.heads * wide


def state_bytes(config: ModelConfig, kind: str, batch: int, size: int) -> int:
    """The state of one layer of a decoder."""
    return batch * config.key_heads * (features_of(config, kind) * columns_of(config, kind) + 1) * max(4, size)
