"""Searches in processes of their own, one for each core.

Two threads that search share one interpreter: between two short matmuls each waits for the other, and both for the
event loop. On two cores this costs a fifth of the throughput. A process has an interpreter of its own. The server
sends it a batch through a pipe and gets every output when its search ends:

    server ─→ process    (items, method, options)          None: nobody waits for the outputs any more
    process ─→ server    ("some", [(row, output), …]) … ("end", outputs)   or ("error", exception)

A process that ends unexpectedly is started again, and computes its batch again. The processes share the memory of the
libraries, and end with the server.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import pickle
import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from regard.predict.bundle import SearchPredictor
from regard.predict.translator import Translator
from regard.serve.work import Cancelled
from regard.tasks.registry import load

Work = tuple[Sequence[Any], str, dict[str, Any]]  # items, the method of the predictor, its options

POLL = 0.05  # seconds between two looks whether a client still waits
TOGETHER = 0.05  # seconds: outputs are sent at most so often, since each time other processes are interrupted


class Processes:
    """`count` processes that have loaded the model of `folder`; each thread that computes uses one at a time."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.free = folder, queue.SimpleQueue[Process]()
        processes = [Process(folder) for _ in range(count)]
        for process in processes:
            process.wait()
            self.free.put(process)

    def predict(self, work: Work, interrupt: Callable[[], None], deliver: Callable[[int, Any], None]) -> Sequence[Any]:
        """The outputs; those that come earlier than others are also given to `deliver`, with their row.

        `interrupt` raises `Cancelled` if nobody waits for the outputs.
        """
        process = self.free.get()
        try:
            for _ in range(2):
                try:
                    return process.predict(work, interrupt, deliver)
                except (EOFError, OSError):
                    code = process.end()
                    process = Process(self.folder)
                    process.wait()
            raise RuntimeError(f"a process of the server has ended twice with this batch, with code {code}")
        finally:
            self.free.put(process)

    def end_one(self) -> None:
        self.free.get().end()


class Process:
    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=compute, args=(other, folder), name="search", daemon=True)
        self.process.start()
        other.close()

    def wait(self) -> None:
        """Until the model is loaded."""
        try:
            kind, error = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"a process of the server has ended with code {self.end()}") from None
        if kind == "error":
            raise error

    def predict(self, work: Work, interrupt: Callable[[], None], deliver: Callable[[int, Any], None]) -> Sequence[Any]:
        self.pipe.send(work)
        is_cancelled = False
        while True:
            while not self.pipe.poll(POLL):
                try:
                    interrupt()
                except Cancelled:
                    if not is_cancelled:
                        self.pipe.send(None)
                    is_cancelled = True
            kind, value = self.pipe.recv()
            if kind == "error":
                raise value
            if kind == "end":
                return value  # type: ignore[no-any-return]
            for row, output in value:
                deliver(row, output)

    def end(self) -> int | None:
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        return self.process.exitcode


def compute(pipe: Connection, folder: Path) -> None:
    """A process: load the model, then search until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the server decides
    torch.set_num_threads(1)
    _keep_memory()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            predictor = load(folder, torch.device("cpu")).predictor
            assert isinstance(predictor, SearchPredictor)
        except Exception as error:
            pipe.send(("error", _portable(error)))
            return
        sender = Sender(pipe)
        predictor.interrupt = sender.interrupt
        if isinstance(predictor, Translator):
            decode = predictor.decode
            predictor.finished = lambda row, found: sender.done.append((row, decode(found))) if found else None
        pipe.send(("end", None))
        while True:
            work = pipe.recv()
            if work is None:  # a cancellation that came too late
                continue
            items, method, options = work
            sender.done.clear()
            try:
                outputs = getattr(predictor, method)(items, **options)
            except Exception as error:
                pipe.send(("error", _portable(error)))
            else:
                pipe.send(("end", outputs))


class Sender:
    """Sends outputs while others are still being searched."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.done, self.sent = pipe, list[tuple[int, Any]](), 0.0

    def interrupt(self) -> None:
        """Called before every step of a search."""
        if self.pipe.poll():
            self.pipe.recv()
            raise Cancelled
        if self.done and time.monotonic() - self.sent > TOGETHER:
            self.pipe.send(("some", self.done))
            self.done.clear()
            self.sent = time.monotonic()


def _keep_memory() -> None:
    """Keep freed memory for the next step: glibc gives it back, and getting it again costs 1 ms per sentence."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, at its maximum: blocks up to 32 MB are taken from the heap
        mallopt(-1, 2**29)  # M_TRIM_THRESHOLD: bytes at the end of the heap that may be free


def _portable(error: Exception) -> Exception:
    """The error, or if it cannot be sent through a pipe, its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
