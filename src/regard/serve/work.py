"""The work of a server: a queue that is bounded in tokens, and a thread per model that empties it.

    Admission     tokens that wait or are being computed, over all models; a request beyond the limit is refused at once
    Batcher       inputs whose outputs come as a whole: all that waits when the thread becomes free is one batch, as far
                  as it has the same options and fits into a budget of tokens, padding included
    Generations   prompts of a language model: a continuous batch, which they join and leave between two steps
    Streams       prompts of an engine that has its own loop (CTranslate2)

A bounded queue is what keeps latency bounded: with a limit of L tokens and a model that computes r tokens/s, an
accepted request waits at most L / r seconds, however many are sent.

No input fails its neighbours: if a batch raises an error, its inputs are computed one by one, and only those that fail
alone report it. An input that was cancelled is dropped before it is computed.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from regard.predict.config import SearchConfig
from regard.predict.continuous import ContinuousBatch
from regard.predict.generator import Token

Options = tuple[tuple[str, Any], ...]  # keyword arguments of a prediction, hashable
Observe = Callable[[str, float], None]  # the name of a metric and its value


class Overloaded(Exception):
    """The queue is full; `retry_after` seconds are an estimate of when it will have room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the server is overloaded; try again in {retry_after} s")
        self.retry_after = retry_after


class Cancelled(Exception):
    """Nobody waits for the output any more."""


class Admission:
    """How many tokens are in the server, and how many may be."""

    def __init__(self, limit: int, observe: Callable[[float], object] = lambda tokens: None) -> None:
        """`observe` is called with the number of tokens when it changes."""
        self.limit, self.tokens, self.observe = limit, 0, observe
        self._lock = threading.Lock()
        self._rate, self._left, self._since = 0.0, 0, time.monotonic()

    def enter(self, tokens: int) -> None:
        """Count the tokens of a request, or raise `Overloaded`. An empty server admits a request of any size."""
        with self._lock:
            if self.tokens and self.tokens + tokens > self.limit:
                seconds = (self.tokens + tokens - self.limit) / self._rate if self._rate else 1
                raise Overloaded(max(1, min(60, round(seconds))))
            if not self.tokens:
                self._left, self._since = 0, time.monotonic()
            self.tokens += tokens
            self.observe(self.tokens)

    def leave(self, tokens: int) -> None:
        with self._lock:
            self.tokens -= tokens
            self.observe(self.tokens)
            self._left += tokens
            if (seconds := time.monotonic() - self._since) >= 1:  # tokens/s of the last second
                self._rate, self._left, self._since = self._left / seconds, 0, time.monotonic()


@dataclass(eq=False)
class Job:
    """One input; `future` gets its output. `alone`: not in a batch with others."""

    item: Any
    options: Options
    tokens: int
    alone: bool = False
    future: Future[Any] = field(default_factory=Future)
    cancelled: bool = False  # while it is being computed: nobody waits for its output


class Worker(ABC):
    """Threads with a queue; subclasses say what is done with it.

    `cores`: how many a matmul of a thread may use. `ended` is called at the end of each thread.
    """

    def __init__(
        self, name: str, observe: Observe = lambda name, value: None, *, threads: int = 1, cores: int | None = None,
        ended: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.observe, self.waiting, self.changed = observe, deque[Any](), threading.Condition()
        self.closing, self.cores, self.ended = False, cores, ended
        self.threads = [threading.Thread(target=self._begin, name=name, daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def _begin(self) -> None:
        if self.cores is not None:
            torch.set_num_threads(self.cores)
        self._run()
        self.ended()

    def submit(self, jobs: Iterable[Any]) -> None:
        with self.changed:
            self.waiting.extend(jobs)
            self.changed.notify_all()

    def close(self) -> None:
        """Finish what is waiting, then end the threads."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def join(self) -> None:
        """Wait for the end of the threads."""
        for thread in self.threads:
            thread.join()

    @abstractmethod
    def _run(self) -> None:
        """The work of a thread, until the worker is closed and nothing is waiting."""


class Batcher(Worker):
    """Dynamic batches: `predict(items, **options)` gives one output for each item.

    Clients whose outputs were computed together send their next inputs together, a little apart. A thread that took the
    first of them alone would make the others wait for a batch of one; it waits for the rest, up to `PATIENCE` of the
    time that the last batch took. A client that sends one input at a time never waits.
    """

    PATIENCE = 0.1

    def __init__(
        self, name: str, predict: Callable[..., Sequence[Any]], *, tokens: int = 4096, most: int = 64, **options: Any
    ) -> None:
        self.predict, self.tokens, self.most = predict, tokens, most
        self.batches: dict[int, list[Job]] = {}  # being computed, by thread
        super().__init__(name, **options)

    def _run(self) -> None:
        count, seconds = 0, 0.0  # of the last batch
        while batch := self._take(count, seconds * self.PATIENCE):
            began = time.perf_counter()
            self._compute(batch)
            count, seconds = len(batch), time.perf_counter() - began
            self.observe("batch_size", count)
            self.observe("batch_seconds", seconds)

    def _take(self, expected: int, patience: float) -> list[Job]:
        """The oldest job, and those after it that can be computed with it; none if the worker is closed.

        What waits and what is being computed is divided among the threads: without this, one thread would keep
        computing nearly everything, and the others a few inputs at a time.
        """
        with self.changed:
            self.batches.pop(threading.get_ident(), None)
            while True:
                self.changed.wait_for(lambda: self.waiting or self.closing)
                if expected > 1:
                    self.changed.wait_for(lambda: len(self.waiting) >= expected or self.closing, patience)
                batch, rest, longest = list[Job](), deque[Job](), 0
                running = (job for batch in self.batches.values() for job in batch if not job.future.done())
                present = len(self.waiting) + sum(1 for _ in running)
                most = min(self.most, -(-present // len(self.threads)))
                while self.waiting:
                    job = self.waiting.popleft()
                    widest = max(longest, job.tokens)
                    fits = (len(batch) + 1) * widest <= self.tokens and len(batch) < most
                    if batch and not (fits and job.options == batch[0].options and not (job.alone or batch[0].alone)):
                        rest.append(job)
                    elif job.future.set_running_or_notify_cancel():
                        batch.append(job)
                        longest = widest
                self.waiting = rest
                if batch or self.closing:
                    self.batches[threading.get_ident()] = batch
                    return batch

    def interrupt(self) -> None:
        """Called by a search before every step: raises `Cancelled` if nobody waits for any output of the batch."""
        batch = self.batches.get(threading.get_ident())
        if batch and all(job.cancelled for job in batch if not job.future.done()):
            raise Cancelled

    def deliver(self, row: int, output: Any) -> None:
        """Called by a search when one input of the batch has its output, perhaps long before the others."""
        batch = self.batches.get(threading.get_ident())
        if batch and not batch[row].future.done():
            batch[row].future.set_result(output)

    def _compute(self, batch: Sequence[Job]) -> None:
        try:
            outputs = self.predict([job.item for job in batch], **dict(batch[0].options))
        except Exception as error:
            left = [job for job in batch if not job.future.done()]
            if len(batch) == 1 or isinstance(error, Cancelled):
                for job in left:
                    job.future.set_exception(error)
                return
            for job in left:
                self.batches[threading.get_ident()] = [job]
                self._compute([job])
            return
        for job, output in zip(batch, outputs, strict=True):
            if not job.future.done():
                job.future.set_result(output)


@dataclass(eq=False)
class Prompt:
    """A prompt to continue. `emit` is called in the model's thread, with a `Token`, or with an error, the last event.

    After `cancelled` is set, nothing more is computed and `emit` is not called again.
    """

    ids: Sequence[int]
    config: SearchConfig
    stops: tuple[str, ...]
    emit: Callable[[Token | Exception], None]
    done: Callable[[], None] = lambda: None  # called once, when nothing more is computed
    top: int = 0  # how many of the most probable tokens each token comes with
    cancelled: bool = False
    created: float = field(default_factory=time.perf_counter)
    live: int = 0  # samples that have not ended


class Generations(Worker):
    """Continuous batching: at every step, prompts join as long as there are at most `most` rows."""

    def __init__(self, name: str, batch: ContinuousBatch, *, most: int = 64, **options: Any) -> None:
        self.batch, self.most = batch, most
        super().__init__(name, **options)

    def _run(self) -> None:
        running: set[Prompt] = set()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closing or running)
                if self.closing and not (self.waiting or running):
                    return
                joining = list[Prompt]()
                room = self.most - len(self.batch.rows)
                while self.waiting and (room >= self.waiting[0].config.n_best or not (running or joining)):
                    joining.append(self.waiting.popleft())
                    room -= joining[-1].config.n_best
            for prompt in [prompt for prompt in running if prompt.cancelled]:
                self.batch.leave(prompt)
                self._end(prompt, running)
            for prompt in joining:
                prompt.live = prompt.config.n_best
                running.add(prompt)
                if prompt.cancelled:
                    self._end(prompt, running)
                else:
                    self._join(prompt, running)
            if self.batch.rows:
                self._step(running, self.batch.step)
                self.observe("batch_size", len(self.batch.rows))

    def _join(self, prompt: Prompt, running: set[Prompt]) -> None:
        try:
            tokens = self.batch.join(prompt, prompt.ids, prompt.config, prompt.stops, prompt.top)
        except Exception as error:  # this prompt's alone
            prompt.emit(error)
            self._end(prompt, running)
            return
        self.observe("first_token_seconds", time.perf_counter() - prompt.created)
        self._give(tokens, running)

    def _step(self, running: set[Prompt], step: Callable[[], list[tuple[Prompt, Token]]]) -> None:
        try:
            tokens = step()
        except Exception as error:  # of the model itself: no row can be continued
            for prompt in list(running):
                self.batch.leave(prompt)
                prompt.emit(error)
                self._end(prompt, running)
            return
        self._give(tokens, running)

    def _give(self, tokens: list[tuple[Prompt, Token]], running: set[Prompt]) -> None:
        self.observe("tokens", len(tokens))
        for prompt, token in tokens:
            if not prompt.cancelled:
                prompt.emit(token)
            prompt.live -= token.ended is not None
            if prompt.live == 0:
                self._end(prompt, running)

    def _end(self, prompt: Prompt, running: set[Prompt]) -> None:
        running.discard(prompt)
        prompt.done()


class Streams(Worker):
    """Prompts of an engine that generates by itself, `most` at once; `generate(prompt)` gives the tokens of one."""

    def __init__(self, name: str, generate: Callable[[Prompt], Iterable[Token]], *, most: int, **options: Any) -> None:
        self.generate, self.pool = generate, ThreadPoolExecutor(most, name)
        super().__init__(name, **options)

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closing)
                if not self.waiting:
                    break
                prompt = self.waiting.popleft()
            self.pool.submit(self._one, prompt)
        self.pool.shutdown()

    def _one(self, prompt: Prompt) -> None:
        try:
            for count, token in enumerate(() if prompt.cancelled else self.generate(prompt)):
                if prompt.cancelled:
                    break
                if count == 0:
                    self.observe("first_token_seconds", time.perf_counter() - prompt.created)
                self.observe("tokens", 1)
                prompt.emit(token)
        except Exception as error:
            prompt.emit(error)
        finally:
            prompt.done()
