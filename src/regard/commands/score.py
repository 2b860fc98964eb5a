"""Log-probability of given outputs. An encoder-decoder scores pairs, log P(target | source) with </s>; a language model
scores texts, each token given those before, without the first; a masked language model gives the pseudo-log-likelihood,
each token masked in turn. Pairs are arguments (SOURCE TARGET), two files whose lines belong together, tables, or lines
SOURCE<tab>TARGET of standard input; texts are arguments or lines. For each there is one line, tab-separated:
log-probability in nats, tokens, log-probability per token, perplexity. The source of a captioning model is an image.
What cannot be scored is reported, its line is empty, and the exit code is 3.

examples:
  regard score runs/demo "July 4th, 1976" "1976년 7월 4일"
  regard score runs/multi30k-en-de --files test.en hypotheses.de -o scores.tsv
  regard score runs/multi30k-en-de --files pairs.tsv --column en de --json
  regard score runs/gpt2 "The cat sat." "The cat sits." --begin
  regard score runs/nsmc-masked --json < reviews.txt
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import RUNS
from regard.commands.inputs import ROWS, Inputs, Item, check_inputs, check_texts
from regard.commands.prediction import Chunk, Shown, input_options, open_predictor, predict_inputs, take_runs
from regard.errors import UserError, listed

if TYPE_CHECKING:
    from regard.data.lines import Problem
    from regard.data.tables import Row
    from regard.predict.scoring import SequenceScore

ARGUMENTS = {
    **input_options(
        "TEXT", "texts, or SOURCE TARGET", "input: text (or source, target), log_probability, …, tokens",
        "read them from these files: lines, two files of pairs, or tables", runs=RUNS,
    ),
    "--column NAME": ("columns of a table: text, or source and target (default: the recipe's)", {"nargs": "+"}),
    "--begin": "language models: a text begins a document, so that its first token counts too",
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from regard.predict.captioner import Captioner
    from regard.predict.generator import Generator
    from regard.predict.mask_predictor import MaskPredictor
    from regard.predict.translator import Translator

    take_runs(args)
    columns, args.column = tuple(args.column or ()), " ".join(args.column or ()) or None
    check_inputs(args, texts=False)
    predictor: Any = open_predictor(args, Generator, MaskPredictor, Translator, Captioner)
    data, names = predictor.bundle.tables["data"], tuple[str, ...](("text",))
    if isinstance(predictor, Captioner):
        names = ("image" if predictor.model.config.input == "patches" else "features", "caption")
    else:
        check_texts(args)
    if isinstance(predictor, Translator):
        names = ("source", "target")
    if columns and len(columns) != len(names):
        raise UserError(f"--column {args.column}: this model needs {len(names)}, for {listed(names)}")
    if args.begin and not isinstance(predictor, Generator):
        raise UserError(f"--begin: {args.run} is not a language model; remove it")
    options, inputs = {"begin": True} if args.begin else {}, Inputs("text", column=str(data.get("column", "text")))
    if len(names) == 2:
        form = [name.upper() for name in names]
        if len(args.inputs) % 2:
            raise UserError(f"{len(args.inputs)} inputs: this model scores pairs; pass  {' '.join(form)}  of each")
        args.inputs = ["\t".join(args.inputs[at : at + 2]) for at in range(0, len(args.inputs), 2)]
        columns = columns or tuple(data[name] for name in names if data.get(name))
        inputs = Inputs("pair", "<tab>".join(form), rows=lambda: read_pairs(args, columns, names))

    def cells(item: Item) -> tuple[str, ...]:
        """The text, or source and target."""
        return (item.text, *item.more) if item.more or len(names) == 1 else tuple(item.text.split("\t"))

    def predict(chunk: Chunk) -> list[Any]:
        rows = list[int]()
        for row, item in enumerate(chunk.items):
            if item.error is None and (count := len(cells(item))) != len(names):
                chunk.failed[row] = f"has {count} column{'s' * (count != 1)}; write  {inputs.what}"
            elif item.error is None:
                rows.append(row)
        outputs = chunk.together(rows, score)
        return [outputs.get(row) for row in range(len(chunk.items))]

    def score(items: list[Item]) -> list[SequenceScore]:
        scores: list[SequenceScore] = predictor.score(
            [cells(item) if len(names) == 2 else item.text for item in items], **options
        )
        return scores

    def show(item: Item, one: SequenceScore) -> Shown:
        means = {name: getattr(one, name) for name in ("log_probability", "per_token", "perplexity")}
        per_token, perplexity = ("" if mean is None else mean for mean in (one.per_token, one.perplexity))
        row = (one.log_probability, len(one.tokens), per_token, perplexity)
        yield {**dict(zip(names, cells(item), strict=True)), **means, **one.to_dict(), **item.origin}, [row]

    return predict_inputs(args, inputs, predict, show, size=ROWS)


def read_pairs(args: argparse.Namespace, columns: tuple[str, ...], names: tuple[str, ...]) -> Iterator[Row | Problem]:
    """Lines of two files that belong together, or two columns of tables; a side may be empty."""
    from regard.data.lines import Notes, Problem
    from regard.data.pairs import find_pairs
    from regard.data.tables import Table, aligned_rows

    images = names[0] != "source"
    how: Any = {"remedy": "Name the columns with --column", "header": images or bool(columns)}
    for paths in find_pairs(args.files):
        if len(paths) == 2:
            yield from aligned_rows(paths[0], paths[1], Notes(), args.encoding)
            continue
        for row in Table(paths[0], columns or names, Notes(), encoding=args.encoding, **how):
            if images and not isinstance(row, Problem):  # their names start in the folder of the table
                row = row._replace(cells=(str(Path(row.file).parent / row.cells[0]), row.cells[1]))
            yield row
