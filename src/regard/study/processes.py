"""Several processes of one machine share a study or a search (`--jobs N` of `regard ablate` and `regard tune`).

Each runs the command for the folder, with its share of the cores and, where there are several GPUs, one of its own;
what it prints goes into FOLDER/logs. This process only waits and reports. Ctrl-C is forwarded to the others, which then
save a checkpoint; they also end if this process is killed.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from regard.errors import UserError
from regard.files import make_folder
from regard.training.trainer import interruptible

PARENT = "REGARD_WORKER"  # in the environment of a process that `work_together` has started: the id of its parent
POLL = 0.5  # seconds between two looks at the processes


def work_together(
    command: Sequence[str], folder: Path, jobs: int, device: str | None, report: Callable[[], object]
) -> bool:
    """Run `regard COMMAND` in `jobs` processes; False if interrupted. `report` is called again and again."""
    make_folder(folder / "logs")
    logs = [folder / "logs" / f"{platform.node()}-{os.getpid()}-{number}.txt" for number in range(1, jobs + 1)]
    processes: list[subprocess.Popen[bytes]] = []

    def end() -> None:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # for the second time: at once

    with interruptible() as stop:
        asked = False
        try:
            for number, log in enumerate(logs):
                processes.append(_start(command, number, jobs, device, log))
            while any(process.poll() is None for process in processes):
                if stop() and not asked:
                    asked = True
                    end()
                time.sleep(POLL)
                report()
        finally:
            end()
            for process in processes:
                process.wait()
    if stop():
        return False
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
            reason = "".join(lines[-1:]).removeprefix("error: ")
            raise UserError(f"a process has ended with code {process.returncode}: {reason} (see {log})")
    return True


def _start(command: Sequence[str], number: int, jobs: int, device: str | None, log: Path) -> subprocess.Popen[bytes]:
    gpus = torch.cuda.device_count() if device in (None, "cuda") else 0
    own = f"cuda:{number % gpus}" if gpus else device
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ, PARENT: str(os.getpid())}
    arguments = [sys.executable, "-m", "regard", *command, "--jobs", "1", *(["--device", own] if own else [])]
    with log.open("wb") as file:
        # a session of its own: a Ctrl-C in the terminal reaches only this process, which passes it on once
        return subprocess.Popen(
            arguments, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def is_worker() -> bool:
    """Whether `work_together` has started this process."""
    return PARENT in os.environ


def follow_parent() -> None:
    """End as with Ctrl-C when the process that has started this one is killed."""

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(POLL)
        os.kill(os.getpid(), signal.SIGTERM)

    if is_worker():
        parent = int(os.environ[PARENT])
        threading.Thread(target=follow, name="parent", daemon=True).start()
