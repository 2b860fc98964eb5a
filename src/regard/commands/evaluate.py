"""`regard evaluate`: the test figures of a trained model."""

from __future__ import annotations

import argparse
import json

DESCRIPTION = """
Score a trained model on the test sets of its recipe, or on other files. Translation: sacrebleu's BLEU with its
signature, tokenised BLEU, chrF, exact match. Language models: loss, perplexity, bits per character and per byte
over every token of a text, with a context that slides by --stride; --json adds the loss at each position.
Classifiers of texts or pictures: accuracy, macro-F1, calibration, and in --json the confusion matrix. Captions: exact
match, BLEU, chrF. Masked language models: loss and right guesses on hidden tokens. Text-to-text: both kinds of figures,
set by set.
"""

EXAMPLES = """
regard evaluate runs/multi30k-en-de                            all test sets of its recipe
regard evaluate runs/multi30k-en-de --test flickr2017          one of them
regard evaluate runs/mine --files test.en test.de --json       other files
regard evaluate runs/fashion-mnist-vit --files photos/test     a folder a class
regard evaluate runs/shakespeare-char --text book.txt --stride 64
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    parser.add_argument("--test", metavar="NAME", help="only this set of the recipe's [data] test, or valid")
    parser.add_argument(
        "--files",
        nargs="+",
        metavar="FILE",
        help="in place of the recipe's: two aligned files, or tables; of pictures, folders that have one folder a "
        "class, or two idx files; of captions, a .jsonl table",
    )
    pairs = parser.add_argument_group("translation")
    pairs.add_argument("--beam", type=int, metavar="N", help="beam of the search (default: the recipe's)")
    pairs.add_argument(
        "--tokenize",
        metavar="NAME",
        help="how BLEU splits words: 13a, intl, zh, char, ja-mecab, ko-mecab, none (default: what fits the references)",
    )
    text = parser.add_argument_group("language models")
    text.add_argument("--text", nargs="+", metavar="FILE", help="text in place of the recipe's: files or folders")
    text.add_argument("--context", type=int, metavar="N", help="tokens seen at once (default: as many as in training)")
    text.add_argument("--stride", type=int, metavar="N", help="tokens by which the context slides (default: context)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from regard.errors import UserError
    from regard.models.folder import find_device, load_recipe
    from regard.tasks.registry import DEFAULT, task_of

    tables = load_recipe(args.run)
    model = tables.get("model")
    imported = "language" if isinstance(model, dict) and model.get("architecture") == "decoder" else DEFAULT
    task = task_of({"task": imported, **tables})
    given = {name: value for name, value in vars(args).items() if name not in ("run", "device", "json", "debug")}
    for name, value in given.items():
        if value is not None and name not in task.EVALUATE:
            kind = f"a{'n' * (task.NAME[0] in 'aeiou')} {task.NAME}"
            raise UserError(f"--{name.replace('_', '-')} {value}: means nothing to {kind} model; leave it out")
    if args.files and args.test is not None:
        raise UserError(f"--test {args.test}: is a set of the recipe, and --files gives others; leave one of them out")
    figures = task.rescore(Path(args.run), find_device(args.device), {name: given[name] for name in task.EVALUATE})
    if args.json:
        print(json.dumps(figures, indent=1))
        return 0
    for name, found in figures.items():
        print(f"{name}:")
        for line in task.tell(found):
            print(f"  {line}")
    return 0
