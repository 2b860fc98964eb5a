"""Text as one long row of token ids on disk: written once, resumable, then read through memory maps.

    shard-00000.ids, …   ids end to end, </s> between documents; 2 bytes an id where the vocabulary allows it, else 4
    index.json           the shards, what text they hold, and the fingerprint of what went in

Making it can take hours for a large corpus, so every finished shard counts: it is on disk under its name, and
progress.json beside it says how far the text was read. Whoever comes next with the same text, settings and tokenizer
goes on from there, and the result is the same, byte for byte. A complete store is used again as it is.

The store is written into a hidden neighbour that is renamed at the end. One process at a time works on it (a lock);
another one that wants the same store waits, and then finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from regard.data.documents import Piece, utf8
from regard.errors import Unfinished, UserError
from regard.files import make_folder, write_atomically
from regard.text.tokenizer import Tokenizer

INDEX, PROGRESS = "index.json", "progress.json"
VERSION = 1
SHARD = 1 << 26  # tokens after which a shard ends
CHUNK = 4_000_000  # characters that are encoded and written at once
COUNTS = ("pieces", "documents", "characters", "bytes", "unknown")


@dataclass(frozen=True)
class Tokens:
    """A finished store, mapped; `index` is what index.json says."""

    folder: Path
    index: Mapping[str, Any]
    shards: tuple[np.ndarray, ...]
    ends: np.ndarray  # [shards] tokens up to the end of each

    def __len__(self) -> int:
        return int(self.ends[-1])

    @classmethod
    def open(cls, folder: str | Path) -> Tokens:
        """Map a finished store; files that are missing, cut off or damaged are a UserError."""
        folder = Path(folder)
        try:
            index = json.loads((folder / INDEX).read_bytes())
            kind, sizes = np.dtype(str(index["type"])), [int(size) for size in index["shards"]]
            if index["version"] != VERSION or not sum(sizes):
                raise ValueError("another version")
            shards = tuple(_map(folder / _name(number), kind, size) for number, size in enumerate(sizes))
        except (OSError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise UserError(
                f"{folder}: is no whole store of tokens ({error}); delete it, and it is made again"
            ) from None
        return cls(folder, index, shards, np.cumsum(sizes))

    def rows(self, starts: Iterable[int], length: int) -> Tensor:
        """ids [R, length]: so many from each start on, across the borders of shards. int64"""
        return torch.from_numpy(np.stack([self.slice(start, start + length) for start in starts]).astype(np.int64))

    def slice(self, begin: int, end: int) -> np.ndarray:
        """The ids from `begin` to before `end`."""
        if not 0 <= begin <= end <= len(self):
            raise ValueError(f"tokens {begin} to {end} of {len(self)}")
        first = int(np.searchsorted(self.ends, begin, side="right"))
        parts, at = [], begin
        while at < end:
            start = int(self.ends[first - 1]) if first else 0
            parts.append(self.shards[first][at - start : min(end, int(self.ends[first])) - start])
            at, first = at + len(parts[-1]), first + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self.shards[0][:0]])


def prepare_tokens(
    stream: Iterator[Piece],
    folder: str | Path,
    tokenizer: Tokenizer,
    *,
    fingerprint: str,
    characters: int | None = None,
    shard: int = SHARD,
) -> Tokens:
    """The documents of `stream` as a store in `folder`, unless the one there is of the same making.

    `fingerprint` stands for the text; `characters`, how many there are, makes the progress bar exact. After an
    interruption the finished shards are kept and their part of the stream is passed over.
    """
    folder = Path(folder)
    digest = hashlib.sha256(tokenizer.json.encode()).hexdigest()
    whole = hashlib.sha256(f"{VERSION} {fingerprint} {digest} {shard}".encode()).hexdigest()
    make_folder(folder.parent)
    fresh = folder.with_name(f".{folder.name}.part")
    with _alone(folder.with_name(f".{folder.name}.lock")):
        if is_whole(folder, whole):
            return Tokens.open(folder)
        writer = _Writer(fresh, tokenizer, whole, shard)
        with tqdm(
            total=characters, initial=writer.counts["characters"], desc="tokenising", unit="char", unit_scale=True,
            disable=not sys.stderr.isatty(), leave=False,
        ) as bar:  # fmt: skip
            writer.write(stream, bar)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(fresh, folder)
    return Tokens.open(folder)


def is_whole(folder: Path, fingerprint: str) -> bool:
    try:
        return bool(Tokens.open(folder).index["fingerprint"] == fingerprint)
    except UserError:
        return False


class _Writer:
    """Shards in a folder under way, and where in the text they end."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, fingerprint: str, shard: int) -> None:
        self.folder, self.tokenizer, self.fingerprint, self.shard = folder, tokenizer, fingerprint, shard
        self.type = "<u2" if len(tokenizer) <= 2**16 else "<u4"
        self.shards: list[int] = []
        self.counts = dict.fromkeys(COUNTS, 0)
        self.first: list[int] = [0, 0]  # characters and bytes of the first token
        self.open_document = False  # the text ends inside a document
        self._take_up()

    def _take_up(self) -> None:
        """Go on with what is there, if it was of the same making; else start anew."""
        try:
            found = json.loads((self.folder / PROGRESS).read_bytes())
            if found["fingerprint"] != self.fingerprint:
                raise ValueError
            for number, size in enumerate(found["shards"]):
                _map(self.folder / _name(number), np.dtype(self.type), size)
            self.shards, self.counts, self.first = found["shards"], found["counts"], found["first"]
            self.open_document = found["open"]
        except (OSError, LookupError, TypeError, ValueError, RecursionError):
            shutil.rmtree(self.folder, ignore_errors=True)
            make_folder(self.folder)
        for path in self.folder.glob("*.ids"):  # begun when the process was stopped
            if path.name not in {_name(number) for number in range(len(self.shards))}:
                path.unlink()

    def write(self, stream: Iterator[Piece], bar: Any) -> None:
        """Everything from here on, shard by shard, then the index."""
        for _ in range(self.counts["pieces"]):
            next(stream)
        chunks = text_chunks(stream)
        try:
            chunk = next(chunks, None)
            while chunk is not None:
                size = 0
                with (self.folder / _name(len(self.shards))).open("wb") as file:
                    while chunk is not None and size < self.shard:
                        ids = self._encode(chunk)
                        file.write(ids.tobytes())
                        size += len(ids)
                        bar.update(sum(len(text) for text, _ in chunk))
                        chunk = next(chunks, None)
                    file.flush()
                    os.fsync(file.fileno())
                self.shards.append(size)
                self._note(PROGRESS)
            if not sum(self.shards):
                raise UserError("the text has no tokens: it is empty")
            self._note(INDEX)
            (self.folder / PROGRESS).unlink()
        except OSError as error:
            raise Unfinished(
                f"{self.folder}: cannot be written ({error.strerror or error}). Make room and run the same command "
                "again: it goes on from the last shard that was"
            ) from error

    def _encode(self, chunk: list[Piece]) -> np.ndarray:
        rows: list[int] = []
        for (text, ends), ids in zip(chunk, self.tokenizer.encode_batch([text for text, _ in chunk]), strict=True):
            begins = not self.open_document
            if begins and text:
                if self.counts["documents"]:
                    rows.append(self.tokenizer.special_id("eos"))
                elif ids:
                    self.first = _size(self.tokenizer, ids[0])
            rows += ids
            self.counts["pieces"] += 1
            self.counts["documents"] += begins
            self.counts["characters"] += len(text)
            self.counts["bytes"] += utf8(text)
            self.counts["unknown"] += 0 if self.tokenizer.unk is None else ids.count(self.tokenizer.unk)
            self.open_document = not ends
        return np.array(rows, self.type)

    def _note(self, name: str) -> None:
        content = {"version": VERSION, "fingerprint": self.fingerprint, "type": self.type, "shards": self.shards}
        content |= {"first": self.first}
        content |= {"counts": self.counts, "open": self.open_document} if name == PROGRESS else self.counts
        write_atomically(self.folder / name, json.dumps(content, indent=1).encode())


def _size(tokenizer: Tokenizer, id: int) -> list[int]:
    """Characters and bytes of a token; the first part of a character is none yet."""
    raw = tokenizer.token_bytes(id) if tokenizer.byte_level else tokenizer.decode([id]).encode()
    return [len(raw.decode(errors="ignore")), len(raw)]


def text_chunks(stream: Iterator[Piece]) -> Iterator[list[Piece]]:
    chunk: list[Piece] = []
    characters = 0
    for piece in stream:
        chunk.append(piece)
        characters += len(piece.text)
        if characters >= CHUNK:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _name(number: int) -> str:
    return f"shard-{number:05d}.ids"


def _map(path: Path, kind: np.dtype, size: int) -> np.ndarray:
    if path.stat().st_size != size * kind.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes instead of {size * kind.itemsize:,}")
    return np.memmap(path, kind, mode="r") if size else np.empty(0, kind)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Inside, no other process is: the others wait."""
    with path.open("ab") as file:
        with contextlib.suppress(ImportError):  # not on Windows, where two processes at once are asked for trouble
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
