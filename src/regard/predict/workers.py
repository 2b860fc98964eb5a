"""Batches in parallel: on a CPU one core per batch, instead of all cores on each small matmul.

A matmul of 64 x 128 by 128 x 384 takes 70 µs on one core. Split in two, it has to be distributed and waited for, some
10 µs each time and hundreds of times per step, and if another program occupies one core, the other waits for it. Two
batches are independent: one core each, with single-threaded matmuls, needs no synchronisation. The results are those
of each batch alone.

    processes   the global interpreter lock admits one thread at a time, and between such short matmuls there is much
                Python code. A fork of the process has its own interpreter and shares the weights. Only a process
                without other threads can be forked safely: a lock that one of them holds would never be released
    threads     elsewhere: the lock is free at least while torch computes
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
from regard.progress import paused

Item = TypeVar("Item")
Result = TypeVar("Result")

_shared: tuple[Callable[[Any], Any], Sequence[Any]] | None = None  # inherited by a fork, so that it need not be sent


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """`work` on each item, as many at once as torch may use threads; results in the order of the items."""
    threads = torch.get_num_threads()
    if threads == 1 or len(items) < 2:
        yield from map(work, items)
        return
    global _shared
    count = min(threads, len(items))
    _shared = work, items
    with paused():
        pool = _processes(count)
    alone = pool is not None
    if pool is None:  # the number of threads is each thread's own, but for MKL's, which is the process's
        pool = ThreadPoolExecutor(count, "batch", torch.set_num_threads, (1,))
    try:
        with paused(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork, for the threads that torch keeps asleep
            results = pool.map(_work, range(len(items))) if alone else pool.map(work, items)
        yield from results
    except BrokenProcessPool:
        raise UserError(
            f"one of {count} processes was ended from outside, perhaps because memory ran out: use smaller "
            "batches, or set OMP_NUM_THREADS=1 for one process"
        ) from None
    except BaseException:  # Ctrl-C, or the rest is not wanted: do not wait for the batches in progress
        for process in list((getattr(pool, "_processes", None) or {}).values()):  # a pool of threads has none
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        _shared = None
        torch.set_num_threads(threads)


def _processes(count: int) -> Executor | None:
    """A pool of forks of this process, if it can be forked."""
    if sys.platform != "linux" or threading.active_count() > 1 or torch.cuda.is_initialized():
        return None
    try:
        return ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin, (os.getpid(),))
    except (OSError, NotImplementedError):  # no shared memory here, as in some sandboxes
        return None


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the parent must not run here
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a fork does not outlive its parent
    if os.getppid() != parent:  # which has already ended
        os._exit(1)
    torch.set_num_threads(1)


def _work(number: int) -> Any:
    assert _shared is not None
    work, items = _shared
    return work(items[number])
