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
import sys
from collections.abc import Sequence

from regard.commands import positive
from regard.commands.inputs import SEARCH, add_run, add_search, open_predictor, progress, read_texts, search_options
from regard.commands.outputs import write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "cpu", "line: source, translation, score, n_best")
    add = parser.add_argument
    add("text", metavar="TEXT", nargs="*", help="lines to translate (default: standard input)")
    add("--batch", type=positive, default=128, metavar="N", help="lines decoded together (default: 128)")
    add_search(parser, *SEARCH)


def run(args: argparse.Namespace) -> None:
    from regard.predict.translator import Translator

    translator = open_predictor(args, Translator)
    config = translator.configured(**search_options(args))
    done = 0
    with progress(args.text) as bar:
        for lines in read_texts(args.text, bar):

            def count(rows: Sequence[int], lines: Sequence[str] = lines) -> None:
                bar.update(sum(len(lines[row].encode()) for row in rows))

            predictions = translator.predict(lines, batch=args.batch, config=config, first=done, done=count)
            for number, (line, prediction) in enumerate(zip(lines, predictions, strict=True), start=done + 1):
                write_text(args.json, number, prediction, config.n_best > 1, "translation", source=line)
            sys.stdout.flush()
            done += len(lines)
