"""Labelled pictures: the [data] table of a recipe with task = "image-classification".

    [data]
    train = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]   two files in MNIST's idx format, gzipped or not
    train = ["photos/train"]                                         or a folder that has one folder a class
    test = { test = ["photos/test"] }

An idx file begins with 0, 0, a type (8: bytes), the number of axes, and the length of each as four bytes, highest
first; then come the bytes (LeCun et al. 1998). In folders the class is the folder's name.
"""

from __future__ import annotations

import gzip
import math
import struct
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.config import Files, check_list, check_tests, expand_all, home
from regard.data.lines import open_bytes
from regard.data.pixelstore import Pixels, store_pixels, tell_resized
from regard.errors import MissingFiles, UserError, suggest
from regard.settings import check_types

BYTES = 8  # the type of an idx file that is read
HELD_OUT = 1  # seed of the choice that `valid_fraction` makes: the same for every training seed


@dataclass(frozen=True, kw_only=True)
class PicturesData:
    train: Files
    valid: Files = ()
    valid_fraction: float = 0.0  # of the training pictures, held out in place of `valid`
    test: dict[str, Files] = field(default_factory=dict)
    classes: Files = ()  # names in the order of the labels; folders bring theirs
    skip_bad: bool = False  # leave out pictures that cannot be read, instead of asking you to mend them
    folder: str = "."  # where relative names start

    def __post_init__(self) -> None:
        for name, files in (("train", self.train), ("valid", self.valid), ("classes", self.classes)):
            check_list(name, files)
        check_tests(self.test, "photos/test")
        check_types(self)
        if not self.train:
            raise UserError('train = []: names nothing; write  train = ["photos/train"], a folder with one a class')
        if not 0 <= self.valid_fraction < 1:
            raise UserError(f"valid_fraction = {self.valid_fraction}: must be at least 0 and below 1, such as 0.05")
        if self.valid_fraction and self.valid:
            raise UserError(
                f"valid_fraction = {self.valid_fraction}: there is valid = {list(self.valid)} too; choose one"
            )
        if len(set(self.classes)) < len(self.classes):
            raise UserError(f"classes = {list(self.classes)}: names one twice")


@dataclass(frozen=True)
class Listed:
    """What a set consists of, before its pictures are decoded: idx content, or files with their classes."""

    pixels: Tensor | None  # idx: [N, 1, height, width] of bytes
    files: list[Path]
    labels: Tensor  # [N]


def find_set(files: Sequence[str], config: PicturesData) -> None:
    """A UserError unless all is there."""
    if not all((home(config.folder) / home(name)).is_dir() for name in files):
        expand_all(files, config.folder)


def list_set(files: Sequence[str], config: PicturesData, classes: Sequence[str]) -> Listed:
    """Find the pictures of a set; `classes` are known, or empty where idx labels only count them."""
    folders = [home(config.folder) / home(name) for name in files]
    if all(folder.is_dir() for folder in folders):
        return _list_folders(folders, classes)
    if len(files) != 2 or any(folder.is_dir() for folder in folders):
        lost = next((f" (there is no {folder})" for folder in folders if not folder.exists()), "")
        raise (MissingFiles if lost else UserError)(
            f"{list(files)}{lost}: give two idx files, pictures and labels, or folders that have one folder a class"
        )
    (images,), (names,) = expand_all(files, config.folder)
    pixels, labels = read_idx(images), read_idx(names)
    if pixels.dim() != 3 or labels.dim() != 1:
        raise UserError(
            f"{images}, {names}: have {pixels.dim()} and {labels.dim()} axes; the first must hold pictures (3), the "
            "second labels (1)"
        )
    if len(pixels) != len(labels) or not len(labels):
        raise UserError(f"{images}: {len(pixels):,} pictures, but {names} has {len(labels):,} labels; take the pair")
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
        raise UserError(f"{path}: the gzip file is cut off or damaged; copy or download it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != BYTES or not 1 <= content[3] <= 4:
        raise UserError(
            f"{path}: is no idx file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}, not 00 00 08"
        )
    axes = content[3]
    if len(content) < 4 + 4 * axes:
        raise UserError(f"{path}: ends within its header; copy or download it again")
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    if len(content) - 4 - 4 * axes != math.prod(shape):
        raise UserError(
            f"{path}: says that it holds {' x '.join(map(str, shape))} bytes, but has {len(content) - 4 - 4 * axes:,}; "
            "copy or download it again"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[4 + 4 * axes :].view(shape)


def folder_classes(files: Sequence[str], config: PicturesData) -> tuple[str, ...]:
    """The classes that the folders of a set have, in order of name; () for idx files."""
    folders = [home(config.folder) / home(name) for name in files]
    if not folders or not all(folder.is_dir() for folder in folders):
        return ()
    found = {entry.name for folder in folders for entry in folder.iterdir() if _is_class(entry)}
    if len(found) < 2:
        raise UserError(
            f"{folders[0]}: has {len(found)} folders; put the pictures of each class into a folder of its own"
        )
    return tuple(sorted(found))


def _is_class(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _list_folders(folders: Sequence[Path], classes: Sequence[str]) -> Listed:
    files: list[Path] = []
    labels: list[int] = []
    for folder in folders:
        for entry in sorted(filter(_is_class, folder.iterdir())):
            if entry.name not in classes:
                raise UserError(
                    f"{entry}: {entry.name!r} is no class of the training data; {suggest(entry.name, classes)}"
                )
            inside = sorted(path for path in entry.rglob("*") if path.is_file() and not path.name.startswith("."))
            files += inside
            labels += [classes.index(entry.name)] * len(inside)
    if not files:
        raise UserError(f"{folders[0]}: holds no pictures; put those of each class into a folder of its own")
    return Listed(None, files, torch.tensor(labels))


@dataclass(frozen=True)
class Pictures:
    """Decoded pictures of one size, with their classes."""

    pixels: Pixels
    labels: Tensor  # [N]

    def __len__(self) -> int:
        return len(self.labels)

    def divide(self, share: float) -> tuple[Pictures, Pictures]:
        """(all but, only) the `share` that a fixed draw picks."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(HELD_OUT))
        count = max(1, round(share * len(self)))
        kept, held = order[count:].sort().values, order[:count].sort().values
        return Pictures(self.pixels.choose(kept), self.labels[kept]), Pictures(
            self.pixels.choose(held), self.labels[held]
        )


def make_pictures(listed: Listed, folder: Path, channels: int, side: int, skip_bad: bool) -> Pictures:
    """Decode a set to pictures of one size: idx in memory, files once into `folder`, from where they are mapped."""
    if listed.pixels is None:
        pixels, kept = store_pixels(listed.files, folder, channels, side, skip_bad)
        return Pictures(pixels, listed.labels[kept])
    return Pictures(Pixels(fit(listed.pixels, channels, side)), listed.labels)


def fit(pixels: Tensor, channels: int, side: int) -> Tensor:
    """Grey pictures [N, 1, height, width] in another size, or repeated in every channel."""
    height, width = pixels.shape[2:]
    if (height, width) != (side, side):
        print(f"note: {tell_resized(len(pixels), f'{width} x {height}', side)}", file=sys.stderr)
        parts = (
            F.interpolate(part.float(), (side, side), mode="bilinear", antialias=True).round().clamp(0, 255).byte()
            for part in pixels.split(4096)
        )
        pixels = torch.cat(list(parts))
    return pixels if channels == 1 else pixels.expand(-1, channels, -1, -1)
