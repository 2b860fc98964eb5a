"""Beam search in fixed shapes: every step the same work on the same memory, so that a GPU can replay it.

`regard.decode.beam` asks the processor after every token which sentences are closed, and lets them go. That
is right where work costs time. On a GPU a small model's step costs little and asking costs much: a kernel is
launched in 8 µs, runs in 2, and every question waits for all of them. So here nothing is asked and nothing
changes its shape; the whole search is tensors, closed sentences are carried along, and one step,

    read tokens -> logits -> 2 · beam best extensions -> finished ones into the table -> live ones reorder the cache

is recorded as a CUDA graph and replayed. Whether all are closed is asked every few steps. The rules, and so
the answers, are those of `beam`, whose docstring has them:

    totals   [n, beam]     live hypotheses           found_*  [n, beam]     finished ones, best first
    written  [n · beam, capacity] their tokens       closed   [n]           nothing more to find
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.decode.beam import extensions, ordered
from regard.decode.config import SearchConfig
from regard.decode.search import Hypothesis, check_scores, length_limits, log_probabilities
from regard.models.transformer import EncoderDecoder, State
from regard.nn.block import Memory
from regard.nn.cache import FixedCache
from regard.nn.mask import Places

ASK = 4  # steps between two questions whether all sentences are closed
SHAPES = 8  # searches kept ready, each with its memory
LONGEST = 512  # tokens of an answer; room for longer ones is better found step by step


class FixedSearches:
    """Searches by shape, made when first needed. Sizes are rounded up, so that few shapes serve all batches."""

    def __init__(self, model: EncoderDecoder, bos: int, eos: int) -> None:
        self.model, self.bos, self.eos = model, bos, eos
        self.ready: OrderedDict[tuple[SearchConfig, int, int, int], FixedBeam] = OrderedDict()

    @staticmethod
    def fits(config: SearchConfig, limits: list[int]) -> bool:
        """Whether this search can be done in fixed shapes."""
        return not (config.sample or config.coverage_penalty or config.no_repeat_ngram) and max(limits) <= LONGEST

    @torch.inference_mode()
    def search(self, source: Tensor, valid: Tensor | None, config: SearchConfig) -> list[list[Hypothesis]]:
        """As `beam`, for token ids [B, S]."""
        limits = length_limits(source, valid, config)
        valid = torch.ones_like(source, dtype=torch.bool) if valid is None else valid
        more = _up(source.shape[1], 16) - source.shape[1]
        memory = self.model.encode(F.pad(source, (0, more)), F.pad(valid, (0, more)))
        sentences = 1 << (len(source) - 1).bit_length()  # the next power of two
        key = (config, sentences, source.shape[1] + more, _up(max(limits), 32))
        found = self.ready.pop(key, None) or FixedBeam(self.model, *key, self.bos, self.eos)
        self.ready[key] = found  # last: used last
        if len(self.ready) > SHAPES:
            self.ready.popitem(last=False)
        return found.search(memory, limits)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


class FixedBeam:
    """Search for up to `sentences` sentences, memories of `length` places and answers of `capacity` tokens."""

    def __init__(
        self,
        model: EncoderDecoder,
        config: SearchConfig,
        sentences: int,
        length: int,
        capacity: int,
        bos: int,
        eos: int,
    ) -> None:
        self.model, self.config, self.bos, self.eos = model, config, bos, eos
        self.sentences, self.capacity, table = sentences, capacity, next(model.parameters())
        device, exact = table.device, torch.promote_types(table.dtype, torch.float32)
        beam, rows = config.beam, sentences * config.beam
        self.cache = FixedCache(capacity, device)
        self.valid = torch.zeros(rows, length, dtype=torch.bool, device=device)
        # what cross attention needs of the memory stands in the cache
        nothing = torch.empty(rows, length, 0, device=device)
        self.state = State(self.cache, Memory(nothing, Places(torch.arange(length, device=device)[None], self.valid)))
        self.t = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.written = torch.zeros(rows, capacity, dtype=torch.long, device=device)
        self.limits = torch.zeros(sentences, dtype=torch.long, device=device)
        self.closed = torch.zeros(sentences, dtype=torch.bool, device=device)
        self.totals, self.found_total, self.found_score = torch.zeros(3, sentences, beam, dtype=exact, device=device)
        self.found_tokens = torch.zeros(sentences, beam, capacity, dtype=torch.long, device=device)
        self.found_length = torch.zeros(sentences, beam, dtype=torch.long, device=device)
        self.found_ended = torch.zeros(sentences, beam, dtype=torch.bool, device=device)
        penalties = [config.penalty(count) for count in range(capacity + 2)]
        self.penalties = torch.tensor(penalties, dtype=exact, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False

    def search(self, memory: Memory, limits: list[int]) -> list[list[Hypothesis]]:
        """The `n_best` best hypotheses of each row of `memory`, none longer than its limit."""
        self._begin(memory, limits)
        for step in range(max(limits)):
            self._next()
            if step % ASK == ASK - 1 and bool(self.closed.all()):
                break
        self.warm = True
        return self._answers(len(limits))

    def _begin(self, memory: Memory, limits: list[int]) -> None:
        device, beam, count = self.tokens.device, self.config.beam, len(limits)
        self.cache.read.zero_()
        self.t.zero_()
        for layer, block in enumerate(self.model.decoder.blocks):
            k, v = block.cross.remember(memory.states)  # type: ignore[union-attr, operator]
            if layer not in self.cache.memory:
                shapes = [(self.sentences * beam, *x.shape[1:]) for x in (k, v)]
                self.cache.memory[layer] = k.new_zeros(shapes[0]), v.new_zeros(shapes[1])
            for buffer, new in zip(self.cache.memory[layer], (k, v), strict=True):
                buffer[: count * beam] = new.repeat_interleave(beam, dim=0)
        valid = memory.places.valid
        self.valid[: count * beam] = True if valid is None else valid.repeat_interleave(beam, dim=0)
        self.limits.fill_(self.capacity)
        self.limits[:count] = torch.tensor(limits, device=device)
        self.closed.fill_(True)
        self.closed[:count] = False
        self.tokens.fill_(self.bos)
        for table in (self.totals, self.found_score):
            table.fill_(float("-inf"))
        self.totals[:, 0] = 0.0

    def _next(self) -> None:
        if self.tokens.is_cuda and self.warm:  # the first search of a shape was its warm-up
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):  # records, does not run
                    self.step()
            self.graph.replay()
        else:
            self.step()

    def step(self) -> None:
        """One more token for every hypothesis. No shape depends on a value, and nothing is read back."""
        size, length = self.config.beam, self.t + 1
        scores = log_probabilities(self.model.step(self.tokens, self.state)[:, -1])  # [n · beam, vocab]
        early = self.t < self.config.min_length
        scores[:, self.eos].masked_fill_(early, float("-inf"))
        values, tokens = ordered(*scores.topk(min(2 * size, scores.shape[1]), dim=1))
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

    def _answers(self, count: int) -> list[list[Hypothesis]]:
        tables = (self.found_score, self.found_total, self.found_length, self.found_ended, self.found_tokens)
        check_scores(self.totals[:count, 0].tolist())
        answers = []
        for row in zip(*(table[:count, : self.config.n_best].tolist() for table in tables), strict=True):
            answers.append(
                [
                    Hypothesis(tokens[:length], score, total, ended)
                    for score, total, length, ended, tokens in zip(*row, strict=True)
                    if score > float("-inf")
                ]
            )
        return answers
