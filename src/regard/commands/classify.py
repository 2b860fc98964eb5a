"""Classify texts, with the probability of every class: those passed as arguments, those of files, or the lines of
standard input. The output is a table with one row per text: label, one column per class, text. Files are tables (.tsv,
.csv, .jsonl, .parquet) whose column of texts is the recipe's, or --column; any other file has one text per line. A
model that was trained on images takes image files instead, or with --files also lists of them. An input that cannot be
used is reported, its label is empty, and the exit code is 3.

examples:
  regard classify runs/nsmc "아 더빙.. 진짜 짜증나네요"
  regard classify runs/nsmc                         enter texts at a prompt
  regard classify runs/nsmc --files reviews.tsv --column review -o labels.tsv
  regard classify runs/nsmc --json < reviews.txt > labels.jsonl
  regard classify runs/fashion-mnist-vit shoe.png bag.jpg
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from regard.commands.inputs import Inputs, Item, check_inputs, check_texts, file_inputs, note
from regard.commands.prediction import Chunk, Shown, input_options, open_predictor, predict_inputs

if TYPE_CHECKING:
    from regard.predict.classifier import ClassPrediction

ARGUMENTS = input_options(
    "TEXT", "texts to classify, or image files", "text: text (or image), label, probabilities, file, row"
)


def run(args: argparse.Namespace) -> int:
    from regard.predict.classifier import ImageClassifier, TextClassifier

    check_inputs(args, texts=False)
    classifier = open_predictor(args, TextClassifier, ImageClassifier)
    inputs, truncated = file_inputs("image", "image"), list[str]()
    if isinstance(classifier, TextClassifier):
        check_texts(args)
        inputs = Inputs("text", column=str(classifier.bundle.tables["data"].get("text", "text")))

    def predict(chunk: Chunk) -> list[ClassPrediction]:
        return classifier.predict(chunk.texts, done=chunk.count, failed=chunk.failed)

    def show(item: Item, prediction: ClassPrediction) -> Shown:
        if prediction.note and inputs.name == "image":
            note(f"{item.text}: {prediction.note}")
        elif prediction.note:
            truncated.append(prediction.note)
        label, probabilities = prediction.label, prediction.probabilities
        value = {inputs.name: item.text, "label": label, "probabilities": probabilities, **item.origin}
        yield value, [(label, *probabilities.values(), item.text)]

    def after() -> None:
        if truncated:
            texts = "1 text was" if len(truncated) == 1 else f"{len(truncated):,} texts were"
            note(f"{texts} {truncated[0]}")
            truncated.clear()

    classes = classifier.bundle.classes
    return predict_inputs(
        args, inputs, predict, show, size=classifier.BATCH, header=("label", *classes, inputs.name),
        empty=lambda item: (*[""] * (1 + len(classes)), item.text), after=after,
    )  # fmt: skip
