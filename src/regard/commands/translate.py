"""Translate the lines passed as arguments, those of files (of a table, one column), or those of standard input; each
input line gives one output line. With --n-best the output lines are  NUMBER<tab>SCORE<tab>TRANSLATION,  best first.
Settings without an option come from the table [decode] of the run's recipe.toml; the default is greedy search. A line
that cannot be translated is reported, its output is an empty line, and the exit code is 3.

examples:
  regard translate runs/demo "July 4th, 1976"
  regard translate runs/demo                        enter lines at a prompt
  regard translate runs/demo < in.txt > out.txt
  regard translate runs/one runs/two runs/three < in.txt         an ensemble: the mean of their probabilities
  regard translate runs/one runs/two runs/three < in.txt         an ensemble: the mean of their probabilities
  regard translate runs/demo --files in.txt -o out.txt
  regard translate runs/demo "seven hundred five" --beam 5 --n-best 3 --json
  regard translate runs/demo "seven hundred five" --sample --temperature 0.8 --top-p 0.95 --seed 7
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from regard.commands import RUNS, positive
from regard.commands.prediction import (
    DECODING,
    ROWS,
    SEARCH,
    Chunk,
    Inputs,
    check_inputs,
    check_texts,
    input_options,
    open_predictor,
    predict_inputs,
    show_texts,
    take_runs,
)

if TYPE_CHECKING:
    from regard.predict.bundle import TextPrediction

ARGUMENTS = {
    **input_options(
        "TEXT", "lines to translate", "line: source, translation, score, n_best",
        column="column of a table with the text (default: the recipe's, or source)", runs=RUNS,
    ),
    "--batch N": ("lines decoded together (default: 128)", {"type": positive, "default": 128}),
    DECODING: SEARCH,
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from regard.predict.translator import Translator

    take_runs(args)
    check_inputs(args)
    check_texts(args)
    translator = open_predictor(args, Translator)

    def predict(chunk: Chunk) -> list[TextPrediction]:
        options = {"batch": args.batch, "first": chunk.first, "done": chunk.count, "failed": chunk.failed}
        return translator.predict(chunk.texts, **options)

    inputs = Inputs("source", column=str(translator.bundle.tables["data"].get("source", "source")))
    several = translator.config.n_best > 1
    return predict_inputs(
        args, inputs, predict, show_texts(inputs, "translation", several), size=ROWS,
        empty=lambda item: (item.number, "", "") if several else ("",),
    )  # fmt: skip
