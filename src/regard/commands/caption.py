"""`regard caption`: what a picture shows, by a trained captioning model."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.predict.bundle import TextPrediction

DESCRIPTION = """
Describe pictures with a trained model, a line for each: files of pictures, or of features (.npy, .safetensors) for a
model that was trained on those. With --n-best the lines are  NUMBER<tab>SCORE<tab>CAPTION,  best first. What no option
says comes from the table [decode] of the run's recipe.toml, or is greedy search.
"""

EXAMPLES = """
regard caption runs/fashion-scenes picture.png --beam 4
regard caption runs/fashion-scenes *.png --json
regard caption runs/regions picture.npy --n-best 3 --beam 5
regard caption runs/regions all.safetensors --key img-7
"""

TOGETHER = 64  # files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    parser.add_argument("files", metavar="FILE", nargs="+", help="pictures, or features")
    parser.add_argument("--key", metavar="NAME", help="features: which tensor of a .safetensors, or number in an .npy")
    parser.add_argument("--beam", type=int, metavar="N", help="hypotheses kept at every step (1: greedy search)")
    parser.add_argument("--n-best", type=int, metavar="N", help="captions of each picture (1)")
    parser.add_argument("--length-penalty", type=float, metavar="A", help="score = log P / ((5 + length) / 6)^A (0)")
    parser.add_argument("--max-length", type=int, metavar="N", help="most tokens of a caption (50)")
    parser.add_argument("--sample", action="store_true", default=None, help="draw the caption instead of searching it")
    parser.add_argument("--temperature", type=float, metavar="T", help="below 1: likelier tokens; above: rarer (1)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed and picture, the same caption (1)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="cpu or cuda (default: cpu)")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a picture: file, caption, score, n_best"
    )


def run(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from regard.commands import predictor_of
    from regard.predict.captioner import Captioner
    from regard.predict.config import SearchConfig

    given = {field.name: getattr(args, field.name, None) for field in fields(SearchConfig)}
    changes = {name: value for name, value in given.items() if value is not None}
    captioner = predictor_of(args.run, args.device, Captioner)
    config = captioner.configured(**changes)
    for at in range(0, len(args.files), TOGETHER):
        some = args.files[at : at + TOGETHER]
        found = captioner.predict(some, key=args.key, config=config, first=at)
        for prediction in found:
            if prediction.note:
                print(f"note: {prediction.note}", file=sys.stderr)
        for number, (file, prediction) in enumerate(zip(some, found, strict=True), start=at + 1):
            _write(number, file, prediction, args.json, config.n_best > 1)
    return 0


def _write(number: int, file: str, found: TextPrediction, as_json: bool, several: bool) -> None:
    if as_json:
        listed = [{"caption": one.text, "score": one.score} for one in found.n_best]
        print(json.dumps({"file": file, **listed[0], "n_best": listed}, ensure_ascii=False), flush=True)
        return
    for one in found.n_best if several else found.n_best[:1]:
        print(f"{number}\t{one.score:.4f}\t{one.text}" if several else one.text, flush=True)
