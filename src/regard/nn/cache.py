"""The KV cache: keys and values that a decoder has already computed.

Token t attends to tokens 0 … t. Their keys and values do not change, so they are stored and only those of the new
token are computed: N steps cost O(N²) attention instead of O(N³). Memory of one cache:

    2 · layers · batch · kv_heads · length · head_dim · bytes per element        (Shazeer 2019)

The cache is separate from the model. It also stores the positions of the keys, so that the masks and positions of a
cached step are those of the whole sequence. Keys are stored after rotation. A causal layer with a window of w tokens
needs the last w - 1 keys alone: its buffer rolls, and its memory does not grow with the length (Mistral 7B, Jiang et
al. 2023). The keys and values of the encoder output
(cross-attention) are computed once and stored too. Linear attention stores one state per layer instead, whose size does
not depend on the length (`regard.nn.linear_attention`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.nn.mask import Positions

Pair = tuple[Tensor, Tensor]  # keys and values


class Cache:
    """Grows by doubling; with `capacity`, the final length, nothing is copied."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.positions: Positions | None = None
        self._layers: dict[int, Pair] = {}  # buffers [B, Hkv, capacity, D]
        self.memory: dict[int, Pair] = {}  # cross-attention, [sources, Hkv, M, D]
        self.reaches: dict[int, int] = {}  # layers that attend to the last n tokens alone
        self.longest: int | None = None  # of these numbers; None: there are layers that attend to all tokens
        self.dropped: dict[int, int] = {}  # how many of the first tokens are no longer stored, by reach
        self.skipped = 0  # how many of the first positions are no longer stored
        self._first: dict[int, int] = {}  # the token in the first slot of the buffers of a layer
        self.states: dict[int, Pair] = {}  # linear attention: S, and the logarithm of its scale

    @property
    def length(self) -> int:
        return 0 if self.positions is None else self.skipped + self.positions.length  # not `__len__`, as in `Positions`

    def next_positions(self, count: int, device: torch.device, is_real: Tensor | None = None) -> Positions:
        """Positions of `count` new tokens after those in the cache."""
        known = self.positions
        if known is None:
            return Positions.of(count, device, is_real)
        if known.start is not None and is_real is None:
            return Positions.of(count, device, start=known.start + known.length)
        ends = known.pos + 1 if known.is_real is None else torch.where(known.is_real, known.pos + 1, 0)
        new = Positions.of(count, device, is_real)
        return Positions(ends.amax(dim=1, keepdim=True) + new.pos, is_real)

    def add(self, new: Positions) -> Positions:
        """Append the positions of new tokens, once per forward pass; returns those of all keys that are stored."""
        known, before = self.positions, self.length
        if new.start is not None and (known is None or known.start is not None):  # index and position are the same
            for reach in self.reaches.values():
                self.dropped[reach] = max(0, before - reach + 1)
        if known is None:
            self.positions = new
        elif known.start is not None and new.start == known.start + known.length:
            kept = known.length if self.longest is None else min(known.length, self.longest - 1)
            self.skipped += known.length - kept
            self.positions = Positions.of(kept + new.length, new.pos.device, start=new.start - kept)
        else:
            rows = max(known.rows, new.rows)
            pos = torch.cat((known.pos.expand(rows, -1), new.pos.expand(rows, -1)), dim=1)
            self.positions = Positions(pos, torch.cat((_is_real(known, rows), _is_real(new, rows)), dim=1))
        return self.positions

    def keys_of(self, reach: int | None, keys: Positions) -> tuple[Positions, int]:
        """Of `keys`, which `add` returned, those of layers with this reach, and the index of the first of them."""
        first = self.skipped if reach is None else self.dropped.get(reach, self.skipped)
        missing = first - self.skipped
        if not missing:
            return keys, first
        start = None if keys.start is None else keys.start + missing
        return Positions(*keys.apply(lambda x: x[:, missing:]), start), first

    def extend(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        """Append the new keys and values [B, Hkv, n, D] of one layer; returns views of all that it attends to."""
        end, count, reach = self.length, k.shape[2], self.reaches.get(layer)
        start = end - count
        needed = 0 if reach is None else self.dropped.get(reach, 0)  # the first token that is still attended to
        first = self._first.get(layer, 0)
        buffers = self._layers.get(layer)
        if buffers is None or buffers[0].shape[2] < end - first:
            size = max(end, self.capacity, 2 * start)
            if reach is not None:
                size = max(end - needed, min(size, 2 * reach))
            old, kept = buffers, start - needed
            if old is None or not size <= old[0].shape[2] <= 2 * size:  # a long prompt leaves more than is needed
                buffers = k.new_empty(*k.shape[:2], size, k.shape[3]), v.new_empty(*v.shape[:2], size, v.shape[3])
            if old is not None and buffers is not None:
                for source, new in zip(old, buffers, strict=True):
                    part = source[:, :, needed - first : start - first]
                    new[:, :, :kept] = part.clone() if source is new else part
            assert buffers is not None
            self._layers[layer], first = buffers, needed
            self._first[layer] = first
        keys, values = buffers
        keys.narrow(2, start - first, count).copy_(k)
        values.narrow(2, start - first, count).copy_(v)
        return keys.narrow(2, needed - first, end - needed), values.narrow(2, needed - first, end - needed)

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """The layers whose keys and values are stored."""
        return tuple(self._layers)

    def stored(self, layer: int) -> tuple[int, Pair]:
        """The first token of one layer that is stored, and the keys and values from it on."""
        first, (keys, values) = self._first.get(layer, 0), self._layers[layer]
        return first, (keys[:, :, : self.length - first], values[:, :, : self.length - first])

    def attend_memory(self, layer: int, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of cross-attention over a stored memory.

        The rows of a source (the hypotheses of a beam) share one row of keys. Cross-attention has no positions, so
        their queries become one longer row: [sources · beams, H, Nq, D] -> [sources, H, beams · Nq, D].
        """
        k, v = self.memory[layer]
        if k.shape[0] < q.shape[0]:
            q = q.view(k.shape[0], -1, *q.shape[1:]).transpose(1, 2).flatten(2, 3)
        return q, k, v

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order, as beam search does; a row may be taken more than once.

        With `sources`, the rows are groups of equal size, one for each source that is kept (in order, none twice);
        the keys and values of a memory are then stored once per source, not once per row.
        """

        def pick(pair: Pair, rows: Tensor) -> Pair:
            return pair[0].index_select(0, rows), pair[1].index_select(0, rows)

        self._layers = {layer: pick(pair, rows) for layer, pair in self._layers.items()}
        self.states = {layer: pick(pair, rows) for layer, pair in self.states.items()}
        kept = rows if sources is None else sources
        for layer, pair in self.memory.items():
            if sources is None or sources.shape[0] < pair[0].shape[0]:
                self.memory[layer] = pick(pair, kept)
        self.positions = None if self.positions is None else self.positions.reorder(rows)

    @property
    def nbytes(self) -> int:
        """Memory of the self-attention buffers, used or not, and of the states."""
        return sum(buffer.nbytes for pair in (*self._layers.values(), *self.states.values()) for buffer in pair)


def _is_real(positions: Positions, rows: int) -> Tensor:
    is_real = torch.ones_like(positions.pos, dtype=torch.bool) if positions.is_real is None else positions.is_real
    return is_real.expand(rows, -1)
