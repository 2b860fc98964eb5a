"""Prefetching: a thread makes the next batches while the model learns from this one.

    thread      b₂ b₃ b₄ …                 up to AHEAD batches wait
    training       b₁      b₂      b₃      the stream stands where the batches *taken* end

Order and content are the stream's own: the thread walks a copy of it, so a stop in between saves the position of
what was learned from, not of what lay ready. A stream that draws at random must do so from generators of its own,
as those here do; the global one belongs to the training step.

For a GPU the batches lie in pinned memory, from where they are copied without the processor's help.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from regard.data.batch import Stream

AHEAD = 4  # batches


def prefetch(stream: Stream, pin: bool = False) -> Generator[Any]:
    """The batches of `stream` from where it stands. Closing it ends the thread."""
    ahead = copy.copy(stream)
    batches = iter(ahead)

    def make() -> tuple[Any, dict[str, int]]:
        batch = next(batches)
        return _pinned(batch) if pin else batch, ahead.position

    with ThreadPoolExecutor(1, "batches") as thread:
        try:
            waiting = deque(thread.submit(make) for _ in range(AHEAD))
            while True:
                batch, position = waiting.popleft().result()  # or the error that the thread met
                waiting.append(thread.submit(make))
                stream.seek(position)
                yield batch
        finally:
            thread.shutdown(cancel_futures=True)


def _pinned(batch: Any) -> Any:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: x.pin_memory() for name, x in tensors.items() if isinstance(x, Tensor)})
