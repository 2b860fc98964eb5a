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

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.models.transformer import Decoder, EncoderDecoder, State
from regard.nn.block import Block
from regard.nn.cache import Cache
from regard.nn.feedforward import FeedForward, activate
from regard.nn.mask import Positions
from regard.nn.multihead import MultiHead
from regard.nn.position import Rotation, rotate

LANE = 16  # float32 numbers of a vector register: a softmax over a multiple of them is up to 9 times as fast


def pack(weight: Tensor) -> Tensor | None:
    """The weight [out, in] in the layout of oneDNN: a matmul of few rows takes a third less. None: not available."""
    if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # type: ignore[no-any-return]


class Lean:
    """An encoder-decoder whose `step` is lean; its encoder, embeddings and head are the model's."""

    def __init__(self, model: EncoderDecoder) -> None:
        self.model = model
        self.layers = [Layer(block) for block in model.decoder.blocks]  # type: ignore[arg-type]
        self.first, self.last = norm_of(model.decoder.embed_norm), norm_of(model.decoder.norm)
        self.positions: Tensor | None = None  # what the positions add, [positions, dim]
        self.packed = pack(model.output_head.project.weight)

    def start(self, source: Tensor, is_real: Tensor | None = None) -> LeanState:
        memory = self.model.start(source, is_real).memory
        assert memory is not None
        return LeanState([layer.remember(memory.states) for layer in self.layers], memory.positions.is_real)

    def step(self, tokens: Tensor, state: LeanState) -> Tensor:
        """Read `tokens` [rows, 1]; logits [rows, 1, vocab_size] of what follows."""
        x = self.first(self._placed(self.model.target_embedding(tokens)[:, 0], state.length))
        state.make_room(self.layers, x)
        for layer, within, across in zip(self.layers, state.within, state.across, strict=True):
            x = layer.step(x, state, within, across)
        state.length += 1
        return self._score(self.last(x))[:, None]

    def _score(self, x: Tensor) -> Tensor:
        """Logits [rows, vocab_size]: the largest product of a step, by far."""
        head = self.model.output_head
        if self.packed is None:
            logits: Tensor = head(x)
            return logits
        return torch.ops.mkldnn._linear_pointwise(head.transform(x), self.packed, head.bias, "none", [], "")  # type: ignore[no-any-return]

    def _placed(self, x: Tensor, at: int) -> Tensor:
        """x [rows, dim] with what position `at` adds; the table of all positions grows by doubling."""
        position, config = self.model.decoder.position, self.model.decoder.config
        if config.position == "none":
            return x
        positions = self.positions  # batches in other threads may put a longer table there, or a shorter one
        if positions is None or at >= len(positions):
            position.check_length(Positions.of(1, x.device, start=at), at)
            count = max(2 * at, 64)
            pos = torch.arange(min(count, config.max_length) if config.position == "learned" else count)
            table = position.embed(pos[None])
            assert table is not None
            positions = self.positions = table[0].to(x.dtype)
        return x + positions[at]


class LeanState:
    """What has been read, and the memory; see the module's docstring for the shapes."""

    def __init__(self, across: list[tuple[Tensor, Tensor]], is_real: Tensor | None) -> None:
        sources, _, length, _ = across[0][0].shape
        more = -length % LANE if length else LANE
        self.across = [longer(pair, more) for pair in across]
        hidden = (torch.arange(length + more) >= length).repeat(sources, 1)
        if is_real is not None:
            hidden[:, :length] = ~is_real
        blind = hidden.all(dim=1)  # a source without a token gives zeros
        for _, v in self.across:
            v[blind] = 0
        hidden &= ~blind[:, None]
        self.memory_mask = across[0][0].new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))  # [sources, M]
        self._shown: dict[int, Tensor] = {}
        self.within: list[tuple[Tensor, Tensor]] = []
        self.length = 0
        self.mask = self.memory_mask

    def shown(self, key_heads: int) -> Tensor:
        """The memory's mask for so many heads of each source, [sources · Hkv, 1, M]; made once for all layers."""
        if key_heads not in self._shown:
            self._shown[key_heads] = self.memory_mask.repeat_interleave(key_heads, dim=0)[:, None]
        return self._shown[key_heads]

    def make_room(self, layers: list[Layer], x: Tensor) -> None:
        """Buffers with a slot for the coming token, and the mask of all slots up to it, [1, 1, slots]."""
        size = self.within[0][0].shape[2] if self.within else 0
        if size == 0:
            self.within = [layer.attention.room(len(x), x) for layer in layers]
        elif size == self.length:
            self.within = [longer(pair, size) for pair in self.within]
        slots = self.length + 1 + -(self.length + 1) % LANE
        self.mask = x.new_zeros(1, 1, slots)
        self.mask[..., self.length + 1 :] = float("-inf")

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """As `Cache.reorder`."""

        def pick(pair: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
            return pair[0].index_select(0, rows), pair[1].index_select(0, rows)

        self.within = [pick(pair, rows) for pair in self.within]
        if sources is None or len(sources) < len(self.memory_mask):
            kept = rows if sources is None else sources
            self.across = [pick(pair, kept) for pair in self.across]
            self.memory_mask = self.memory_mask.index_select(0, kept)
            self._shown.clear()


def longer(pair: tuple[Tensor, Tensor], slots: int) -> tuple[Tensor, Tensor]:
    """So many more slots, of zeros; contiguous."""
    k, v = (F.pad(x, (0, 0, 0, slots)) if slots else x.contiguous() for x in pair)
    return k, v


class Layer:
    """One block: attention to what was written, attention to the memory, feed-forward, each with its surroundings."""

    def __init__(self, block: Block) -> None:
        assert block.cross is not None and block.cross_norm is not None
        assert isinstance(block.feedforward, FeedForward)
        self.attention, self.cross = Attention(block.attention), Attention(block.cross)
        self.work = partial(work, block.feedforward)
        norms = (block.attention_norm, block.cross_norm, block.feedforward_norm)
        self.add_attention, self.add_cross, self.add_feedforward = (residual(block, norm) for norm in norms)

    def remember(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.cross.part.project_memory(memory)

    def step(self, x: Tensor, state: LeanState, within: tuple[Tensor, Tensor], across: tuple[Tensor, Tensor]) -> Tensor:
        x = self.add_attention(x, lambda h: self.attention.within(h, *within, state.mask, state.length))
        x = self.add_cross(x, lambda h: self.cross.across(h, *across, state.shown(self.cross.key_heads)))
        return self.add_feedforward(x, self.work)


class Attention:
    def __init__(self, part: MultiHead) -> None:
        self.part, self.heads, self.key_heads = part, part.heads, part.key_heads
        self.group = part.heads // part.key_heads
        self.size, self.value_size = part.config.key_dim, part.config.val_dim
        self.scale = self.size**-0.5 if part.config.scale is None else part.config.scale

    def room(self, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (like.new_zeros(rows, self.key_heads, LANE, size) for size in (self.size, self.value_size))
        return k, v

    def within(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, place: int) -> Tensor:
        """x [rows, dim]; its key and value go to slot `place` of the buffers."""
        project = self.part.qkv
        q, k, v = F.linear(x, project.weight, project.bias).split(self.part.sizes, dim=-1)
        keys.select(2, place).copy_(k.view(len(x), self.key_heads, -1))
        values.select(2, place).copy_(v.view(len(x), self.key_heads, -1))
        slots = mask.shape[-1]
        return self._attend(q, keys[:, :, :slots], values[:, :, :slots], mask)

    def across(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """x [rows, dim], several rows a source; keys and values of the memory, mask [sources · Hkv, 1, M]."""
        project = self.part.q
        return self._attend(F.linear(x, project.weight, project.bias), keys, values, mask)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """q [rows, H · D]; keys, values [sources, Hkv, slots, D]; mask [1 | sources · Hkv, 1, slots], added."""
        sources, beams = len(keys), len(q) // len(keys)
        # heads that share keys and beams that share a source are queries of one small product
        asked = q.view(sources, beams, self.key_heads, self.group, self.size).transpose(1, 2)
        asked = asked.reshape(sources * self.key_heads, beams * self.group, self.size)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        weights = torch.baddbmm(mask, asked, keys.transpose(1, 2), alpha=self.scale).softmax(dim=-1)
        heads = torch.bmm(weights, values).view(sources, self.key_heads, beams, self.group, self.value_size)
        out = self.part.out
        return F.linear(heads.transpose(1, 2).reshape(len(q), -1), out.weight, out.bias)


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
