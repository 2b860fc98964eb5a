"""From a request to its outputs: admission, waiting, timeout, cancellation.

    predict   every input of a request becomes a job; the outputs come back together, in their order
    stream    every prompt becomes a generation; tokens come back as they are sampled

Both are awaited on the event loop while the model's thread computes. If the client disconnects or the timeout passes,
what has not begun is dropped, and a generation leaves its batch before the next step.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from regard.errors import UserError
from regard.predict.config import SearchConfig
from regard.predict.generator import LIMIT, Token
from regard.serve.errors import ApiError
from regard.serve.models import Models, NotReady, Served
from regard.serve.work import Admission, Job, Overloaded, Prompt

SHORT = 2000  # characters whose tokens are counted on the event loop: 0.2 ms


class Client(Protocol):
    """A request whose body was read (`starlette.requests.Request`): what it receives next is its end."""

    async def receive(self) -> Any: ...


async def disconnected(client: Client) -> ApiError:
    """Returns when the client is gone."""
    while (await client.receive())["type"] != "http.disconnect":
        pass
    return ApiError(499, "the client disconnected")


def noted(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a future that nobody may await any more, which asyncio would otherwise log."""
    if not future.cancelled():
        future.exception()


def name_input(message: str, where: str, jobs: Sequence[Job], error: Exception) -> str:
    """A message about one of several inputs, an "image" or "line 1" of its batch, with its place in the request."""
    ended = (job.future.exception() if job.future.done() and not job.future.cancelled() else None for job in jobs)
    number = next((number for number, one in enumerate(ended) if one is error), 0)
    return re.sub("^(image|line [0-9]+): ", f"{where}.{number}: ", message)


class Post:
    """Hands tokens from the models' threads to the event loop: all of one step with one wake-up."""

    def __init__(self) -> None:
        self._sent, self._awake = deque[tuple[asyncio.Queue[Any], Any]](), False

    def send(self, loop: asyncio.AbstractEventLoop, to: asyncio.Queue[Any], number: int, event: Any) -> None:
        self._sent.append((to, (number, event)))
        if not self._awake:
            self._awake = True
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._awake = False  # first: what is sent from here on has its own wake-up
        while self._sent:
            to, item = self._sent.popleft()
            to.put_nowait(item)


@dataclass
class Service:
    """What all routes share."""

    models: Models
    admission: Admission
    timeout: float = 60.0  # seconds until a request is cancelled
    draining: bool = False  # no new requests are accepted
    post: Post = field(default_factory=Post)
    count: Callable[[str], None] = lambda outcome: None  # called with "accepted" or "refused", and how it ended

    def model(self, name: str | None, *kinds: str) -> Served:
        """The model for a request, or the error to respond with."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="draining", retry_after=1)
        try:
            return self.models.get(name, kinds)
        except NotReady as error:
            raise ApiError(503, str(error), code="not_ready", retry_after=2) from None
        except LookupError as error:
            raise ApiError(404, str(error.args[0]), param="model", code="model_not_found") from None

    @contextmanager
    def _admitted(self, tokens: int) -> Iterator[None]:
        """Admits a request or refuses it, and counts how it ends; its tokens leave when they have been computed."""
        try:
            self.admission.enter(tokens)
        except Overloaded as error:
            self.count("refused")
            raise ApiError(429, str(error), code="overloaded", retry_after=error.retry_after) from None
        self.count("accepted")
        outcome = "cancelled"
        try:
            yield
            outcome = "answered"
        except ApiError as error:
            outcome = {499: "cancelled", 504: "timeout"}.get(error.status, "failed")
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.count(outcome)

    async def predict(
        self,
        client: Client,
        served: Served,
        items: Sequence[Any],
        *,
        where: str = "input",
        alone: bool = False,
        **options: Any,
    ) -> list[Any]:
        """One output for each item of the field `where`; `options` are the predictor's. `alone`: a batch each."""
        texts = (text for item in items for text in (item if isinstance(item, tuple) else (item,)))
        is_short = sum(len(text) for text in texts if isinstance(text, str)) <= SHORT
        try:
            # Another thread would have to wait for the interpreter, which takes longer than a few tokens to count.
            counted = map(served.count_tokens, items)
            costs = list(counted) if is_short else await asyncio.to_thread(list, counted)
        except UserError as error:
            raise ApiError(400, served.shown(error), code="invalid_input") from None
        if (longest := max(costs)) > served.limits.tokens:
            raise ApiError(
                400,
                f"{where}.{costs.index(longest)}: has {longest:,} tokens; the server takes at most "
                f"{served.limits.tokens:,} in one input (--batch-tokens)",
                code="invalid_input",
            )
        with self._admitted(sum(costs)):
            key = tuple(sorted(options.items()))
            jobs = [Job(item, key, cost, alone) for item, cost in zip(items, costs, strict=True)]
            return await self._predict(client, served, where, jobs)

    async def _predict(self, client: Client, served: Served, where: str, jobs: Sequence[Job]) -> list[Any]:
        for job in jobs:
            job.future.add_done_callback(partial(self._leave, job.tokens))
        served.worker.submit(jobs)
        outputs = asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
        outputs.add_done_callback(noted)
        gone = asyncio.create_task(disconnected(client))
        try:
            await asyncio.wait((outputs, gone), timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if outputs.done():
                return list(outputs.result())
            raise gone.result() if gone.done() else self._late()
        except UserError as error:
            raise ApiError(400, name_input(served.shown(error), where, jobs, error), code="invalid_input") from None
        finally:
            gone.cancel()
            for job in jobs:
                job.cancelled = True
                job.future.cancel()
            outputs.cancel()

    async def stream(
        self,
        client: Client,
        served: Served,
        prompts: Sequence[Sequence[int]],
        config: SearchConfig,
        stops: Iterable[str],
        top: int = 0,
    ) -> AsyncIterator[tuple[int, Token]]:
        """Tokens of all prompts as they are sampled, each with the number of its prompt, and with the `top` most
        probable ones in its place."""
        costs = [len(ids) + config.n_best * (config.max_length or LIMIT) for ids in prompts]
        with self._admitted(sum(costs)):
            async for item in self._stream(client, served, prompts, costs, config, tuple(stops), top):
                yield item

    async def _stream(
        self,
        client: Client,
        served: Served,
        prompts: Sequence[Sequence[int]],
        costs: Sequence[int],
        config: SearchConfig,
        stops: tuple[str, ...],
        top: int,
    ) -> AsyncIterator[tuple[int, Token]]:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Token | Exception]]()
        requests = [
            Prompt(ids, config, stops, partial(self.post.send, loop, events, number), done, top)
            for number, ids in enumerate(prompts)
            for done in (partial(self.admission.leave, costs[number]),)
        ]
        served.worker.submit(requests)
        left, end = config.n_best * len(requests), loop.time() + self.timeout

        async def watch() -> None:
            events.put_nowait((0, await disconnected(client)))

        gone = asyncio.create_task(watch())
        try:
            while left:
                if events.empty() or loop.time() > end:
                    try:
                        number, event = await asyncio.wait_for(events.get(), end - loop.time())
                    except TimeoutError:
                        raise self._late() from None
                else:
                    number, event = events.get_nowait()
                if isinstance(event, UserError):
                    raise ApiError(400, served.shown(event), code="invalid_input")
                if isinstance(event, Exception):
                    raise event
                left -= event.ended is not None
                yield number, event
        finally:
            gone.cancel()
            for request in requests:
                request.cancelled = True

    def _leave(self, tokens: int, future: Future[Any]) -> None:
        self.admission.leave(tokens)

    def _late(self) -> ApiError:
        return ApiError(504, f"no output within {self.timeout:g} s", code="timeout")
