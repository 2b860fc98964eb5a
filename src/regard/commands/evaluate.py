"""`regard evaluate`: BLEU and chrF of a trained model."""

from __future__ import annotations

import argparse
import json

DESCRIPTION = (
    "Translate test sets and score them: sacrebleu's BLEU with its signature, tokenised BLEU, chrF, exact match."
)

EXAMPLES = """
regard evaluate runs/multi30k-en-de                            all test sets of its recipe
regard evaluate runs/multi30k-en-de --test flickr2017          one of them
regard evaluate runs/mine --files test.en test.de --json       other files
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a trained model")
    parser.add_argument("--test", metavar="NAME", help="only this set of the recipe's [data] test, or valid")
    parser.add_argument(
        "--files", nargs="+", metavar="FILE", help="two aligned files, or tables, in place of the recipe's"
    )
    parser.add_argument("--beam", type=int, metavar="N", help="beam of the search (default: the recipe's)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    import dataclasses

    from regard.data.config import DataConfig
    from regard.data.read import pairs
    from regard.decode.translate import Translator
    from regard.errors import UserError, suggest
    from regard.run import find_device, load_recipe
    from regard.score import score
    from regard.settings import from_dict

    if args.files:
        config = DataConfig(train=tuple(args.files))
        sets = {"files": config.train}
    else:
        table = load_recipe(args.run).get("data")
        if not isinstance(table, dict) or isinstance(table.get("train"), int):  # imported, or a demo
            raise UserError(f"{args.run}: its recipe names no files; give some with --files")
        config = from_dict(DataConfig, table, "data.")
        sets = {"valid": config.valid, **config.test}
        if args.test is not None and args.test not in sets:
            raise UserError(f"--test {args.test}: the recipe has no such set; {suggest(args.test, sets)}")
        sets = {name: files for name, files in sets.items() if files and args.test in (None, name)}
    if not sets:
        raise UserError(f"{args.run}: its recipe names no test set; give files with --files")
    changes = {} if args.beam is None else {"beam": args.beam}
    translator = Translator.load(args.run, str(find_device(args.device)), changes)
    figures = {}
    for name, files in sets.items():
        lines = list(pairs(files, config))
        found = score(translator.translate([pair.source for pair in lines]), [pair.target for pair in lines])
        figures[name] = dataclasses.asdict(found)
        if not args.json:
            print(f"{name}: {found.lines:,} lines, {found.exact:.1%} exact")
            print(f"  BLEU {found.bleu:.2f}  ({found.signature})")
            print(f"  tokenised BLEU {found.tokenised_bleu:.2f}  ({found.reference_tokens:,} reference tokens)")
            print(f"  chrF {found.chrf:.2f}")
    if args.json:
        print(json.dumps(figures, indent=1))
    return 0
