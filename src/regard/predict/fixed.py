"""Search in fixed shapes: every step the same work on the same memory, so that a GPU can replay it.

`regard.predict.beam` asks the processor after every token which sentences are closed, and lets them go. That
is right where work costs time. On a GPU a small model's step costs little and asking costs much: a kernel is
launched in 8 µs, runs in 2, and every question waits for all of them. So here nothing is asked and nothing
changes its shape; the whole search is tensors, closed sentences are carried along, and one step,

    read tokens -> logits -> 2 · beam best extensions -> finished ones into the table -> live ones reorder the cache

is recorded as a CUDA graph and replayed, and so is the reading of the sources. The kernels of a small model do not
fill a GPU: a few batches are under way at once, each in a stream of its own, and whether all sentences of one are
closed is looked up when the others have been given work. The rules, and so the answers, are those of `beam`, whose
docstring has them:

    totals   [n, beam]     live hypotheses           found_*  [n, beam]     finished ones, best first
    written  [n · beam, capacity] their tokens       closed   [n]           nothing more to find
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from regard.models.transformer import EncoderDecoder, State
from regard.nn.block import Memory
from regard.nn.mask import Positions
from regard.predict.beam import extensions, foremost, ordered
from regard.predict.config import SearchConfig
from regard.predict.fixed_cache import FixedCache, recordable
from regard.predict.search import TURN, Hypothesis, check_scores, keep_ready, length_limits, log_probabilities

Name = TypeVar("Name")
Key = tuple[SearchConfig, int, int, int, int, int]  # what a search is made for: see `_taken`
ASK = 4  # steps between two questions whether all sentences are closed
LANES = 4  # batches under way at once
SHAPES = 12  # searches kept ready, each with its memory
REACH = 32  # slots of the cache that a step sees are a multiple of this
LONGEST = 512  # tokens of an answer; room for longer ones is better found step by step


class FixedSearches:
    """Searches by shape, made when first needed. Sizes are rounded up, so that few shapes serve all batches.

    Each serves one batch at a time: it is taken and given back, so several threads may search with the same model.
    """

    def __init__(self, model: EncoderDecoder, bos: int, eos: int) -> None:
        self.model, self.bos, self.eos = model, bos, eos
        self.device = next(model.parameters()).device
        self.lanes = [torch.cuda.Stream(self.device) for _ in range(LANES)] if self.device.type == "cuda" else [None]
        self.ready: OrderedDict[Key, FixedSearch] = OrderedDict()

    def fits(self, config: SearchConfig, limits: list[int]) -> bool:
        """Whether this search can be done in fixed shapes."""
        plain = not (config.sample or config.coverage_penalty or config.no_repeat_ngram)
        return plain and max(limits) <= LONGEST and recordable(self.model.config) and self.model.decoder.tap is None

    def search(self, source: Tensor, is_real: Tensor | None, config: SearchConfig) -> list[list[Hypothesis]]:
        """As `beam`, for token ids [B, S]."""
        return next(self.search_all([(None, source, is_real)], config))[1]

    def search_all(
        self, batches: Iterable[tuple[Name, Tensor, Tensor | None]], config: SearchConfig
    ) -> Iterator[tuple[Name, list[list[Hypothesis]]]]:
        """The answers to each batch by its name, in the order in which they are found."""
        waiting, live = iter(batches), deque[tuple[Name, Key, FixedSearch]]()
        free = list(range(len(self.lanes)))
        try:
            while True:
                while free and (given := next(waiting, None)) is not None:
                    name, source, is_real = given
                    with TURN:
                        limits = length_limits(source, is_real, config)
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
                    found = search.answers()
                    keep_ready(self.ready, key, search, SHAPES)
                free.append(key[4])
                yield name, found
        finally:  # an error, or nobody wants the rest: a GPU may still be writing into these
            with TURN:
                for _, key, search in live:
                    search.finished()
                    keep_ready(self.ready, key, search, SHAPES)

    def _taken(self, source: Tensor, limits: list[int], config: SearchConfig, lane: int) -> tuple[Key, FixedSearch]:
        sentences = 1 << (len(source) - 1).bit_length()  # the next power of two
        weights = next(self.model.parameters()).data_ptr()  # where they are: a graph reads them there
        key = (config, sentences, _up(source.shape[1], 16), _up(max(limits), 32), lane, weights)
        found = self.ready.pop(key, None)
        if found is None:
            kind = FixedGreedy if config.beam == 1 else FixedBeam
            found = kind(self.model, *key[:4], self.bos, self.eos, self.lanes[lane])
        return key, found


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


class FixedSearch(ABC):
    """Search for up to `sentences` sentences of `length` tokens, answers of `capacity`; see `FixedSearches`."""

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
        self.model, self.config, self.bos, self.eos, self.stream = model, config, bos, eos, stream
        self.sentences, self.capacity, table = sentences, capacity, next(model.parameters())
        self.device, self.exact = table.device, torch.promote_types(table.dtype, torch.float32)
        rows, device = sentences * config.beam, self.device
        self.cache = FixedCache(capacity, device)
        self.source = torch.zeros(sentences, length, dtype=torch.long, device=device)
        self.is_real = torch.zeros(sentences, length, dtype=torch.bool, device=device)
        # what cross attention needs of the memory stands in the cache, once a sentence
        nothing = torch.empty(sentences, length, 0, device=device)
        self.state = State(
            self.cache, Memory(nothing, Positions(torch.arange(length, device=device)[None], self.is_real))
        )
        self.t = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.written = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.limits = torch.zeros(sentences, dtype=torch.long, device=device)
        self.closed = torch.zeros(sentences, dtype=torch.bool, device=device)
        penalties = [config.penalty(count) for count in range(capacity + 2)]
        self.penalties = torch.tensor(penalties, dtype=self.exact, device=device)
        self.told = torch.zeros((), dtype=torch.bool, pin_memory=stream is not None)  # whether all are closed
        self.event = None if stream is None else torch.cuda.Event()
        self.graphs: dict[str, torch.cuda.CUDAGraph | None] = {}  # None: done once, not yet recorded

    def _here(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @torch.inference_mode()
    def start(self, source: Tensor, is_real: Tensor | None, limits: list[int]) -> None:
        """Read token ids [B, S] and begin; no answer shall be longer than its limit."""
        count, length = source.shape
        self.count, self.steps, self.most = count, 0, max(limits)
        if self.stream is not None:  # weights and new buffers may still be on their way
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._here():
            self.source.zero_()
            self.source[:count, :length] = source.to(self.device)
            self.is_real.zero_()
            self.is_real[:, 0] = True  # a row without a sentence has something to look at, too
            self.is_real[:count, :length] = True if is_real is None else is_real.to(self.device)
            self.limits.fill_(self.capacity)
            self.limits[:count] = torch.tensor(limits, device=self.device)
            self.closed.fill_(True)
            self.closed[:count] = False
            self._do("read", self.read)
        self.advance()

    @torch.inference_mode()
    def advance(self) -> None:
        """A few steps more, without waiting for them."""
        with self._here():
            for _ in range(min(ASK, self.most - self.steps)):
                self.cache.reach = min(_up(self.steps + 1, REACH), self.capacity)
                self._do(f"step {self.cache.reach}", self.step)
                self.steps += 1
            self.told.copy_(self.closed.all(), non_blocking=True)
            if self.event is not None:
                self.event.record()

    def finished(self) -> bool:
        """Whether the steps asked for so far have closed all sentences."""
        if self.event is not None:
            self.event.synchronize()
        return self.steps >= self.most or bool(self.told)

    def _do(self, name: str, work: Callable[[], None]) -> None:
        """On a GPU: the first time as it is, the second time recorded, from then on replayed."""
        if self.stream is None or name not in self.graphs:
            work()
            self.graphs[name] = None
            return
        graph = self.graphs[name]
        if graph is None:
            graph = self.graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):  # records, does not run
                work()
        graph.replay()

    def read(self) -> None:
        """The memory of the sources, and empty tables. No shape depends on a value, and nothing is read back."""
        memory = self.model.encode(self.source, self.is_real)
        for layer, block in enumerate(self.model.decoder.blocks):
            new = block.cross.project_memory(memory.states)  # type: ignore[union-attr, operator]
            if layer not in self.cache.memory:
                self.cache.memory[layer] = torch.empty_like(new[0]), torch.empty_like(new[1])
            for buffer, part in zip(self.cache.memory[layer], new, strict=True):
                buffer.copy_(part)
        self.cache.read.zero_()
        self.t.zero_()
        self.tokens.fill_(self.bos)
        self.clear()

    @abstractmethod
    def clear(self) -> None:
        """Empty tables."""

    @abstractmethod
    def step(self) -> None:
        """One more token for every hypothesis. No shape depends on a value, and nothing is read back."""

    @abstractmethod
    def answers(self) -> list[list[Hypothesis]]:
        """The `n_best` best hypotheses of each sentence."""


class FixedGreedy(FixedSearch):
    """Beam 1: the first </s> is the end."""

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        self.totals = torch.zeros(self.sentences, dtype=self.exact, device=self.device)
        self.length = torch.zeros(self.sentences, dtype=torch.long, device=self.device)  # </s> included

    def clear(self) -> None:
        self.totals.zero_()
        self.length.zero_()

    def step(self) -> None:
        scores = log_probabilities(self.model.step(self.tokens, self.state)[:, -1])  # [n, vocab_size]
        scores[:, self.eos].masked_fill_(self.t < self.config.min_length, float("-inf"))
        best, tokens = scores.max(dim=1)
        self.totals += torch.where(self.closed, 0.0, best)
        self.length += ~self.closed
        self.written.index_copy_(1, self.t, tokens[:, None])
        self.tokens.copy_(tokens[:, None])
        self.t += 1
        self.closed |= (tokens == self.eos) | (self.limits == self.t)

    def answers(self) -> list[list[Hypothesis]]:
        with self._here():
            scores = self.totals / self.penalties[self.length]
            tables = [table[: self.count].tolist() for table in (scores, self.totals, self.length, self.written)]
        check_scores(tables[1])
        found = []
        for score, total, length, tokens in zip(*tables, strict=True):
            ended = tokens[length - 1] == self.eos
            found.append([Hypothesis(tokens[: length - ended], score, total, ended)])
        return found


class FixedBeam(FixedSearch):
    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        shape, device = (self.sentences, self.config.beam), self.device
        self.totals, self.found_total, self.found_score = torch.zeros(3, *shape, dtype=self.exact, device=device)
        self.found_tokens = torch.zeros(*shape, self.capacity, dtype=torch.long, device=device)
        self.found_length = torch.zeros(shape, dtype=torch.long, device=device)
        self.found_ended = torch.zeros(shape, dtype=torch.bool, device=device)

    def clear(self) -> None:
        for table in (self.totals, self.found_score):
            table.fill_(float("-inf"))
        self.totals[:, 0] = 0.0

    def step(self) -> None:
        size, length = self.config.beam, self.t + 1
        scores = log_probabilities(self.model.step(self.tokens, self.state)[:, -1])  # [n · beam, vocab_size]
        early = self.t < self.config.min_length
        scores[:, self.eos].masked_fill_(early, float("-inf"))
        values, tokens = ordered(*foremost(scores, min(2 * size, scores.shape[1])))
        totals, tokens, rows = extensions(values.to(self.totals), tokens, self.totals, 2 * size, self.eos)
        ends, full = tokens == self.eos, (self.limits == length)[:, None]
        taken = (ends | full)[:, :size] & (totals[:, :size] > float("-inf")) & ~self.closed[:, None]
        self._finish(taken, totals[:, :size], tokens[:, :size], rows[:, :size], length)
        # the first `beam` that go on; where </s> stands among them for want of others, that beam is dead
        order = ends.int().sort(dim=1, stable=True).indices[:, :size]
        totals = totals.masked_fill(ends, float("-inf")).gather(1, order)
        self._close(totals[:, 0], length)
        rows, tokens = rows.gather(1, order).flatten(), tokens.gather(1, order).view(-1, 1)
        self.totals.copy_(totals)
        self.tokens.copy_(tokens)
        self.written.copy_(self.written.index_select(0, rows))
        self.written.index_copy_(1, self.t, tokens)
        self.cache.reorder(rows)
        self.t += 1

    def _finish(self, taken: Tensor, totals: Tensor, tokens: Tensor, rows: Tensor, length: Tensor) -> None:
        """Merge what ends here [n, beam] into the table of the finished; of equal ones the earlier stays in front."""
        score = torch.where(taken, totals / self.penalties[length], float("-inf"))
        score, order = torch.cat((self.found_score, score), dim=1).sort(dim=1, descending=True, stable=True)
        order = order[:, : self.config.beam]
        ended = tokens == self.eos
        text = self.written[rows].index_copy(2, self.t, torch.where(ended, 0, tokens)[..., None])
        self.found_score.copy_(score[:, : self.config.beam])
        for table, new in (
            (self.found_total, totals),
            (self.found_length, torch.where(ended, self.t, length)),
            (self.found_ended, ended),
        ):
            table.copy_(torch.cat((table, new), dim=1).gather(1, order))
        both = torch.cat((self.found_tokens, text), dim=1)
        self.found_tokens.copy_(both.gather(1, order[..., None].expand(-1, -1, self.capacity)))

    def _close(self, best: Tensor, length: Tensor) -> None:
        """Sentences whose best live total can no longer pass the worst of the finished."""
        config, worst = self.config, self.found_score[:, -1]
        if config.early_stopping or config.beam == 1:
            settled = worst > float("-inf")
        else:
            mildest = self.penalties[self.limits] if config.length_penalty >= 0 else self.penalties[length + 1]
            settled = (worst > float("-inf")) & (best / mildest <= worst)
        self.closed |= (self.limits == length) | (best == float("-inf")) | settled

    def answers(self) -> list[list[Hypothesis]]:
        tables = (self.found_score, self.found_total, self.found_length, self.found_ended, self.found_tokens)
        with self._here():
            best = self.totals[: self.count, 0].tolist()
            columns = [table[: self.count, : self.config.n_best].tolist() for table in tables]
        check_scores(best)
        answers = []
        for row in zip(*columns, strict=True):
            answers.append(
                [
                    Hypothesis(tokens[:length], score, total, ended)
                    for score, total, length, ended, tokens in zip(*row, strict=True)
                    if score > float("-inf")
                ]
            )
        return answers
