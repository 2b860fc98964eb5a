"""Bright and dark squares: pictures that a few steps suffice to tell apart, as idx files and in a folder a class."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import Image


def write_idx(path: Path, numbers: np.ndarray) -> None:
    head = struct.pack(f">4B{numbers.ndim}I", 0, 0, 8, numbers.ndim, *numbers.shape)
    path.write_bytes(head + numbers.astype(np.uint8).tobytes())


def write_squares(folder: Path) -> None:
    """The pictures, and two recipes: idx.toml and folders.toml."""
    chance = np.random.default_rng(0)
    for name, count in (("train", 24), ("test", 8)):
        labels = np.arange(count) % 2
        pictures = chance.integers(0, 60, (count, 8, 8)) + 150 * labels[:, None, None]
        write_idx(folder / f"{name}-images", pictures)
        write_idx(folder / f"{name}-labels", labels)
        for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            place = folder / "photos" / name / ("dark", "bright")[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture.astype(np.uint8)).save(place / f"{number}.png")
    head = 'task = "image-classification"\n[model]\nimage_size = 8\npatch_size = 2\nchannels = 1\n[data]\n'
    augmented = "[augment]\ncrop = 1\nflip = 0.5\nerase = 0.5\nmixup = 0.4\n"
    idx = 'train = ["train-images", "train-labels"]\ntest = { test = ["test-images", "test-labels"] }\n'
    (folder / "idx.toml").write_text(head + idx + 'classes = ["dark", "bright"]\n' + augmented)
    (folder / "folders.toml").write_text(
        head + 'train = ["photos/train"]\ntest = { test = ["photos/test"] }\nvalid_fraction = 0.25\n' + augmented
    )
