"""Ctrl-C as a request: the current step is finished and saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def interruptible(quiet: bool = False) -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C or SIGTERM only sets a flag; a second one interrupts at once.

    A signal that is ignored stays ignored, as Ctrl-C in the background jobs of a shell script. Signals can only be
    handled in the main thread; in another one nothing changes.
    """
    requested = False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        if quiet:
            return
        with suppress(OSError):  # not print: its buffer may be in the middle of another line
            os.write(2, b"\nstopping after this step; Ctrl-C again to stop at once\n")

    main = threading.current_thread() is threading.main_thread()
    handled = [
        number for number in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, request) for number in handled}
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
