"""Signs of life: work that takes more than two seconds says so on standard error.

    with stage("tokenising train", "pairs", total) as done:
        done.count += 4096                            tokenising train: 1,241,088 of 2,000,000 pairs, 12 s

Stages nest, and the innermost is shown: in a terminal on one line, which is overwritten and at last removed; elsewhere,
as in a log, by lines after 2, 5, 11, 23, 47 s and then every minute. A thread shows them, so that one long call is no
silence. It uses neither torch nor random numbers, and is absent while the process is forked (`paused`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from regard.messages import localize
from regard.terminal import screen_width

T = TypeVar("T")
FIRST, LONGEST = 2.0, 60.0  # seconds before the first line, and between two lines at most
POLL = 0.5  # seconds between two looks of the thread, and between two updates in a terminal
WIDTH = 60  # characters of what is done, such as a list of files

_stages: list[Stage] = []
_thread: threading.Thread | None = None
_stop = threading.Event()
_lock = threading.Lock()  # one line at a time, and none after its stage has ended


def duration(seconds: float) -> str:
    """Rounded for people: 45 s, 12 min, 3 h 20 min, 2 days 4 h."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h" + f" {minutes % 60} min" * (minutes % 60 > 0)
    return f"{hours // 24} days" + f" {hours % 24} h" * (hours % 24 > 0)


def rounded(number: float) -> str:
    """Two digits of a small number, whole numbers from 10 on."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


class Stage:
    """Work in progress: `count` of `total` units are done."""

    def __init__(self, what: str, unit: str = "", total: int = 0, count: int = 0) -> None:
        self.what, self.unit, self.total, self.count = what, unit, total, count
        self.began = time.monotonic()
        self.wait, self.due = FIRST, self.began + FIRST
        self.width = 0  # of the line in the terminal

    def text(self, now: float) -> str:
        """The line to show, or nothing."""
        of = localize(f" of {self.total:,}") if self.total else ""
        done = f" {self.count:,}{of} {localize(self.unit)}," if self.unit else ""
        what = localize(self.what)
        what = what if len(what) <= WIDTH else f"{what[: WIDTH - 1]}…"
        return f"{what}:{done} {localize(duration(now - self.began))}"

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items, counted."""
        for item in items:
            yield item
            self.count += 1

    def show(self, now: float) -> None:
        """Show the stage if it is due."""
        if now < self.due or not (text := self.text(now)):
            return
        if sys.stderr.isatty():
            width = screen_width(text)
            print(f"\r{text}{' ' * (self.width - width)}", end="", file=sys.stderr, flush=True)
            self.width = width
            return
        print(text, file=sys.stderr, flush=True)
        self.wait = min(2 * self.wait if self.wait > FIRST else 3.0, LONGEST)
        self.due = now + self.wait

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self.width:
            print(f"\r{'':<{self.width}}\r", end="", file=sys.stderr, flush=True)
            self.width = 0


@contextmanager
def running(stage: Stage) -> Iterator[Stage]:
    """Show this stage while the block runs."""
    with _lock:
        for outer in _stages:
            outer.clear()
        _stages.append(stage)
    _start()
    try:
        yield stage
    finally:
        with _lock:
            _stages.remove(stage)
            stage.clear()
        if not _stages:
            _end()


@contextmanager
def stage(what: str, unit: str = "", total: int = 0, count: int = 0) -> Iterator[Stage]:
    """Show what the block does; add to `count` what is done."""
    with running(Stage(what, unit, total, count)) as one:
        yield one


def watched(items: Iterable[T], what: str, unit: str, total: int = 0) -> Iterator[T]:
    """The items, shown as a stage while they are taken."""
    with stage(what, unit, total) as done:
        yield from done.each(items)


@contextmanager
def paused() -> Iterator[None]:
    """Without the thread inside the block: a process can only be forked safely if it has one thread."""
    _end()
    try:
        yield
    finally:
        if _stages:
            _start()


def _start() -> None:
    global _thread
    if _thread is None or not _thread.is_alive():
        _stop.clear()
        _thread = threading.Thread(target=_watch, name="progress", daemon=True)
        _thread.start()


def _end() -> None:
    global _thread
    if _thread is not None:
        _stop.set()
        _thread.join()
        _thread = None


def _watch() -> None:
    while not _stop.wait(POLL):
        with _lock, suppress(OSError, ValueError, AttributeError):  # standard error is closed
            for stage in _stages[-1:]:
                stage.show(time.monotonic())
