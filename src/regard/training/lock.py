"""A lock on the folder of a run: two processes that train in one folder would corrupt it.

The lock is the operating system's (flock) on RUN/.lock, so it is released when its process ends, for whatever reason; a
file left behind by a killed process locks nothing. Under torchrun, rank 0 holds it.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regard.errors import UserError
from regard.files import make_folder

NAME = ".lock"
PAUSE = 0.05  # seconds between two attempts

_held: set[Path] = set()  # by this process


class Locked(UserError):
    """Another process holds the folder."""


@contextmanager
def hold(folder: Path, wait: bool = False) -> Iterator[None]:
    """Inside, no other process can lock `folder`. It is created if needed, and removed if it stays empty.

    `wait` until another process has released it; otherwise that is an error.
    """
    path = folder.resolve()
    if path in _held:  # the outermost call releases it
        yield
        return
    created = [parent for parent in (path, *path.parents) if not parent.exists()]
    handle = _take(folder, wait)
    _held.add(path)
    try:
        yield
    finally:
        _held.remove(path)
        with suppress(OSError):
            (path / NAME).unlink()  # while it is still ours
        os.close(handle)
        with suppress(OSError):  # it is not empty
            for parent in created:
                parent.rmdir()


def _take(folder: Path, wait: bool) -> int:
    path = folder / NAME
    while True:
        make_folder(folder)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:
            continue  # another process has just removed the empty folder
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
        if not _lock(handle, folder):
            holder = os.read(handle, 200).decode(errors="replace")
            os.close(handle)
            if wait:
                time.sleep(PAUSE)
                continue
            raise Locked(
                f"{folder}: another process is training in this folder ({holder or 'it has just started'}): wait for "
                "it or stop it, or name another folder"
            )
        with suppress(FileNotFoundError):  # its owner had just removed it
            if os.path.samestat(os.fstat(handle), path.stat()):
                with suppress(OSError):  # a full disk: the lock works without its content
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
                return handle
        os.close(handle)


def _lock(handle: int, folder: Path) -> bool:
    """False if another process holds the lock."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError) as error:  # Windows; a network drive
        print(f"warning: {folder}: cannot be locked here ({error}): start no other process there", file=sys.stderr)
    return True
