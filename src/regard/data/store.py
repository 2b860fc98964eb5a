"""Tokenised pairs on disk: written once as a stream, then read through memory maps.

Sentences become ids once, before training; after that a batch is a handful of slices. A store is a folder:

    source.ids       all source sequences end to end; 2 bytes an id where the vocabulary allows it, else 4
    source.offsets   [rows + 1], int64: row i is ids[offsets[i] : offsets[i + 1]]
    target.ids, target.offsets
    index.json       rows, sizes, and the fingerprint of what went in

The operating system loads the pages that a batch touches and drops them when memory is short, so the data may
be larger than memory: a row needs 32 bytes of it, for its lengths and where it starts, whatever its
own size.

A store appears under its name only when it is complete: it is written into a hidden neighbour, which is then
renamed. Its fingerprint covers the input files (names, sizes, times), the settings that choose lines, the
tokenizers and the special tokens around a sentence. While it fits, the store is used again; else
it is made anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from tqdm import tqdm

from regard.data.batch import Pairs, Ragged
from regard.data.pairs import Pair, PairData, find_pairs, read_pairs
from regard.errors import UserError
from regard.files import make_folder
from regard.text.tokenizer import Tokenizer

INDEX = "index.json"
VERSION = 1
CHUNK = 4096  # rows that are encoded and written at once …
CHUNK_CHARACTERS = 4_000_000  # … or fewer, where sentences are long

ID_TYPES = ("<u2", "<u4")
Ids = Sequence[int]


@dataclass(frozen=True)
class Store:
    """A finished store, mapped; `index` is what index.json says."""

    folder: Path
    sources: Ragged
    targets: Ragged
    index: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.sources)

    def pairs(self) -> Pairs:
        """The rows as `Batches` takes them."""
        return Pairs(self.sources, self.targets)

    @classmethod
    def write(
        cls,
        folder: str | Path,
        rows: Iterable[tuple[Ids, ...]],
        *,
        vocab_size: tuple[int, int],
        fingerprint: str = "",
        notes: Mapping[str, Any] | None = None,
    ) -> Store:
        """Write (source ids, target ids) as they come and open the result.

        `vocab_size` is the size of each side's vocabulary. `notes` go into index.json, as they stand after the
        last row. A store under that name is replaced, any other folder is left alone.
        """
        folder = Path(folder)
        if folder.exists() and not (folder / INDEX).is_file() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder}: holds no {INDEX}, so it is no store and is not replaced; name another folder")
        make_folder(folder.parent)
        fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.new")
        make_folder(fresh)
        try:
            sizes = _write_sides(fresh, rows, [_id_type(size) for size in vocab_size])
            index = {"version": VERSION, "fingerprint": fingerprint, **sizes, **(notes or {})}
            _write(fresh / INDEX, json.dumps(index, indent=1).encode())
            _swap(fresh, folder, fingerprint)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Store:
        """Map a finished store; files that are missing, cut off or damaged are a UserError."""
        folder = Path(folder)
        index = _read_index(folder)
        if index is None:
            raise UserError(f"{folder}: is no finished store of tokenised pairs (no readable {INDEX}); make it again")
        try:
            return cls(folder, _map(folder, 0, index), _map(folder, 1, index), index)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{folder}: the store is damaged ({error}); delete the folder, it is made again") from None


def prepare(
    files: Sequence[str],
    config: PairData,
    folder: str | Path,
    source: Tokenizer,
    target: Tokenizer,
    *,
    max_length: int | None = None,
    count: int | None = None,
) -> Store:
    """The pairs of `files` as a store in `folder`, made now unless the one there is of the same making.

    Longer pairs than `max_length` are dropped and counted (`index["dropped"]`); None keeps all. `count`, how
    many pairs there are, makes the progress bar exact.
    """
    print_now = partial(fingerprint, files, config, source, target, max_length)
    return prepare_pairs(
        lambda: iter(read_pairs(files, config)), folder, source, target, name=", ".join(files), print_now=print_now,
        max_length=max_length, count=count,
    )  # fmt: skip


def prepare_pairs(
    read: Callable[[], Iterator[Pair]],
    folder: str | Path,
    source: Tokenizer,
    target: Tokenizer,
    *,
    name: str,
    print_now: Callable[[], str],
    max_length: int | None = None,
    count: int | None = None,
) -> Store:
    """The same for pairs from anywhere: `print_now` gives the fingerprint of what decides them, `name` says what."""
    before = print_now()
    if is_whole(Path(folder), before):
        return Store.open(folder)
    notes: dict[str, int | str | None] = {"dropped": 0, "max_length": max_length}

    def rows() -> Iterator[tuple[Ids, ...]]:
        kept = dropped = 0
        with tqdm(total=count, desc="tokenising", unit="pair", disable=not sys.stderr.isatty(), leave=False) as bar:
            for chunk in _chunks(read()):
                sources = source.encode_batch([pair.source for pair in chunk], add_eos=True)
                targets = target.encode_batch([pair.target for pair in chunk], add_bos=True, add_eos=True)
                for pair, *row in zip(chunk, sources, targets, strict=True):
                    # A decoder reads its target without the last token, so both sides count one special token.
                    if max_length is None or max(len(row[0]), len(row[1]) - 1) <= max_length:
                        kept += 1
                        yield tuple(row)
                    else:
                        dropped += 1
                        notes.setdefault("first_dropped", f"{pair.file}, line {pair.line:,}")
                bar.update(len(chunk))
        notes["dropped"] = dropped
        if not kept:
            why = f": all {dropped:,} are longer than max_length = {max_length}; raise it" if dropped else ""
            raise UserError(f"{name}: no sentence pairs{why}")
        if print_now() != before:
            raise UserError(f"{name}: changed while being read; start again when they are complete")

    return Store.write(folder, rows(), vocab_size=(len(source), len(target)), fingerprint=before, notes=notes)


def fingerprint(
    files: Sequence[str],
    config: PairData,
    source: Tokenizer,
    target: Tokenizer,
    max_length: int | None,
) -> str:
    """A digest of everything that decides what a store holds."""
    paths = [path.resolve() for paths in find_pairs(files, config.folder) for path in paths]
    parts = {
        "version": VERSION,
        "files": [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths],
        "columns": (config.source, config.target),
        "skip_bad": config.skip_bad,
        "max_length": max_length,
        "tokenizers": [digest_of(source), digest_of(target)],
        "framing": (source.special_id("eos"), target.special_id("bos"), target.special_id("eos")),
    }
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def digest_of(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.json.encode()).hexdigest()


def _chunks(stream: Iterator[Pair]) -> Iterator[list[Pair]]:
    """Lists of pairs, limited in number and in characters."""
    chunk: list[Pair] = []
    characters = 0
    for pair in stream:
        chunk.append(pair)
        characters += len(pair.source) + len(pair.target)
        if len(chunk) == CHUNK or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _id_type(vocab_size: int) -> str:
    """The narrowest whole numbers that hold 0 to vocab_size - 1, in a byte order that is the same everywhere."""
    return ID_TYPES[0] if vocab_size <= 2**16 else ID_TYPES[1]


def _name(side: int) -> str:
    return ("source", "target")[side]


def _write_sides(folder: Path, rows: Iterable[tuple[Ids, ...]], types: Sequence[str]) -> dict[str, Any]:
    count, tokens = 0, [0 for _ in types]
    names = [f"{_name(side)}.{part}" for side in range(len(types)) for part in ("ids", "offsets")]
    files: list[IO[bytes]] = []
    try:
        for name in names:
            files.append((folder / name).open("xb"))
        for side in range(len(types)):
            files[2 * side + 1].write(np.zeros(1, "<i8").tobytes())
        stream = iter(rows)
        while chunk := list(islice(stream, CHUNK)):
            count += len(chunk)
            for side in range(len(types)):
                lengths = np.array([len(row[side]) for row in chunk], "<i8")
                ends = tokens[side] + lengths.cumsum()
                files[2 * side].write(_pack([row[side] for row in chunk], types[side]))
                files[2 * side + 1].write(ends.astype("<i8").tobytes())
                tokens[side] = int(ends[-1])
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files:
            file.close()
    return {"rows": count, "types": list(types), "tokens": tokens}


def _pack(sequences: Sequence[Ids], kind: str) -> bytes:
    ids = np.fromiter(chain.from_iterable(sequences), np.int64)
    if len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(kind).max:
        raise UserError(f"a token id is {ids.max() if ids.min() >= 0 else ids.min()}: outside the vocabulary given")
    return ids.astype(kind).tobytes()


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _swap(fresh: Path, folder: Path, fingerprint: str) -> None:
    """Give `fresh` its name and take away what had it, unless another process has made the same store meanwhile."""
    old = fresh.with_suffix(".old")
    for attempt in range(10):
        if fingerprint and is_whole(folder, fingerprint):
            break
        try:
            if folder.exists():
                os.replace(folder, old)
            os.replace(fresh, folder)
            break
        except OSError:  # another process is between the same two steps
            if attempt == 9:
                if old.exists() and not folder.exists():
                    os.replace(old, folder)
                raise
            time.sleep(0.05)
    shutil.rmtree(old, ignore_errors=True)


def is_whole(folder: Path, fingerprint: str) -> bool:
    index = _read_index(folder)
    if index is None or index.get("fingerprint") != fingerprint:
        return False
    try:
        Store.open(folder)
    except UserError:
        return False
    return True


def _read_index(folder: Path) -> dict[str, Any] | None:
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return index if isinstance(index, dict) and index.get("version") == VERSION else None


def _map(folder: Path, side: int, index: Mapping[str, Any]) -> Ragged:
    """One side of a store; its files have exactly the size the index gives them."""
    rows, tokens = int(index["rows"]), int(index["tokens"][side])
    kind = np.dtype(ID_TYPES[ID_TYPES.index(index["types"][side])])
    ids, offsets = folder / f"{_name(side)}.ids", folder / f"{_name(side)}.offsets"
    for path, size in ((ids, tokens * kind.itemsize), (offsets, (rows + 1) * 8)):
        if path.stat().st_size != size:
            raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes instead of {size:,}")
    bounds = torch.from_numpy(np.fromfile(offsets, "<i8"))
    lengths = bounds.diff()
    if int(bounds[0]) != 0 or int(bounds[-1]) != tokens or (rows and int(lengths.min()) < 0):
        raise ValueError(f"{offsets.name} does not rise from 0 to {tokens:,}")
    # "c": pages may be changed in memory, never on disk; torch wants no read-only arrays. Nothing can be mapped
    # from an empty file.
    flat = np.memmap(ids, kind, mode="c") if tokens else np.empty(0, kind)
    return Ragged(torch.from_numpy(np.asarray(flat)), lengths)
