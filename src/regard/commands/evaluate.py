"""Evaluate a trained model on the test sets of its recipe, or on other files. Translation: sacrebleu's BLEU with its
signature, tokenised BLEU, chrF, exact match. Language models: loss, perplexity, bits per character and per byte
over every token of a text, with a context that slides by --stride; --json adds the loss at each position.
Classifiers of texts or images: accuracy, macro-F1, calibration, and with --json the confusion matrix. Captions: exact
match, BLEU, chrF. Masked language models: loss and accuracy on masked tokens. Taggers: precision, recall and F1 of
entities, accuracy. Text-to-text: the metrics of both kinds, set by set. With -o the predictions are saved: SET.jsonl
with source, reference, hypothesis and sentence-level chrF, or label and probabilities, and SET.txt with one hypothesis
per line; training saves the same in RUN/predictions.

examples:
  regard evaluate runs/multi30k-en-de                            all test sets of its recipe
  regard evaluate runs/multi30k-en-de --test flickr2017          one of them
  regard evaluate runs/one runs/two runs/three                   the ensemble of three models
  regard evaluate runs/mine --files test.en test.de --json       other files
  regard evaluate runs/mine --files test.en test.de -o out       then  sacrebleu test.de < out/files.txt
  regard evaluate runs/t5 --files test.en test.de --task german  as data of this task of a text-to-text model
  regard evaluate runs/fashion-mnist-vit --files photos/test     one folder per class
  regard evaluate runs/shakespeare-char --files book.txt --stride 64
"""

from __future__ import annotations

import argparse

from regard.commands import DEVICE, show
from regard.errors import UserError
from regard.messages import localize

ARGUMENTS = {
    "RUN": (
        "folder of a trained model; of several translators or captioners, the ensemble is evaluated",
        {"nargs": "+"},
    ),
    "--test NAME": "only this set of the recipe's [data] test, or valid",
    "--files FILE": (
        "instead of the recipe's: two aligned files, or tables; text files or folders; folders with one folder per "
        "class, or two idx files; of captions, a .jsonl table",
        {"nargs": "+"},
    ),
    "--encoding NAME": "encoding of --files, such as cp949 (default: the recipe's)",
    "-o --out DIR": "save the predictions for each set in this folder",
    **DEVICE,
    "--json": "print the metrics as JSON",
    "translation": {
        "--beam N": ("beam size of the search (default: the recipe's)", {"type": int}),
        "--tokenize NAME": "how BLEU splits words: 13a, intl, zh, char, ja-mecab, ko-mecab, none (default: what fits "
        "the references)",
    },
    "text-to-text": {"--task NAME": "table of [data.tasks] whose kind and prefix --files have"},
    "language models, masked ones too": {
        "--column NAME": "column of tables in --files (default: the recipe's)",
        "--context N": ("tokens of context (default: as in training)", {"type": int}),
        "--stride N": ("tokens by which it slides (default: context)", {"type": int}),
    },
}


def run(args: argparse.Namespace) -> None:
    from regard.models.folder import find_device
    from regard.tasks.registry import load, task_for, task_of
    from regard.training.task import evaluate_bundle

    bundle = load(args.run[0], find_device(args.device), ensemble=args.run[1:])
    task = task_of({"task": task_for(bundle.config), **bundle.recipe})
    options = {name: value for name, value in vars(args).items() if name not in ("run", "device", "json", "debug")}
    for name, value in options.items():
        if value is not None and name not in (*task.OPTIONS, "encoding"):
            text = " ".join(value) if isinstance(value, list) else value
            raise UserError(f"--{name} {text}: has no effect for a model of task {task.NAME}; remove it")
    for name in ("task", "column", "encoding"):
        if getattr(args, name) is not None and not args.files:
            raise UserError(f"--{name} {getattr(args, name)}: is about --files, and there are none")
    if args.files and args.test is not None:
        raise UserError(f"--test {args.test}: is a set of the recipe, but --files names others; remove one of them")
    metrics = evaluate_bundle(task, bundle, options)
    lines = ("\n  ".join([f"{name}:", *map(localize, task.format_metrics(one))]) for name, one in metrics.items())
    show(args.json, metrics, lines)
