"""Translate the lines passed as arguments, those of files (of a table, one column), or those of standard input; each
input line gives one output line. With --n-best the output lines are  NUMBER<tab>SCORE<tab>TRANSLATION,  best first.
Settings without an option come from the table [decode] of the run's recipe.toml; the default is greedy search. A line
that cannot be translated is reported, its output is an empty line, and the exit code is 3. With --alignments a line is
TRANSLATION ||| 0-0 1-2,  where 1-2 links source word 1 to target word 2; words are separated by white space.

examples:
  regard translate runs/demo "July 4th, 1976"
  regard translate runs/demo                        enter lines at a prompt
  regard translate runs/demo < in.txt > out.txt
  regard translate runs/one runs/two runs/three < in.txt         an ensemble: the mean of their probabilities
  regard translate runs/demo --files in.txt -o out.txt
  regard translate runs/demo "seven hundred five" --beam 5 --n-best 3 --json
  regard translate runs/demo "July 4th, 1976" --alignments
  regard translate runs/mine "This is a house." --prefix "Das ist" --constraint Haus --forbid Gebäude
  regard translate runs/mine --files in.jsonl --prefix-column begin --constraint-column terms
  regard translate runs/demo "seven hundred five" --sample --temperature 0.8 --top-p 0.95 --seed 7
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from regard.commands import REPEATABLE, RUNS, positive
from regard.commands.inputs import ROWS, Inputs, Item, check_inputs
from regard.commands.prediction import (
    DECODING,
    SEARCH,
    Chunk,
    Shown,
    input_options,
    is_ensemble,
    open_predictor,
    predict_inputs,
    search_options,
    show_texts,
    take_runs,
)
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.predict.alignment import Links
    from regard.predict.ctranslate2_search import PlainTranslator
    from regard.predict.outputs import TextPrediction
    from regard.predict.translator import Translator
    from regard.text.tokenizer import Tokenizer

ARGUMENTS = {
    **input_options(
        "TEXT", "lines to translate", "line: source, translation, score, n_best",
        column="column of a table with the text (default: the recipe's, or source)", runs=RUNS,
    ),
    "--batch N": ("lines decoded together (default: 128)", {"type": positive, "default": 128}),
    "--alignments": "append the word alignment, by cross-attention, in Pharaoh format; in JSON, pairs of numbers",
    "--alignment-layer N": ("decoder layer, from 0 (default: the second-last; the last of two)", {"type": int}),
    DECODING: SEARCH,
    "constraints": {
        "--prefix TEXT": "every output begins with this text",
        "--constraint PHRASE": ("every output contains this word or phrase (repeatable)", REPEATABLE),
        "--forbid PHRASE": ("no output contains this word or phrase (repeatable)", REPEATABLE),
        "--prefix-column NAME": "column of a table of --files with the prefix of each line",
        "--constraint-column NAME": "column with the phrases of each line: separated by |, or in JSON a list",
    },
}  # fmt: skip


def check_constraints(args: argparse.Namespace, target: Tokenizer, source: str) -> dict[str, Callable[[Any], Any]]:
    """The further columns of a table; an error about constraints of all lines shows before the first one."""
    names = {"--prefix-column": args.prefix_column, "--constraint-column": args.constraint_column}
    for option, name in names.items():
        if name is not None and not args.files:
            raise UserError(f"{option} {name}: is a column of --files, and there are none")
        if name is not None and [args.column or source, *names.values()].count(name) > 1:
            raise UserError(f"{option} {name}: the column is used twice; name another one")
    if args.prefix or args.constraint or args.forbid:
        from regard.predict.constraints import read_phrases, read_prefix

        forbidden = [one for some in read_phrases(target, args.forbid, name="--forbid") for one in some]
        read_prefix(target, args.prefix or "", forbidden)
        read_phrases(target, args.constraint, forbidden)
    columns = {args.prefix_column: read_prefix_cell, args.constraint_column: read_phrases_cell}
    return {name: read for name, read in columns.items() if name is not None}


def read_prefix_cell(value: Any) -> str:
    from regard.data.tables import text

    return "" if value is None else text(value)


def read_phrases_cell(value: Any) -> list[str]:
    """Phrases separated by |, or a list of them."""
    from regard.data.tables import text

    phrases = map(text, value) if isinstance(value, list) else read_prefix_cell(value).split("|")
    return [phrase for phrase in phrases if phrase.strip()]


def needs_torch(args: argparse.Namespace) -> bool:
    """Whether a line needs more than the search of CTranslate2 in a folder for it."""
    from regard.predict.ctranslate2_search import is_ctranslate2

    more = (args.prefix, args.constraint, args.forbid, args.prefix_column, args.constraint_column, args.alignments)
    return not is_ctranslate2(args.run) or any(more) or args.device not in (None, "cpu") or is_ensemble(args)


def open_translator(args: argparse.Namespace) -> Translator | PlainTranslator:
    if not needs_torch(args):
        from regard.predict.ctranslate2_search import open_plain

        if (translator := open_plain(args.run, args.device, search_options(args))) is not None:
            return translator
    from regard.predict.translator import Translator

    return open_predictor(args, Translator)


def run(args: argparse.Namespace) -> int:
    if args.alignment_layer is not None and not args.alignments:
        raise UserError(f"--alignment-layer {args.alignment_layer}: there are no --alignments; add them, or remove it")
    take_runs(args)
    check_inputs(args)
    translator: Any = open_translator(args)  # with alignments and constraints, a Translator

    source = str(translator.bundle.tables["data"].get("source", "source"))
    columns = check_constraints(args, translator.target, source)
    if args.alignments:
        from regard.predict.alignment import pharaoh

        translator.align([], args.alignment_layer)  # a mistake shows before everything is translated

    def predict(chunk: Chunk) -> list[tuple[TextPrediction, list[Links]]]:
        options = {"batch": args.batch, "first": chunk.first, "done": chunk.count, "failed": chunk.failed}
        cells = [dict(zip(columns, item.more, strict=False)) for item in chunk.items]  # empty: a row that is not read
        if args.prefix or args.prefix_column:
            options["prefixes"] = [one.get(args.prefix_column, "") or args.prefix or "" for one in cells]
        if args.constraint or args.constraint_column:
            options["constraints"] = [[*args.constraint, *one.get(args.constraint_column, ())] for one in cells]
        predictions = translator.predict(chunk.texts, forbid=args.forbid, **options)
        if not args.alignments:
            return [(one, []) for one in predictions]
        outputs = zip(chunk.texts, predictions, strict=True)
        pairs = [(text, one.text) for text, prediction in outputs for one in prediction.n_best]
        links = iter(translator.align(pairs, args.alignment_layer))
        return [(one, list(islice(links, len(one.n_best)))) for one in predictions]

    def show(item: Item, output: tuple[TextPrediction, list[Links]]) -> Shown:
        prediction, links = output
        for value, rows in show_plain(item, prediction):
            if links:
                value["alignment"] = links[0]
                for one, some in zip(value["n_best"], links, strict=True):
                    one["alignment"] = some
                rows = [(*row[:-1], f"{row[-1]} ||| {pharaoh(some)}") for row, some in zip(rows, links, strict=True)]
            yield value, rows

    inputs = Inputs("source", column=source, more=columns)
    several = translator.config.n_best > 1
    show_plain = show_texts(inputs, "translation", several)
    return predict_inputs(
        args, inputs, predict, show, size=ROWS,
        empty=lambda item: (item.number, "", "") if several else ("",),
    )  # fmt: skip
