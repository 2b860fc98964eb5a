"""Images with captions: the [data] table of a recipe that captions images, and its sets.

    [data]
    train = ["train.jsonl"]       {"image": "a.png", "caption": "a dog on a beach"}              per line, or
                                  {"features": "a.npy", "caption": "…"}, with a "key" where a file contains many
    [data.scenes]                 in place of files: scenes composed of real items, see `regard.data.scenes`

Any table will do (.jsonl, .tsv, .csv, .parquet); `image`, `features`, `key` and `caption` name its columns. File names
start in the folder of the table that names them. An image may be in several rows, with a caption each.

    scenes     sampled for every batch by (seed, epoch, batch)
    images     decoded once into RUN/data, then memory-mapped
    features   read from their files as they are needed, cached in memory up to a limit

A caption becomes  <s> … </s>,  padded to one length: the input is all but the last token, the
labels are all but the first. Features are those of another model: a few vectors per image, such as
36 regions x 2048 (Anderson et al. 2018).

    image.npy                       [regions, size]
    all.npy, key 7                  [images, regions, size]: number 7, from 0
    all.safetensors, key "img-7"    the tensor of that name; a file with one tensor needs no key

An .npy file with objects is a pickle, which can run code when it is opened, so it is rejected.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.data.batch import PairBatch, Tensors, pad_rows
from regard.data.images import ImageData, list_set, store_pixels
from regard.data.lines import Notes
from regard.data.scenes import Phrase, SceneGenerator, Scenes, ScenesData
from regard.data.sets import Group, TextFiles, file_names
from regard.data.streams import ChunkedStream
from regard.data.tables import TABLES, Row, read_rows, table_kind, text
from regard.errors import UserError, listed, suggest
from regard.settings import check_fields
from regard.text.tokenizer import Tokenizer

ENDINGS = (".npy", ".safetensors")  # of features
KEPT = 1 << 30  # bytes of features that are kept in memory
SIDE = 28  # pixels of a Fashion-MNIST item


@dataclass(frozen=True, kw_only=True)
class CaptionData(TextFiles):
    """Where the images and captions are, and which columns of a table have them."""

    image: str = "image"  # name of the column with the file of an image
    features: str = "features"  # name of the column with the file of features, in place of an image
    key: str = "key"  # name of the column, if there is one, with the key of the features in their file
    caption: str = "caption"  # name of the column of captions
    scenes: ScenesData | None = None  # generated images, instead of files
    max_length: int = 64  # maximum number of tokens of a caption, its end included
    word_dropout: float = 0.0  # probability that a training caption's token is masked

    GENERATORS: ClassVar[tuple[str, ...]] = ("scenes",)
    EXAMPLE: ClassVar[str] = "captions.jsonl"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, ("word_dropout",), max_length=2)  # a token and its end
        names = [self.image, self.features, self.key, self.caption]
        if len(set(names)) < len(names):
            raise UserError(f"image, features, key, caption = {', '.join(map(repr, names))}: name different columns")


class Captioned(NamedTuple):
    """A row of a table: the file of an image or of features, the key in it, and the caption."""

    file: Path
    key: str | int | None
    caption: str


def read_captions(
    files: Sequence[str] | Sequence[Group], config: CaptionData, source: str, size: int | None = None
) -> tuple[list[Captioned], int]:
    """All rows; `source` is "patches" or "features", and decides which column is read.

    Features are read once, and their size is returned with the rows: `size`, or else that of the first; all are equal.
    """
    column, example, other, needed = config.image, "a.png", "features", "features"
    if source == "features":
        column, example, other, needed = config.features, "a.npy", "images", "patches"
    columns = (column, config.caption, config.key)

    def make(row: Row, notes: Notes) -> Captioned:
        nonlocal size
        name, caption, key = row.cells
        file = Path(row.file).parent / name
        if not file.is_file():
            raise UserError(f"{file}: no such file")
        size = open_features(file, key, size).shape[1] if source == "features" else size
        return Captioned(file, key, caption)

    for path in config.find(files):
        if table_kind(path) is None:
            raise UserError(f"{path}: captions are in tables ending in {', '.join(f'.{kind}' for kind in TABLES)}")
    how = {
        "optional": (config.key,),
        "convert": {config.caption: _caption, config.key: _key},
        "make": make,
        "remedy": f'Write  {{"{column}": "{example}", "{config.caption}": "…"}}, name the columns in [data], or for '
        f'{other} set  model.input = "{needed}"',
    }
    rows = read_rows(file_names(files), columns, config.folder, config.skip_bad, **how, **config.format)
    return replace(rows, what="captions").read(), size or 0


def _caption(value: Any) -> str:
    caption = " ".join(text(value).split())
    if not caption:
        raise ValueError("is empty")
    return caption


def _key(value: Any) -> str | int | None:
    if value == "":  # of TSV and CSV, where there is no other way to leave it out
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"is {value!r}: give a name or a number")
    return value


@dataclass(frozen=True)
class CaptionSet:
    """Images or features by row, with their captions; of scenes, also what they consist of."""

    captions: list[str]
    sources: Callable[[Tensor], tuple[Tensor, Tensor | None]]  # row numbers -> (input, which of it is real)
    scenes: Scenes | None = None
    phrases: list[Phrase] | None = None

    def __len__(self) -> int:
        return len(self.captions)


@dataclass(frozen=True)
class Targets(Tensors):
    """Captions as ids: `target` is read, `labels` are the tokens that follow, [N, T] each."""

    target: Tensor
    labels: Tensor

    @classmethod
    def of(cls, tokenizer: Tokenizer, captions: Sequence[str], max_length: int) -> Targets:
        ids = tokenizer.encode_batch(captions, add_bos=True, add_eos=True)
        longest = max(map(len, ids)) - 1
        if longest > max_length:
            row = max(range(len(ids)), key=lambda at: len(ids[at]))
            raise UserError(
                f"caption {row + 1:,} has {longest} tokens, its end included ({captions[row][:60]!r} …), more than "
                f"data.max_length = {max_length}: raise that, or shorten it"
            )
        rows, is_real = pad_rows([torch.tensor(one) for one in ids])
        return cls(rows[:, :-1], torch.where(is_real[:, 1:], rows[:, 1:], PairBatch.IGNORE))

    def batch(self, rows: Tensor, source: Tensor, is_real: Tensor | None) -> PairBatch:
        at = rows.to(self.target.device)
        return PairBatch(source, is_real, self.target[at], self.labels[at])


def scene_generators(config: ScenesData, folder: str, canvas: int) -> tuple[SceneGenerator, SceneGenerator]:
    """For training, and for the tests, which have other items."""
    generators = []
    for files in (config.items, config.test_items):
        images, labels, _ = list_set(files, ImageData(train=files, folder=folder))
        if not isinstance(images, Tensor) or images.shape[1:] != (1, SIDE, SIDE):
            raise UserError(f"{listed(files)}: scenes are made of Fashion-MNIST's idx files, images of {SIDE} x {SIDE}")
        generators.append(SceneGenerator(images[:, 0], labels, canvas, config))
    return generators[0], generators[1]


def scene_sets(train: SceneGenerator, test: SceneGenerator) -> dict[str, CaptionSet]:
    """Validation with training items; tests with others, of combinations seen and not seen in training."""

    def sampled(generator: SceneGenerator, count: int, held_out: bool, seed: int) -> CaptionSet:
        scenes = generator.sample(count, held_out, 0, seed)
        phrases = generator.phrases(scenes)
        captions = [phrase.text for phrase in phrases]
        return CaptionSet(captions, lambda rows: (generator.render(scenes.rows(rows)), None), scenes, phrases)

    config = train.config
    train.sample(1, False, 0, common=config.common > 0)  # an error here is before training begins
    sets = {"valid": sampled(train, config.valid, False, 0), "test": sampled(test, config.test, False, 1)}
    if test.held_out.any():
        sets["held-out"] = sampled(test, config.test, True, 2)
    return sets


class SceneStream(ChunkedStream):
    """Batches of new scenes, `train` per epoch; in the first `common` epochs, `common` ones (`SceneGenerator.sample`).

    `targets` are those of all captions, by `SceneGenerator.caption_ids`.
    """

    def __init__(self, generator: SceneGenerator, targets: Targets, rows: int, seed: int) -> None:
        super().__init__(chunk=1)
        self.generator, self.targets, self.rows, self.seed = generator, targets, rows, seed
        self.batches = max(1, generator.config.train // rows)

    @property
    def size(self) -> dict[str, int]:
        return {"examples": self.generator.config.train}

    def prepare(self, epoch: int, chunk: int) -> tuple[int, Scenes]:
        common = epoch < self.generator.config.common
        return self.batches, self.generator.sample(self.rows, False, 1, self.seed, epoch, chunk, common=common)

    def finish(self, epoch: int, chunk: int, prepared: Scenes) -> Callable[[int], PairBatch]:
        images = self.generator.render(prepared)
        batch = self.targets.batch(self.generator.caption_ids(prepared), images, None)
        return lambda number: batch


def image_set(rows: Sequence[Captioned], folder: Path, channels: int, side: int, config: CaptionData) -> CaptionSet:
    files = sorted({row.file for row in rows})
    pixels, kept = store_pixels(files, folder, channels, side, config.skip_bad)
    position = {files[number]: at for at, number in enumerate(kept.tolist())}
    readable = [row for row in rows if row.file in position]
    at = torch.tensor([position[row.file] for row in readable])
    return CaptionSet([row.caption for row in readable], lambda chosen: (pixels[at[chosen]], None))


def feature_set(rows: Sequence[Captioned], size: int) -> CaptionSet:
    @lru_cache(KEPT // (256 * size))  # an image has about 64 vectors of floats
    def read(row: int) -> Tensor:
        return open_features(rows[row].file, rows[row].key, size)

    return CaptionSet([row.caption for row in rows], lambda chosen: pad_features([read(at) for at in chosen.tolist()]))


def open_features(path: str | Path, key: str | int | None = None, size: int | None = None) -> Tensor:
    """The vectors [regions, size] of one image, as float32; `size` is what a model expects."""
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise UserError(f"{path}: features are in files ending in {' or '.join(ENDINGS)}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        features = _from_numpy(path, key) if path.suffix == ".npy" else _from_safetensors(path, key)
    except UserError:
        raise
    except (SafetensorError, OSError, ValueError, EOFError) as error:
        reason = "it contains objects, a pickle" if re.search("pickle|object", str(error), re.IGNORECASE) else error
        raise UserError(f"{path}: cannot be read as features ({reason}); save them again as plain numbers") from None
    if features.dim() != 2 or 0 in features.shape:
        raise UserError(f"{path}: has shape {tuple(features.shape)}; give [regions, size], a vector for each region")
    if size is not None and features.shape[1] != size:
        raise UserError(
            f"{path}: each region has {features.shape[1]:,} numbers, but the model reads feature_dim = {size:,}; use "
            "features of the same kind as in training"
        )
    if not bool(features.isfinite().all()):
        region, at = (~features.isfinite()).nonzero()[0].tolist()
        raise UserError(
            f"{path}: region {region}, number {at} is {float(features[region, at])}; make the features again"
        )
    return features


def pad_features(features: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Features of several images, padded to [B, regions, size], and which are real; None: all."""
    rows, is_real = pad_rows(features)
    return rows, None if bool(is_real.all()) else is_real


def _from_numpy(path: Path, key: str | int | None) -> Tensor:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not np.issubdtype(array.dtype, np.number) or np.issubdtype(array.dtype, np.complexfloating):
        raise UserError(f"{path}: contains {array.dtype}, not numbers; save them as float32")
    if array.ndim == 3:
        key = int(key) if isinstance(key, str) and key.isdecimal() else key  # of TSV and CSV
        if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < len(array):
            which = f'choose one (0 to {len(array) - 1}) with  "key": 0  in a table, or  regard caption --key 0'
            raise UserError(f"{path}: contains {len(array):,} images; {which}")
        array = array[key]
    elif key is not None:
        raise UserError(f"{path}: contains one image, so key = {key!r} has no meaning; remove it")
    return torch.from_numpy(np.array(array, dtype=np.float32))


def _from_safetensors(path: Path, key: str | int | None) -> Tensor:
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        if not names:
            raise UserError(f"{path}: contains no tensors; make the features again")
        if key is None and len(names) > 1:
            raise UserError(
                f'{path}: contains {len(names):,} tensors; choose one with  "key": "{names[0]}"  in a table, or  '
                f"regard caption --key {shlex.quote(names[0])}"
            )
        name = names[0] if key is None else str(key)
        if name not in names:
            raise UserError(f"{path}: has no tensor {name!r}; {suggest(name, names[:50])}")
        tensor: Tensor = file.get_tensor(name).float()
        return tensor
