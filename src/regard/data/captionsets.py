"""Sets of images (or features) with captions, for training and for evaluation.

    scenes     sampled for every batch by (seed, epoch, batch)
    images     decoded once into RUN/data, then memory-mapped
    features   read from their files as they are needed, cached in memory up to a limit

A caption becomes  <s> … </s>,  padded to one length: the input is all but the last token, the
labels are all but the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.data.batch import PairBatch
from regard.data.captions import CaptionData, Captioned, ScenesData, pad_features
from regard.data.features import open_features
from regard.data.images import ImageData, list_set
from regard.data.pixels import store_pixels
from regard.data.scenes import Phrase, SceneMaker, Scenes
from regard.data.streams import Ahead, Examples
from regard.errors import UserError
from regard.text.tokenizer import Tokenizer

ROOM = 1 << 30  # bytes of features that are kept in memory
SIDE = 28  # pixels of a Fashion-MNIST item
Sources = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # row numbers -> (input, which of it is real)


@dataclass(frozen=True)
class CaptionSet:
    """Images or features by row, with their captions; of scenes, also what they consist of."""

    captions: list[str]
    sources: Sources
    scenes: Scenes | None = None
    phrases: list[Phrase] | None = None

    def __len__(self) -> int:
        return len(self.captions)


@dataclass(frozen=True)
class Targets:
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
        rows = torch.zeros(len(ids), longest + 1, dtype=torch.long)
        real = torch.zeros(len(ids), longest + 1, dtype=torch.bool)
        for at, one in enumerate(ids):
            rows[at, : len(one)] = torch.tensor(one)
            real[at, : len(one)] = True
        return cls(rows[:, :-1], torch.where(real[:, 1:], rows[:, 1:], PairBatch.IGNORE))

    def to(self, device: torch.device) -> Targets:
        return Targets(self.target.to(device), self.labels.to(device))

    def batch(self, rows: Tensor, source: Tensor, is_real: Tensor | None) -> PairBatch:
        at = rows.to(self.target.device)
        return PairBatch(source, is_real, self.target[at], self.labels[at])


# --- scenes


def scene_makers(config: ScenesData, folder: str, canvas: int) -> tuple[SceneMaker, SceneMaker]:
    """For training, and for the tests, which have other items."""
    makers = []
    for files in (config.items, config.test_items):
        listed = list_set(files, ImageData(train=files, folder=folder), ())
        if listed.pixels is None or listed.pixels.shape[1:] != (1, SIDE, SIDE):
            raise UserError(f"{list(files)}: scenes are made of Fashion-MNIST's idx files, images of {SIDE} x {SIDE}")
        pixels = listed.pixels[:, 0]
        makers.append(SceneMaker(pixels, listed.labels, canvas, config.nouns, config.sizes, config.held_out))
    return makers[0], makers[1]


def scene_sets(config: ScenesData, train: SceneMaker, test: SceneMaker) -> dict[str, CaptionSet]:
    """Validation with training items; tests with others, of combinations seen and not seen in training."""
    train.sample(1, False, 0, common=config.common > 0)  # an error here is before training begins
    sets = {"valid": _scene_set(train, train.sample(config.valid, False, 0, 0), config.language)}
    sets["test"] = _scene_set(test, test.sample(config.test, False, 0, 1), config.language)
    if bool(test.kept_out.any()):
        sets["held-out"] = _scene_set(test, test.sample(config.test, True, 0, 2), config.language)
    return sets


def _scene_set(maker: SceneMaker, scenes: Scenes, language: str) -> CaptionSet:
    phrases = maker.phrases(scenes, language)

    def paint(rows: Tensor) -> tuple[Tensor, None]:
        return maker.paint(scenes.each(lambda part: part[rows])), None

    return CaptionSet([phrase.text for phrase in phrases], paint, scenes, phrases)


class SceneStream(Ahead):
    """Batches of new scenes, `count` per epoch.

    In the first `common` epochs items are only where every noun may be (`SceneMaker.sample`).
    """

    def __init__(self, maker: SceneMaker, targets: Targets, rows: int, count: int, seed: int, common: int = 0) -> None:
        """`targets` are those of all captions, by `SceneMaker.numbers`."""
        super().__init__(chunk=1)
        self.maker, self.targets, self.rows, self.batches, self.seed = maker, targets, rows, max(1, count // rows), seed
        self.common = common

    def prepare(self, epoch: int, chunk: int) -> tuple[int, Scenes]:
        common = epoch < self.common
        return self.batches, self.maker.sample(self.rows, False, 1, self.seed, epoch, chunk, common=common)

    def finish(self, epoch: int, chunk: int, prepared: Scenes) -> PairBatch:
        return self.targets.batch(self.maker.numbers(prepared), self.maker.paint(prepared), None)

    def batch(self, finished: PairBatch, number: int) -> PairBatch:
        return finished


# --- files


def image_set(rows: Sequence[Captioned], folder: Path, channels: int, side: int, config: CaptionData) -> CaptionSet:
    files = sorted({row.file for row in rows})
    pixels, kept = store_pixels(files, folder, channels, side, config.skip_bad)
    position = {files[number]: at for at, number in enumerate(kept.tolist())}
    readable = [row for row in rows if row.file in position]
    at = torch.tensor([position[row.file] for row in readable])
    return CaptionSet([row.caption for row in readable], lambda chosen: (pixels[at[chosen]], None))


def feature_set(rows: Sequence[Captioned], size: int) -> CaptionSet:
    kept: dict[int, Tensor] = {}
    room = [ROOM]

    def read(row: int) -> Tensor:
        if row in kept:
            return kept[row]
        features = open_features(rows[row].file, rows[row].key, size)
        if (left := room[0] - features.nbytes) > 0:
            kept[row], room[0] = features, left
        return features

    return CaptionSet([row.caption for row in rows], lambda chosen: pad_features([read(at) for at in chosen.tolist()]))


def file_stream(data: CaptionSet, targets: Targets, rows: int, seed: int) -> Examples:
    return Examples(len(data), rows, seed, lambda chosen: targets.batch(chosen, *data.sources(chosen)))
