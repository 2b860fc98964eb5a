"""One run, one holder: a folder in which two processes train at once would be spoilt by both.

The lock is the operating system's (flock) on RUN/.lock, so it ends with the process that holds it, however that
ends; a file left behind by a killed one holds nobody up. Of several processes under torchrun, rank 0 holds it.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from regard.errors import UserError
from regard.files import make_folder

NAME = ".lock"


@dataclass
class _Hold:
    handle: int
    made: list[Path]  # the folder and those around it, as far as they were not there before
    times: int = 0


_held: dict[Path, _Hold] = {}  # by this process


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Inside, no other process can hold `folder`. It is made if need be, and goes again if it stays empty."""
    place = folder.resolve()
    if place not in _held:
        made = [path for path in (place, *place.parents) if not path.exists()]
        _held[place] = _Hold(_take(folder), made)
    held = _held[place]
    held.times += 1
    try:
        yield
    finally:
        held.times -= 1
        if not held.times:
            del _held[place]
            with suppress(OSError):
                (place / NAME).unlink()  # while it is still ours
            os.close(held.handle)
            with suppress(OSError):  # it is not empty
                for path in held.made:
                    path.rmdir()


def _take(folder: Path) -> int:
    path = folder / NAME
    while True:
        make_folder(folder)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # another process has just left the folder, and it was empty
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
        if not _lock(handle, folder):
            holder = os.read(handle, 200).decode(errors="replace")
            os.close(handle)
            raise UserError(
                f"{folder}: another process trains in this folder ({holder or 'it has just started'}): wait for it or "
                "stop it, or name another folder"
            )
        if _is_at(handle, path):
            with suppress(OSError):  # a full disk: the lock holds without a name in it
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
            return handle
        os.close(handle)  # its holder had just removed it


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _lock(handle: int, folder: Path) -> bool:
    """False if another process has it."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError) as error:  # Windows; a network drive
        print(f"warning: {folder}: cannot be locked here ({error}): let no other process train in it", file=sys.stderr)
    return True
