"""Pictures decoded once: a training run reads each of them many times, and decoding a JPEG takes longer than a step.

    RUN/data/NAME/pixels.npy    [N, channels, side, side] of bytes, mapped rather than loaded
    RUN/data/NAME/index.json    what they were made from: files, sizes and times, side and channels

The folder appears whole or not at all. A change of the files makes it anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from regard.data.pixels import open_pixels
from regard.data.tables import SHOWN
from regard.errors import UserError
from regard.files import make_folder, write_atomically

RESIDENT = 4 << 30  # bytes of pictures that are kept on the device as a whole: nothing is copied a step


class Pixels:
    """Bytes [N, channels, side, side], in memory or mapped, and which rows of them are meant."""

    def __init__(self, bytes: Tensor, rows: Tensor | None = None) -> None:
        self.bytes, self.rows = bytes, rows

    def __len__(self) -> int:
        return len(self.bytes if self.rows is None else self.rows)

    def choose(self, rows: Tensor) -> Pixels:
        return Pixels(self.bytes, rows if self.rows is None else self.rows[rows])

    def to(self, device: torch.device) -> Pixels:
        """On the device if they fit there; rows that are left out stay behind."""
        size = len(self) * self.bytes[0].numel()
        if device.type == "cpu" or size > RESIDENT:
            return self
        return Pixels(self[torch.arange(len(self))].to(device))

    def __getitem__(self, rows: Tensor) -> Tensor:
        """[B, channels, side, side] where the pictures are."""
        at = rows if self.rows is None else self.rows[rows]
        return self.bytes[at.to(self.bytes.device)]


def store_pixels(
    files: Sequence[Path], folder: Path, channels: int, side: int, skip_bad: bool = False
) -> tuple[Pixels, Tensor]:
    """The pictures of `files`, and the numbers of those that could be read (all, unless `skip_bad`)."""
    mark = _fingerprint(files, channels, side, skip_bad)
    index = _read_index(folder)
    if index is None or index["mark"] != mark:
        index = _make(files, folder, channels, side, skip_bad, mark)
    mapped = np.load(folder / "pixels.npy", mmap_mode="c", allow_pickle=False)  # c: torch wants it writable; disk stays
    return Pixels(torch.from_numpy(mapped)), torch.tensor(index["kept"], dtype=torch.long)


def _make(files: Sequence[Path], folder: Path, channels: int, side: int, skip_bad: bool, mark: str) -> dict:
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    make_folder(fresh)
    try:
        shape = (len(files), channels, side, side)
        room = np.lib.format.open_memmap(fresh / "pixels.npy", mode="w+", dtype=np.uint8, shape=shape)
        kept: list[int] = []
        wrong: list[str] = []
        resized: Counter[tuple[int, int]] = Counter()
        for number, path in enumerate(tqdm(files, desc="pictures", disable=not sys.stderr.isatty(), leave=False)):
            try:
                pixels, size = open_pixels(path, channels, side)
            except UserError as error:
                wrong.append(str(error))
                continue
            room[len(kept)] = pixels.numpy()
            kept.append(number)
            resized.update([] if size == (side, side) else [size])
        _tell(files, wrong, skip_bad, kept, resized, side)
        room.flush()
        index = {"mark": mark, "kept": kept}
        write_atomically(fresh / "index.json", json.dumps(index).encode())
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(fresh, folder)
        return index
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error}); make room and start again") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _tell(
    files: Sequence[Path],
    wrong: list[str],
    skip_bad: bool,
    kept: list[int],
    resized: Counter[tuple[int, int]],
    side: int,
) -> None:
    listed = "".join(f"\n  {line}" for line in wrong[:SHOWN]) + f"\n  and {len(wrong) - SHOWN:,} more" * (
        len(wrong) > SHOWN
    )
    if wrong and (not skip_bad or not kept):
        raise UserError(
            f"{len(wrong):,} of {len(files):,} pictures cannot be used:{listed}\nMend them, or leave them out with  "
            "skip_bad = true  in [data]."
        )
    if wrong:
        print(f"left out: {len(wrong):,} of {len(files):,} pictures:{listed}", file=sys.stderr)
    if resized:
        (width, height), _ = resized.most_common(1)[0]
        more = f" and {len(resized) - 1:,} other sizes" if len(resized) > 1 else ""
        note = describe_resized(sum(resized.values()), f"{width} x {height}{more}", side)
        print(f"note: {note}", file=sys.stderr)


def describe_resized(count: int, sizes: str, side: int) -> str:
    pictures, are = ("picture", "is") if count == 1 else ("pictures", "are")
    return f"{count:,} {pictures} of {sizes} {are} resized to {side} x {side}"


def _fingerprint(files: Sequence[Path], channels: int, side: int, skip_bad: bool) -> str:
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.exists()]
    return hashlib.sha256(json.dumps([states, len(files), channels, side, skip_bad]).encode()).hexdigest()


def _read_index(folder: Path) -> dict | None:
    try:
        index = json.loads((folder / "index.json").read_bytes())
        return index if isinstance(index, dict) and {"mark", "kept"} <= index.keys() else None
    except (OSError, ValueError, RecursionError):
        return None
