"""Continuous batching: generations join and leave a running batch between two steps.

A batch that runs until its longest text is complete makes a new prompt wait, and keeps computing rows that have ended.
Here the rows of a batch change at every step (Yu et al. 2022, Orca, OSDI): a new prompt is read alone and its keys and
values are copied into the cache; a row that has ended is removed.

    join    prompt [1, T]  -> keys and values of T tokens, and the first token of each sample
    step    tokens [R, 1]  -> logits [R, vocab_size] -> one more token for each of R rows

Rows have different lengths. Row r has its keys in slots 0 … length_r - 1 of the cache; the slots behind them have
positions in the future, so the causal mask excludes them. The tokens are those that `Generator` samples for the prompt
alone, up to rounding: a row's random numbers depend on its own seed, and its scores on its own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.models.transformer import State
from regard.nn.cache import Cache, Pair
from regard.nn.mask import Positions
from regard.predict.config import SearchConfig
from regard.predict.engine import lean
from regard.predict.generator import LIMIT, Generator, SampleWriter, Token, most_probable
from regard.predict.next_token import check_scores, next_scores
from regard.predict.sampling import Uniform, sample_token


class Row:
    """A sample in progress; `request` is what `join` was called with, to tell whose token it is."""

    def __init__(self, request: Any, writer: SampleWriter, config: SearchConfig, random: Any, top: int) -> None:
        self.request, self.writer, self.config, self.random, self.top = request, writer, config, random, top
        self.ids: list[int] = []  # generated so far


class ContinuousBatch:
    """The generations in progress of one model."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.rows = generator, list[Row]()
        self.engine = lean(generator.model)
        self.cache = RowCache(generator.device)
        self.state = State(self.cache)

    @torch.inference_mode()
    def join(
        self, request: Any, prompt: Sequence[int], config: SearchConfig, stops: Sequence[str] = (), top: int = 0
    ) -> list[tuple[Any, Token]]:
        """Read a prompt, which fits into the context; the first token of each of its `n_best` samples.

        Every token comes with the `top` most probable ones.
        """
        generator, count = self.generator, config.n_best
        limit = min(config.max_length or LIMIT, generator.context - len(prompt) + 1)
        reason = "limit" if limit == (config.max_length or LIMIT) else "context"
        state = generator.model.start(capacity=len(prompt))
        logits = generator.model.step(torch.tensor([prompt], device=generator.device), state, last=True)[:, -1]
        streams = Uniform(config.seed, [0], count).streams
        rows = [
            Row(request, SampleWriter(generator.tokenizer, stops, limit, reason, number), config, streams[number], top)
            for number in range(count)
        ]
        tokens = self._sample(rows, logits.expand(count, -1))
        live = [row for row in rows if not row.writer.ended]
        if live:
            self.cache.join(state.cache, len(live))
            self.rows += live
        return tokens

    @torch.inference_mode()
    def step(self) -> list[tuple[Any, Token]]:
        """One more token for every row; rows that end with it are removed."""
        if not self.rows:
            return []
        last = torch.tensor([row.ids[-1:] for row in self.rows], device=self.generator.device)
        logits = self.engine.step(last, self.state, last=True)[:, -1]
        tokens = self._sample(self.rows, logits)
        self._keep([not row.writer.ended for row in self.rows])
        return tokens

    @torch.inference_mode()
    def leave(self, request: Any) -> None:
        """Remove the rows of a request."""
        self._keep([row.request is not request for row in self.rows])

    def _keep(self, kept: list[bool]) -> None:
        """Remove rows; the last rows take the slots that become free, so that little is copied."""
        count, holes = sum(kept), [index for index, is_kept in enumerate(kept) if not is_kept]
        free = [index for index in holes if index < count]
        moved = [index for index in range(count, len(kept)) if kept[index]]
        for to, origin in zip(free, moved, strict=True):
            self.rows[to] = self.rows[origin]
        del self.rows[count:]
        self.cache.leave(free, moved, count)

    def _sample(self, rows: list[Row], logits: Tensor) -> list[tuple[Any, Token]]:
        """The next token of each row, by its own settings; rows with the same settings together."""
        eos, logits = self.generator.tokenizer.eos, logits[:, : len(self.generator.tokenizer)]
        groups: dict[Any, list[int]] = {}
        for index, row in enumerate(rows):
            config = row.config
            alone = index if config.min_length or config.no_repeat_ngram else None  # these read the row's own text
            groups.setdefault((config.temperature, config.top_k, config.top_p, config.sample, alone), []).append(index)
        tokens: list[tuple[Any, Token]] = [(None, Token(0, 0, 0.0, ""))] * len(rows)
        for members in groups.values():
            first = rows[members[0]]
            part = logits if len(members) == len(rows) else logits[members]
            written = torch.tensor([first.ids], dtype=torch.long, device=logits.device)
            known, scores = next_scores(part, len(first.ids) < first.config.min_length, written, first.config, eos)
            uniforms = torch.tensor([rows[index].random.random() for index in members], dtype=torch.float64)
            chosen = sample_token(scores, first.config, uniforms.to(logits.device))
            values = known.gather(1, chosen[:, None])[:, 0].tolist()
            check_scores(values)
            tops = most_probable(known, max(rows[index].top for index in members))
            for index, id, value, top in zip(members, chosen.tolist(), values, tops, strict=True):
                row = rows[index]
                row.ids.append(id)
                tokens[index] = row.request, row.writer.add(id, value, top[: row.top])
        return tokens


class RowCache(Cache):
    """Rows of different lengths, each in the first slots of its own; a step appends one token to every row."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.device = device
        self._at = torch.zeros(0, dtype=torch.long)  # the slots of the step in progress

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    def next_positions(self, count: int, device: torch.device, is_real: Tensor | None = None) -> Positions:
        if count != 1:
            raise UserError(f"a continuous batch reads one token per row and step, not {count}")
        return Positions(torch.tensor(self.lengths, device=device)[:, None])

    def add(self, new: Positions) -> Positions:
        self._at = new.pos[:, 0]
        self.lengths = [length + 1 for length in self.lengths]
        self._reserve(len(self.lengths), self.length)
        return Positions(torch.arange(self.length, device=new.pos.device)[None])

    def extend(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        rows, reach = k.shape[0], self.length
        index = torch.arange(rows, device=k.device)
        keys, values = (buffer[:rows] for buffer in self._layers[layer])
        keys[index, :, self._at], values[index, :, self._at] = k[:, :, 0], v[:, :, 0]
        return keys.narrow(2, 0, reach), values.narrow(2, 0, reach)

    def join(self, read: Cache, rows: int) -> None:
        """Append `rows` copies of the row that `read` has."""
        first, length = len(self.lengths), read.length
        for layer, pair in read._layers.items():
            if layer not in self._layers:
                empty = [part.new_zeros(0, part.shape[1], 0, part.shape[3]) for part in pair]
                self._layers[layer] = (empty[0], empty[1])
        self.lengths += [length] * rows
        self._reserve(first + rows, length)
        for layer in read._layers:
            begin, pair = read.stored(layer)
            for slots, stored in zip(self._layers[layer], pair, strict=True):
                own = slots[first : first + rows]
                own[:, :, begin:length] = stored
                own[:, :, :begin] = own[:, :, length:] = 0  # masked, but NaN times a weight of 0 would still be NaN
        for layer, pair in read.states.items():
            new = [part.expand(rows, *part.shape[1:]) for part in pair]
            known = self.states.get(layer, ())
            joined = [torch.cat(parts) for parts in zip(known, new, strict=True)] if known else new
            self.states[layer] = (joined[0], joined[1])

    def leave(self, free: list[int], moved: list[int], count: int) -> None:
        """Move rows into the free ones, and keep the first `count`."""
        for to, origin in zip(free, moved, strict=True):
            length = self.lengths[to] = self.lengths[origin]
            for slots in (part for pair in self._layers.values() for part in pair):
                slots[to, :, :length] = slots[origin, :, :length]
                slots[to, :, length:] = 0
        rows = list(range(count))
        for to, origin in zip(free, moved, strict=True):
            rows[to] = origin
        if self.states and count < len(self.lengths):
            kept = torch.tensor(rows, dtype=torch.long, device=self.device)
            self.states = {layer: (pair[0][kept], pair[1][kept]) for layer, pair in self.states.items()}
        del self.lengths[count:]
        if not self.lengths:
            self._layers.clear()  # an idle server gives the memory back
            self.states.clear()

    def _reserve(self, rows: int, length: int) -> None:
        """Make room for so many rows and slots; both grow by doubling."""
        for layer, pair in self._layers.items():
            old = pair[0].shape[0], pair[0].shape[2]
            if old[0] < rows or old[1] < length:
                size = [max(have, 1 << (need - 1).bit_length()) for have, need in zip(old, (rows, length), strict=True)]
                grown = [part.new_zeros(size[0], part.shape[1], size[1], part.shape[3]) for part in pair]
                for new, part in zip(grown, pair, strict=True):
                    new[: old[0], :, : old[1]] = part
                self._layers[layer] = (grown[0], grown[1])
