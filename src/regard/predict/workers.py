"""Batches side by side: on a CPU a core a batch, instead of all cores on each small product.

A product of 64 x 128 by 128 x 384 takes 70 µs on one core. Cut in two, it has to be handed out and waited for, some
10 µs each time and hundreds of times a step, and where another program holds one core, the other waits for it. Two
batches know nothing of each other: a core each, with products of one thread, needs no waiting at all. What each batch
gives is what it would have given alone.

    processes   Python works on one thing at a time, and between such short products there is much of it. A copy of the
                process (fork) has a Python of its own and shares the weights. Only a process without threads of its own
                can be copied safely: a lock that one of them holds would be held in the copy for ever
    threads     elsewhere: Python's lock is free at least while torch computes
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from regard.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_shared: tuple[Callable[[Any], Any], Sequence[Any]] | None = None  # what a copy finds: no need to send it


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """`work` on each item, as many at a time as torch may use threads; results in the order of the items."""
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        yield from map(work, items)
        return
    global _shared
    count = min(threads, len(items))
    _shared = work, items
    pool = _processes(count)
    alone = pool is not None
    if pool is None:  # the number of threads is each thread's own, but for MKL's, which is the process's
        pool = ThreadPoolExecutor(count, "batch", torch.set_num_threads, (1,))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork, for the threads that torch keeps asleep
            results = pool.map(_work, range(len(items))) if alone else pool.map(work, items)
        yield from results
    except BrokenProcessPool:
        raise UserError(
            f"one of {count} processes was ended from outside, perhaps for want of memory: give smaller batches, "
            "or set OMP_NUM_THREADS=1 for one process"
        ) from None
    except BaseException:  # Ctrl-C, or nobody wants the rest: nobody waits for the batches under way
        for process in list((getattr(pool, "_processes", None) or {}).values()):  # a pool of threads has none
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        _shared = None
        torch.set_num_threads(threads)


def _processes(count: int) -> Executor | None:
    """A pool of copies of this process, where it can be copied."""
    if sys.platform != "linux" or threading.active_count() > 1 or torch.cuda.is_initialized():
        return None
    try:
        return ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin, (os.getpid(),))
    except (OSError, NotImplementedError):  # no shared memory here, as in some sandboxes
        return None


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that was copied
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler that waits for the end of a step would wait for ever here
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a copy does not outlive the process
    if os.getppid() != parent:  # which has ended meanwhile
        os._exit(1)
    torch.set_num_threads(1)


def _work(number: int) -> Any:
    assert _shared is not None
    work, items = _shared
    return work(items[number])
