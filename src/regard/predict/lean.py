"""Lean steps for a CPU: the model's formulas and weights as plain tensor operations.

A small model's step is short on a CPU: 64 tokens cost a layer of width 128 a few 10 µs per matmul. Modules that can
be traced, compiled, trained and given any mask then cost as much as the matmuls. These engines compute the same
numbers, up to rounding, from tensors alone:

    x [rows, dim]                     one token per row, no axis of length 1
    k, v [rows, Hkv, capacity, D]     buffers of zeros; a multiple of 16 slots takes part, masked ones at -inf
    attention                         softmax(mask + scale · q kᵀ) v as two batched matmuls; the beams of a sentence
                                      attend to its memory [sources, Hkv, M, D] together

What they do not know (biases, windows, experts, learned scores, tracing, autocast, half precision) is left to the
model itself: `regard.predict.engine` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.transformer import Decoder, EncoderDecoder, State
from regard.nn.block import Block
from regard.nn.cache import Cache, Pair
from regard.nn.feedforward import FeedForward, activate
from regard.nn.mask import Positions
from regard.nn.multihead import MultiHead
from regard.nn.position import Rotation, rotate

LANE = 16  # float32 numbers of a vector register: a softmax over a multiple of them is up to 9 times as fast


class Lean:
    """An encoder-decoder whose `step` is lean; its encoder, embeddings and head are the model's."""

    def __init__(self, model: EncoderDecoder) -> None:
        self.model = model
        self.layers = [Layer(block) for block in model.decoder.blocks]  # type: ignore[arg-type]
        self.first, self.last = norm_of(model.decoder.embed_norm), norm_of(model.decoder.norm)
        self.positions: Tensor | None = None  # position embeddings, [positions, dim]
        weight, self.packed = model.output_head.project.weight, None
        if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            # The output matrix in the layout of oneDNN: a matmul of few rows takes a third less.
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    def start(self, source: Tensor, is_real: Tensor | None = None) -> LeanState:
        memory = self.model.start(source, is_real).memory
        assert memory is not None
        return LeanState([layer.block for layer in self.layers], memory.states, memory.positions.is_real)

    def step(self, tokens: Tensor, state: LeanState) -> Tensor:
        """Read `tokens` [rows, 1]; logits [rows, 1, vocab_size] of the next one."""
        x = self.first(self._embed(tokens, state.length))
        state.grow(x)
        for number, layer in enumerate(self.layers):
            x = layer.step(x, state, number)
        state.length += 1
        x, head = self.last(x), self.model.output_head
        if self.packed is None:
            logits: Tensor = head(x)
        else:
            logits = torch.ops.mkldnn._linear_pointwise(head.transform(x), self.packed, head.bias, "none", [], "")
        return logits[:, None]

    def _embed(self, tokens: Tensor, at: int) -> Tensor:
        """The tokens [rows, 1] at position `at`, [rows, dim]; the table of all positions grows by doubling."""
        x = self.model.target_embedding(tokens)[:, 0]
        position, config = self.model.decoder.position, self.model.decoder.config
        if config.position == "none":
            return x
        positions = self.positions  # batches in other threads may store a longer table there, or a shorter one
        if positions is None or at >= len(positions):
            position.check_length(Positions.of(1, x.device, start=at), at)
            count = max(2 * at, 64)
            pos = torch.arange(min(count, config.max_length) if config.position == "learned" else count)
            table = position.embed(pos[None])
            assert table is not None
            positions = self.positions = table[0].to(x.dtype)
        return x + positions[at]


class LeanState:
    """Keys and values of the tokens so far and of the memory, by layer; see the module's docstring for the shapes."""

    def __init__(self, blocks: Sequence[Any], memory: Tensor, is_real: Tensor | None) -> None:
        (sources, length), self.blocks = memory.shape[:2], blocks
        more = -length % LANE if length else LANE
        self.across = [padded(block.cross.project_memory(memory), more) for block in blocks]
        masked = (torch.arange(length + more) >= length).repeat(sources, 1)
        if is_real is not None:
            masked[:, :length] = ~is_real
        empty = masked.all(dim=1)  # attention to a source without a token gives zeros
        for _, v in self.across:
            v[empty] = 0
        masked &= ~empty[:, None]
        self.memory_mask = memory.new_zeros(masked.shape).masked_fill(masked, float("-inf"))  # [sources, M]
        self.within: list[Pair] = []
        self.length = 0
        self._spread()

    def _spread(self) -> None:
        """The memory's mask for every key head of a source, [sources · Hkv, 1, M], by the number of heads."""
        counts = {block.cross.key_heads for block in self.blocks}
        self.masks = {count: self.memory_mask.repeat_interleave(count, dim=0)[:, None] for count in counts}

    def grow(self, x: Tensor) -> None:
        """Buffers with a slot for the next token, and the mask of all slots up to it, [1, 1, slots]."""
        if not self.within:
            for part in (block.attention for block in self.blocks):
                shape, config = (len(x), part.key_heads, LANE), part.config
                self.within.append((x.new_zeros(*shape, config.key_dim), x.new_zeros(*shape, config.val_dim)))
        elif (size := self.within[0][0].shape[2]) == self.length:
            self.within = [padded(pair, size) for pair in self.within]
        slots = self.length + 1 + -(self.length + 1) % LANE
        self.mask = x.new_zeros(1, 1, slots)
        self.mask[..., self.length + 1 :] = float("-inf")

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """As `Cache.reorder`."""
        self.within = [(k.index_select(0, rows), v.index_select(0, rows)) for k, v in self.within]
        if sources is None or len(sources) < len(self.memory_mask):
            kept = rows if sources is None else sources
            self.across = [(k.index_select(0, kept), v.index_select(0, kept)) for k, v in self.across]
            self.memory_mask = self.memory_mask.index_select(0, kept)
            self._spread()


def padded(pair: Pair, slots: int) -> Pair:
    """With this many more slots of zeros; contiguous."""
    k, v = (F.pad(x, (0, 0, 0, slots)) if slots else x.contiguous() for x in pair)
    return k, v


class Layer:
    """One block of an encoder-decoder: attention to the tokens so far, attention to the memory, feed-forward."""

    def __init__(self, block: Any) -> None:
        self.block = block  # a Block with cross-attention
        norms = (block.attention_norm, block.cross_norm, block.feedforward_norm)
        self.add_attention, self.add_cross, self.add_feedforward = (residual(block, norm) for norm in norms)
        self.work = partial(work, block.feedforward)

    def step(self, x: Tensor, state: LeanState, layer: int) -> Tensor:
        cross, own, memory = self.block.cross, state.within[layer], state.across[layer]
        x = self.add_attention(x, lambda h: self._attend_self(h, *own, state.mask, state.length))
        mask = state.masks[cross.key_heads]
        x = self.add_cross(x, lambda h: attend(cross, F.linear(h, cross.q.weight, cross.q.bias), *memory, mask))
        return self.add_feedforward(x, self.work)

    def _attend_self(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, slot: int) -> Tensor:
        """x [rows, dim]; its key and value go to `slot` of the buffers."""
        part, slots = self.block.attention, mask.shape[-1]
        q, k, v = F.linear(x, part.qkv.weight, part.qkv.bias).split(part.sizes, dim=-1)
        keys.select(2, slot).copy_(k.view(len(x), part.key_heads, -1))
        values.select(2, slot).copy_(v.view(len(x), part.key_heads, -1))
        return attend(part, q, keys[:, :, :slots], values[:, :, :slots], mask)


def attend(part: MultiHead, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [rows, H · D]; keys, values [sources, Hkv, slots, D]; mask [1 | sources · Hkv, 1, slots], added."""
    sources, beams, key_heads = len(keys), len(q) // len(keys), part.key_heads
    group, config = part.heads // key_heads, part.config
    # heads that share keys and beams that share a source are queries of one small matmul
    queries = q.view(sources, beams, key_heads, group, config.key_dim).transpose(1, 2)
    queries = queries.reshape(sources * key_heads, beams * group, config.key_dim)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    weights = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=config.scale).softmax(dim=-1)
    heads = torch.bmm(weights, values).view(sources, key_heads, beams, group, config.val_dim)
    return F.linear(heads.transpose(1, 2).reshape(len(q), -1), part.out.weight, part.out.bias)


class LeanDecoder:
    """A decoder whose step for one token is lean; several tokens at once are read by the model."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.start = model, model.start
        self.layers = [DecoderLayer(block) for block in model.decoder.blocks]  # type: ignore[arg-type]
        self.first, self.final = norm_of(model.decoder.embed_norm), norm_of(model.decoder.norm)

    def step(self, tokens: Tensor, state: State, *, last: bool) -> Tensor:
        """As the model's: logits of the last token. Every key in the cache is visible to a single token."""
        if tokens.shape[1] > 1:
            return self.model.step(tokens, state, last=last)
        stack, cache = self.model.decoder, state.cache
        positions = cache.next_positions(1, tokens.device)
        stack.position.check_length(positions, len(cache))
        cache.add(positions)
        x = self.model.embedding(tokens)[:, 0]
        embedded, rotation = stack.position.embed(positions.pos), stack.position.rotation(positions.pos)  # type: ignore[operator]
        if embedded is not None:
            x = x + embedded[0].to(x.dtype)
        x = self.first(x)
        for layer in self.layers:
            x = layer.step(x, cache, rotation)
        logits: Tensor = self.model.output_head(self.final(x))
        return logits[:, None]


class DecoderLayer:
    """One block of a decoder: attention to every key of the cache, and the feed-forward layer."""

    def __init__(self, block: Block) -> None:
        assert isinstance(block.feedforward, FeedForward)
        self.attention, self.work = block.attention, partial(work, block.feedforward)
        self.add_attention = residual(block, block.attention_norm)
        self.add_feedforward = residual(block, block.feedforward_norm)

    def step(self, x: Tensor, cache: Cache, rotation: Rotation | None) -> Tensor:
        x = self.add_attention(x, lambda h: self._attend(h, cache, rotation))
        return self.add_feedforward(x, self.work)

    def _attend(self, x: Tensor, cache: Cache, rotation: Rotation | None) -> Tensor:
        part = self.attention
        config, rows = part.config, len(x)
        q, k, v = F.linear(x, part.qkv.weight, part.qkv.bias).split(part.sizes, dim=-1)
        q, k = q.view(rows, part.heads, 1, -1), k.view(rows, part.key_heads, 1, -1)
        if part.q_norm is not None and part.k_norm is not None:
            q, k = part.q_norm(q), part.k_norm(k)
        if rotation is not None:
            q, k = (rotate(one, rotation, config.pairs) for one in (q, k))
        keys, values = cache.extend(part.layer, k, v.view(rows, part.key_heads, 1, -1))
        grouped = part.heads != part.key_heads
        heads = F.scaled_dot_product_attention(q, keys, values, scale=config.scale, enable_gqa=grouped)
        return F.linear(heads.view(rows, -1), part.out.weight, part.out.bias)


def residual(block: Block, norm: nn.Module) -> Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]:
    """Norm and residual connection around a sub-layer, as `Block` has them, without dropout."""
    normalise, pre_norm, has_residual = norm_of(norm), block.pre_norm, block.residual

    def apply(x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        out = layer(normalise(x) if pre_norm else x)
        if has_residual:
            out = out.add_(x)
        return out if pre_norm else normalise(out)

    return apply


def work(feedforward: FeedForward, x: Tensor) -> Tensor:
    up, down = feedforward.up, feedforward.down
    return F.linear(activate(F.linear(x, up.weight, up.bias), feedforward.activation), down.weight, down.bias)


def norm_of(module: Any) -> Callable[[Tensor], Tensor]:
    match module:
        case nn.LayerNorm():
            shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
            return lambda x: F.layer_norm(x, shape, weight, bias, eps)
        case nn.RMSNorm():
            return partial(F.rms_norm, normalized_shape=module.normalized_shape, weight=module.weight, eps=module.eps)
        case nn.Identity():
            return lambda x: x
        case _:
            raise TypeError(f"norm {type(module).__name__}: the lean decoder does not know it")
