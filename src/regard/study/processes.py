"""Several processes of one machine work on one search (`regard tune --jobs N`).

Each is a worker like any other, with its share of the cores and, where there are several GPUs, one of its own. This
process only waits and reports. Ctrl-C is forwarded to the workers, which then save a checkpoint; they also end if this
process is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch

from regard.errors import UserError
from regard.files import make_folder
from regard.study.search import Search, work
from regard.training.trainer import interruptible

POLL = 0.5  # seconds between two looks at the trials


def work_together(search: Search, trials: int, device: torch.device, jobs: int, report: Callable[[int], None]) -> bool:
    """Train trials in `jobs` processes; False if interrupted. `report` is called with the number of each trial."""
    known = {one.number for one in search.results if one.status != "running"}
    context = multiprocessing.get_context("spawn")
    threads = max(1, torch.get_num_threads() // jobs)
    make_folder(search.folder / "logs")
    logs = [search.folder / "logs" / f"{platform.node()}-{os.getpid()}-{number}.txt" for number in range(1, jobs + 1)]
    processes = [
        context.Process(target=_work, args=(search.folder, trials, _own_device(device, number), threads, log))
        for number, log in enumerate(logs)
    ]
    with interruptible() as stop:
        try:
            for process in processes:
                process.start()
            asked = False
            while alive := [process for process in processes if process.is_alive()]:
                if stop() and not asked:
                    asked = True
                    for process in alive:
                        process.terminate()
                wait([process.sentinel for process in alive], POLL)
                for one in search.results:
                    if one.status != "running" and one.number not in known:
                        known.add(one.number)
                        report(one.number)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    if stop():
        return False
    for process, log in zip(processes, logs, strict=True):
        if process.exitcode:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise UserError(f"a process has ended with code {process.exitcode}: {''.join(last)} (see {log})")
    return True


def _own_device(device: torch.device, number: int) -> str:
    several = device.type == "cuda" and device.index is None and torch.cuda.device_count() > 1
    return f"cuda:{number % torch.cuda.device_count()}" if several else str(device)


def _work(folder: Path, trials: int, device: str, threads: int, log: Path) -> None:
    """A worker, in a new process: what training prints goes into the file `log`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the first one decides
    threading.Thread(target=_follow_parent, daemon=True).start()
    with log.open("w", buffering=1, encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        torch.set_num_threads(threads)
        try:
            search = Search(folder)
            finished = work(search, trials, torch.device(device), lambda number: None)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)
    sys.exit(0 if finished else 130)


def _follow_parent() -> None:
    """End as with Ctrl-C when the parent has ended without a word."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
