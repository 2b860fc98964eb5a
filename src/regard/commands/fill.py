"""Predict the most probable tokens for every <mask> of a text; each mask is predicted on its own. Texts are arguments,
or the lines of standard input. The output is a table with one row per token: text, mask, rank, token, probability.

examples:
  regard fill runs/nsmc-masked "이 영화 <mask> 재밌다"
  regard fill runs/nsmc-masked "배우들의 <mask> 이 <mask>" --top 3 --json
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain

from regard.commands import positive
from regard.commands.inputs import GPU, add_run, open_predictor, progress, read_texts
from regard.commands.outputs import write_json, write_row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, GPU, "text: text, masks")
    parser.add_argument("text", metavar="TEXT", nargs="*", help="texts with <mask> in them (default: standard input)")
    parser.add_argument("--top", type=positive, default=5, metavar="N", help="tokens for each mask (default: 5)")


def run(args: argparse.Namespace) -> None:
    from regard.predict.mask_predictor import MaskPredictor

    predictor = open_predictor(args, MaskPredictor)
    with progress(args.text) as bar:
        pieces = read_texts(args.text, bar, lambda lines: [predictor.encode(text) for text in lines])
        first = next(pieces, [])  # an error comes before the header of the table
        if not args.json:
            write_row("text", "mask", "rank", "token", "probability")
        for number, text in enumerate(chain(first, chain.from_iterable(pieces)), 1):
            prediction = predictor.predict([text], top=args.top)[0]
            if args.json:
                write_json({"text": text, **prediction.to_dict()})
                continue
            for mask, candidates in enumerate(prediction.masks, 1):
                for rank, candidate in enumerate(candidates, 1):
                    write_row(number, mask, rank, candidate.token, candidate.probability)
            sys.stdout.flush()
