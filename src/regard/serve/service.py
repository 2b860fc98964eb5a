"""From a request to its outputs: admission, waiting, timeout, cancellation.

    predict   every input of a request becomes a job; the outputs come back together, in their order
    stream    every prompt becomes a generation; tokens come back as they are sampled

Both are awaited on the event loop while the model's thread computes. If the client disconnects or the timeout passes,
what has not begun is dropped, and a generation leaves its batch before the next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from regard.errors import UserError
from regard.predict.config import SearchConfig
from regard.predict.generator import LIMIT, Token
from regard.serve.errors import ApiError
from regard.serve.models import Models, NotReady, Served
from regard.serve.work import Admission, Job, Overloaded, Prompt


class Client(Protocol):
    """A request whose body was read (`starlette.requests.Request`): what it receives next is its end."""

    async def receive(self) -> Any: ...


async def disconnected(client: Client) -> ApiError:
    """Returns when the client is gone."""
    while (await client.receive())["type"] != "http.disconnect":
        pass
    return ApiError(499, "the client disconnected")


@dataclass
class Service:
    """What all routes share."""

    models: Models
    admission: Admission
    timeout: float = 60.0  # seconds until a request is cancelled
    draining: bool = False  # no new requests are accepted

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

    def _admit(self, tokens: int) -> None:
        try:
            self.admission.enter(tokens)
        except Overloaded as error:
            raise ApiError(429, str(error), code="overloaded", retry_after=error.retry_after) from None

    async def predict(
        self, client: Client, served: Served, items: Sequence[Any], *, alone: bool = False, **options: Any
    ) -> list[Any]:
        """One output for each item; `options` are those of the predictor. `alone`: one batch per item."""
        try:
            costs = await asyncio.to_thread(lambda: [served.count_tokens(item) for item in items])
        except UserError as error:
            raise ApiError(400, served.shown(error), code="invalid_input") from None
        if (longest := max(costs)) > served.limits.tokens:
            raise ApiError(
                400,
                f"input.{costs.index(longest)}: has {longest:,} tokens; the server takes at most "
                f"{served.limits.tokens:,} in one input (--batch-tokens)",
                code="invalid_input",
            )
        self._admit(sum(costs))
        key = tuple(sorted(options.items()))
        jobs = [Job(item, key, cost, alone) for item, cost in zip(items, costs, strict=True)]
        for job in jobs:
            job.future.add_done_callback(partial(self._leave, job.tokens))
        served.worker.submit(jobs)
        outputs = asyncio.gather(*(asyncio.wrap_future(job.future) for job in jobs))
        gone = asyncio.create_task(disconnected(client))
        try:
            await asyncio.wait((outputs, gone), timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if outputs.done():
                return list(outputs.result())
            raise gone.result() if gone.done() else self._late()
        except UserError as error:
            raise ApiError(400, served.shown(error), code="invalid_input") from None
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
    ) -> AsyncIterator[tuple[int, Token]]:
        """Tokens of all prompts as they are sampled, each with the number of its prompt."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Token | Exception]]()
        costs = [len(ids) + config.n_best * (config.max_length or LIMIT) for ids in prompts]
        self._admit(sum(costs))

        def emit(number: int, event: Token | Exception) -> None:
            loop.call_soon_threadsafe(events.put_nowait, (number, event))

        requests = [
            Prompt(ids, config, tuple(stops), partial(emit, number), partial(self.admission.leave, cost))
            for number, (ids, cost) in enumerate(zip(prompts, costs, strict=True))
        ]
        served.worker.submit(requests)
        left, end = config.n_best * len(requests), loop.time() + self.timeout

        async def watch() -> None:
            events.put_nowait((0, await disconnected(client)))

        gone = asyncio.create_task(watch())
        try:
            while left:
                try:
                    number, event = await asyncio.wait_for(events.get(), end - loop.time())
                except TimeoutError:
                    raise self._late() from None
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
