"""Lean steps for a CPU: the model's formulas and weights as plain tensor operations.

A small model's step is short on a CPU: 64 tokens cost a layer of width 128 a few 10 µs per matmul. Modules that can
be traced, compiled, trained and given any mask then cost as much as the matmuls. With few rows, a matmul is limited by
reading its weights, and most of the time is lost where their layout is that of training. These engines compute the
same numbers, up to rounding, from tensors alone:

    x [rows, dim]                     one token per row, no axis of length 1
    k, v [rows, Hkv, capacity, D]     buffers of zeros; a multiple of 16 slots takes part, masked ones at -inf
    attention                         softmax(mask + scale · q kᵀ) v as two batched matmuls; the beams of a sentence
                                      attend to its memory [sources, Hkv, M, D] together
    W                                 a copy in the blocked layout of oneDNN, made once for a model

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
from regard.nn.multihead import MultiHead
from regard.nn.position import Learned, Rotation, rotate

LANE = 16  # float32 numbers of a vector register: a softmax over a multiple of them is up to 9 times as fast


class Lean:
    """An encoder-decoder whose `step` is lean, and its encoder too if `encodes`; embeddings are the model's.

    The model is not kept alive, so that an engine can be kept for as long as its model lives.
    """

    def __init__(self, model: EncoderDecoder, *, encodes: bool = True) -> None:
        self.model: Any = weakref.proxy(model)
        self.encoder = [Layer(block) for block in model.encoder.blocks] if encodes else None
        self.embed_norm, self.norm = norm_of(model.encoder.embed_norm), norm_of(model.encoder.norm)
        self.layers = [Layer(block) for block in model.decoder.blocks]
        self.first, self.last = norm_of(model.decoder.embed_norm), norm_of(model.decoder.norm)
        self.positions = torch.empty(0)  # position embeddings, [positions, dim]; the table grows by doubling
        self.project = linear(model.output_head.project.weight, model.output_head.bias)

    def start(self, source: Tensor, is_real: Tensor | None = None) -> LeanState:
        return LeanState(self.model, self.encode(source, is_real), is_real)

    def encode(self, source: Tensor, is_real: Tensor | None) -> Tensor:
        """The states of the encoder [sources, length, dim]."""
        if self.encoder is None or not source.numel():
            states: Tensor = self.model.encode(source, is_real).states
            return states
        x, position = self.model.source_embedding(source), self.model.encoder.position
        positions = Positions.of(x.shape[1], x.device, is_real)
        if isinstance(position, Learned):
            position.check_length(positions, 0)
        table, shape = position.embed(positions.pos), x.shape
        x = self.embed_norm(x if table is None else x + table.to(x.dtype)).flatten(0, 1)
        mask = None if is_real is None else is_real[:, None, None]
        for layer in self.encoder:
            x = layer.step(x, partial(attend_all, layer.attention, mask, shape[:2]))
        return self.norm(x).view(shape)

    def step(self, tokens: Tensor, state: LeanState) -> Tensor:
        """Read `tokens` [rows, 1]; logits [rows, 1, vocab_size] of the next one."""
        x, slot, position = self.model.target_embedding(tokens)[:, 0], state.length, self.model.decoder.position
        positions = self.positions  # another thread may replace it by a shorter table
        if slot >= len(positions):
            if isinstance(position, Learned):
                position.check_length(Positions.of(1, x.device, start=slot), slot)
            size = 2 * slot or 64
            size = min(size, position.config.max_length) if position.config.position == "learned" else size
            table = position.embed(torch.arange(size)[None])
            self.positions = positions = x.new_zeros(size, 1) if table is None else table[0].to(x.dtype)
        x = self.first(x + positions[slot])
        if state.within[0][0].shape[2] == slot:
            state.within = [(F.pad(k, (0, 0, 0, LANE)), F.pad(v, (0, 0, 0, LANE))) for k, v in state.within]
        mask = x.new_zeros(1, 1, state.within[0][0].shape[2])
        mask[..., slot + 1 :] = float("-inf")
        for layer, (k, v), (memory_k, memory_v, memory_mask) in zip(
            self.layers, state.within, state.across, strict=True
        ):
            within = partial(attend_self, layer.attention, k, v, mask, slot)
            across = partial(attend_memory, layer.cross, memory_k, memory_v, memory_mask)
            x = layer.step(x, within, across)
        state.length += 1
        return self.project(self.model.output_head.transform(self.last(x)))[:, None]


class LeanState:
    """Keys and values by layer, of the tokens so far and of the memory, the latter with their mask."""

    def __init__(self, model: EncoderDecoder, states: Tensor, is_real: Tensor | None = None) -> None:
        """`states` [sources, length, dim] are those of the encoder."""
        sources, length = states.shape[:2]
        more = -length % LANE if length else LANE
        masked = (torch.arange(length + more) >= length).repeat(sources, 1)
        if is_real is not None:
            masked[:, :length] = ~is_real
        empty = masked.all(dim=1)  # attention to a source without a token gives zeros
        masked &= ~empty[:, None]
        mask = states.new_zeros(masked.shape).masked_fill(masked, float("-inf"))[:, None, None]  # [sources, 1, 1, M]
        self.length = 0
        self.within: list[Any] = []  # (k, v): [rows, Hkv, capacity, D]
        self.across: list[Any] = []  # (k, v, mask): [sources, Hkv, M, D] and [sources, Hkv, 1, M]
        blocks: Any = model.decoder.blocks
        for own, cross in ((block.attention, block.cross) for block in blocks):
            shape, config = (sources, own.key_heads, LANE), own.config
            self.within.append((states.new_zeros(*shape, config.key_dim), states.new_zeros(*shape, config.val_dim)))
            k, v = (F.pad(x, (0, 0, 0, more)).contiguous() for x in cross.project_memory(states))
            v[empty] = 0
            self.across.append((k, v, mask.repeat(1, cross.key_heads, 1, 1)))

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """As `Cache.reorder`."""
        used = -(-self.length // LANE) * LANE
        self.within = [tuple(x[:, :, :used].index_select(0, rows) for x in parts) for parts in self.within]
        if sources is None or len(sources) < len(self.across[0][0]):
            kept = rows if sources is None else sources
            self.across = [tuple(x.index_select(0, kept) for x in parts) for parts in self.across]


def attend_self(lean: LeanMultiHead, keys: Tensor, values: Tensor, mask: Tensor, slot: int, x: Tensor) -> Tensor:
    """x [rows, dim]; keys, values [rows, Hkv, M, D], where those of x are stored in `slot`; mask [1, 1, M], added."""
    rows, key_heads = len(x), lean.key_heads
    q, k, v = lean.project(x).split(lean.sizes, dim=-1)
    keys.select(2, slot).copy_(k.view(rows, key_heads, lean.key_dim))
    values.select(2, slot).copy_(v.view(rows, key_heads, lean.val_dim))
    # heads that share keys are queries of one small matmul
    queries = q.reshape(rows * key_heads, lean.group, lean.key_dim)
    weights = torch.baddbmm(mask, queries, keys.flatten(0, 1).mT, alpha=lean.scale).softmax(dim=-1)
    return lean.out(torch.bmm(weights, values.flatten(0, 1)).view(rows, -1))


def attend_all(lean: LeanMultiHead, mask: Tensor | None, shape: tuple[int, int], x: Tensor) -> Tensor:
    """x [B · N, dim], shape (B, N); mask [B, 1, 1, N]: which tokens are real."""
    q, k, v = lean.project(x).split(lean.sizes, dim=-1)
    q, k = (part.view(*shape, -1, lean.key_dim).transpose(1, 2) for part in (q, k))
    v = v.view(*shape, -1, lean.val_dim).transpose(1, 2)
    heads = F.scaled_dot_product_attention(q, k, v, mask, scale=lean.scale, enable_gqa=lean.group > 1)
    return lean.out(heads.transpose(1, 2).reshape(len(x), -1))


def attend_memory(lean: LeanMultiHead, keys: Tensor, values: Tensor, mask: Tensor, x: Tensor) -> Tensor:
    """x [rows, dim]; keys, values [sources, Hkv, M, D]; mask [sources, Hkv, 1, M], added."""
    sources, key_heads, group = len(keys), lean.key_heads, lean.group
    beams = len(x) // sources
    # so are beams that share a source
    queries = lean.project(x).view(sources, beams, key_heads, group, lean.key_dim).transpose(1, 2)
    queries = queries.reshape(sources * key_heads, beams * group, lean.key_dim)
    weights = torch.baddbmm(mask.flatten(0, 1), queries, keys.flatten(0, 1).mT, alpha=lean.scale).softmax(dim=-1)
    heads = torch.bmm(weights, values.flatten(0, 1)).view(sources, key_heads, beams, group, lean.val_dim)
    return lean.out(heads.transpose(1, 2).reshape(len(x), -1))


class LeanDecoder:
    """A decoder whose step for one token is lean; several tokens at once are read by the model."""

    def __init__(self, model: Decoder) -> None:
        self.model: Any = weakref.proxy(model)
        self.project = linear(model.output_head.project.weight, model.output_head.bias)
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


class LeanMultiHead:
    """The projections of a `MultiHead`: queries, keys and values of x, or the queries alone, and the output."""

    def __init__(self, part: MultiHead, is_cross: bool = False) -> None:
        project, config = part.q if is_cross else part.qkv, part.config
        self.part, self.project = part, linear(project.weight, project.bias)
        self.out = linear(part.out.weight, part.out.bias)
        self.key_heads, self.group, self.sizes = part.key_heads, part.heads // part.key_heads, part.sizes
        self.key_dim, self.val_dim, self.scale = config.key_dim, config.val_dim, config.scale


class Layer:
    """One `Block` without dropout: each sub-layer with its norm and its residual connection."""

    def __init__(self, block: Any) -> None:
        self.pre_norm, self.residual = block.pre_norm, block.residual
        self.attention = LeanMultiHead(block.attention)
        self.cross: Any = None if block.cross is None else LeanMultiHead(block.cross, is_cross=True)
        norms = (block.attention_norm, block.cross_norm, block.feedforward_norm)
        self.norms = [norm_of(norm) for norm in norms if norm is not None]
        up, down = (linear(one.weight, one.bias) for one in (block.feedforward.up, block.feedforward.down))
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


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x -> x Wᵀ + b, in single precision with W in the layout of oneDNN."""
    weight = weight.detach()
    if weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return lambda x: F.linear(x, weight, bias)
    packed, multiply = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


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
