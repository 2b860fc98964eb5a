"""Labelled images: the [data] table of a recipe that classifies images.

    [data]
    train = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]   two files in MNIST's idx format, gzipped or not
    train = ["photos/train"]                                         or a folder with one folder per class
    test = { test = ["photos/test"] }

An idx file begins with 0, 0, a type (8: bytes), the number of axes, and the length of each as four bytes, most
significant first; then come the bytes (LeCun et al. 1998). In folders the class is the folder's name.
"""

from __future__ import annotations

import gzip
import math
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.lines import open_bytes
from regard.data.pixels import Pixels, describe_resized, store_pixels
from regard.data.sets import DataConfig, Files, find_files, home
from regard.errors import MissingFiles, UserError, suggest

BYTES = 8  # the type of an idx file that is read
HELD_OUT = 1  # seed of what `valid_fraction` holds out: the same for every train.seed


@dataclass(frozen=True, kw_only=True)
class ImageData(DataConfig):
    valid_fraction: float = 0.0  # of the training images, held out in place of `valid`
    classes: Files = ()  # names in the order of the labels; folders have their own

    EXAMPLE: ClassVar[str] = "photos/train"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_valid_fraction(self.valid_fraction)
        if len(set(self.classes)) < len(self.classes):
            raise UserError(f"classes = {list(self.classes)}: names one twice")


@dataclass(frozen=True)
class Listed:
    """A set before its images are decoded: the content of idx files, or image files with their classes."""

    pixels: Tensor | None  # idx: [N, 1, height, width] of bytes
    files: list[Path]
    labels: Tensor  # [N]


def find_set(files: Sequence[str], config: ImageData) -> None:
    """A UserError unless all files exist."""
    if not all((home(config.folder) / home(name)).is_dir() for name in files):
        find_files(files, config.folder)


def list_set(files: Sequence[str], config: ImageData, classes: Sequence[str]) -> Listed:
    """Find the images of a set; `classes` are known, or empty where idx labels only count them."""
    folders = [home(config.folder) / home(name) for name in files]
    if all(folder.is_dir() for folder in folders):
        return _list_folders(folders, classes)
    if len(files) != 2 or any(folder.is_dir() for folder in folders):
        lost = next((f" ({folder}: no such file)" for folder in folders if not folder.exists()), "")
        raise (MissingFiles if lost else UserError)(
            f"{list(files)}{lost}: give two idx files, images and labels, or folders with one folder per class"
        )
    images, names = find_files(files, config.folder)
    pixels, labels = read_idx(images), read_idx(names)
    if pixels.dim() != 3 or labels.dim() != 1:
        raise UserError(
            f"{images}, {names}: have {pixels.dim()} and {labels.dim()} axes; the first must contain images (3), the "
            "second labels (1)"
        )
    if len(pixels) != len(labels) or not len(labels):
        raise UserError(f"{images}: {len(pixels):,} images, but {names} has {len(labels):,} labels; they do not match")
    if classes and int(labels.max()) >= len(classes):
        row = int((labels >= len(classes)).nonzero()[0])
        raise UserError(
            f"{names}, row {row + 1:,}: label {int(labels[row])}, but data.classes names {len(classes)} "
            f"(0 to {len(classes) - 1}): add the missing ones"
        )
    return Listed(pixels[:, None], [], labels.long())


def read_idx(path: Path) -> Tensor:
    """The bytes of an idx file in their shape."""
    try:
        with open_bytes(path) as file:
            content = file.read()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{path}: the gzip file is truncated or damaged; copy or download it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != BYTES or not 1 <= content[3] <= 4:
        raise UserError(
            f"{path}: is not an idx file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}, not 00 00 08"
        )
    axes = content[3]
    if len(content) < 4 + 4 * axes:
        raise UserError(f"{path}: is truncated within its header; copy or download it again")
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    if len(content) - 4 - 4 * axes != math.prod(shape):
        raise UserError(
            f"{path}: declares {' x '.join(map(str, shape))} bytes, but has {len(content) - 4 - 4 * axes:,}; "
            "copy or download it again"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[4 + 4 * axes :].view(shape)


def folder_classes(files: Sequence[str], config: ImageData) -> tuple[str, ...]:
    """The classes that the folders of a set have, in order of name; () for idx files."""
    folders = [home(config.folder) / home(name) for name in files]
    if not folders or not all(folder.is_dir() for folder in folders):
        return ()
    names = {entry.name for folder in folders for entry in folder.iterdir() if _is_class(entry)}
    if len(names) < 2:
        raise UserError(
            f"{folders[0]}: has {len(names)} folders; put the images of each class into a folder of its own"
        )
    return tuple(sorted(names))


def _is_class(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _list_folders(folders: Sequence[Path], classes: Sequence[str]) -> Listed:
    files: list[Path] = []
    labels: list[int] = []
    for folder in folders:
        for entry in sorted(filter(_is_class, folder.iterdir())):
            if entry.name not in classes:
                raise UserError(
                    f"{entry}: {entry.name!r} is not a class of the training data; {suggest(entry.name, classes)}"
                )
            inside = sorted(path for path in entry.rglob("*") if path.is_file() and not path.name.startswith("."))
            files += inside
            labels += [classes.index(entry.name)] * len(inside)
    if not files:
        raise UserError(f"{folders[0]}: contains no images; put those of each class into a folder of its own")
    return Listed(None, files, torch.tensor(labels))


@dataclass(frozen=True)
class Images:
    """Decoded images of one size, with their classes."""

    pixels: Pixels
    labels: Tensor  # [N]

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, fraction: float) -> tuple[Images, Images]:
        """(the rest, a random `fraction`), always the same."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(HELD_OUT))
        count = max(1, round(fraction * len(self)))
        kept, held = order[count:].sort().values, order[:count].sort().values
        parts = [Images(self.pixels.choose(rows), self.labels[rows]) for rows in (kept, held)]
        return parts[0], parts[1]


def make_images(listed: Listed, folder: Path, channels: int, side: int, skip_bad: bool) -> Images:
    """Decode a set to images of one size: idx in memory, files once into `folder`, which is memory-mapped."""
    if listed.pixels is None:
        pixels, kept = store_pixels(listed.files, folder, channels, side, skip_bad)
        return Images(pixels, listed.labels[kept])
    return Images(Pixels(fit(listed.pixels, channels, side)), listed.labels)


def fit(pixels: Tensor, channels: int, side: int) -> Tensor:
    """Grey images [N, 1, height, width] in another size, or repeated in every channel."""
    height, width = pixels.shape[2:]
    if (height, width) != (side, side):
        print(f"note: {describe_resized(len(pixels), f'{width} x {height}', side)}", file=sys.stderr)
        parts = (
            F.interpolate(part.float(), (side, side), mode="bilinear", antialias=True).round().clamp(0, 255).byte()
            for part in pixels.split(4096)
        )
        pixels = torch.cat(list(parts))
    return pixels if channels == 1 else pixels.expand(-1, channels, -1, -1)
