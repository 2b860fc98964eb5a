"""Translate the lines passed as arguments, those of files (of a table, one column), or those of standard input; each
input line gives one output line. With --n-best the output lines are  NUMBER<tab>SCORE<tab>TRANSLATION,  best first.
Settings without an option come from the table [decode] of the run's recipe.toml; the default is greedy search.

examples:
  regard translate runs/demo "July 4th, 1976"
  regard translate runs/demo < in.txt > out.txt
  regard translate runs/one runs/two runs/three < in.txt         an ensemble: the mean of their probabilities
  regard translate runs/demo --files in.txt -o out.txt
  regard translate runs/demo "seven hundred five" --beam 5 --n-best 3 --json
  regard translate runs/demo "seven hundred five" --sample --temperature 0.8 --top-p 0.95 --seed 7
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from regard.commands import DEVICE, RUNS, positive
from regard.commands.prediction import (
    DECODING,
    SEARCH,
    check_inputs,
    open_predictor,
    opened,
    read_tables,
    read_texts,
    take_runs,
    write_texts,
)
from regard.errors import UserError

LINES = 8192  # of files that are translated, and written, together
ARGUMENTS = {
    **RUNS,
    "TEXT": ("lines to translate (default: standard input)", {"nargs": "*"}),
    "--files FILE": ("read the lines from these files", {"nargs": "+"}),
    "--column NAME": "column of a table with the text (default: the recipe's, or source)",
    "-o --out FILE": "save to a file, which appears when it is complete",
    "--batch N": ("lines decoded together (default: 128)", {"type": positive, "default": 128}),
    **DEVICE,
    "--json": "print one JSON object per line: source, translation, score, n_best",
    DECODING: SEARCH,
}


def run(args: argparse.Namespace) -> None:
    from regard.predict.translator import Translator

    take_runs(args, args.text)
    check_inputs(args)
    if len(args.text) == 1 and Path(args.text[0]).is_file():
        raise UserError(f"{args.text[0]!r} is the name of a file: read its lines with  --files {args.text[0]}")
    translator, done = open_predictor(args, Translator), 0
    if args.files:
        column = str(translator.bundle.tables["data"].get("source", "source"))
        tables = read_tables(args.files, args.column, column, LINES)
        chunks: Iterable[Any] = (([text for text, _ in chunk], None) for chunk in tables)
    else:
        chunks = read_texts(args.text)
    with opened(args.out) as out:
        for lines, count in chunks:
            predictions = translator.predict(lines, batch=args.batch, first=done, done=count)
            write_texts(args, ("source", "translation"), lines, predictions, translator.config.n_best > 1, done, out)
            done += len(lines)
