"""The key/value cache: what a decoder has already computed and need not compute again.

Token t attends to tokens 0 … t. Their keys and values do not change, so they are kept and only the new
token's are computed: N steps cost O(N²) attention instead of O(N³). Memory of one cache:

    2 · layers · batch · kv_heads · length · head_dim · bytes per number        (Shazeer 2019)

The cache stands beside the model, not in it. It also keeps where each key stands (`positions`: position,
validity), so that the masks and positions of a cached step are those of the whole sequence. Keys are
stored after rotation. The keys and values of a memory (cross attention) are computed once and kept too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.nn.mask import Positions


class Cache:
    """Grows by doubling; give `capacity` when the final length is known, and nothing is copied twice."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.positions: Positions | None = None
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # buffers [B, Hkv, capacity, D]
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}  # cross attention, [sources, Hkv, M, D]

    def __len__(self) -> int:
        return 0 if self.positions is None else len(self.positions)

    def next_positions(self, count: int, device: torch.device, is_real: Tensor | None = None) -> Positions:
        """Positions of `count` new tokens after those that are here."""
        known = self.positions
        if known is None:
            return Positions.of(count, device, is_real)
        if known.start is not None and is_real is None:
            return Positions.of(count, device, start=len(known))
        seen = known.pos + 1 if known.is_real is None else torch.where(known.is_real, known.pos + 1, 0)
        fresh = Positions.of(count, device, is_real)
        return Positions(seen.amax(dim=1, keepdim=True) + fresh.pos, is_real)

    def add(self, new: Positions) -> Positions:
        """Take in the positions of new tokens; gives those of all keys. Called once a forward pass."""
        known = self.positions
        if known is None:
            self.positions = new
        elif known.start is not None and new.start == known.start + len(known):
            self.positions = Positions.of(len(known) + len(new), new.pos.device, start=known.start)
        else:
            rows = max(known.rows, new.rows)
            pos = torch.cat((known.pos.expand(rows, -1), new.pos.expand(rows, -1)), dim=1)
            self.positions = Positions(pos, torch.cat((_is_real(known, rows), _is_real(new, rows)), dim=1))
        return self.positions

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's new keys and values [B, Hkv, n, D]; gives views of all of them."""
        end, count = len(self), k.shape[2]
        start = end - count
        buffers = self._layers.get(layer)
        if buffers is None or buffers[0].shape[2] < end:
            size = max(end, self.capacity, 2 * start)
            grown = k.new_empty(*k.shape[:2], size, k.shape[3]), v.new_empty(*v.shape[:2], size, v.shape[3])
            if buffers is not None:
                for old, new in zip(buffers, grown, strict=True):
                    new[:, :, :start] = old[:, :, :start]
            buffers = self._layers[layer] = grown
        keys, values = buffers
        keys.narrow(2, start, count).copy_(k)
        values.narrow(2, start, count).copy_(v)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order, as beam search does; a row may be taken more than once.

        With `sources` the rows are groups of equal size, one for each source kept (in their order, none twice);
        a memory's keys and values then stand there once a source, not once a row.
        """

        def pick(pair: tuple[Tensor, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
            return pair[0].index_select(0, rows), pair[1].index_select(0, rows)

        self._layers = {layer: pick(pair, rows) for layer, pair in self._layers.items()}
        kept = rows if sources is None else sources
        for layer, pair in self.memory.items():
            if sources is None or len(sources) < len(pair[0]):
                self.memory[layer] = pick(pair, kept)
        self.positions = None if self.positions is None else self.positions.reorder(rows)

    @property
    def nbytes(self) -> int:
        """Memory of the self-attention buffers, filled or not."""
        return sum(buffer.nbytes for pair in self._layers.values() for buffer in pair)


class FixedCache(Cache):
    """All slots from the start, and the length as a tensor: every step has the same shapes and positions in memory.

    That is what a CUDA graph can record. Slots not yet written stand in the future, so a causal mask hides them; those
    behind `reach` are left out, so that a short text need not attend to room for a long one.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        super().__init__(capacity)
        self.reach = capacity
        self.read = torch.zeros((), dtype=torch.long, device=device)  # tokens read so far
        self.slots = torch.arange(capacity, device=device)[None]

    def next_positions(self, count: int, device: torch.device, is_real: Tensor | None = None) -> Positions:
        return Positions(self.read + self.slots[:, :count])

    def add(self, new: Positions) -> Positions:
        self.coming = new.pos[0]
        self.read += new.length
        return Positions(self.slots[:, : self.reach])

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            self._layers[layer] = self._room(k, v, k.shape[0])
        keys, values = self._layers[layer]
        slots, new = together(keys, values), together(k, v)
        if slots is not None and new is not None:  # one kernel instead of two
            slots.index_copy_(3, self.coming, new)
        else:
            keys.index_copy_(2, self.coming, k)
            values.index_copy_(2, self.coming, v)
        return keys.narrow(2, 0, self.reach), values.narrow(2, 0, self.reach)

    def _room(self, k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        shapes = [(rows, x.shape[1], self.capacity, x.shape[3]) for x in (k, v)]
        if shapes[0] == shapes[1]:
            both = k.new_zeros(2, *shapes[0])
            return both[0], both[1]
        return k.new_zeros(shapes[0]), v.new_zeros(shapes[1])

    def take(self, read: Cache, rows: int) -> None:
        """Begin again with what a growing cache holds; where that is one row, it serves all `rows`."""
        length = len(read)
        for layer, pair in read._layers.items():
            if layer not in self._layers:
                self._layers[layer] = self._room(*pair, rows)
            for slots, given in zip(self._layers[layer], pair, strict=True):
                slots[:, :, :length] = given[:, :, :length]
                slots[:, :, length:] = 0  # hidden, but a number that is none would be seen even so
        self.read.fill_(length)

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order, in place; the memory stays, as rows keep to their source."""
        for keys, values in self._layers.values():
            both = together(keys, values)
            for buffer in (keys[None], values[None]) if both is None else (both,):
                part = _words(buffer).narrow(3, 0, self.reach)
                part.copy_(part.index_select(1, rows))


def together(k: Tensor, v: Tensor) -> Tensor | None:
    """Both as one tensor [2, …], where they lie alike in one memory, as parts of one product do."""
    alike = k.shape == v.shape and k.stride() == v.stride()
    if not alike or k.untyped_storage()._cdata != v.untyped_storage()._cdata:
        return None
    apart = v.storage_offset() - k.storage_offset()
    return k.as_strided((2, *k.shape), (apart, *k.stride()), k.storage_offset()) if apart > 0 else None


def _words(x: Tensor) -> Tensor:
    """The same memory [..., D] in words of 16 bytes, if D fills them: fewer and larger pieces to move."""
    return x.view(torch.complex128) if x.shape[-1] * x.element_size() % 16 == 0 else x


def _is_real(positions: Positions, rows: int) -> Tensor:
    is_real = torch.ones_like(positions.pos, dtype=torch.bool) if positions.is_real is None else positions.is_real
    return is_real.expand(rows, -1)
