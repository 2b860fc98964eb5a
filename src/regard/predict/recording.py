"""What recorded decoding needs: a cache in fixed shapes, and the rules for recording a step as a CUDA graph.

A small model's decoding step is some two hundred kernels of 2 to 5 µs; launched one by one from Python, each costs
more than it computes. A CUDA graph launches all of them at once, but replays them with the same shapes and addresses
and cannot read a value back. `regard.predict.recorded` records searches, `regard.predict.replay` generation.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TypeVar

import torch
from torch import Tensor

from regard.models.transformer import Decoder, EncoderDecoder
from regard.nn.cache import Cache, Pair
from regard.nn.mask import Positions
from regard.predict.engine import known, traced

# Held while work that may be recorded as a graph is launched: a recording fails if another thread launches then.
TURN = threading.RLock()
POSITIONS = ("sinusoidal", "learned", "relative", "t5", "rope", "none")
Key = TypeVar("Key")
Recorded = TypeVar("Recorded")


def recordable(model: EncoderDecoder | Decoder) -> bool:
    """Whether a step does the same work for all values and reads none back; what is not known is not recorded."""
    config = model.config
    return (
        config.position in POSITIONS
        and config.attention in ("fused", "reference")
        and config.experts == 0
        and not config.pruned
        and not traced(model)
        and known(model)
    )


def keep_ready(ready: OrderedDict[Key, Recorded], key: Key, one: Recorded, most: int) -> None:
    """Keep what was recorded for the next use of its shape; beyond `most` the least recently used is dropped."""
    ready[key] = one
    if len(ready) > most:
        ready.popitem(last=False)


class FixedCache(Cache):
    """All slots exist from the start, and the number of tokens read is a tensor: every step has the same shapes.

    Slots that are not yet written have positions in the future, so the causal mask excludes them; those beyond
    `reach` are left out, so that a short text does not attend to space for a long one.
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

    def extend(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        if layer not in self._layers:
            self._layers[layer] = self._allocate(k, v, k.shape[0])
        keys, values = self._layers[layer]
        slots, new = together(keys, values), together(k, v)
        if slots is not None and new is not None:  # one kernel instead of two
            slots.index_copy_(3, self.coming, new)
        else:
            keys.index_copy_(2, self.coming, k)
            values.index_copy_(2, self.coming, v)
        return keys.narrow(2, 0, self.reach), values.narrow(2, 0, self.reach)

    def _allocate(self, k: Tensor, v: Tensor, rows: int) -> Pair:
        shapes = [(rows, x.shape[1], self.capacity, x.shape[3]) for x in (k, v)]
        if shapes[0] == shapes[1]:
            both = k.new_zeros(2, *shapes[0])
            return both[0], both[1]
        return k.new_zeros(shapes[0]), v.new_zeros(shapes[1])

    def take(self, read: Cache, rows: int) -> None:
        """Restart with the contents of a growing cache; if that has one row, all `rows` get a copy."""
        length = len(read)
        for layer, pair in read._layers.items():
            if layer not in self._layers:
                self._layers[layer] = self._allocate(*pair, rows)
            for slots, stored in zip(self._layers[layer], pair, strict=True):
                slots[:, :, :length] = stored[:, :, :length]
                slots[:, :, length:] = 0  # masked, but NaN times a weight of 0 would still be NaN
        self.read.fill_(length)

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order, in place; the memory stays, because rows stay with their source."""
        for keys, values in self._layers.values():
            both = together(keys, values)
            for buffer in (keys[None], values[None]) if both is None else (both,):
                part = _words(buffer).narrow(3, 0, self.reach)
                part.copy_(part.index_select(1, rows))


def together(k: Tensor, v: Tensor) -> Tensor | None:
    """Both as one tensor [2, …], if they have the same layout in one storage, as slices of one projection do."""
    alike = k.shape == v.shape and k.stride() == v.stride()
    if not alike or k.untyped_storage()._cdata != v.untyped_storage()._cdata:
        return None
    apart = v.storage_offset() - k.storage_offset()
    return k.as_strided((2, *k.shape), (apart, *k.stride()), k.storage_offset()) if apart > 0 else None


def _words(x: Tensor) -> Tensor:
    """The same memory [..., D] in words of 16 bytes, if D fills them: fewer and larger elements to copy."""
    return x.view(torch.complex128) if x.shape[-1] * x.element_size() % 16 == 0 else x
