"""Files that are complete or absent: atomic writes, folders that replace one another.

Every write goes to a temporary neighbour first, is flushed to disk and then renamed (`os.replace` is atomic on one
file system), so a reader never sees half a file and a full disk leaves the old one as it was.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from regard.errors import UserError


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file that is whole or absent: a temporary neighbour, flushed to disk, then renamed."""
    path = Path(path).resolve()  # through links, so that a link stays a link
    if path.is_dir():
        raise UserError(f"{path}: cannot be written: it is a folder; give the name of a file in it")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{folder}: is a file; name a folder") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}") from None


@contextmanager
def staged(folder: str | Path, *, marker: str, force: bool, keep: str | Path) -> Iterator[Path]:
    """A temporary neighbour that becomes `folder` when the block ends well, and vanishes when it does not.

    With `force` an existing folder is replaced, but only one that holds `marker`, the file that shows what it
    is, and never one that `keep` lies in.
    """
    target = Path(folder).resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not force:
            raise UserError(f"{folder}: exists already; name another folder, or replace it with --force")
        if not (target / marker).is_file():
            raise UserError(f"{folder}: holds no {marker}, so --force does not replace it; name another folder")
        if Path(keep).resolve().is_relative_to(target):
            raise UserError(f"{folder}: holds {keep}, which is being read; name another folder")
    made = not target.parent.exists()
    make_folder(target.parent)
    suffix = secrets.token_hex(4)
    fresh, old = target.with_name(f".{target.name}.{suffix}.new"), target.with_name(f".{target.name}.{suffix}.old")
    make_folder(fresh)
    try:
        yield fresh
        if target.exists():
            os.replace(target, old)
        os.replace(fresh, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.replace(old, target)
        shutil.rmtree(fresh, ignore_errors=True)
        if made:
            with suppress(OSError):  # someone else has put something there meanwhile
                target.parent.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def name_some(names: list[str]) -> str:
    """The first three of many names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
