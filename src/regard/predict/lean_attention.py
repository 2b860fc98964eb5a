"""What a lean step attends to: the tokens so far, and a memory, in layouts that one matmul reads (see `lean`).

    OneRow      tokens so far of one row: a matmul writes queries, keys and values where attention reads them
    Rows        tokens so far of several rows, which a search reorders
    Across      memories of several sources; the beams of a source attend to its memory [sources, Hkv, M, D] together
    AcrossOne   a single short memory, multiplied by the projections of queries and outputs

The keys and values of a memory are computed for all layers at once. With those of a single short source,
cross-attention is a softmax between two small matmuls; with head h of H, and all heads side by side,

    q_h k_hᵀ = x (W_q,h k_hᵀ)         (Σ over h)  weights_h v_h W_o,h = weights (v_h W_o,h)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.multihead import MultiHead

SMALL = 2**18  # numbers of a weight that are multiplied with a row before oneDNN has begun
LANE = 16  # float32 numbers of a vector register: a softmax over a multiple of them is up to 9 times as fast


class LeanMultiHead:
    """The projections of a `MultiHead`: queries, keys and values of x, and the output.

    Of cross-attention: the queries of x and the output; `Memories` has the keys and values.
    """

    def __init__(self, part: MultiHead, is_cross: bool = False) -> None:
        project, config = part.q if is_cross else part.qkv, part.config
        self.part, self.project = part, Linear(project.weight, project.bias)
        self.out = Linear(part.out.weight, part.out.bias)
        self.heads, self.key_heads, self.sizes = part.heads, part.key_heads, part.sizes
        self.own_sizes = [part.sizes[0], part.sizes[1] + part.sizes[2]]  # queries; keys and values
        self.group = part.heads // part.key_heads  # heads that share a key/value head
        self.key_dim, self.val_dim, self.scale = config.key_dim, config.val_dim, config.scale


class OneRow:
    """What a single row has read so far: queries, keys and values side by side, [layers, capacity, (H + 2 Hkv) · D].

    A matmul writes them where attention reads them, and all layers have the same shapes: few views are needed.
    """

    def __init__(self, layers: Sequence[LeanMultiHead], buffer: Tensor) -> None:
        self.layers, self.buffer = layers, buffer
        heads, key_heads, size = layers[0].heads, layers[0].key_heads, layers[0].key_dim
        queries, keys, values = buffer.unflatten(2, (-1, size)).split((heads, key_heads, key_heads), dim=2)
        self.queries = queries.unflatten(2, (key_heads, -1))
        self.keys, self.values = keys.permute(0, 2, 3, 1).unbind(0), values.transpose(1, 2).unbind(0)

    @classmethod
    def empty(cls, layers: Sequence[LeanMultiHead], rows: int, like: Tensor) -> OneRow:
        return cls(layers, like.new_zeros(len(layers), LANE, sum(layers[0].sizes)))

    def grown(self) -> OneRow:
        return OneRow(self.layers, F.pad(self.buffer, (0, 0, 0, LANE)))

    def open(self, slot: int) -> None:
        """The next token is stored in `slot`."""
        self.slots = self.buffer.narrow(1, slot, 1).unbind(0)
        self.new = self.queries.select(1, slot).unbind(0)

    def select(self, rows: Tensor) -> Rows:
        one, count = self.layers[0], len(rows)
        pairs = self.buffer[:, :, one.sizes[0] :].unflatten(2, (2, 1, one.key_heads, one.key_dim))
        return Rows(self.layers, pairs.permute(0, 2, 3, 4, 1, 5).repeat(1, 1, count, 1, 1, 1).unbind(0))

    def attend(self, layer: int, mask: Tensor, x: Tensor) -> Tensor:
        """x [1, dim], whose keys and values are stored in the slot that is open; mask [1, 1, capacity], added."""
        lean = self.layers[layer]
        lean.project.write(self.slots[layer], x)
        weights = torch.baddbmm(mask, self.new[layer], self.keys[layer], alpha=lean.scale).softmax(dim=-1)
        return lean.out(torch.bmm(weights, self.values[layer]).view(1, -1))


class Rows:
    """Keys and values of the tokens so far of several rows, by layer: [2, rows, Hkv, capacity, D] each."""

    def __init__(self, layers: Sequence[LeanMultiHead], buffers: Sequence[Tensor]) -> None:
        self.layers, self.buffers = layers, buffers
        matrices = [buffer.flatten(1, 2) for buffer in buffers]  # [2, rows · Hkv, capacity, D]
        self.keys, self.values = [one.select(0, 0).mT for one in matrices], [one.select(0, 1) for one in matrices]

    @classmethod
    def empty(cls, layers: Sequence[LeanMultiHead], rows: int, like: Tensor) -> Rows:
        return cls(layers, [like.new_zeros(2, rows, one.key_heads, LANE, one.key_dim) for one in layers])

    def grown(self) -> Rows:
        return Rows(self.layers, [F.pad(buffer, (0, 0, 0, LANE)) for buffer in self.buffers])

    def open(self, slot: int) -> None:
        """The next token is stored in `slot`."""
        self.slots = [buffer.select(3, slot) for buffer in self.buffers]  # [2, rows, Hkv, D]

    def select(self, rows: Tensor) -> Rows:
        return Rows(self.layers, [buffer.index_select(1, rows) for buffer in self.buffers])

    def attend(self, layer: int, mask: Tensor, x: Tensor) -> Tensor:
        """As of `OneRow`; x [rows, dim]."""
        lean, size = self.layers[layer], self.layers[layer].key_dim
        queries, new = lean.project(x).split_with_sizes(lean.own_sizes, dim=1)
        self.slots[layer].copy_(new.view(len(x), 2, -1, size).transpose(0, 1))
        # heads that share keys are queries of one small matmul
        weights = torch.baddbmm(mask, queries.reshape(-1, lean.group, size), self.keys[layer], alpha=lean.scale)
        return lean.out(torch.bmm(weights.softmax(dim=-1), self.values[layer]).view(len(x), -1))


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
        self.project = Linear(torch.cat([*itertools.chain(*keys_and_values)]), biases)  # to [2 · G · D]
        # [H, D, dim] and [H, D, 1]: what a short memory is multiplied by
        views = [(part, one.heads, one.scale) for part, one in zip(parts, layers, strict=True)]
        self.q = torch.cat([part.q.weight.view(heads, size, -1) * scale for part, heads, scale in views])
        self.q_bias = None
        if parts[0].q.bias is not None:
            self.q_bias = torch.cat([part.q.bias.view(heads, size, 1) * scale for part, heads, scale in views])
        self.out = torch.cat([part.out.weight.view(-1, heads, size).permute(1, 2, 0) for part, heads, _ in views])
        self.out_biases = [self.out.new_zeros(1) if part.out.bias is None else part.out.bias.detach() for part in parts]
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


class Linear:
    """x -> x Wᵀ + b, in single precision with W in the layout of oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias, size = weight.detach(), None if bias is None else bias.detach(), len(weight)
        self.packed = self.halves = None
        if weight.dtype == torch.float32 and torch.backends.mkldnn.is_available():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            self.multiply = torch.ops.mkldnn._linear_pointwise.default
            if weight.numel() <= SMALL and self.bias is not None:
                self.parts = parts = 2 if size % 2 == 0 else 1
                self.biases = self.bias.view(parts, 1, -1)
                self.halves = self.weight.view(parts, size // parts, -1).mT

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        if self.halves is None or x.shape[0] != 1:
            return self.multiply(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return torch.baddbmm(self.biases, x.expand(self.parts, -1, -1), self.halves).view(1, -1)

    def write(self, out: Tensor, x: Tensor) -> None:
        """The output of a single row x to `out` [1, size]."""
        if self.halves is None:
            out.copy_(self(x))
        else:
            torch.baddbmm(self.biases, x.expand(self.parts, -1, -1), self.halves, out=out.view(self.parts, 1, -1))
