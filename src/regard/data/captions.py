"""Pictures with captions: the [data] table of a recipe with task = "captioning".

    [data]
    train = ["train.jsonl"]       {"picture": "a.png", "caption": "a dog on a beach"}              a line each, or
                                  {"features": "a.npy", "caption": "…"}, with a "key" where a file holds many
    [data.scenes]                 in place of files: scenes composed of real items, see `regard.data.scenes`

File names start in the folder of the table that names them. A picture may stand in several rows, with a caption each.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from regard.data.config import Files, check_list, check_tests, check_word_dropout, expand_all
from regard.data.features import open_features
from regard.data.lines import Notes, Problem, left_out, read_lines, refusal
from regard.data.pixels import open_pixels
from regard.data.read import SHOWN, remedy_for
from regard.data.scenes import HELD_OUT, NOUNS, SIZES, split_pair
from regard.errors import UserError, suggest
from regard.settings import check_types


@dataclass(frozen=True, kw_only=True)
class ScenesData:
    """Scenes that are composed: from which items, how many, and what about them is said."""

    items: Files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")  # of Fashion-MNIST, for training
    test_items: Files = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")  # others, for the tests
    language: Literal["en", "ko"] = "en"
    train: int = 50_000  # scenes of an epoch; every epoch has others
    valid: int = 500
    test: int = 2_000  # of combinations that occur in training, and as many of those that do not
    held_out: Files = HELD_OUT  # pairs of noun and place that are kept out of training
    common: int = 0  # epochs at the start in which items stand only where every noun may
    nouns: Files = tuple(NOUNS)
    sizes: Files = tuple(SIZES)

    def __post_init__(self) -> None:
        for name in ("items", "test_items", "held_out", "nouns", "sizes"):
            check_list(name, getattr(self, name))
        check_types(self)
        for name, least in (("train", 1), ("valid", 1), ("test", 1), ("common", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: must be {least} or more")
        for name, known in (("nouns", NOUNS), ("sizes", SIZES)):
            given = getattr(self, name)
            if wrong := [one for one in given if one not in known]:
                raise UserError(f"{name}: {wrong[0]!r} is not known; {suggest(wrong[0], known)}")
            if len(set(given)) < len(given) or len(given) < (2 if name == "nouns" else 1):
                raise UserError(f"{name} = {list(given)}: give {2 if name == 'nouns' else 1} or more, each once")
        apart = [split_pair(pair)[0] for pair in self.held_out]
        if apart and not {*apart} & {*self.nouns}:
            raise UserError(
                f"held_out = {list(self.held_out)}: none of its nouns is in nouns = {list(self.nouns)}; name "
                "others, or set held_out = []"
            )


@dataclass(frozen=True, kw_only=True)
class CaptionData:
    train: Files = ()
    valid: Files = ()
    test: dict[str, Files] = field(default_factory=dict)
    scenes: ScenesData | None = None
    max_length: int = 64  # most tokens of a caption, its end included
    word_dropout: float = 0.0  # probability that a training caption's token is masked
    skip_bad: bool = False  # leave out rows that cannot be used
    folder: str = "."  # where relative names start

    def __post_init__(self) -> None:
        for name, files in (("train", self.train), ("valid", self.valid)):
            check_list(name, files)
        check_tests(self.test, "new.jsonl")
        check_types(self)
        check_word_dropout(self.word_dropout)
        if bool(self.train) == (self.scenes is not None):
            raise UserError('train: write  train = ["captions.jsonl"], or a table [data.scenes], and not both')
        if self.scenes is not None and (self.valid or self.test):
            raise UserError("valid and test: [data.scenes] makes its own; leave them out")
        if self.max_length < 2:
            raise UserError(f"max_length = {self.max_length}: a token and its end make 2; give 2 or more")


class Captioned(NamedTuple):
    """A row of a table: the file of a picture or of features, the key in it, and what is said about it."""

    file: Path
    key: str | int | None
    caption: str


def read_captions(
    files: Sequence[str], config: CaptionData, source: str, size: int | None = None
) -> tuple[list[Captioned], int]:
    """All rows; `source` is "patches" or "features", and decides which column is read.

    Features are read once, and their width comes with the rows: `size`, or else that of the first; all have the same.
    """
    found: list[Captioned] = []
    wrong: list[Problem] = []
    notes: Notes = Counter()
    column = "picture" if source == "patches" else "features"
    for path in (path for paths in expand_all(files, config.folder) for path in paths):
        for number, item in _scan(path, column, notes):
            if isinstance(item, Problem):
                wrong.append(item)
                continue
            try:
                size = size if source == "patches" else open_features(item.file, item.key, size).shape[1]
                found.append(item)
            except UserError as error:
                wrong.append(Problem(str(path), number, str(error)))
    told, _ = _other_source(column)
    if not found and wrong and all(problem.what == told for problem in wrong):
        raise UserError(str(wrong[0]))  # the whole table: the same thing about every line helps nobody
    fatal = any(problem.fatal for problem in wrong)
    if fatal or (wrong and not (config.skip_bad and found)):
        raise refusal(files, f"{len(found):,} good rows", wrong[:SHOWN], len(wrong), remedy_for(fatal))
    if wrong:
        print(left_out(files, wrong[:SHOWN], len(wrong)), file=sys.stderr)
    if not found:
        raise UserError(f"{', '.join(files)}: no captions; put an object in each line")
    return found, size or 0


def _scan(path: Path, column: str, notes: Notes) -> Iterator[tuple[int, Captioned | Problem]]:
    if ".jsonl" not in path.suffixes:
        yield 0, Problem(str(path), None, "captions stand in a .jsonl file, an object a line", fatal=True)
        return
    for number, line in enumerate(read_lines(path, notes), 1):
        if isinstance(line, Problem):
            yield number, line
            continue
        try:
            yield number, _row(line, column, path.parent)
        except UserError as error:
            yield number, Problem(str(path), number, str(error))


def _row(line: str, column: str, folder: Path) -> Captioned:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON: {error}") from None
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in (column, "caption")):
        told, other = _other_source(column)
        swapped = isinstance(row, dict) and column not in row and other in row
        raise UserError(told if swapped else f"write  {_example(column)}")
    key = row.get("key")
    if key is not None and (isinstance(key, bool) or not isinstance(key, str | int)):
        raise UserError(f'"key" is {key!r}: give a name or a number')
    caption = " ".join(row["caption"].split())
    if not caption:
        raise UserError('"caption" is empty')
    if any("\ud800" <= char <= "\udfff" for char in caption):
        raise UserError('"caption" has half a surrogate pair (\\ud800 to \\udfff), which is no Unicode text')
    file = folder / row[column]
    if not file.is_file():
        raise UserError(f"{file}: there is no such file")
    return Captioned(file, key, caption)


def _example(column: str) -> str:
    return f'{{"{column}": "a.{"png" if column == "picture" else "npy"}", "caption": "…"}}'


def _other_source(column: str) -> tuple[str, str]:
    """Why a row with the other column cannot be used, and that column."""
    pictures = column == "picture"
    other, reads, source = ("features", "pictures", "features") if pictures else ("picture", "features", "patches")
    told = f'names "{other}", but the model reads {reads}: set  input = "{source}"  in [model], or write  '
    return told + _example(column), other


def pad_features(found: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Features of several pictures side by side, [B, regions, size], and which are real; None: all."""
    longest = max(len(one) for one in found)
    rows = torch.zeros(len(found), longest, found[0].shape[1])
    is_real = torch.zeros(len(found), longest, dtype=torch.bool)
    for at, one in enumerate(found):
        rows[at, : len(one)] = one
        is_real[at, : len(one)] = True
    return rows, None if bool(is_real.all()) else is_real


def open_source(
    path: str | Path, source: str, channels: int, side: int, size: int, key: str | None = None
) -> tuple[Tensor, str]:
    """What a model reads of one file, without a batch axis, and what is to be said about it."""
    if source == "features":
        counted = Path(path).suffix == ".npy" and key is not None and key.isdecimal() and len(key) < 19
        return open_features(path, int(key or 0) if counted else key, size), ""
    pixels, (width, height) = open_pixels(path, channels, side)
    told = (
        "" if (width, height) == (side, side) else f"{path}: {width} x {height} pixels are resized to {side} x {side}"
    )
    return pixels, told
