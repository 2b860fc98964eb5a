"""Columns on disk: prepared data, written once as a stream and then memory-mapped.

    index.json       number of rows, type and shape of each column, fingerprint of what went in, notes of the writer
    NAME.values      the values of a column, concatenated, little-endian
    NAME.offsets     [rows + 1] int64, of a ragged column: row i is values[offsets[i] : offsets[i + 1]]

A column is ragged (token ids, `Ragged`) or has one shape per row (labels, pixels, the ids of one long text). The
operating system loads the pages that a batch touches and drops them when memory is short, so the data may be larger
than memory: in memory are 16 bytes per row of a ragged column.

A store appears under its name only when it is complete: it is written into a hidden neighbour, which is then renamed.
Its fingerprint covers input files, settings and tokenizers; while that matches, the store is used again. One process
at a time prepares a store (a lock), and others wait for it. A writer may save checkpoints, from which an interrupted
preparation continues.

Two plain files per column, and not Arrow IPC: importing pyarrow takes 0.1 s at every start, it is an optional extra,
and reading memory-mapped values takes less code than converting Arrow's list arrays to tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.batch import Ragged
from regard.errors import Unfinished, UserError
from regard.files import locked, make_folder, write_atomically

INDEX, PROGRESS = "index.json", "progress.json"
VERSION = 2
UNREADABLE = (OSError, LookupError, TypeError, ValueError, RuntimeError, AttributeError)


@dataclass(frozen=True)
class Column:
    """Type of the values, and shape of a row; None: sequences of any length."""

    dtype: str
    shape: tuple[int, ...] | None = ()


def token_type(vocab_size: int) -> str:
    """The narrowest integers for ids from 0 to vocab_size - 1."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


@dataclass(frozen=True)
class Store:
    """A complete store, mapped; `index` is the content of index.json."""

    folder: Path
    index: Mapping[str, Any]
    columns: Mapping[str, Any]  # `Ragged`, or a tensor [rows, *shape]

    def __len__(self) -> int:
        return int(self.index["rows"])

    @classmethod
    def open(cls, folder: str | Path) -> Store:
        """Map a complete store; files that are missing, truncated or damaged are a UserError."""
        folder = Path(folder)
        try:
            index = json.loads((folder / INDEX).read_bytes())
            if index["version"] != VERSION:
                raise ValueError(f"version {index['version']}, not {VERSION}")
            for name, size in _file_sizes(index).items():
                if (found := (folder / name).stat().st_size) != size:
                    raise ValueError(f"{name} has {found:,} bytes instead of {size:,}")
            return cls(folder, index, {name: _map(folder, name, index) for name in index["columns"]})
        except UNREADABLE as error:
            raise UserError(
                f"{folder}: not a complete store ({error}); delete the folder, and it is made again"
            ) from None


class Writer:
    """Appends rows to the columns of a store in preparation; `notes` go into its index."""

    def __init__(self, folder: Path, columns: Mapping[str, Column], fingerprint: str) -> None:
        self.folder, self.notes = folder, dict[str, Any]()
        empty = {name: {**asdict(column), "values": 0} for name, column in columns.items()}
        self.index: dict[str, Any] = {"version": VERSION, "fingerprint": fingerprint, "rows": 0, "columns": empty}
        self.saved = self._resume()
        self.files = {name: (folder / name).open("ab") for name in _file_sizes(self.index)}
        for name, file in self.files.items():
            if name.endswith(".offsets") and not self.saved:
                file.write(np.zeros(1, "<i8").tobytes())

    @property
    def rows(self) -> int:
        return int(self.index["rows"])

    def _resume(self) -> bool:
        """Continue from the last checkpoint of the same preparation; else start again."""
        try:
            saved = json.loads((self.folder / PROGRESS).read_bytes())
            if any(saved[key] != self.index[key] for key in ("version", "fingerprint")):
                raise ValueError
            for name, size in _file_sizes(saved).items():
                if (self.folder / name).stat().st_size < size:
                    raise ValueError
                os.truncate(self.folder / name, size)
            self.index, self.notes = {key: saved.pop(key) for key in self.index}, saved
            return True
        except UNREADABLE:
            shutil.rmtree(self.folder, ignore_errors=True)
            make_folder(self.folder)
            return False

    def append(self, **rows: Sequence[Any] | np.ndarray) -> None:
        """More rows of every column: sequences of a ragged one, an array [n, *shape] of the others."""
        for name, column in self.index["columns"].items():
            values, dtype = rows[name], column["dtype"]
            if column["shape"] is None:
                ends = column["values"] + np.array([len(row) for row in values], "<i8").cumsum()
                self.files[f"{name}.offsets"].write(ends.astype("<i8").tobytes())
                values = np.fromiter(chain.from_iterable(values), np.int64)
            flat, limits = np.asarray(values).reshape(-1), np.iinfo(dtype)
            if len(flat) and not limits.min <= flat.min() <= flat.max() <= limits.max:
                raise UserError(f"{name}: {flat.max() if flat.min() >= 0 else flat.min()} is outside of {dtype}")
            self.files[f"{name}.values"].write(flat.astype(dtype).tobytes())
            column["values"] += len(flat)
        self.index["rows"] += max(map(len, rows.values()))

    def checkpoint(self) -> None:
        """Rows and notes so far are kept if the preparation is interrupted."""
        self._write_index(PROGRESS)
        self.saved = True

    def finish(self) -> None:
        self._write_index(INDEX)
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _write_index(self, name: str) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        write_atomically(self.folder / name, json.dumps({**self.index, **self.notes}, indent=1).encode())

    def close(self) -> None:
        for file in self.files.values():
            with contextlib.suppress(OSError):  # a full disk has been reported already
                file.close()


def prepare(
    folder: str | Path, columns: Mapping[str, Column], fingerprint: Callable[[], str], write: Callable[[Writer], None]
) -> Store:
    """The store in `folder`, written now unless the one there has the same fingerprint and columns.

    `fingerprint` is called again at the end: data that changed while it was read is a UserError.
    """
    folder, before = Path(folder), fingerprint()
    parts = [VERSION, before, {name: asdict(column) for name, column in columns.items()}]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    make_folder(folder.parent)
    with folder.with_name(f".{folder.name}.lock").open("ab") as lock, locked(lock):
        with contextlib.suppress(UserError):
            if (store := Store.open(folder)).index["fingerprint"] == digest:
                return store
        if folder.exists() and not (folder / INDEX).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder}: has no {INDEX}, so it is not a store and is not replaced; name another folder")
        writer, part = None, folder.with_name(f".{folder.name}.part")
        try:
            writer = Writer(part, columns, digest)
            write(writer)
            writer.finish()
            if fingerprint() != before:
                raise UserError(
                    f"{folder.name}: the files changed while being read; start again when they are complete"
                )
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(part, folder)
        except OSError as error:
            reason = error.strerror or error
            raise Unfinished(
                f"{folder}: cannot be written ({reason}). Free some space and run the same command again"
            ) from error
        finally:
            if writer is not None:
                writer.close()
            if writer is None or not writer.saved:
                shutil.rmtree(part, ignore_errors=True)
    return Store.open(folder)


def _file_sizes(index: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of every file of a store."""
    sizes = {}
    for name, column in index["columns"].items():
        sizes[f"{name}.values"] = column["values"] * np.dtype(column["dtype"]).itemsize
        if column["shape"] is None:
            sizes[f"{name}.offsets"] = 8 * (index["rows"] + 1)
    return sizes


def _map(folder: Path, name: str, index: Mapping[str, Any]) -> Ragged | Tensor:
    rows, column = int(index["rows"]), index["columns"][name]
    dtype, count = np.dtype(column["dtype"]), int(column["values"])
    if dtype.kind not in "iuf":  # an object would be a pointer to anywhere
        raise ValueError(f"{name} has the type {dtype}")
    values = _map_file(folder / f"{name}.values", dtype, count)
    if column["shape"] is not None:
        return values.view(rows, *column["shape"])
    offsets = _map_file(folder / f"{name}.offsets", np.dtype("<i8"), rows + 1)
    lengths = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != count or (rows and int(lengths.min()) < 0):
        raise ValueError(f"{name}.offsets does not rise from 0 to {count:,}")
    return Ragged(values, lengths)


def _map_file(path: Path, dtype: np.dtype, count: int) -> Tensor:
    array = np.memmap(path, dtype, mode="r") if count else np.empty(0, dtype)  # an empty file cannot be mapped
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the array is read-only; nobody writes to these tensors
        return torch.from_numpy(np.asarray(array))
