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
from collections.abc import Iterable
from itertools import chain
from typing import Any

from regard.commands import DEVICE, RUN
from regard.commands.prediction import check_inputs, note, open_predictor, opened, read_tables, read_texts, write
from regard.errors import UserError
from regard.files import name_some

ARGUMENTS = {
    **RUN,
    "TEXT": ("texts to classify (default: standard input), or image files", {"nargs": "*"}),
    "--files FILE": ("read the texts from these files", {"nargs": "+"}),
    "--column NAME": "column of a table with the text (default: the recipe's)",
    "-o --out FILE": "save to a file, which appears when it is complete",
    **DEVICE,
    "--json": "print one JSON object per text: text (or image), label, probabilities, file, row",
}


def run(args: argparse.Namespace) -> None:
    from regard.predict.classifier import ImageClassifier, TextClassifier

    check_inputs(args)
    classifier = open_predictor(args, TextClassifier, ImageClassifier)
    images, files = isinstance(classifier, ImageClassifier), args.text or args.files
    if images and (not files or args.column is not None):
        raise UserError(f"{args.run}: reads images; pass image files, such as  classify {args.run} image.png")
    kind, truncated = "image" if images else "text", []
    if images:
        chunks: Iterable[list[tuple[str, dict[str, Any]]]] = [[(file, {}) for file in files]]
    elif args.files:
        column = classifier.bundle.tables["data"].get("text")
        chunks = read_tables(args.files, args.column, str(column or "text"), classifier.BATCH)
    else:
        chunks = ([(line, {}) for line in lines] for lines, _ in read_texts(args.text))
    with opened(args.out) as out:
        predicted = ((chunk, classifier.predict([text for text, _ in chunk])) for chunk in chunks)
        first = next(predicted, ([], []))  # an error comes before the header of the table
        if not args.json:
            write(args, {}, ("label", *classifier.bundle.classes, kind), out=out)
        for chunk, predictions in chain([first], predicted):
            for (text, where), prediction in zip(chunk, predictions, strict=True):
                if images and prediction.note:
                    note(f"{text}: {prediction.note}")
                elif prediction.note:
                    truncated.append(prediction.note)
                label, probabilities = prediction.label, prediction.probabilities
                value = {kind: text, "label": label, "probabilities": probabilities, **where}
                write(args, value, (label, *probabilities.values(), text), out=out)
            out.flush()
    if truncated:
        texts = "1 text was" if len(truncated) == 1 else f"{len(truncated):,} texts were"
        note(f"{texts} {truncated[0]}")
    if not images and (named := [text for text in args.text if len(text.split()) == 1 and os.path.isfile(text)]):
        note(f"{name_some(named)}: the name of a file, and the name itself was classified; --files reads files")
