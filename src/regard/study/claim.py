"""Claims: several processes share the runs of a study through a folder, and each run has one process at a time.

A claim is a file that only one process can create (O_EXCL). Its owner touches it every few seconds; a claim that was
not touched for the time of its lease belongs to a process that is dead, and the run may be taken over. Two processes
may notice that at once, and one may have checked before the other acted, so a claim is never removed or replaced:

    claims/heads-1@2.0      the first owner of run heads-1, seed 2
    claims/heads-1@2.1      the one that has taken it over, and so on; the last number owns the run

Taking over number n means creating number n + 1, which again only one process can do. To release a claim is to let its
lease end at once (modification time 0).

Clocks of machines differ, so ages are computed from times of one clock, that of the file system: the modification time
of the claim against that of a file touched now. A process of the same machine is known to be dead as soon as it is.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from regard.files import is_running, make_folder

LEASE = 90.0  # seconds without a heartbeat after which a process counts as dead
BEATS = 6  # heartbeats per lease


def machine() -> str:
    """Where process numbers mean the same: the host since it started, and the namespace of a container."""
    parts = [platform.node()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def file_system_time(folder: Path) -> float:
    """Now, by the clock that sets modification times in this folder."""
    path = folder / ".clock"
    path.touch()
    os.utime(path)
    return path.stat().st_mtime


class Claim:
    """The right to train a run, from `take` until `release`."""

    def __init__(self, folder: Path, name: str, number: int, lease: float) -> None:
        self.folder, self.name, self.number, self.lease = folder, name, number, lease
        self.lost = False  # another process has taken the run over
        self.on_lost: Callable[[], object] | None = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self.thread.start()

    @property
    def path(self) -> Path:
        return _path(self.folder, self.name, self.number)

    def _beat(self) -> None:
        while not self.stop.wait(self.lease / BEATS):
            if _path(self.folder, self.name, self.number + 1).exists():  # this process was stopped for too long
                self.lost = True
                if self.on_lost is not None:
                    self.on_lost()
                return
            with suppress(OSError):  # the file system is away for a moment
                os.utime(self.path)

    def release(self) -> None:
        self.stop.set()
        self.thread.join()
        with suppress(OSError):
            os.utime(self.path, (0, 0))


def take(folder: Path, name: str, lease: float = LEASE) -> Claim | None:
    """The claim of a run, or None if a living process has it."""
    make_folder(folder)
    number = _last(folder, name)
    if number >= 0 and _is_alive(folder, _path(folder, name, number)):
        return None
    owner = {"machine": machine(), "process": os.getpid(), "host": platform.node(), "lease": lease}
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    temporary.write_text(json.dumps(owner))
    try:
        os.link(temporary, _path(folder, name, number + 1))  # with its content, or not at all
    except FileExistsError:
        return None
    except OSError:  # a file system without hard links
        try:
            with _path(folder, name, number + 1).open("x") as file:
                json.dump(owner, file)
        except FileExistsError:
            return None
    finally:
        temporary.unlink(missing_ok=True)
    return Claim(folder, name, number + 1, lease)


def owner_of(folder: Path, name: str) -> dict[str, Any] | None:
    """Who trains the run now: host, process, and since when in seconds ("age"); None if nobody does."""
    number = _last(folder, name)
    if number < 0 or not _is_alive(folder, path := _path(folder, name, number)):
        return None
    return {**_read(path)[0], "number": number}


def _path(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}.{number}"


def _last(folder: Path, name: str) -> int:
    """The number of the newest claim; -1 if there is none."""
    number = -1
    while _path(folder, name, number + 1).exists():
        number += 1
    return number


def _read(path: Path) -> tuple[dict[str, Any], float]:
    """The owner and the time of its last sign of life; opening the file makes a network drive look at it anew."""
    try:
        with path.open() as file:
            touched = os.fstat(file.fileno()).st_mtime
            owner = json.loads(file.read() or "{}")
    except (OSError, ValueError):
        return {}, time.time()
    return owner if isinstance(owner, dict) else {}, touched


def _is_alive(folder: Path, path: Path) -> bool:
    owner, touched = _read(path)
    if touched <= 0:
        return False
    own = owner.get("machine") == machine()
    if own and isinstance(process := owner.get("process"), int) and not is_running(process):
        return False
    return file_system_time(folder) - touched < float(owner.get("lease", LEASE))
