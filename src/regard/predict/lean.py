"""Lean steps for a CPU: the model's formulas and weights as plain tensor operations.

A small model's step is short on a CPU: 64 tokens cost a layer of width 128 a few 10 µs per matmul. Modules that can
be traced, compiled, trained and given any mask then cost as much as the matmuls. With few rows, a matmul is limited by
reading its weights, and most of the time is lost where their layout is that of training. These engines compute the
same numbers, up to rounding, from tensors alone:

    x [rows, dim]                     one token per row, no axis of length 1
    k, v [2, rows, Hkv, capacity, D]  one buffer of zeros; a multiple of 16 slots takes part, masked ones at -inf
    attention                         softmax(mask + scale · q kᵀ) v as two batched matmuls; the beams of a sentence
                                      attend to its memory [sources, Hkv, M, D] together
    W                                 a copy in the blocked layout of oneDNN, made once for a model; small ones for a
                                      single row as they are, in two halves, one per core: oneDNN takes 10 µs before
                                      it begins to multiply

The keys and values of a memory are computed for all layers at once. Those of a single short source are also multiplied
by the projections of queries and outputs, and cross-attention is then a softmax between two small matmuls. With head h
of H, and all heads side by side,

    q_h k_hᵀ = x (W_q,h k_hᵀ)         (Σ over h)  weights_h v_h W_o,h = weights (v_h W_o,h)

What they do not know (biases, windows, experts, learned scores, tracing, autocast, half precision) is left to the
model itself: `regard.predict.engine` decides.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
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

SMALL = 2**18  # numbers of a weight that are multiplied with a row before oneDNN has begun
LANE = 16  # float32 numbers of a vector register: a softmax over a multiple of them is up to 9 times as fast


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
        self.embed, self.scale = partial(torch.embedding, embedding.tokens.weight), embedding.scale
        self.transform = model.output_head.transform
        self.source_positions = PositionTable(model.encoder.position)
        self.target_positions = PositionTable(model.decoder.position)
        self.project = linear(model.output_head.project.weight, model.output_head.bias)

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
        mask = state.next_slot()
        for layer, own, across in zip(self.layers, state.own, state.across, strict=True):
            x = layer.step(x, partial(attend_self, layer.attention, own, mask, slot), across)
        state.length += 1
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
            self.table = table = like.new_zeros(size, 1) if embedded is None else embedded[0].to(like.dtype)
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
        self.own = [Own(states.new_zeros(2, sources, one.key_heads, LANE, one.key_dim)) for one in attention]
        self.across = engine.memories.read(states, is_real)

    def next_slot(self) -> Tensor:
        """Make room for one more token; the mask with its slot."""
        if self.length == self.mask.shape[2]:
            self.mask = F.pad(self.mask, (0, LANE), value=float("-inf"))
            self.own = [Own(F.pad(own.buffer, (0, 0, 0, LANE))) for own in self.own]
        self.mask.select(2, self.length).zero_()
        return self.mask

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """As `Cache.reorder`."""
        self.own = [Own(own.buffer.index_select(1, rows)) for own in self.own]
        if sources is None or len(sources) < self.across[0].sources:
            self.across = [across.select(rows if sources is None else sources) for across in self.across]


class Own:
    """Keys and values of the tokens so far: one buffer [2, rows, Hkv, capacity, D], and matrices of it."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        matrices = buffer.flatten(1, 2)  # [2, rows · Hkv, capacity, D]
        self.keys, self.values = matrices.select(0, 0).mT, matrices.select(0, 1)


def attend_self(lean: LeanMultiHead, own: Own, mask: Tensor, slot: int, x: Tensor) -> Tensor:
    """x [rows, dim], whose keys and values are stored in `slot`; mask [1, 1, capacity], added."""
    rows, size, heads = x.shape[0], lean.key_dim, lean.key_heads
    queries, new = lean.project(x).split_with_sizes(lean.own_sizes, dim=1)
    own.buffer.select(3, slot).copy_(new.view(rows, 2, heads, size).transpose(0, 1))
    # heads that share keys are queries of one small matmul
    queries = queries.reshape(rows * heads, lean.group, size)
    weights = torch.baddbmm(mask, queries, own.keys, alpha=lean.scale).softmax(dim=-1)
    return lean.out(torch.bmm(weights, own.values).view(rows, -1))


def attend_all(lean: LeanMultiHead, mask: Tensor | None, shape: tuple[int, int], x: Tensor) -> Tensor:
    """x [B · N, dim], shape (B, N); mask [B, 1, 1, N]: which tokens are real."""
    q, k, v = lean.project(x).split(lean.sizes, dim=-1)
    q, k = (part.view(*shape, -1, lean.key_dim).transpose(1, 2) for part in (q, k))
    v = v.view(*shape, -1, lean.val_dim).transpose(1, 2)
    heads = F.scaled_dot_product_attention(q, k, v, mask, scale=lean.scale, enable_gqa=lean.group > 1)
    return lean.out(heads.transpose(1, 2).reshape(len(x), -1))


class Across:
    """Attention to memories: k, v [sources, Hkv, M, D] and their mask [sources, 1, 1, M], added."""

    def __init__(self, lean: LeanMultiHead, k: Tensor, v: Tensor, mask: Tensor) -> None:
        self.lean, self.sources, self.parts = lean, len(k), (k, v, mask)
        self.keys, self.values = k.flatten(0, 1).mT, v.flatten(0, 1)
        self.mask = mask.expand(-1, lean.key_heads, -1, -1).flatten(0, 1)

    def select(self, rows: Tensor) -> Across:
        return Across(self.lean, *(part.index_select(0, rows) for part in self.parts))

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, dim], the same number of rows for each source."""
        lean, sources = self.lean, self.sources
        beams, key_heads, group = x.shape[0] // sources, lean.key_heads, lean.group
        # beams that share a source are queries of one small matmul, and so are heads that share keys
        queries = lean.project(x).view(sources, beams, key_heads, group, lean.key_dim).transpose(1, 2)
        queries = queries.reshape(sources * key_heads, beams * group, lean.key_dim)
        weights = torch.baddbmm(self.mask, queries, self.keys, alpha=lean.scale).softmax(dim=-1)
        heads = torch.bmm(weights, self.values).view(sources, key_heads, beams, group, lean.val_dim)
        return lean.out(heads.transpose(1, 2).reshape(x.shape[0], -1))


class AcrossOne:
    """Attention to one short memory, with the projections of queries and outputs multiplied into keys and values.

    scores, outputs [H, M, dim], bias [H, M].
    """

    sources = 1

    def __init__(self, scores: Tensor, bias: Tensor, outputs: Tensor, out_bias: Tensor) -> None:
        self.shape, self.bias, self.out_bias = bias.shape, bias.flatten(), out_bias
        self.scores, self.outputs = scores.flatten(0, 1).t(), outputs.flatten(0, 1)

    def select(self, rows: Tensor) -> AcrossOne:
        return self  # there is one source

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, dim]"""
        scores = torch.addmm(self.bias, x, self.scores)
        weights = scores.view(x.shape[0], *self.shape).softmax(dim=-1)
        return torch.addmm(self.out_bias, weights.view(scores.shape), self.outputs)


class Memories:
    """The cross-attention of all layers to the states of an encoder: one matmul gives their keys and values.

    G and H are the key/value heads and the heads of all layers together.
    """

    @torch.no_grad()
    def __init__(self, layers: Sequence[LeanMultiHead]) -> None:
        parts, size = [one.part for one in layers], layers[0].key_dim
        self.layers, self.size = layers, size
        self.heads, self.key_heads = [one.heads for one in layers], [one.key_heads for one in layers]
        keys_and_values = zip(*(part.kv.weight.chunk(2) for part in parts), strict=True)
        biases = None
        if parts[0].kv.bias is not None:
            biases = torch.cat([*itertools.chain(*zip(*(part.kv.bias.chunk(2) for part in parts), strict=True))])
        self.project = linear(torch.cat([*itertools.chain(*keys_and_values)]), biases)  # to [2 · G · D]
        # [H, D, dim] and [H, D, 1]: what a short memory is multiplied by
        views = [(part, one.heads, one.scale) for part, one in zip(parts, layers, strict=True)]
        self.q = torch.cat([part.q.weight.view(heads, size, -1) * scale for part, heads, scale in views])
        self.q_bias = None
        if parts[0].q.bias is not None:
            self.q_bias = torch.cat([part.q.bias.view(heads, size, 1) * scale for part, heads, scale in views])
        self.out = torch.cat([part.out.weight.view(-1, heads, size).permute(1, 2, 0) for part, heads, _ in views])
        self.out_biases = [self.out.new_zeros(1) if part.out.bias is None else part.out.bias for part in parts]
        groups = torch.tensor([one.group for one in layers for _ in range(one.key_heads)])
        self.key_of = torch.arange(len(groups)).repeat_interleave(groups) if any(groups > 1) else None  # of each head

    def read(self, states: Tensor, is_real: Tensor | None) -> list[Across | AcrossOne]:
        """By layer; states [sources, length, dim]."""
        sources, length = states.shape[:2]
        is_short = sources == 1 and 0 < max(self.heads) * length <= 2 * states.shape[2]
        shape = (sources, length, 2, sum(self.key_heads), self.size)
        k, v = self.project(states.flatten(0, 1)).view(shape).permute(2, 0, 3, 1, 4)  # [sources, G, length, D] each
        more = 0 if is_short else -length % LANE if length else LANE
        mask = states.new_zeros(sources, length + more)
        mask[:, length:] = float("-inf")
        if is_real is not None or not length:
            real = torch.ones(sources, 0, dtype=torch.bool) if is_real is None else is_real
            empty = ~real.any(dim=1, keepdim=True)  # attention to a source without a token gives zeros
            mask[:, :length].masked_fill_(~real, float("-inf"))
            mask.masked_fill_(empty, 0)
            v = v.masked_fill(empty[..., None, None], 0)
        if is_short:
            return self._multiply(k[0], v[0], mask)
        across = list[Across | AcrossOne]()
        for layer, *pair in zip(self.layers, *(x.split(self.key_heads, dim=1) for x in (k, v)), strict=True):
            keys, values = (F.pad(x, (0, 0, 0, more)) for x in pair) if more else pair
            across.append(Across(layer, keys, values, mask[:, None, None]))
        return across

    def _multiply(self, k: Tensor, v: Tensor, mask: Tensor) -> list[Across | AcrossOne]:
        """k, v [G, M, D]; mask [1, M], added."""
        if self.key_of is not None:
            k, v = k[self.key_of], v[self.key_of]
        scores, outputs = torch.bmm(k, self.q), torch.bmm(v, self.out)  # [H, M, dim]
        bias = mask.expand(len(k), -1)
        if self.q_bias is not None:
            bias = torch.baddbmm(mask.mT, k, self.q_bias)[..., 0]
        by_layer = (x.split(self.heads) for x in (scores, bias, outputs))
        return [AcrossOne(*parts) for parts in zip(*by_layer, self.out_biases, strict=True)]


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
    """The projections of a `MultiHead`: queries, keys and values of x, and the output.

    Of cross-attention: the queries of x and the output; `Memories` has the keys and values.
    """

    def __init__(self, part: MultiHead, is_cross: bool = False) -> None:
        project, config = part.q if is_cross else part.qkv, part.config
        self.part, self.project = part, linear(project.weight, project.bias)
        self.out = linear(part.out.weight, part.out.bias)
        self.heads, self.key_heads, self.sizes = part.heads, part.key_heads, part.sizes
        self.own_sizes = [part.sizes[0], part.sizes[1] + part.sizes[2]]  # queries; keys and values
        self.group = part.heads // part.key_heads  # heads that share a key/value head
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
    if weight.numel() > SMALL or bias is None:
        return lambda x: multiply(x, packed, bias, "none", [], "")
    size, parts = len(weight), 2 if len(weight) % 2 == 0 else 1
    halves, biases = weight.view(parts, size // parts, -1).mT, bias.detach().view(parts, 1, -1)

    def project(x: Tensor) -> Tensor:
        if x.shape[0] != 1:
            return multiply(x, packed, bias, "none", [], "")
        return torch.baddbmm(biases, x.expand(parts, -1, -1), halves).view(1, size)

    return project


def norm_of(module: Any) -> Callable[[Tensor], Tensor]:
    match module:
        case nn.LayerNorm():
            shape, weight, bias, eps = module.normalized_shape, module.weight, module.bias, module.eps
            return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
        case nn.RMSNorm():
            return partial(F.rms_norm, normalized_shape=module.normalized_shape, weight=module.weight, eps=module.eps)
        case nn.Identity():
            return lambda x: x
        case _:
            raise TypeError(f"norm {type(module).__name__}: the lean decoder does not know it")
