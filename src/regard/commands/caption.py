"""Describe images with a trained model, one line per file: image files, or features (.npy, .safetensors) for a model
that was trained on those. A list (.txt, .tsv, .csv, .jsonl, .parquet) in --files names files, relative to its folder.
With --n-best the lines are  NUMBER<tab>SCORE<tab>CAPTION,  best first. Settings without an option come from the table
[decode] of the run's recipe.toml; the default is greedy search. A file that cannot be read is reported, its output is
an empty line, and the exit code is 3.

examples:
  regard caption runs/fashion-scenes image.png --beam 4
  regard caption runs/fashion-scenes *.png --json
  regard caption runs/fashion-scenes --files images.txt -o captions.txt
  find images -name '*.png' | regard caption runs/fashion-scenes
  regard caption runs/regions image.npy --n-best 3 --beam 5
  regard caption runs/regions all.safetensors --key img-7
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from regard.commands import RUNS
from regard.commands.inputs import check_inputs, file_inputs
from regard.commands.prediction import (
    DECODING,
    SEARCH,
    Chunk,
    input_options,
    open_predictor,
    predict_inputs,
    show_texts,
    take_runs,
)

if TYPE_CHECKING:
    from regard.predict.bundle import TextPrediction

OPTIONS = (
    "--beam N", "--n-best N", "--length-penalty A", "--max-length N", "--sample", "--temperature T", "--seed N"
)  # fmt: skip
ARGUMENTS = {
    **input_options(
        "FILE", "images, or features", "image: file, caption, score, n_best", "images, or lists of them",
        "column of a list with the file names (default: image, or features)", RUNS,
    ),
    "--key NAME": "features: which tensor of a .safetensors, or row of an .npy",
    DECODING: {name: SEARCH[name] for name in OPTIONS},
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from regard.predict.captioner import Captioner

    take_runs(args)
    check_inputs(args, texts=False)
    captioner = open_predictor(args, Captioner)

    def predict(chunk: Chunk) -> list[TextPrediction]:
        return captioner.predict(chunk.texts, key=args.key, first=chunk.first, failed=chunk.failed)

    inputs = file_inputs("file", "features" if captioner.model.config.input == "features" else "image")
    several = captioner.config.n_best > 1
    return predict_inputs(
        args, inputs, predict, show_texts(inputs, "caption", several), size=captioner.BATCH,
        empty=lambda item: (item.number, "", "") if several else ("",),
    )  # fmt: skip
