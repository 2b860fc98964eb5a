"""Images in files as numbers: [channels, side, side] of bytes, 0 to 255, decoded once.

An image is rotated as its EXIF data says, composited on white where it is transparent, and resized bilinearly to the
square that a model reads, like the processors of published ViTs. Files without one correct reading are rejected with a
remedy: several frames, CMYK, a single pixel, values without a known range.

Training reads each image many times, and decoding a JPEG takes longer than a step, so decoded images are stored as a
column of bytes (`regard.data.columns`), which is memory-mapped.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from regard.data.columns import Column, Writer, prepare
from regard.data.lines import Notes, Problem
from regard.data.sets import fingerprint
from regard.data.tables import Rows
from regard.errors import MissingExtra, UserError

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
LEAST = 2  # pixels a side
RESIDENT = 4 << 30  # bytes of images that are kept on the device: a step then copies nothing


def open_pixels(path: str | Path, channels: int, side: int) -> tuple[Tensor, tuple[int, int]]:
    """The bytes [channels, side, side] of an image, and its (width, height) in the file."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise MissingExtra("images", "pillow", f"{path}: reading an image") from None
    if channels not in MODES:
        raise UserError(f"channels = {channels}: an image file has 1, 3 or 4; use features instead")
    if not Path(path).is_file():
        folder = Path(path).is_dir()
        raise UserError(f"{path}: {'is a folder; name a file in it' if folder else 'no such file'}")
    try:
        with Image.open(path) as image:
            _refuse(path, image)
            size = image.size
            if image.mode.startswith("I;16"):  # 16 bits of grey: convert would clip them at 255
                grey = np.asarray(image, dtype=np.float32) / 257
                image = Image.fromarray(np.rint(grey).astype(np.uint8))
            image = ImageOps.exif_transpose(image)
            if channels != 4 and ("A" in image.getbands() or "transparency" in image.info):
                image = image.convert("RGBA")
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image)
            image = image.convert(MODES[channels])
            if image.size != (side, side):
                image = image.resize((side, side), Image.Resampling.BILINEAR)
            pixels = np.asarray(image, dtype=np.uint8)
    except UserError:
        raise
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = str(error).replace(str(path), "").replace("''", "").strip() or type(error).__name__
        raise UserError(f"{path}: cannot be read as an image ({reason}); save it again as PNG or JPEG") from None
    return torch.from_numpy(pixels.reshape(side, side, channels).copy()).permute(2, 0, 1).contiguous(), size


def _refuse(path: str | Path, image: Any) -> None:
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise UserError(f"{path}: has {frames} frames; save one of them as an image of its own")
    if image.mode == "CMYK":
        raise UserError(f"{path}: is in CMYK, colours for print; save it as RGB")
    if image.mode in ("I", "F"):
        raise UserError(f"{path}: contains values of mode {image.mode!r} of unknown range; save it as 8 or 16 bits")
    width, height = image.size
    if min(width, height) < LEAST:
        raise UserError(f"{path}: has {width} x {height} pixels, too few; remove or replace it")


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
