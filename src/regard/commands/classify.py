"""Classify texts, with the probability of every class: those passed as arguments, those of files, or the lines of
standard input. The output is a table with one row per text: label, one column per class, text. Files are tables (.tsv,
.csv, .jsonl, .parquet) whose column of texts is the recipe's, or --column; any other file has one text per line. A
model that was trained on images takes image files instead.

examples:
  regard classify runs/nsmc "아 더빙.. 진짜 짜증나네요"
  regard classify runs/nsmc --files reviews.tsv --column review -o labels.tsv
  regard classify runs/nsmc --json < reviews.txt > labels.jsonl
  regard classify runs/fashion-mnist-vit shoe.png bag.jpg
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from regard.commands.inputs import GPU, add_run, open_predictor, progress, read_texts
from regard.commands.outputs import note, opened, write_json, write_row
from regard.errors import UserError
from regard.files import name_some


class Input(NamedTuple):
    """A text, or the name of an image; of a table also the file and the row."""

    text: str
    file: str | None = None
    row: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, GPU, "text: text (or image), label, probabilities, file, row")
    add = parser.add_argument
    add("text", metavar="TEXT", nargs="*", help="texts to classify (default: standard input), or image files")
    add("--files", nargs="+", metavar="FILE", help="read the texts from these files")
    add("--column", metavar="NAME", help="column of a table with the text (default: the recipe's)")
    add("-o", "--out", metavar="FILE", help="save to a file, which appears when it is complete")


def run(args: argparse.Namespace) -> None:
    from regard.predict.classifier import ImageClassifier, TextClassifier

    if args.text and args.files:
        raise UserError(f"--files {args.files[0]}: there is a TEXT too; pass one of them")
    if args.column is not None and not args.files:
        raise UserError(f"--column {args.column}: is a column of --files, and there are none")
    classifier = open_predictor(args, TextClassifier, ImageClassifier)
    images, files = isinstance(classifier, ImageClassifier), args.text or args.files
    if images and (not files or args.column is not None):
        raise UserError(f"{args.run}: reads images; pass image files, such as  classify {args.run} image.png")
    kind, truncated = "image" if images else "text", []
    column = classifier.bundle.tables["data"].get("text")
    chunks = iter([[Input(file) for file in files]]) if images else read_inputs(args, column, classifier.BATCH)
    with opened(args.out) as out:
        predicted = ((chunk, classifier.predict([one.text for one in chunk])) for chunk in chunks)
        first = next(predicted, ([], []))  # an error comes before the header of the table
        if not args.json:
            write_row("label", *classifier.bundle.classes, kind, out=out)
        for chunk, predictions in chain([first], predicted):
            for one, prediction in zip(chunk, predictions, strict=True):
                if images and prediction.note:
                    note(f"{one.text}: {prediction.note}")
                elif prediction.note:
                    truncated.append(prediction.note)
                if args.json:
                    row = {} if one.file is None else {"file": one.file, "row": one.row}
                    result = {"label": prediction.label, "probabilities": prediction.probabilities}
                    write_json({kind: one.text, **result, **row}, out)
                else:
                    write_row(prediction.label, *prediction.probabilities.values(), one.text, out=out)
            out.flush()
    if truncated:
        texts = "1 text was" if len(truncated) == 1 else f"{len(truncated):,} texts were"
        note(f"{texts} {truncated[0]}")
    if not images and (named := [text for text in args.text if _names_file(text)]):
        note(f"{name_some(named)}: the name of a file, and the name itself was classified; --files reads files")


def _names_file(text: str) -> bool:
    """Whether a text looks like the name of a file and is one."""
    short = len(text.encode(errors="replace")) <= 255
    return short and not any(map(str.isspace, text)) and os.path.isfile(text)


def read_inputs(args: argparse.Namespace, column: Any, size: int) -> Iterator[list[Input]]:
    """The texts of arguments, standard input or files, some at a time; `column` is the recipe's column of texts."""
    from regard.data.sets import find_files
    from regard.data.tables import read_rows, table_kind

    if not args.files:
        with progress(args.text) as bar:
            for lines in read_texts(args.text, bar, len):
                for at in range(0, len(lines), size):
                    yield [Input(line) for line in lines[at : at + size]]
        return
    tables = [
        read_rows(
            [str(path)],
            (args.column or str(column or "text"),),
            kind="text" if args.column is None and table_kind(path) is None else None,
            remedy="Name the column with --column",
        )
        for path in find_files(args.files)
    ]
    for table in tables:  # every file is read to its end before the first output
        table.check()
    inputs = (Input(row.cells[0], row.file, row.line) for row in chain.from_iterable(tables))
    while chunk := list(islice(inputs, size)):
        yield chunk
