"""Public data sets: where they are, how large, and a digest that tells whether a download is the right file.

A URL can return anything: another version, an error page with status 200, half a file. So a file gets its name only
after its size and SHA-256 have been verified. URLs name a commit, not a branch, and therefore never change.

Regard contains none of this data. Without a network, the error lists the files: get them elsewhere, put them into a
folder and give it with --data DIR.
"""

from __future__ import annotations

import hashlib
import http.client
import tomllib
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import regard
from regard.errors import UserError, suggest
from regard.files import replacing
from regard.progress import Stage, stage

TIMEOUT = 30.0  # seconds without a byte before a download fails
BLOCK = 1 << 16


@dataclass(frozen=True)
class Remote:
    """One file: its name here, its URL, its size in bytes and its digest."""

    name: str
    url: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Dataset:
    """Files that belong together."""

    name: str
    summary: str
    licence: str
    files: tuple[Remote, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def _dataset(name: str, table: dict[str, str]) -> Dataset:
    rows = (line.split() for line in table["files"].strip().splitlines())
    files = tuple(Remote(file, f"{table['url']}/{file}", int(size), digest) for file, size, digest in rows)
    return Dataset(name, table["summary"], table["licence"], files)


_TABLES = tomllib.loads((resources.files("regard.data") / "datasets.toml").read_text(encoding="utf-8"))
DATASETS = {name: _dataset(name, table) for name, table in _TABLES.items()}


def named(name: str) -> Dataset:
    """The data set of that name."""
    if name not in DATASETS:
        raise UserError(f"{name!r}: unknown data set; {suggest(name, DATASETS)}")
    return DATASETS[name]


def fetch(dataset: Dataset, folder: str | Path, timeout: float = TIMEOUT) -> list[Path]:
    """Download what is not in `folder` yet and return all paths; complete files are kept."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; name a folder with -o")
    missing = [file for file in dataset.files if not _exists(folder / file.name, file)]
    with stage(f"downloading {dataset.name}", "bytes", sum(file.size for file in missing)) as done:
        for at, file in enumerate(missing):
            try:
                _download(file, folder / file.name, timeout, done)
            except (ValueError, OSError, http.client.HTTPException) as error:  # ValueError: ours, or a bad URL
                reason = str(error) or type(error).__name__
                raise UserError(_by_hand(dataset, missing[at:], folder, file, reason)) from None
    return [folder / file.name for file in dataset.files]


def _exists(path: Path, file: Remote) -> bool:
    """Whether the file exists already; another one of its name is not overwritten."""
    if not path.exists():
        return False
    if path.is_file() and path.stat().st_size == file.size:
        with path.open("rb") as opened:
            if hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256:
                return True
    raise UserError(f"{path}: exists with other content; delete it or name another folder with -o")


def _download(file: Remote, path: Path, timeout: float, done: Stage) -> None:
    """Fetch one file; it is renamed when it is complete."""
    request = urllib.request.Request(file.url, headers={"User-Agent": f"regard/{regard.__version__}"})
    digest, size = hashlib.sha256(), 0
    with urllib.request.urlopen(request, timeout=timeout) as response:
        path.parent.mkdir(parents=True, exist_ok=True)  # only now: without a response there is no folder
        with replacing(path) as temporary:
            with temporary.open("xb") as out:
                while size <= file.size and (block := response.read(BLOCK)):  # an endless response is cut short
                    size += len(block)
                    digest.update(block)
                    out.write(block)
                    done.count += len(block)
            if size != file.size:
                more = "more" if size > file.size else f"{size:,}"
                raise UserError(f"received {more} bytes instead of {file.size:,}")
            if digest.hexdigest() != file.sha256:
                raise UserError(f"wrong content: its SHA-256 is {digest.hexdigest()}")


def _by_hand(dataset: Dataset, missing: Sequence[Remote], folder: Path, failed: Remote, reason: str) -> str:
    width = max(len(file.name) for file in missing)
    listed = [f"  {file.name:<{width}}  {file.size:>9,} bytes  sha256 {file.sha256}" for file in missing]
    lines = [
        f"{dataset.name}: {failed.url} cannot be downloaded: {reason}",
        f"Try again later: complete files are kept. Or get the files below another way, put them into {folder} or any",
        "folder, and name it with --data DIR. Their URLs differ from this one only in the name:",
    ]
    return "\n".join(lines + listed)
