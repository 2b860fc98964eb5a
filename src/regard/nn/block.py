"""Blocks and stacks: attention and feed-forward, each with a residual connection, repeated.

    post-LN (2017)   x ← Norm(x + f(x))        pre-LN (GPT-2)   x ← x + f(Norm(x))

One block serves encoder and decoder: a block of a decoder may also attend to a memory (cross-attention), and its
self-attention is causal. Two flags give the three kinds of stack:

    encoder              causal=False, memory=False
    decoder-only (GPT)   causal=True,  memory=False
    decoder              causal=True,  memory=True

    x [B, N, dim] -> [B, N, dim]            Vaswani et al. 2017, figure 1; pre-LN: Xiong et al. 2020
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.errors import UserError
from regard.nn.banded import kernels_for, prepare
from regard.nn.cache import Cache
from regard.nn.config import SOFTMAX, StackConfig
from regard.nn.dropout import dropout
from regard.nn.feedforward import Experts, FeedForward
from regard.nn.mask import AttentionMask, Mask, Positions, causal, everything
from regard.nn.mixer import depends_on_texts, layer_mask, make_mixer, reaches
from regard.nn.multihead import Context, MultiHead
from regard.nn.norm import make_norm
from regard.nn.parts import Part
from regard.nn.patterns import tiles
from regard.nn.position import KINDS, Learned, Position
from regard.nn.trace import Traceable


class Block(Traceable):
    """Self-attention, optionally cross-attention, and feed-forward, each with norm, dropout and residual connection."""

    def __init__(self, config: StackConfig, *, layer: int = 0, memory: bool = False, causal: bool = False) -> None:
        super().__init__()
        parts = ("attention.", "cross.", "feedforward.") if memory else ("attention.", "feedforward.")
        self.stages = (*(part + stage for part in parts for stage in ("before", "norm", "sum", "after")), "output")
        self.pre_norm, self.residual, self.dropout = config.norm_order == "pre", config.residual, config.dropout
        self.attention = make_mixer(config, layer, causal)
        self.attention_norm = make_norm(config)
        self.cross = MultiHead(config, layer=layer, cross=True) if memory else None
        self.cross_norm = make_norm(config) if memory else None
        self.feedforward = Experts(config) if config.experts else FeedForward(config)
        self.feedforward_norm = make_norm(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self._add(x, "attention.", self.attention, self.attention_norm, context)
        if self.cross is not None and self.cross_norm is not None:
            x = self._add(x, "cross.", self.cross, self.cross_norm, context)
        return self.mark("output", self._add(x, "feedforward.", self.feedforward, self.feedforward_norm))

    def _add(self, x: Tensor, part: str, layer: nn.Module, norm: nn.Module, *context: Context) -> Tensor:
        """x + f(x) for a sub-layer f, with its norm before it or at the end, and dropout on its output."""
        x = self.mark("before", x, part)
        out: Tensor = layer(self.mark("norm", norm(x), part) if self.pre_norm else x, *context)
        if self.training and self.dropout:
            out = dropout(out, self.dropout)
        out = self.mark("sum", x + out if self.residual else out, part)
        return self.mark("after", out if self.pre_norm else self.mark("norm", norm(out), part), part)


def run_block(block: nn.Module, x: Tensor, context: Context) -> Tensor:
    """The function that training compiles: once, for all layers of a stack."""
    return block(x, context)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Memory:
    """The output of an encoder, which a decoder attends to: states [B, M, dim] and their positions."""

    states: Tensor
    positions: Positions


class Stack(Traceable):
    def __init__(self, config: StackConfig, *, causal: bool, memory: bool = False) -> None:
        super().__init__()
        if (config.position_axes == 2 or config.shifted_window is not None) and config.grid is None:
            raise UserError(
                f"position_axes = {config.position_axes}, shifted_window = {config.shifted_window}: this stack has no "
                "rows and columns; use a ModelConfig with input = 'patches', or remove them"
            )
        self.config, self.causal = config, causal
        self.checkpoint = False  # recompute activations in the backward pass instead of storing them
        self.compute: Callable[[nn.Module, Tensor, Context], Tensor] | None = None  # of training: `run_block` compiled
        self.part: Part | None = None  # of training: the tokens of this process (`regard.nn.parts`)
        self.is_recorded = False  # of training: as a CUDA graph, which must not depend on what tensors contain
        self.position = KINDS[config.position](config, causal)
        added = ("position_encoding",) if type(self.position).embed is not Position.embed else ()
        self.stages = ("embedding", "positions", *added, "embedded", "output")
        self.embed_norm = make_norm(config) if config.embed_norm else nn.Identity()
        self.embed_projection = nn.Linear(config.dim, config.dim) if config.embed_projection else nn.Identity()
        layers = range(config.layers)
        self.blocks = nn.ModuleList(Block(config, layer=layer, memory=memory, causal=causal) for layer in layers)
        self.norm = make_norm(config) if config.ends_with_norm else nn.Identity()

    def forward(
        self, x: Tensor, positions: Positions, *, memory: Memory | None = None, cache: Cache | None = None,
        mask: Mask = everything,
    ) -> Tensor:  # fmt: skip
        """x: embeddings [B, N, dim]; `mask` further restricts self-attention."""
        keys = positions if self.part is None or not self.training else self.part.keys(positions, mask)
        if isinstance(self.position, Learned):
            self.position.check_length(keys, 0 if cache is None else cache.length)
        x = self.mark("embedding", x)
        pos = self.mark("positions", positions.pos)  # a trace may change what is encoded; masks keep the real positions
        contexts = self._contexts(positions, keys, pos, memory, cache, mask)
        embedded = self.position.embed(pos)
        if embedded is not None:
            x = x + self.mark("position_encoding", embedded.to(x.dtype))
        x = self.embed_projection(self.embed_norm(x))
        if self.training and self.config.embed_dropout:
            x = dropout(x, self.config.embed_dropout)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        # under autocast to bfloat16 the residual stream is bfloat16 too: half the memory traffic
        x = self.mark("embedded", x.to(dtype) if dtype == torch.bfloat16 else x)
        routes = self._prepare(contexts, x, dtype)
        # a trace records each activation once, so nothing is recomputed under it
        recompute = self.checkpoint and self.tap is None and torch.is_grad_enabled()
        bias = contexts[0].bias
        if recompute and bias is not None and not bias.content and routes & {"dense", "reference"}:
            bias.dense(x)  # all layers share it, so it is not part of a layer that is recomputed
        for layer, (block, context) in enumerate(zip(self.blocks, contexts, strict=False)):  # blocks may be removed
            is_eager = not self.training or depends_on_texts(self.config, layer, context.attention_mask, self.causal)
            run = block if is_eager or self.compute is None else partial(self.compute, block)
            x = checkpoint(run, x, context, use_reentrant=False) if recompute else run(x, context)
        return self.mark("output", self.norm(x))

    def _prepare(self, contexts: tuple[Context, ...], x: Tensor, dtype: torch.dtype) -> set[str]:
        """Compute what the layers share of masks, which compiled layers only read; the implementations in use."""
        config = self.config
        routes: set[str] = set()
        if self.tap is not None or config.attention == "reference":
            return {"reference"}
        dropout, bias = config.attention_dropout * self.training, contexts[0].bias
        for shared in self._shared_masks(contexts):
            route, shared.is_recorded = str(config.attention), self.is_recorded and self.training
            if route == "fused":
                is_plain = (bias is None or shared is contexts[0].memory_mask) and config.key_heads == config.heads
                kernels = kernels_for(dtype, config.key_dim, config.val_dim, is_plain=is_plain)
                route = prepare(shared, x.device, dropout, kernels)
                if route == "dense" and shared.fused()[0] is not None and x.is_cuda:
                    shared.additive(dtype)
            if shared is not contexts[0].memory_mask:
                routes.add(route)
                if route == "flex":
                    shared.blocks(x.shape[0])
        return routes

    def _contexts(
        self, positions: Positions, keys: Positions, pos: Tensor, memory: Memory | None, cache: Cache | None, mask: Mask
    ) -> tuple[Context, ...]:
        """One per layer; layers with the same mask share it."""
        kinds = (self.config.mixer_of(layer) for layer in range(self.config.layers))
        if mask is not everything and (other := next((kind for kind in kinds if kind not in SOFTMAX), None)):
            raise UserError(
                f"mask = {mask}: mixer = '{other}' knows no masks but those of padding and documents; remove it, or "
                "use mixer = 'full'"
            )
        if cache is not None and self.causal:
            cache.reaches, cache.longest = reaches(self.config)
        part, k_pos = (None, pos) if keys is positions else (self.part, keys.pos)
        first, keys = (0, keys) if cache is None else (cache.length, cache.add(positions))
        rotation, bias = self.position.rotation(pos), self.position.bias(pos, k_pos) if cache is None else None
        states = None if memory is None else memory.states
        memory_mask = None if memory is None else AttentionMask(everything, positions, memory.positions)
        contexts: dict[Mask, Context] = {}
        masks = [self._layer_mask(layer) for layer in range(self.config.layers)]
        for layer, own in enumerate(masks):
            if own in contexts:
                continue
            whole = causal & (own & mask) if self.causal else own & mask
            own_keys, k_first = (keys, 0) if cache is None else cache.keys_of(cache.reaches.get(layer), keys)
            attention_mask = AttentionMask(whole, positions, own_keys, first=first, k_first=k_first)
            own_bias = bias if cache is None else self.position.bias(pos, own_keys.pos)
            contexts[own] = Context(attention_mask, rotation, own_bias, cache, states, memory_mask, part)
        return tuple(contexts[own] for own in masks)

    def _shared_masks(self, contexts: tuple[Context, ...]) -> list[AttentionMask]:
        """The masks that layers use; one that is used by no softmax attention is not computed."""
        masks = [c.attention_mask for layer, c in enumerate(contexts) if self.config.mixer_of(layer) in SOFTMAX]
        memory_mask = contexts[0].memory_mask
        return masks if memory_mask is None else [*masks, memory_mask]

    def _layer_mask(self, layer: int) -> Mask:
        """The mask of one layer, apart from causality, padding and documents; equal ones are one object."""
        size, grid = self.config.shifted_window, self.config.grid
        if size is None or self.causal:
            return layer_mask(self.config, layer)
        assert grid is not None  # checked in `__init__`
        return tiles(size, grid, size // 2 if layer % 2 else 0)
