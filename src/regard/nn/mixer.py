"""Mixers: how a layer lets the tokens of a sequence exchange information.

    full           softmax attention to all tokens                     O(N²)          Vaswani et al. 2017
    window         … to tokens less than `window` away                 O(N · window)  Longformer: Beltagy et al. 2020
    bigbird        … and to global tokens and random blocks            O(N)           Zaheer et al. 2020
    linformer      … to keys and values projected to a fixed length    O(N)           Wang et al. 2020
    linear         φ(q) (Σ φ(k)ᵀ v), φ = elu + 1                       O(N)           Katharopoulos et al. 2020
    performer      … with φ of positive random features                O(N)           Choromanski et al. 2021
    gated-linear   … with a decay that depends on the token            O(N)           Yang et al. 2024
    fourier        no attention: Re(FFT over tokens and dimensions)    O(N log N)     FNet: Lee-Thorp et al. 2021

The first three are `MultiHead` with a mask (see `layer_mask`). `make_mixer` builds the self-attention part of a block
for any kind: a module called as mixer(x, context), x [B, N, dim] -> [B, N, dim]. A pattern such as
`mixer = "window, window, full"` gives each layer its own kind. Cross-attention is always full attention.
"""

from __future__ import annotations

from functools import cache

from regard.errors import UserError
from regard.nn.config import BY_TEXT, SOFTMAX, StackConfig
from regard.nn.fourier import FourierMixing
from regard.nn.linear_attention import GatedLinearAttention, LinearAttention
from regard.nn.linformer import LinformerAttention
from regard.nn.longformer import GlobalMultiHead
from regard.nn.mask import AttentionMask, Mask, everything, window
from regard.nn.multihead import MultiHead
from regard.nn.patterns import global_tokens, random_blocks
from regard.nn.trace import Traceable


def make_mixer(config: StackConfig, layer: int, causal: bool) -> Traceable:
    """The part of layer `layer` that mixes tokens; `causal`: in a stack that is."""
    kind = config.mixer_of(layer)
    if causal and kind in ("linformer", "fourier"):
        raise UserError(
            f"mixer = {config.mixer!r}: {kind} mixes tokens with later ones, so a decoder cannot use it; "
            "use architecture = 'encoder', or another mixer such as 'window'"
        )
    if config.global_projections and causal:
        raise UserError(
            "global_projections = true: the global tokens of a decoder cannot attend to later tokens; remove it, or "
            "use architecture = 'encoder'"
        )
    match kind:
        case "window" if config.global_projections:
            return GlobalMultiHead(config, layer=layer)
        case "full" | "window" | "bigbird":
            return MultiHead(config, layer=layer)
        case "linformer":
            return LinformerAttention(config, layer=layer)
        case "linear" | "performer":
            return LinearAttention(config, layer=layer, causal=causal, kind=kind)
        case "gated-linear":
            return GatedLinearAttention(config, layer=layer, causal=causal)
        case "fourier":
            return FourierMixing()


def depends_on_texts(config: StackConfig, layer: int, own: AttentionMask, causal: bool) -> bool:
    """Whether a layer computes tensors whose shapes differ with the texts of a batch: they cannot be compiled once."""
    kind, is_packed = config.mixer_of(layer), own.q.document is not None
    if kind in SOFTMAX and own.plan is not None and own.q.start is None:  # the plan of padded or packed texts
        return True
    if kind == "window" and config.global_projections:  # as many global tokens as the row with the most texts has
        return is_packed
    return kind in BY_TEXT and is_packed and not causal


def layer_mask(config: StackConfig, layer: int) -> Mask:
    """The mask of self-attention in layer `layer`, apart from causality, padding and documents."""
    size = config.window_of(layer)
    if size is None:
        return everything
    if config.mixer_of(layer) == "window":
        return sparse_mask(size, config.dilation, config.global_tokens)
    chosen = (config.random_blocks, config.block_size, config.mixer_seed * config.layers + layer)
    return sparse_mask(size, 1, config.global_tokens, chosen)


@cache
def sparse_mask(size: int, dilation: int, first: int, chosen: tuple[int, int, int] | None = None) -> Mask:
    """A window, global tokens and random blocks: (number, block size, seed). The same settings give the same object."""
    mask = window(size) if dilation == 1 else window(size, dilation)  # one object: that of window(size)
    if first:
        mask = mask | global_tokens(first)
    return mask if chosen is None or not chosen[0] else mask | random_blocks(*chosen)


def reaches(config: StackConfig) -> tuple[dict[int, int], int | None]:
    """How far back each causal layer with a window attends, and the farthest; None: a layer attends to all tokens.

    Linear attention has a state instead of keys, so without softmax attention only the new tokens are needed.
    """
    reached = {layer: config.reach_of(layer) for layer in range(config.layers)}
    found = {layer: reach for layer, reach in reached.items() if reach is not None}
    softmax = [layer for layer in range(config.layers) if config.mixer_of(layer) in SOFTMAX]
    return found, max(found.values(), default=1) if len(found) == len(softmax) else None
