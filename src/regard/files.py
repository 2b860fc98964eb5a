"""Atomic writes of files and folders.

Everything is written to a temporary file or folder beside the target, flushed to disk and then renamed (`os.replace` is
atomic within a file system), so a reader never sees a partial file, and a full disk leaves the old one unchanged.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from regard.errors import Terminated, UserError, listed


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file in the same folder, to be written, which becomes `path` when the block succeeds."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: str | os.PathLike[str], content: bytes | Callable[[Path], object]) -> None:
    """Write a file atomically; `content` may be a function that writes the file at the path it is called with."""
    path = Path(path).resolve()  # follow links, so that a link stays a link
    if path.is_dir():
        raise UserError(f"{path}: cannot be written: it is a folder; pass the name of a file")
    try:
        with replacing(path) as temporary:
            content(temporary) if callable(content) else temporary.write_bytes(content)
            os.chmod(temporary, 0o644)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file, or it holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def locked(file: IO[Any]) -> Iterator[None]:
    """One process at a time is in such a block with the same file, and others wait; on Windows, nobody does."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{folder}: is a file, not a folder; choose another name") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be created: {error.strerror}") from None


def no_files(folder: Path) -> Collection[str]:
    return ()


@contextmanager
def staged(
    folder: str | Path, *, force: bool = False, own: Callable[[Path], Collection[str]] = no_files, keep: str | Path = ""
) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block succeeds and is deleted when it fails.

    With `force` an existing folder is replaced, but only if each of its files is one of `own(folder)`, those that such
    a command has written there (none: it is no such folder), and never if it contains `keep`.
    """
    if not str(folder):
        raise UserError("the name of the folder to write is empty; give it a name")
    target = Path(folder).resolve()
    _remove_left_over(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not force:
            raise UserError(f"{folder}: already exists; choose another folder, or replace it with --force")
        if Path(keep).resolve().is_relative_to(target):
            raise UserError(f"{folder}: contains {keep}, which is being read; choose another folder")
        if not (files := own(target)):
            raise UserError(
                f"{folder}: was not written by this command, so --force does not replace it; choose another folder"
            )
        if foreign := sorted({*files_in(target)} - {*files}):
            raise UserError(
                f"{folder}: contains {name_some(foreign)}, not written by this command, so --force does not replace "
                "it; move that elsewhere, or choose another folder"
            )
    new_parent = not target.parent.exists()
    name = f".{target.name}.{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
    fresh, old = target.with_name(f"{name}.new"), target.with_name(f"{name}.old")
    with terminable():
        try:
            make_folder(target.parent)
            with _named(fresh, str(folder)):
                make_folder(fresh)
                yield fresh
                if target.exists():
                    os.replace(target, old)
                os.replace(fresh, target)
        except BaseException:
            if old.exists() and not target.exists():
                os.replace(old, target)
            shutil.rmtree(fresh, ignore_errors=True)
            if new_parent:
                with suppress(OSError):  # not empty: another process has written there
                    target.parent.rmdir()
            raise
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _named(fresh: Path, folder: str) -> Iterator[None]:
    """Errors name the folder that was asked for, not the temporary one, and not none, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and str(fresh) not in str(error.filename):
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno, reason, str(error.filename or fresh).replace(str(fresh), folder)) from error
    except UserError as error:
        if str(fresh) not in str(error):
            raise
        raise UserError(str(error).replace(str(fresh), folder)) from (error.__cause__ or error)


def _remove_left_over(target: Path) -> None:
    """Delete what a process of this machine that was killed has left of writing `target`.

    If it was killed between its two renames, the folder that it was about to replace is put back.
    """
    left = re.compile(rf"\.{re.escape(target.name)}\.{re.escape(platform.node())}-(\d+)-[0-9a-f]{{8}}\.(new|old)")
    for path in sorted(target.parent.glob(".*"), reverse=True):  # the old one first
        if (match := left.fullmatch(path.name)) is None or is_running(int(match[1])):
            continue
        if match[2] == "old" and not target.exists():
            os.replace(path, target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def is_running(process: int) -> bool:
    """Whether a process of this machine has not ended; True if that cannot be asked."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        pass
    return True


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM ends the work as Ctrl-C does, so that what is temporary is removed.

    Where it is ignored or handled already, and outside of the main thread, nothing changes.
    """
    requested = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        requested = True
        raise Terminated

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except Exception as error:
        if requested:  # a library, such as PyTorch's exporter, has made an error of its own from it
            raise Terminated from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def files_in(folder: Path) -> list[str]:
    """Everything in a folder except folders, links included, by its path in it."""
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def name_some(names: list[str]) -> str:
    """The first three of a list of names, and how many more there are."""
    return listed(names if len(names) < 4 else [*names[:3], f"{len(names) - 3} more"])
