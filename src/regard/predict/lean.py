"""Lean steps for a CPU: the model's formulas and weights as plain tensor operations.

A small model's step is short on a CPU: 64 tokens cost a layer of width 128 a few 10 µs per matmul. Modules that can
be traced, compiled, trained and given any mask then cost as much as the matmuls. With few rows, a matmul is limited by
reading its weights, and most of the time is lost where their layout is that of training. These engines compute the
same numbers, up to rounding, from tensors alone:

    x [rows, dim]   one token per row, no axis of length 1
    k, v            buffers of zeros; a multiple of 16 slots takes part, masked ones at -inf (`lean_attention`)
    attention       softmax(mask + scale · q kᵀ) v as two batched matmuls
    W               a copy in the blocked layout of oneDNN, made once for a model; small ones for a single row as they
                    are, in two halves, one per core: oneDNN takes 10 µs before it begins to multiply

What they do not know (biases, windows, experts, learned scores, tracing, autocast, half precision) is left to the
model itself: `regard.predict.engine` decides.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.transformer import Decoder, EncoderDecoder, State
from regard.nn.cache import Cache
from regard.nn.feedforward import ACTIVATIONS
from regard.nn.mask import Positions
from regard.nn.position import Learned, Rotation, rotate
from regard.predict.lean_attention import LANE, LeanMultiHead, Linear, Memories, OneRow, Rows, attend_all


class Lean:
    """An encoder-decoder whose `step` is lean, and its encoder too if `encodes`; source embeddings are the model's.

    The model is not kept alive, so that an engine can be kept for as long as its model lives.
    """

    def __init__(self, model: EncoderDecoder, *, encodes: bool = True) -> None:
        self.model: Any = weakref.proxy(model)
        self.encoder = [Layer(block) for block in model.encoder.blocks] if encodes else None
        self.embed_norm, self.norm = norm_of(model.encoder.embed_norm), norm_of(model.encoder.norm)
        self.layers = [Layer(block) for block in model.decoder.blocks]
        self.memories = Memories([layer.cross for layer in self.layers])
        self.first, self.last = norm_of(model.decoder.embed_norm), norm_of(model.decoder.norm)
        embedding: Any = model.target_embedding
        self.embed, self.scale = partial(torch.embedding, embedding.tokens.weight.detach()), embedding.scale
        self.transform = model.output_head.transform
        self.source_positions = PositionTable(model.encoder.position)
        self.target_positions = PositionTable(model.decoder.position)
        self.project = Linear(model.output_head.project.weight, model.output_head.bias)

    @torch.no_grad()
    def start(self, source: Tensor, is_real: Tensor | None = None) -> LeanState:
        return LeanState(self, self.encode(source, is_real), is_real)

    def encode(self, source: Tensor, is_real: Tensor | None) -> Tensor:
        """The states of the encoder [sources, length, dim]."""
        if self.encoder is None or not source.numel():
            states: Tensor = self.model.encode(source, is_real).states
            return states
        x = self.model.source_embedding(source)
        x, shape = x + self.source_positions.of_tokens(x, is_real), x.shape
        x = self.embed_norm(x).flatten(0, 1)
        mask = None if is_real is None else is_real[:, None, None]
        for layer in self.encoder:
            x = layer.step(x, partial(attend_all, layer.attention, mask, shape[:2]))
        return self.norm(x).view(shape)

    def step(self, tokens: Tensor, state: LeanState) -> Tensor:
        """Read `tokens` [rows, 1]; logits [rows, 1, vocab_size] of the next one."""
        slot, x = state.length, self.embed(tokens[:, 0])
        x = self.first(torch.add(self.target_positions.rows(slot, 1, x), x, alpha=self.scale))
        state.next_slot()
        attend, mask = state.own.attend, state.mask
        for number, (layer, across) in enumerate(zip(self.layers, state.across, strict=True)):
            x = layer.step(x, partial(attend, number, mask), across)
        return self.project(self.transform(self.last(x)))[:, None]


class PositionTable:
    """Position embeddings [positions, dim], which are computed once; the table grows by doubling."""

    def __init__(self, position: Any) -> None:
        self.position, self.table = position, torch.empty(0)

    def rows(self, start: int, count: int, like: Tensor) -> Tensor:
        """Those of `count` positions, to be added to `like`."""
        end, table = start + count, self.table  # another thread may replace it by a shorter table
        if end > len(table):
            size = max(64, 1 << (end - 1).bit_length())
            if isinstance(self.position, Learned):
                self.position.check_length(Positions.of(count, like.device, start=start), start)
                size = min(size, self.position.config.max_length)
            embedded = self.position.embed(torch.arange(size)[None])
            self.table = table = like.new_zeros(size, 1) if embedded is None else embedded[0].detach().to(like.dtype)
        return table[start:end]

    def of_tokens(self, x: Tensor, is_real: Tensor | None) -> Tensor:
        """Those of tokens x [B, N, dim], [B|1, N, dim]; padding does not count."""
        if is_real is None:
            return self.rows(0, x.shape[1], x)
        positions = Positions.of(x.shape[1], x.device, is_real)
        if isinstance(self.position, Learned):
            self.position.check_length(positions)
        embedded = self.position.embed(positions.pos)
        return x.new_zeros(1) if embedded is None else embedded.to(x.dtype)


class LeanState:
    """Keys and values by layer, of the tokens so far and of the memory."""

    def __init__(self, engine: Lean, states: Tensor, is_real: Tensor | None = None) -> None:
        """`states` [sources, length, dim] are those of the encoder."""
        self.length, sources = 0, len(states)
        # 0 for the tokens so far, -inf for free slots; [1, 1, capacity]
        self.mask = states.new_full((1, 1, LANE), float("-inf"))
        attention = [layer.attention for layer in engine.layers]
        is_even = len({(one.heads, one.key_heads) for one in attention}) == 1
        kind = OneRow if sources == 1 and is_even else Rows
        self.own: OneRow | Rows = kind.empty(attention, sources, states)
        self.across = engine.memories.read(states, is_real)

    def next_slot(self) -> None:
        """Make room for one more token; the mask and the keys and values with its slot."""
        if self.length == self.mask.shape[2]:
            self.mask = F.pad(self.mask, (0, LANE), value=float("-inf"))
            self.own = self.own.grown()
        self.mask.select(2, self.length).zero_()
        self.own.open(self.length)
        self.length += 1

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """As `Cache.reorder`."""
        self.own = self.own.select(rows)
        if sources is None or len(sources) < self.across[0].sources:
            self.across = [across.select(rows if sources is None else sources) for across in self.across]


class LeanDecoder:
    """A decoder whose step for one token is lean; several tokens at once are read by the model."""

    def __init__(self, model: Decoder) -> None:
        self.model: Any = weakref.proxy(model)
        self.project = Linear(model.output_head.project.weight, model.output_head.bias)
        self.layers = [Layer(block) for block in model.decoder.blocks]
        self.first, self.last = norm_of(model.decoder.embed_norm), norm_of(model.decoder.norm)

    def start(self, capacity: int = 0) -> State:
        state: State = self.model.start(capacity)
        return state

    def step(self, tokens: Tensor, state: State, *, last: bool) -> Tensor:
        """As the model's: logits of the last token. A single token attends to every key at or before its position."""
        if tokens.shape[1] > 1:
            return self.model.step(tokens, state, last=last)
        stack, cache = self.model.decoder, state.cache
        positions = cache.next_positions(1, tokens.device)
        if isinstance(stack.position, Learned):
            stack.position.check_length(positions, cache.length)
        keys = cache.add(positions)
        # rows of one length see the whole cache; those of a continuous batch have lengths of their own
        mask = None if positions.rows == 1 else keys.pos[:, None, None] <= positions.pos[:, None, :, None]
        x = self.model.embedding(tokens)[:, 0]
        embedded, rotation = stack.position.embed(positions.pos), stack.position.rotation(positions.pos)  # type: ignore[operator]
        if embedded is not None:
            x = x + embedded[:, 0].to(x.dtype)
        x = self.first(x)
        for layer in self.layers:
            x = layer.step(x, partial(attend_cache, layer.attention, cache, rotation, mask))
        return self.project(self.model.output_head.transform(self.last(x)))[:, None]


def attend_cache(
    lean: LeanMultiHead, cache: Cache, rotation: Rotation | None, mask: Tensor | None, x: Tensor
) -> Tensor:
    """x [rows, dim] attends to the keys of the cache, those in mask [rows, 1, 1, M], and to its own, which is added."""
    part, config, rows = lean.part, lean.part.config, len(x)
    q, k, v = lean.project(x).split(part.sizes, dim=-1)
    q, k = q.view(rows, part.heads, 1, -1), k.view(rows, part.key_heads, 1, -1)
    if part.q_norm is not None and part.k_norm is not None:
        q, k = part.q_norm(q), part.k_norm(k)
    if rotation is not None:
        q, k = (rotate(one, rotation, config.pairs) for one in (q, k))
    keys, values = cache.extend(part.layer, k, v.view(rows, part.key_heads, 1, -1))
    grouped = part.heads != part.key_heads
    heads = F.scaled_dot_product_attention(q, keys, values, mask, scale=config.scale, enable_gqa=grouped)
    return lean.out(heads.view(rows, -1))


class Layer:
    """One `Block` without dropout: each sub-layer with its norm and its residual connection."""

    def __init__(self, block: Any) -> None:
        self.pre_norm, self.residual = block.pre_norm, block.residual
        self.attention = LeanMultiHead(block.attention)
        self.cross: Any = None if block.cross is None else LeanMultiHead(block.cross, is_cross=True)
        norms = (block.attention_norm, block.cross_norm, block.feedforward_norm)
        self.norms = [norm_of(norm) for norm in norms if norm is not None]
        up, down = (Linear(one.weight, one.bias) for one in (block.feedforward.up, block.feedforward.down))
        activate = ACTIVATIONS[block.feedforward.activation]
        self.feedforward = lambda x: down(activate(up(x)))

    def step(self, x: Tensor, *attention: Callable[[Tensor], Tensor]) -> Tensor:
        """x [rows, dim] through attention to the tokens so far, to a memory if there is one, and feed-forward."""
        for norm, sublayer in zip(self.norms, (*attention, self.feedforward), strict=True):
            out = sublayer(norm(x) if self.pre_norm else x)
            if self.residual:
                out = out.add_(x)
            x = out if self.pre_norm else norm(out)
        return x


def norm_of(module: Any) -> Callable[[Tensor], Tensor]:
    match module:
        case nn.LayerNorm():
            shape, weight, eps = module.normalized_shape, module.weight.detach(), module.eps
            bias = None if module.bias is None else module.bias.detach()
            return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
        case nn.RMSNorm():
            weight = module.weight.detach()
            return partial(F.rms_norm, normalized_shape=module.normalized_shape, weight=weight, eps=module.eps)
        case nn.Identity():
            return lambda x: x
        case _:
            raise TypeError(f"norm {type(module).__name__}: the lean decoder does not know it")
