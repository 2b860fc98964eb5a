"""Ctrl-C as a request: the step under way is finished and saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def interruptible(quiet: bool = False) -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C or SIGTERM only sets a flag; a second Ctrl-C interrupts at once.

    A signal that is ignored stays so, as Ctrl-C is in a shell script's background jobs. Only the main thread
    can listen; in another one nothing changes.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        if quiet:
            return
        with suppress(OSError):  # not print: its buffer may be in the middle of another line
            os.write(2, b"\nstopping after this step; Ctrl-C again to stop at once\n")

    main = threading.current_thread() is threading.main_thread()
    wanted = [
        number for number in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, ask) for number in wanted}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
