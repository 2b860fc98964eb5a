"""The work of the page's server: one thread that computes, a bounded queue, and an early end for abandoned requests.

One thread computes, because a pass uses all cores by itself, and because the memory that several threads take from the
system in turns is not given back. The event loop does nothing but wait, so `api/alive` is answered at any load:

    queue full        status 503 with Retry-After: at most `WAITING` requests wait
    client gone       a waiting request is dropped; a running one is interrupted before the next layer or search step

The interrupt is an exception, raised by `check` in a hook before each block of the model (`interruptible`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

if TYPE_CHECKING:
    from torch import nn

WAITING = 32  # requests that wait or are computed
BUSY = "the server is busy with other requests; try again in a second"
T = TypeVar("T")


class Abandoned(Exception):
    """Nobody waits for the response any more."""


class Job:
    abandoned = False


class Work:
    """The computing thread of a server. `run` is called in the event loop, everything it runs in the thread."""

    def __init__(self) -> None:
        self.jobs = 0
        self.pool = ThreadPoolExecutor(1, "explore")
        self.current = threading.local()

    @property
    def is_full(self) -> bool:
        return self.jobs >= WAITING

    async def run(self, request: Request, compute: Callable[[], T]) -> T:
        """The result of `compute`, unless the queue is full or the client disconnects."""
        if self.is_full:
            raise HTTPException(503, BUSY, {"Retry-After": "1"})
        job, loop = Job(), asyncio.get_running_loop()
        self.jobs += 1
        running = self.pool.submit(self._compute, job, compute)
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._leave))
        result = asyncio.wrap_future(running)
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise HTTPException(499, "the client has closed the connection")
            return result.result()
        finally:
            job.abandoned = True  # also when the server stops
            gone.cancel()
            result.cancel()

    def _leave(self) -> None:
        self.jobs -= 1

    def submit(self, compute: Callable[[], object]) -> None:
        """Compute something that no request waits for, such as loading a model."""
        self.pool.submit(compute)

    def check(self) -> None:
        """Raise `Abandoned` if nobody waits for what this thread computes."""
        job = getattr(self.current, "job", None)
        if job is not None and job.abandoned:
            raise Abandoned

    def _compute(self, job: Job, compute: Callable[[], T]) -> T:
        self.current.job = job
        try:
            self.check()
            return compute()
        finally:
            self.current.job = None

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def interruptible(model: nn.Module, check: Callable[[], None]) -> None:
    """Call `check` before every block and attention of a model; an exception that it raises ends the pass."""
    from regard.nn.trace import Traceable

    for module in model.modules():
        if isinstance(module, Traceable):
            module.register_forward_pre_hook(lambda module, inputs: check())


async def disconnected(request: Request) -> None:
    """Wait until the client closes the connection; the body of the request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
