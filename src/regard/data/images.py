"""Images: files as numbers, and the [data] table of a recipe that classifies images.

    [data]
    train = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]   two files in MNIST's idx format, gzipped or not
    train = ["photos/train"]                                         or a folder with one folder per class
    test = { test = ["photos/test"] }

An idx file begins with 0, 0, a type (8: bytes), the number of axes, and the length of each as four bytes, most
significant first; then come the bytes (LeCun et al. 1998). In folders the class is the folder's name.

An image file becomes bytes [channels, side, side]: rotated as its EXIF data says, composited on white where it is
transparent, and resized bilinearly to the square that a model reads, like the processors of published ViTs. Files
without one correct reading are rejected with a remedy: several frames, CMYK, a single pixel, values without a known
range. Training reads each image many times, and decoding a JPEG takes longer than a step, so decoded images are stored
as a column of bytes (`regard.data.columns`), which is memory-mapped.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.columns import Column, Writer, prepare
from regard.data.lines import UNREADABLE, Notes, Problem, open_bytes
from regard.data.sets import DataConfig, Files, Group, file_names, fingerprint, home
from regard.data.tables import Rows
from regard.errors import MissingExtra, UserError, listed, suggest
from regard.messages import localize

BYTES = 8  # the type of an idx file that is read
HELD_OUT = 1  # seed of what `valid_fraction` holds out: the same for every train.seed
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
LUMA = (0.299, 0.587, 0.114)  # red, green and blue in a grayscale image (ITU-R 601, as in Pillow)
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")  # of images in requests; others run programs, such as Ghostscript
MOST_PIXELS = 25_000_000  # of images in requests: a small file may contain very many
LEAST = 2  # pixels a side
RESIDENT = 4 << 30  # bytes of images that are kept on the device: a step then copies nothing


@dataclass(frozen=True, kw_only=True)
class ImageData(DataConfig):
    """Where the images are, and their classes."""

    valid_fraction: float = 0.0  # fraction of the training images that is used in place of `valid`
    classes: Files = ()  # names of the classes in the order of the labels; folders have their own

    EXAMPLE: ClassVar[str] = "photos/train"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_valid_fraction(self.valid_fraction)
        if repeated := {name for name in self.classes if self.classes.count(name) > 1}:
            raise UserError(f"classes: names {listed(sorted(repeated))} twice")

    def find(self, files: Sequence[str] | Sequence[Group]) -> list[Path]:
        """All of them folders, or files."""
        folders = [home(self.folder) / home(name) for name in file_names(files)]
        return folders if all(folder.is_dir() for folder in folders) else super().find(files)


class Listed(NamedTuple):
    """A set before its images are decoded: the content of idx files, or image files, with their classes."""

    images: Tensor | list[Path]  # idx: [N, 1, height, width] of bytes
    labels: Tensor  # [N]
    classes: tuple[str, ...]


def list_set(files: Sequence[str] | Sequence[Group], config: ImageData, classes: tuple[str, ...] = ()) -> Listed:
    """Find the images of a set; without `classes`, they are the names of the folders, or the numbers of idx labels."""
    paths = config.find(files)
    if paths[0].is_dir():
        return _list_folders(paths, classes)
    if len(paths) != 2:
        raise UserError(f"{listed(files)}: give two idx files, images and labels, or folders with one folder per class")
    images, names = paths
    pixels, labels = read_idx(images), read_idx(names)
    if pixels.dim() != 3 or labels.dim() != 1:
        raise UserError(
            f"{images}, {names}: have {pixels.dim()} and {labels.dim()} axes; the first must contain images (3), the "
            "second labels (1)"
        )
    if len(pixels) != len(labels) or not len(labels):
        raise UserError(f"{images}: {len(pixels):,} images, but {names} has {len(labels):,} labels; they do not match")
    classes = classes or tuple(map(str, range(int(labels.max()) + 1)))
    if int(labels.max()) >= len(classes):
        row = int((labels >= len(classes)).nonzero()[0])
        raise UserError(
            f"{names}, row {row + 1:,}: label {int(labels[row])}, but data.classes names {len(classes)} "
            f"(0 to {len(classes) - 1}): add the missing ones"
        )
    return Listed(pixels[:, None], labels.long(), classes)


def read_idx(path: Path) -> Tensor:
    """The bytes of an idx file in their shape."""
    try:
        with open_bytes(path) as file:
            content = file.read()
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({error}); copy or download it again") from None
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != BYTES or not 1 <= content[3] <= 4:
        raise UserError(
            f"{path}: is not an idx file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}, not 00 00 08"
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise UserError(f"{path}: is truncated within its header; copy or download it again")
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise UserError(
            f"{path}: declares {' x '.join(map(str, shape))} bytes, but has {len(content) - start:,}; "
            "copy or download it again"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].view(shape)


def _list_folders(folders: Sequence[Path], classes: tuple[str, ...]) -> Listed:
    files: list[Path] = []
    labels: list[int] = []
    entries = [one for folder in folders for one in sorted(folder.iterdir()) if one.is_dir() and one.name[0] != "."]
    names = sorted({entry.name for entry in entries})
    if not classes and len(names) < 2:
        raise UserError(f"{folders[0]}: has {len(names)} folders; put the images of each class into one of its own")
    learned, classes = not classes, classes or tuple(names)
    for entry in entries:
        if entry.name not in classes:
            raise UserError(
                f"{entry}: {entry.name!r} is not a class of the training data; {suggest(entry.name, classes)}"
            )
        inside = sorted(path for path in entry.rglob("*") if path.is_file() and not path.name.startswith("."))
        if learned and not inside:
            raise UserError(f"{entry}: is empty, so the class {entry.name!r} has no images; add some or remove it")
        files += inside
        labels += [classes.index(entry.name)] * len(inside)
    if not files:
        raise UserError(f"{folders[0]}: contains no images; put those of each class into a folder of its own")
    return Listed(files, torch.tensor(labels), classes)


def open_pixels(image_file: str | Path | bytes, channels: int, side: int) -> tuple[Tensor, tuple[int, int]]:
    """The bytes [channels, side, side] of an image, a file or its content, and its (width, height) there."""
    path = "image" if isinstance(image_file, bytes) else image_file  # what messages call it
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise MissingExtra("images", "pillow", f"{path}: reading an image") from None
    if channels not in MODES:
        raise UserError(f"channels = {channels}: an image file has 1, 3 or 4; use features instead")
    if not isinstance(image_file, bytes) and not Path(path).is_file():
        folder = Path(path).is_dir()
        raise UserError(f"{path}: {'is a folder; name a file in it' if folder else 'no such file'}")
    try:
        content = isinstance(image_file, bytes)  # of a request, so it may be hostile
        source = io.BytesIO(image_file) if isinstance(image_file, bytes) else path
        with Image.open(source, formats=FORMATS if content else None) as image:
            _refuse(path, image)
            if content and image.width * image.height > MOST_PIXELS:
                raise UserError(f"{path}: has {image.width} x {image.height} pixels; send at most {MOST_PIXELS:,}")
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
        unknown = isinstance(error, UnidentifiedImageError)  # its message has the address of an object
        reason = "its format is unknown" if unknown else str(error).replace(str(path), "").replace("''", "").strip()
        reason = reason or type(error).__name__
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


def store_pixels(
    files: Sequence[Path], folder: Path, channels: int, side: int, skip_bad: bool = False
) -> tuple[Tensor, Tensor]:
    """The images of `files` [N, channels, side, side], and the numbers of those that could be read.

    These are all, unless `skip_bad`.
    """

    def write(writer: Writer) -> None:
        resized: Counter[tuple[int, int]] = Counter()
        writer.notes["kept"] = []

        def scan(notes: Notes) -> Iterator[int | Problem]:
            for number, path in enumerate(files):
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
        Rows(names, scan, skip_bad=skip_bad, what="images", remedy="give some").check().print()
        _note_resized(resized, side)

    columns = {"pixels": Column("|u1", (channels, side, side))}
    store = prepare(folder, columns, lambda: fingerprint(files, [str(file) for file in files], skip_bad), write)
    return store.columns["pixels"], torch.tensor(store.index["kept"], dtype=torch.long)


def _note_resized(sizes: Counter[tuple[int, int]], side: int) -> None:
    for (width, height), _ in sizes.most_common(1):
        images = f"{sizes.total():,} image{'s' * (sizes.total() != 1)} of {width} x {height}"
        more = f" and {len(sizes) - 1:,} other sizes" * (len(sizes) > 1)
        print(localize(f"note: {images}{more} resized to {side} x {side}"), file=sys.stderr)


class Images:
    """Bytes [n, channels, side, side], in memory or mapped, or some of their rows [N], with their classes [N]."""

    def __init__(self, bytes: Tensor, labels: Tensor, rows: Tensor | None = None) -> None:
        self.bytes, self.labels = bytes, labels
        self.rows = torch.arange(len(bytes), device=bytes.device) if rows is None else rows

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, numbers: Tensor) -> Tensor:
        """[B, channels, side, side] on the device of the images."""
        return self.bytes[self.rows[numbers]]

    def choose(self, numbers: Tensor) -> Images:
        return Images(self.bytes, self.labels[numbers], self.rows[numbers])

    def split(self, fraction: float) -> tuple[Images, Images]:
        """(the rest, a random `fraction`), always the same."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(HELD_OUT))
        count = max(1, round(fraction * len(self)))
        return self.choose(order[count:].sort().values), self.choose(order[:count].sort().values)

    def to(self, device: torch.device) -> Images:
        """On the device if they fit there."""
        fits = len(self) * self.bytes[0].numel() <= RESIDENT
        return Images(self[torch.arange(len(self))].to(device), self.labels.to(device)) if fits else self


def make_images(listed: Listed, folder: Path, channels: int, side: int, skip_bad: bool) -> Images:
    """Decode a set to images of one size: idx in memory, files once into `folder`, which is memory-mapped."""
    if isinstance(listed.images, Tensor):
        return Images(_fit(listed.images, channels, side), listed.labels)
    pixels, kept = store_pixels(listed.images, folder, channels, side, skip_bad)
    return Images(pixels, listed.labels[kept])


def _fit(pixels: Tensor, channels: int, side: int) -> Tensor:
    """Grey images [N, 1, height, width] in another size, or repeated in every channel."""
    height, width = pixels.shape[2:]
    if (height, width) != (side, side):
        _note_resized(Counter({(width, height): len(pixels)}), side)
        pixels = torch.cat([resize(part, side) for part in pixels.split(4096)])
    return pixels if channels == 1 else pixels.expand(-1, channels, -1, -1)


def resize(pixels: Tensor, side: int) -> Tensor:
    """Bytes [N, 1, height, width] -> [N, 1, side, side]"""
    small = F.interpolate(pixels.float(), (side, side), mode="bilinear", antialias=True)
    return small.round().clamp(0, 255).byte()
