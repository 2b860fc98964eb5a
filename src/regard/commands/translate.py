"""Translate the lines passed as arguments, or those of standard input; each input line gives one output line. With
--n-best the output lines are  NUMBER<tab>SCORE<tab>TRANSLATION,  best first. Settings without an option come from the
table [decode] of the run's recipe.toml; the default is greedy search.

examples:
  regard translate runs/demo "July 4th, 1976"
  regard translate runs/demo < in.txt > out.txt
  regard translate runs/demo "seven hundred five" --beam 5 --n-best 3 --json
  regard translate runs/demo "seven hundred five" --sample --temperature 0.8 --top-p 0.95 --seed 7
"""

from __future__ import annotations

import argparse

from regard.commands import CPU, RUN, positive
from regard.commands.prediction import DECODING, SEARCH, open_predictor, read_texts, write_texts

ARGUMENTS = {
    **RUN,
    "TEXT": ("lines to translate (default: standard input)", {"nargs": "*"}),
    "--batch N": ("lines decoded together (default: 128)", {"type": positive, "default": 128}),
    **CPU,
    "--json": "print one JSON object per line: source, translation, score, n_best",
    DECODING: SEARCH,
}


def run(args: argparse.Namespace) -> None:
    from regard.predict.translator import Translator

    translator, done = open_predictor(args, Translator), 0
    for lines, count in read_texts(args.text):
        predictions = translator.predict(lines, batch=args.batch, first=done, done=count)
        write_texts(args, ("source", "translation"), lines, predictions, translator.config.n_best > 1, done)
        done += len(lines)
