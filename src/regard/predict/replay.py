"""Recorded generation: one step is recorded, and a GPU replays it for every token.

Reading a token back after every step makes the GPU wait. So here a step is operations on tensors alone,

    read the last token -> logits -> sample -> store the token, its log-probability and t + 1

over buffers whose shapes and addresses never change, recorded as a CUDA graph:

    written, known  [capacity, rows]   tokens sampled since the prompt was read, and log P of each
    uniforms        [capacity, rows]   uniform random numbers, made from the seed in advance (`regard.predict.sampling`)

The CPU launches the next 8 steps before it reads the last 8, so the GPU never waits: a sample that has ended is
noticed a little late, and the tokens beyond its end are dropped. The tokens are those of the eager `Sampler`.
Attention reaches over 128 slots of the cache, then 256, 512, …: one graph for each, recorded when needed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from regard.models.transformer import Decoder, State
from regard.predict.config import SearchConfig
from regard.predict.next_token import check_scores, next_scores
from regard.predict.recorded import TURN, FixedCache, Graphs, keep_ready, recordable, replay
from regard.predict.sampling import Uniform, sample_token

ASK = 8  # steps that are launched, and read back, together
FIRST = 128  # slots that attention reaches over at first
SHAPES = 4  # recorded steps kept ready, each with its memory


class Replays:
    """Recorded steps by shape, made when first needed.

    Each serves one text at a time: it is taken and given back, so several threads may generate with the same model.
    """

    def __init__(self, model: Decoder, vocab_size: int, eos: int | None) -> None:
        self.model, self.vocab_size, self.eos = model, vocab_size, eos
        self.ready: OrderedDict[tuple[SearchConfig, int, int], FixedStep] = OrderedDict()

    def fits(self, config: SearchConfig) -> bool:
        """Whether a step can be recorded: nothing in it may depend on a value."""
        return recordable(self.model) and not config.no_repeat_ngram

    @contextmanager
    def sampler(self, prompt: list[int], config: SearchConfig, context: int, limit: int) -> Iterator[FixedSampler]:
        capacity = min(reach(min(context, len(prompt) + limit)), -(-context // 64) * 64)
        # of the settings only those that change what is recorded; of the weights, their address
        alike = replace(config, seed=1, max_length=None, min_length=min(config.min_length, 1))
        key = alike, capacity, next(self.model.parameters()).data_ptr()
        with TURN:
            step = self.ready.pop(key, None) or FixedStep(self.model, alike, capacity, self.vocab_size, self.eos)
        try:
            yield FixedSampler(step, prompt, config, context, limit)
        finally:
            with TURN:
                keep_ready(self.ready, key, step, SHAPES)


def reach(tokens: int) -> int:
    """Slots to attend to for this many tokens: few sizes, each twice the one before."""
    return max(FIRST, 1 << (tokens - 1).bit_length())


class FixedSampler:
    """As `regard.predict.generator.Sampler`, over a `FixedStep`. Rows keep their index; finished ones are ignored."""

    def __init__(self, step: FixedStep, prompt: list[int], config: SearchConfig, context: int, limit: int) -> None:
        self.fixed, self.config, self.context, self.left = step, config, context, limit
        self.uniform, self.live = Uniform(config.seed, [0], config.n_best), list(range(config.n_best))
        self.ready: deque[tuple[list[int], list[float]]] = deque()  # arrived, and not yet returned
        self.pending: deque[tuple[int, int, torch.cuda.Event | None]] = deque()  # launched: from, to, arrival
        self.ids = torch.tensor([prompt], device=step.tokens.device)  # [1, T], later [rows, T]
        self.generated = 0  # tokens of a row before the ones that follow `ids`
        self._begin()

    def _begin(self) -> None:
        """Read `ids`; after that as many tokens can be generated as fit into the context, and one more."""
        self.most = min(self.left, self.context - self.ids.shape[1] + 1)
        with TURN:
            self.fixed.begin(self.ids, self.uniform.following(self.most), self.config.min_length - self.generated)
        self.queued, self.fetched = 1, 0
        self.left -= self.most

    def step(self) -> tuple[list[int], list[int], list[float]]:
        """One more token for every live row: (numbers of the samples, ids, log-probabilities under the model)."""
        if not self.ready:
            with TURN:
                self._more()
        ids, known = self.ready.popleft()
        values = [known[row] for row in self.live]
        check_scores(values)
        return self.live, [ids[row] for row in self.live], values

    def _more(self) -> None:
        if not self.pending and self.fetched == self.most:
            self._slide()
        while len(self.pending) < 2 and self.fetched < self.most:  # the GPU gets more work before the CPU waits for it
            begin, self.fetched = self.fetched, min(self.fetched + ASK, self.most)
            while self.queued < self.fetched:
                self.fixed.next()
                self.queued += 1
            self.pending.append((begin, self.fetched, self.fixed.fetch(begin, self.fetched)))
        begin, end, event = self.pending.popleft()
        if event is not None:
            event.synchronize()
        self.ready.extend(
            zip(self.fixed.read_written[begin:end].tolist(), self.fixed.read_known[begin:end].tolist(), strict=True)
        )

    def _slide(self) -> None:
        """Drop the older half of the context, and read the newer half again."""
        written = self.fixed.written[: self.most].T  # [rows, most]
        both = torch.cat((self.ids.expand(len(written), -1), written), dim=1)
        self.ids = both[:, -max(1, self.context // 2) :].contiguous()
        self.generated += self.most
        self._begin()

    def keep(self, rows: list[int]) -> None:
        """Continue with these of the live rows only."""
        self.live = [self.live[row] for row in rows]


class FixedStep:
    """The buffers of `config.n_best` rows and up to `capacity` tokens, and the recorded steps over them."""

    def __init__(self, model: Decoder, config: SearchConfig, capacity: int, vocab_size: int, eos: int | None) -> None:
        self.model, self.config, self.vocab_size, self.eos = model, config, vocab_size, eos
        table, self.rows = next(model.parameters()), config.n_best
        device, exact = table.device, torch.promote_types(table.dtype, torch.float32)
        self.cache = FixedCache(capacity, device)
        self.state = State(self.cache)
        self.read = 0  # tokens that the cache holds, as `cache.read` says on the device
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # tokens sampled
        self.least = torch.zeros(1, dtype=torch.long, device=device)  # tokens before </s> is allowed
        self.tokens = torch.zeros(self.rows, 1, dtype=torch.long, device=device)  # sampled last
        self.written = torch.zeros(capacity, self.rows, dtype=torch.long, device=device)
        self.known = torch.zeros(capacity, self.rows, dtype=exact, device=device)
        self.uniforms = torch.zeros(capacity, self.rows, dtype=torch.float64, device=device)
        pinned = device.type == "cuda"  # what the CPU reads of them: asynchronous copies
        self.read_written = torch.zeros(capacity, self.rows, dtype=torch.long, pin_memory=pinned)
        self.read_known = torch.zeros(capacity, self.rows, dtype=exact, pin_memory=pinned)
        self.graphs: Graphs = {}  # by reach
        self.pool = torch.cuda.graph_pool_handle() if pinned else None  # they run in turn, in the same memory

    def begin(self, ids: Tensor, uniforms: Tensor, least: int) -> None:
        """Read `ids` [1 | rows, T], the same for all rows or a row each, and sample the first token."""
        state = self.model.start(capacity=ids.shape[1])
        logits = self.model.step(ids, state, last=True)[:, -1]
        self.cache.take(state.cache, self.rows)
        self.read = ids.shape[1]
        self.t.zero_()
        self.least.fill_(least)
        self.uniforms[: uniforms.shape[1]] = uniforms.T.to(self.uniforms.device)
        self._sample(logits.expand(self.rows, -1))

    def next(self) -> None:
        """One more token for every row."""
        self.read += 1
        self.cache.reach = min(reach(self.read), self.cache.capacity)
        replay(self.graphs, self.cache.reach, self.step, self.tokens.is_cuda, pool=self.pool)

    def step(self) -> None:
        """What is recorded: no shape depends on a value, and nothing is read back."""
        self._sample(self.model.step(self.tokens, self.state, last=True)[:, -1])

    def _sample(self, logits: Tensor) -> None:
        logits = logits[:, : self.vocab_size]  # rows that pad a vocabulary are not tokens
        early = self.config.min_length > 0 and self.t < self.least
        known, scores = next_scores(logits, early, self.written[:0].T, self.config, self.eos)
        token = sample_token(scores, self.config, self.uniforms.index_select(0, self.t)[0])[:, None]  # [rows, 1]
        self.tokens.copy_(token)
        self.written.index_copy_(0, self.t, token.T)
        self.known.index_copy_(0, self.t, known.gather(1, token).T)
        self.t += 1

    def fetch(self, begin: int, end: int) -> torch.cuda.Event | None:
        """Copy the tokens from `begin` to `end` to the CPU; the event is set when they have arrived."""
        for copy, table in ((self.read_written, self.written), (self.read_known, self.known)):
            copy[begin:end].copy_(table[begin:end], non_blocking=True)
        if not self.tokens.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
