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

from regard.commands import DEVICE, RUN, positive
from regard.commands.prediction import open_predictor, read_texts, write

ARGUMENTS = {
    **RUN,
    "TEXT": ("texts with <mask> in them (default: standard input)", {"nargs": "*"}),
    "--top N": ("tokens for each mask (default: 5)", {"type": positive, "default": 5}),
    **DEVICE,
    "--json": "print one JSON object per text: text, masks",
}


def run(args: argparse.Namespace) -> None:
    from regard.predict.mask_predictor import MaskPredictor

    predictor = open_predictor(args, MaskPredictor)
    pieces = (lines for lines, _ in read_texts(args.text, lambda lines: [predictor.encode(text) for text in lines]))
    first = next(pieces, [])  # an error comes before the header of the table
    if not args.json:
        write(args, {}, ("text", "mask", "rank", "token", "probability"))
    for number, text in enumerate(chain(first, chain.from_iterable(pieces)), 1):
        prediction = predictor.predict([text], top=args.top)[0]
        masks = enumerate(prediction.masks, 1)
        ranked = ((mask, rank, one) for mask, candidates in masks for rank, one in enumerate(candidates, 1))
        rows = [(number, mask, rank, one.token, one.probability) for mask, rank, one in ranked]
        write(args, {"text": text, **prediction.to_dict()}, *rows)
        sys.stdout.flush()
