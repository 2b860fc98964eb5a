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
import sys

from regard.commands.inputs import add_run, add_search, open_predictor, search_options
from regard.commands.outputs import note, write_text

OPTIONS = ("beam", "n_best", "length_penalty", "max_length", "sample", "temperature", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "cpu", "image: file, caption, score, n_best")
    parser.add_argument("files", metavar="FILE", nargs="+", help="images, or features")
    parser.add_argument("--key", metavar="NAME", help="features: which tensor of a .safetensors, or row of an .npy")
    add_search(parser, *OPTIONS)


def run(args: argparse.Namespace) -> None:
    from regard.predict.captioner import Captioner

    captioner = open_predictor(args, Captioner)
    config = captioner.configured(**search_options(args))
    for at in range(0, len(args.files), captioner.BATCH):
        files = args.files[at : at + captioner.BATCH]
        predictions = captioner.predict(files, key=args.key, config=config, first=at)
        for number, (file, prediction) in enumerate(zip(files, predictions, strict=True), start=at + 1):
            if prediction.note:
                note(prediction.note)
            write_text(args.json, number, prediction, config.n_best > 1, "caption", file=file)
        sys.stdout.flush()
