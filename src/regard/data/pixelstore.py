"""Images decoded once: training reads each of them many times, and decoding a JPEG takes longer than a step.

They are a column `pixels` of bytes, [N, channels, side, side], memory-mapped (`regard.data.columns`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from regard.data.columns import Column, Writer, prepare
from regard.data.lines import Notes, Problem
from regard.data.pixels import open_pixels
from regard.data.sets import fingerprint
from regard.data.tables import Rows
from regard.errors import UserError

RESIDENT = 4 << 30  # bytes of images that are kept on the device: a step then copies nothing


class Pixels:
    """Bytes [N, channels, side, side], in memory or mapped, or some of their rows."""

    def __init__(self, bytes: Tensor, rows: Tensor | None = None) -> None:
        self.bytes, self.rows = bytes, rows

    def __len__(self) -> int:
        return len(self.bytes if self.rows is None else self.rows)

    def choose(self, rows: Tensor) -> Pixels:
        return Pixels(self.bytes, rows if self.rows is None else self.rows[rows])

    def to(self, device: torch.device) -> Pixels:
        """On the device if they fit there."""
        size = len(self) * self.bytes[0].numel()
        if device.type == "cpu" or size > RESIDENT:
            return self
        return Pixels(self[torch.arange(len(self))].to(device))

    def __getitem__(self, rows: Tensor) -> Tensor:
        """[B, channels, side, side] on the device of the images."""
        at = rows if self.rows is None else self.rows[rows]
        return self.bytes[at.to(self.bytes.device)]


def store_pixels(
    files: Sequence[Path], folder: Path, channels: int, side: int, skip_bad: bool = False
) -> tuple[Pixels, Tensor]:
    """The images of `files`, and the numbers of those that could be read (all, unless `skip_bad`)."""

    def write(writer: Writer) -> None:
        resized: Counter[tuple[int, int]] = Counter()
        writer.notes["kept"] = []

        def scan(notes: Notes) -> Iterator[int | Problem]:
            for number, path in enumerate(tqdm(files, desc="images", disable=not sys.stderr.isatty(), leave=False)):
                try:
                    pixels, size = open_pixels(path, channels, side)
                except UserError as error:
                    yield Problem(str(path), None, str(error).removeprefix(f"{path}: "))
                    continue
                writer.append(pixels=pixels.numpy()[None])
                writer.notes["kept"].append(number)
                resized.update([] if size == (side, side) else [size])
                yield number

        names = [f"{len(files):,} images"]
        Rows(names, scan, skip_bad=skip_bad, what="images", remedy="give some").check().print(names)
        if resized:
            (width, height), _ = resized.most_common(1)[0]
            more = f" and {len(resized) - 1:,} other sizes" if len(resized) > 1 else ""
            note = describe_resized(sum(resized.values()), f"{width} x {height}{more}", side)
            print(f"note: {note}", file=sys.stderr)

    columns = {"pixels": Column("|u1", (channels, side, side))}
    store = prepare(folder, columns, lambda: fingerprint(files, [str(file) for file in files], skip_bad), write)
    return Pixels(store.tensor("pixels")), torch.tensor(store.index["kept"], dtype=torch.long)


def describe_resized(count: int, sizes: str, side: int) -> str:
    images, are = ("image", "is") if count == 1 else ("images", "are")
    return f"{count:,} {images} of {sizes} {are} resized to {side} x {side}"
