"""Images with captions: the [data] table of a recipe that captions images.

    [data]
    train = ["train.jsonl"]       {"image": "a.png", "caption": "a dog on a beach"}              per line, or
                                  {"features": "a.npy", "caption": "…"}, with a "key" where a file contains many
    [data.scenes]                 in place of files: scenes composed of real items, see `regard.data.scenes`

Any table will do (.jsonl, .tsv, .csv, .parquet). File names start in the folder of the table that names them. An image
may be in several rows, with a caption each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from regard.data.features import open_features
from regard.data.lines import Notes, Problem
from regard.data.pixels import open_pixels
from regard.data.scenes import HELD_OUT, NOUNS, SIZES, split_pair
from regard.data.sets import DataConfig, Files, check_files, check_word_dropout, find_files
from regard.data.tables import TABLES, Row, Rows, Table, column_names, table_kind, text
from regard.errors import UserError, suggest
from regard.settings import check_types


@dataclass(frozen=True, kw_only=True)
class ScenesData:
    """Generated scenes: of which items, how many, and how they are described."""

    items: Files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")  # of Fashion-MNIST, for training
    test_items: Files = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # others, for the tests
    language: Literal["en", "ko"] = "en"
    train: int = 50_000  # scenes per epoch; every epoch has others
    valid: int = 500
    test: int = 2_000  # of combinations that occur in training, and as many of held-out ones
    held_out: Files = HELD_OUT  # pairs of noun and position that are kept out of training
    common: int = 0  # epochs at the start in which items are only where every noun may be
    nouns: Files = tuple(NOUNS)
    sizes: Files = tuple(SIZES)

    def __post_init__(self) -> None:
        for name in ("items", "test_items", "held_out", "nouns", "sizes"):
            check_files(name, getattr(self, name))
        check_types(self)
        for name, least in (("train", 1), ("valid", 1), ("test", 1), ("common", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: must be {least} or more")
        for name, known in (("nouns", NOUNS), ("sizes", SIZES)):
            words, least = getattr(self, name), 2 if name == "nouns" else 1
            if unknown := [word for word in words if word not in known]:
                raise UserError(f"{name}: {unknown[0]!r} is not known; {suggest(unknown[0], known)}")
            if len(set(words)) < len(words) or len(words) < least:
                raise UserError(f"{name} = {list(words)}: give {least} or more, each once")
        apart = [split_pair(pair)[0] for pair in self.held_out]
        if apart and not {*apart} & {*self.nouns}:
            raise UserError(
                f"held_out = {list(self.held_out)}: none of its nouns is in nouns = {list(self.nouns)}; name "
                "others, or set held_out = []"
            )


@dataclass(frozen=True, kw_only=True)
class CaptionData(DataConfig):
    scenes: ScenesData | None = None
    max_length: int = 64  # most tokens of a caption, its end included
    word_dropout: float = 0.0  # probability that a training caption's token is masked

    NEEDS_FILES: ClassVar[bool] = False
    EXAMPLE: ClassVar[str] = "captions.jsonl"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_word_dropout(self.word_dropout)
        if bool(self.train) == (self.scenes is not None):
            raise UserError('train: write  train = ["captions.jsonl"], or a table [data.scenes], and not both')
        if self.scenes is not None and (self.valid or self.test):
            raise UserError("valid and test: [data.scenes] generates its own; remove them")
        if self.max_length < 2:
            raise UserError(f"max_length = {self.max_length}: a token and its end make 2; give 2 or more")


class Captioned(NamedTuple):
    """A row of a table: the file of an image or of features, the key in it, and the caption."""

    file: Path
    key: str | int | None
    caption: str


def read_captions(
    files: Sequence[str], config: CaptionData, source: str, size: int | None = None
) -> tuple[list[Captioned], int]:
    """All rows; `source` is "patches" or "features", and decides which column is read.

    Features are read once, and their size is returned with the rows: `size`, or else that of the first; all are equal.
    """
    column = "image" if source == "patches" else "features"
    convert = {"caption": _caption, "key": _key}
    sizes = [size]

    def scan(notes: Notes) -> Iterator[Captioned | Problem]:
        for path in find_files(files, config.folder):
            _check_columns(path, column)
            remedy = f"Write  {_example(column)}"
            columns = (column, "caption", "key")
            for row in Table(path, columns, notes, optional=("key",), convert=convert, remedy=remedy):
                yield row if isinstance(row, Problem) else captioned(row, path)

    def captioned(row: Row, path: Path) -> Captioned | Problem:
        name, caption, key = row.cells
        file = path.parent / name
        if not file.is_file():
            return Problem(row.file, row.line, f"{file}: no such file")
        try:
            if source == "features":
                sizes[0] = open_features(file, key, sizes[0]).shape[1]
        except UserError as error:
            return Problem(row.file, row.line, str(error))
        return Captioned(file, key, caption)

    rows = Rows(files, scan, skip_bad=config.skip_bad, what="captions").read()
    return rows, sizes[0] or 0


def _check_columns(path: Path, column: str) -> None:
    """What is not a table, or one for the other kind of input, is one error, not one per row."""
    if table_kind(path) is None:
        raise UserError(f"{path}: captions are in tables ending in {', '.join(f'.{kind}' for kind in TABLES)}")
    other, reads, needed = ("features", "images", "features") if column == "image" else ("image", "features", "patches")
    try:
        names = column_names(path)
    except (ValueError, OSError, RecursionError):  # reported with the rows
        return
    if column not in names and other in names:
        raise UserError(
            f'{path}, line 1: has "{other}", but the model reads {reads}: set  input = "{needed}"  in [model], or '
            f"write  {_example(column)}"
        )


def _caption(value: Any) -> str:
    caption = " ".join(text(value).split())
    if not caption:
        raise ValueError("is empty")
    return caption


def _key(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"is {value!r}: give a name or a number")
    return value


def _example(column: str) -> str:
    return f'{{"{column}": "a.{"png" if column == "image" else "npy"}", "caption": "…"}}'


def pad_features(features: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Features of several images, padded to [B, regions, size], and which are real; None: all."""
    longest = max(len(one) for one in features)
    rows = torch.zeros(len(features), longest, features[0].shape[1])
    is_real = torch.zeros(len(features), longest, dtype=torch.bool)
    for at, one in enumerate(features):
        rows[at, : len(one)] = one
        is_real[at, : len(one)] = True
    return rows, None if bool(is_real.all()) else is_real


def open_source(
    path: str | Path, source: str, channels: int, side: int, size: int, key: str | None = None
) -> tuple[Tensor, str]:
    """The input of a model from one file, without a batch axis, and a note about it."""
    if source == "features":
        counted = Path(path).suffix == ".npy" and key is not None and key.isdecimal() and len(key) < 19
        return open_features(path, int(key or 0) if counted else key, size), ""
    pixels, (width, height) = open_pixels(path, channels, side)
    resized = f"{path}: {width} x {height} pixels are resized to {side} x {side}"
    return pixels, "" if (width, height) == (side, side) else resized
