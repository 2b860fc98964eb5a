"""Describe images with a trained model, one line per file: image files, or features (.npy, .safetensors) for a model
that was trained on those. With --n-best the lines are  NUMBER<tab>SCORE<tab>CAPTION,  best first. Settings without
an option come from the table [decode] of the run's recipe.toml; the default is greedy search.

examples:
  regard caption runs/fashion-scenes image.png --beam 4
  regard caption runs/fashion-scenes *.png --json
  regard caption runs/regions image.npy --n-best 3 --beam 5
  regard caption runs/regions all.safetensors --key img-7
"""

from __future__ import annotations

import argparse

from regard.commands import DEVICE, RUNS
from regard.commands.prediction import DECODING, SEARCH, open_predictor, take_runs, write_texts
from regard.errors import UserError

OPTIONS = (
    "--beam N", "--n-best N", "--length-penalty A", "--max-length N", "--sample", "--temperature T", "--seed N"
)  # fmt: skip
ARGUMENTS = {
    **RUNS,
    "FILE": ("images, or features", {"nargs": "+"}),
    "--key NAME": "features: which tensor of a .safetensors, or row of an .npy",
    **DEVICE,
    "--json": "print one JSON object per image: file, caption, score, n_best",
    DECODING: {name: SEARCH[name] for name in OPTIONS},
}


def run(args: argparse.Namespace) -> None:
    from regard.predict.captioner import Captioner

    take_runs(args, args.file)
    if not args.file:
        raise UserError("no input: pass images, or files of features, after the folders of the models")
    captioner = open_predictor(args, Captioner)
    for at in range(0, len(args.file), captioner.BATCH):
        files = args.file[at : at + captioner.BATCH]
        predictions = captioner.predict(files, key=args.key, first=at)
        write_texts(args, ("file", "caption"), files, predictions, captioner.config.n_best > 1, at)
