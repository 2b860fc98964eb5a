"""Recorded search: every step the same work on the same memory, so that a GPU can replay it.

`regard.predict.beam` reads back after every token which sentences are closed, and lets them leave. That is right where
computing costs time. On a GPU a small model's step costs little and reading back costs much: a kernel is launched in
8 µs, runs in 2, and every question waits for all of them. So here nothing is read back and nothing changes its shape;
closed sentences are carried along, and one step,

    read tokens -> logits -> 2 · beam best extensions -> finished ones into the tables -> live ones reorder the cache

is recorded as a CUDA graph and replayed, and so is the encoder. The kernels of a small model do not fill a GPU: a few
batches are in progress at once, each in a stream of its own, and whether all sentences of one are closed is looked up
when the others have been given work. The rules are those of `regard.predict.beam`; `regard.predict.replay` records
generation in the same way.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.models.folder import cudnn_attention
from regard.models.transformer import Decoder, EncoderDecoder, State
from regard.nn.block import Memory
from regard.nn.cache import Cache, Pair
from regard.nn.mask import Positions
from regard.predict.beam import Beams, Greedy
from regard.predict.config import SearchConfig
from regard.predict.engine import known, parts_of, traced
from regard.predict.next_token import check_scores
from regard.predict.outputs import Hypothesis

# Held while work that may be recorded as a graph is launched: a recording fails if another thread launches then.
TURN = threading.RLock()
POSITIONS = ("sinusoidal", "learned", "relative", "t5", "rope", "none")
Name = TypeVar("Name")
Shape = TypeVar("Shape")
Recorded = TypeVar("Recorded")
Graphs = dict[str | int, torch.cuda.CUDAGraph | None]  # None: done once, not yet recorded
Key = tuple[SearchConfig, int, int, int, int, int]  # what a search is made for: see `_taken`
ASK = 4  # steps between two questions whether all sentences are closed
LANES = 4  # batches in progress at once
SHAPES = 12  # searches kept ready, each with its memory
REACH = 32  # slots of the cache that a step attends to are a multiple of this
LONGEST = 512  # tokens of an output; longer ones are better searched step by step


def recordable(model: EncoderDecoder | Decoder) -> bool:
    """Whether a step does the same work for all values and reads none back; what is not known is not recorded."""
    config, parts = model.config, parts_of(model)
    return (
        config.position in POSITIONS
        and config.attention in ("fused", "reference")
        and config.experts == 0
        and config.causal  # it excludes slots that are not yet written
        and not config.pruned
        and not traced(parts)
        and known(parts)
    )


def keep_ready(ready: OrderedDict[Shape, Recorded], key: Shape, one: Recorded, most: int) -> None:
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
        length = read.length
        for layer in read._layers:
            first, pair = read.stored(layer)
            if layer not in self._layers:
                self._layers[layer] = self._allocate(*pair, rows)
            for slots, stored in zip(self._layers[layer], pair, strict=True):
                slots[:, :, first:length] = stored
                slots[:, :, :first] = slots[:, :, length:] = 0  # masked, but NaN times a weight of 0 would still be NaN
        self.read.fill_(length)

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows in this order, in place; the memory stays, because rows stay with their source."""
        for keys, values in self._layers.values():
            both = together(keys, values)
            for buffer in (keys[None], values[None]) if both is None else (both,):
                wide = buffer.shape[-1] * buffer.element_size() % 16 == 0  # words of 16 bytes are copied faster
                part = (buffer.view(torch.complex128) if wide else buffer).narrow(3, 0, self.reach)
                part.copy_(part.index_select(1, rows))


def together(k: Tensor, v: Tensor) -> Tensor | None:
    """Both as one tensor [2, …], if they have the same layout in one storage, as slices of one projection do."""
    alike = k.shape == v.shape and k.stride() == v.stride()
    if not alike or k.untyped_storage()._cdata != v.untyped_storage()._cdata:
        return None
    apart = v.storage_offset() - k.storage_offset()
    return k.as_strided((2, *k.shape), (apart, *k.stride()), k.storage_offset()) if apart > 0 else None


def replay(graphs: Graphs, key: str | int, work: Callable[[], None], is_cuda: bool, **options: Any) -> None:
    """On a GPU: the first time `work` is done as it is, the second time it is recorded, from then on replayed."""
    if not is_cuda or key not in graphs:
        with cudnn_attention():  # the shapes are fixed
            work()
        graphs[key] = None
        return
    if (graph := graphs[key]) is None:
        graph = torch.cuda.CUDAGraph()
        with cudnn_attention(), torch.cuda.graph(graph, **options):  # records, does not run
            work()
        graphs[key] = graph
    graph.replay()


class RecordedSearches:
    """Recorded searches by shape, made when first needed. Sizes are rounded up, so that few shapes serve all batches.

    Each serves one batch at a time: it is taken and given back, so several threads may search with the same model.
    """

    def __init__(self, model: EncoderDecoder, bos: int, eos: int) -> None:
        self.model, self.bos, self.eos = model, bos, eos
        self.device = next(model.parameters()).device
        self.lanes = [torch.cuda.Stream(self.device) for _ in range(LANES)] if self.device.type == "cuda" else [None]
        self.ready: OrderedDict[Key, RecordedSearch] = OrderedDict()

    def fits(self, config: SearchConfig) -> bool:
        """Whether this search can be done in fixed shapes, with outputs of up to LONGEST tokens."""
        return recordable(self.model) and not (config.sample or config.coverage_penalty or config.no_repeat_ngram)

    def search_all(
        self, batches: Iterable[tuple[Name, Tensor, Tensor | None]], config: SearchConfig
    ) -> Iterator[tuple[Name, list[list[Hypothesis]]]]:
        """As `beam`, for batches of token ids [B, S]: the results of each by its name, in the order they are ready."""
        waiting, live = iter(batches), deque[tuple[Name, Key, RecordedSearch]]()
        free = list(range(len(self.lanes)))
        try:
            while True:
                while free and (batch := next(waiting, None)) is not None:
                    name, source, is_real = batch
                    with TURN:
                        limits = config.limits(source, is_real)
                        key, search = self._taken(source, limits, config, free.pop())
                        search.start(source, is_real, limits)
                    live.append((name, key, search))
                if not live:
                    return
                name, key, search = live.popleft()
                with TURN:
                    if not search.finished():
                        search.advance()
                        live.append((name, key, search))
                        continue
                    results = search.results()
                    keep_ready(self.ready, key, search, SHAPES)
                free.append(key[4])
                yield name, results
        finally:  # an error, or the rest is not wanted: a GPU may still be writing into these
            with TURN:
                for _, key, search in live:
                    search.finished()
                    keep_ready(self.ready, key, search, SHAPES)

    def _taken(self, source: Tensor, limits: list[int], config: SearchConfig, lane: int) -> tuple[Key, RecordedSearch]:
        sentences = 1 << (len(source) - 1).bit_length()  # the next power of two
        weights = next(self.model.parameters()).data_ptr()  # their address: a graph reads them there
        key = (config, sentences, _up(source.shape[1], 16), _up(max(limits), 32), lane, weights)
        search = self.ready.pop(key, None)
        return key, search or RecordedSearch(self.model, *key[:4], self.bos, self.eos, self.lanes[lane])


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


class RecordedSearch:
    """A search of up to `sentences` sentences of `length` tokens, with outputs of `capacity` tokens."""

    def __init__(
        self,
        model: EncoderDecoder,
        config: SearchConfig,
        sentences: int,
        length: int,
        capacity: int,
        bos: int,
        eos: int,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.model, self.bos, self.stream, self.capacity = model, bos, stream, capacity
        like = next(model.parameters())
        self.device = device = like.device
        self.live = (Greedy if config.beam == 1 else Beams)(config, sentences, capacity, eos, like, recorded=True)
        self.cache = FixedCache(capacity, device)
        self.source = torch.zeros(sentences, length, dtype=torch.long, device=device)
        self.is_real = torch.zeros(sentences, length, dtype=torch.bool, device=device)
        # The keys and values of cross attention are in the cache, once per sentence.
        nothing = torch.empty(sentences, length, 0, device=device)
        memory = Memory(nothing, Positions(torch.arange(length, device=device)[None], self.is_real))
        self.state = State(self.cache, memory)
        self.all_closed = torch.zeros((), dtype=torch.bool, pin_memory=stream is not None)  # as the CPU knows it
        self.event = None if stream is None else torch.cuda.Event()
        self.graphs: Graphs = {}

    def _here(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @torch.inference_mode()
    def start(self, source: Tensor, is_real: Tensor | None, limits: list[int]) -> None:
        """Read token ids [B, S] and begin; no output is longer than its limit."""
        count, length = source.shape
        self.count, self.steps, self.most = count, 0, max(limits)
        if self.stream is not None:  # weights and new buffers may still be on their way
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._here():
            self.source.zero_()
            self.source[:count, :length] = source.to(self.device)
            self.is_real.zero_()
            self.is_real[:, 0] = True  # a row without a sentence has something to attend to, too
            self.is_real[:count, :length] = True if is_real is None else is_real.to(self.device)
            self.live.start(torch.tensor(limits, device=self.device))
            replay(self.graphs, "read", self.read, self.stream is not None, stream=self.stream)
        self.advance()

    @torch.inference_mode()
    def advance(self) -> None:
        """A few steps more, without waiting for them."""
        with self._here():
            for _ in range(min(ASK, self.most - self.steps)):
                self.cache.reach = min(_up(self.steps + 1, REACH), self.capacity)
                replay(self.graphs, self.cache.reach, self.step, self.stream is not None, stream=self.stream)
                self.steps += 1
            self.all_closed.copy_(self.live.closed.all(), non_blocking=True)
            if self.event is not None:
                self.event.record()

    def finished(self) -> bool:
        """Whether the steps launched so far have closed all sentences."""
        if self.event is not None:
            self.event.synchronize()
        return self.steps >= self.most or bool(self.all_closed)

    def read(self) -> None:
        """The memory of the sources. No shape depends on a value, and nothing is read back."""
        memory = self.model.encode(self.source, self.is_real)
        for layer, block in enumerate(self.model.decoder.blocks):
            new = block.cross.project_memory(memory.states)  # type: ignore[union-attr, operator]
            if layer not in self.cache.memory:
                self.cache.memory[layer] = torch.empty_like(new[0]), torch.empty_like(new[1])
            for buffer, part in zip(self.cache.memory[layer], new, strict=True):
                buffer.copy_(part)
        self.cache.read.zero_()
        self.live.tokens.fill_(self.bos)

    def step(self) -> None:
        """One more token for every hypothesis. No shape depends on a value, and nothing is read back."""
        rows = self.live.advance(self.model.step(self.live.tokens, self.state)[:, -1])
        if rows is not None:
            self.cache.reorder(rows)

    def results(self) -> list[list[Hypothesis]]:
        """The `n_best` best hypotheses of each sentence."""
        with self._here():
            sentences = torch.arange(self.count, device=self.device)
            check_scores(self.live.totals[: self.count, 0].tolist())
            return self.live.results(sentences)
