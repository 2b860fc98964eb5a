"""Predict the most probable tokens for every <mask> of a text; each mask is predicted on its own. Texts are arguments,
the lines of files (of a table, one column), or the lines of standard input. The output is a table with one row per
token: text, mask, rank, token, probability. A text that cannot be used (without a mask, or too long) is reported, its
row is empty but for the number, and the exit code is 3.

examples:
  regard fill runs/nsmc-masked "이 영화 <mask> 재밌다"
  regard fill runs/nsmc-masked                      enter texts at a prompt
  regard fill runs/nsmc-masked "배우들의 <mask> 이 <mask>" --top 3 --json
  regard fill runs/nsmc-masked --files masked.txt -o tokens.tsv
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from regard.commands import positive
from regard.commands.inputs import Inputs, Item, check_inputs
from regard.commands.prediction import Shown, input_options, open_predictor, predict_inputs

if TYPE_CHECKING:
    from regard.predict.mask_predictor import MaskPrediction

HEADER = ("text", "mask", "rank", "token", "probability")
ARGUMENTS = {
    **input_options("TEXT", "texts with <mask> in them", "text: text, masks"),
    "--top N": ("tokens for each mask (default: 5)", {"type": positive, "default": 5}),
}


def run(args: argparse.Namespace) -> int:
    from regard.predict.mask_predictor import MaskPredictor

    check_inputs(args)
    predictor = open_predictor(args, MaskPredictor)

    def predict(item: Item) -> MaskPrediction:
        return predictor.predict([item.text], top=args.top)[0]

    def show(item: Item, prediction: MaskPrediction) -> Shown:
        masks = enumerate(prediction.masks, 1)
        ranked = ((mask, rank, one) for mask, candidates in masks for rank, one in enumerate(candidates, 1))
        rows = [(item.number, mask, rank, one.token, one.probability) for mask, rank, one in ranked]
        yield {"text": item.text, **prediction.to_dict(), **item.origin}, rows

    inputs = Inputs("text", "a text with <mask>", column=str(predictor.bundle.tables["data"].get("column", "text")))
    return predict_inputs(
        args, inputs, lambda chunk: chunk.each(predict), show, header=HEADER,
        empty=lambda item: (item.number, "", "", "", ""),
    )  # fmt: skip
