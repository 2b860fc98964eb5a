"""`regard data`: download public data sets, and check your own before training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DESCRIPTION = """
List and download public data sets (verified by SHA-256), and check the files in the [data] table of a recipe: whether
they exist, are valid UTF-8, and have matching lines.
"""

EXAMPLES = """
regard data list                        list the data sets
regard data get multi30k                download to data/multi30k
regard data get multi30k -o ~/corpora   download to another folder
regard data check recipe.toml           read all files of [data] and report problems
regard data check recipe.toml --data ~/corpora
"""

ACTIONS = ("list", "get", "check")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", help="list, get or check")
    parser.add_argument("name", nargs="?", metavar="NAME", help="get: a data set; check: a recipe")
    parser.add_argument("-o", "--out", metavar="DIR", help="get: the output folder (default: data/NAME)")
    parser.add_argument("--data", metavar="DIR", help="check: the data folder (default: the folder of the recipe)")
    parser.add_argument("--skip-bad-lines", action="store_true", help="check: count bad lines instead of stopping")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    from regard.commands.train import data_hint
    from regard.errors import UserError, suggest

    if args.action not in ACTIONS:
        raise UserError(f"regard data {args.action}: unknown action; {suggest(args.action, ACTIONS)}")
    if args.action == "list" and args.name is not None:
        raise UserError(f"regard data list takes no name; download with  regard data get {args.name}")
    if args.action != "list" and args.name is None:
        missing = {"get": "name a data set, such as  regard data get multi30k", "check": "name a recipe file"}
        raise UserError(f"regard data {args.action}: {missing[args.action]}")
    for option, used, action in (
        ("-o", args.out is not None, "get"),
        ("--data", args.data is not None, "check"),
        ("--skip-bad-lines", args.skip_bad_lines, "check"),
    ):
        if used and args.action != action:
            raise UserError(f"regard data {args.action} has no option {option}: it belongs to  regard data {action}")
    with data_hint(args):
        return {"list": _list, "get": _get, "check": _check}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from regard.data.fetch import DATASETS

    if args.json:
        rows = [
            {
                "name": one.name, "summary": one.summary, "licence": one.licence, "bytes": one.size,
                "files": [vars(file) for file in one.files],
            }
            for one in DATASETS.values()
        ]  # fmt: skip
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    for one in DATASETS.values():
        count = f"{len(one.files)} file{'s' * (len(one.files) > 1)}"
        print(f"{one.name}  ({count}, {one.size / 1e6:.1f} MB)\n  {one.summary}\n  licence: {one.licence}")
    return 0


def _get(args: argparse.Namespace) -> int:
    from regard.data.fetch import fetch, named

    dataset = named(args.name)
    folder = Path(args.out).expanduser() if args.out else Path("data") / dataset.name
    paths = fetch(dataset, folder)
    if args.json:
        print(json.dumps({"name": dataset.name, "folder": str(folder), "files": [str(path) for path in paths]}))
        return 0
    count = f"{len(paths)} file{'s' * (len(paths) > 1)}"
    print(f"{dataset.name}: {count}, {dataset.size / 1e6:.1f} MB in {folder}, verified by SHA-256")
    print(f"licence: {dataset.licence}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from regard.api import open_recipe

    tables, _ = open_recipe(args.name, args.data, skip_bad=args.skip_bad_lines)
    task, data = tables.get("task", "translation"), tables["data"]
    assert isinstance(data, dict)
    match task:
        case "translation":
            results = _check_pairs(data)
        case "text-classification":
            results = _check_labels(data)
        case "language-modeling" | "masked-language-modeling":
            results = _check_text(data)
        case _:
            return _check_run(args, tables)
    if args.json:
        print(json.dumps({name: fields for name, (_, fields, _) in results.items()}, ensure_ascii=False))
        return 0
    for name, (summary, fields, lines) in results.items():
        skipped = f", {fields['bad']:,} skipped" if fields["bad"] else ""
        print(f"{name}: {summary}{skipped}")
        for line in lines:
            print(f"  {line}")
    return 0


Results = dict[str, tuple[str, dict[str, Any], list[str]]]  # set -> (summary, fields of the JSON output, notes)


def _check_pairs(table: dict[str, Any]) -> Results:
    from regard.data.pairs import PairData, read_pairs
    from regard.settings import from_dict

    config, results = from_dict(PairData, table, "data."), {}
    sets = {"train": config.train, "valid": config.valid, **{f"test.{name}": f for name, f in config.test.items()}}
    for name, files in sets.items():
        if files:
            one = read_pairs(files, config).check()
            first = [str(problem) for problem in one.bad]
            more = [f"and {one.bad_count - len(one.bad):,} more"] if one.bad_count > len(one.bad) else []
            fields = {"pairs": one.count, "bad": one.bad_count, "first": first, "notes": one.notes}
            results[name] = f"{one.count:,} pairs", fields, [*first, *one.notes, *more]
    return results


def _check_labels(table: dict[str, Any]) -> Results:
    from regard.data.labels import LabelData, check_examples, choose_classes
    from regard.settings import from_dict

    config, results = from_dict(LabelData, table, "data."), {}
    classes = config.classes
    for name, files in {"train": config.train, **config.sets}.items():
        one = check_examples(files, config, classes)
        classes = classes or choose_classes(config, one)
        fields = {"texts": one.count, "classes": one.counts, "bad": one.bad_count, "notes": one.notes}
        by_class = ", ".join(f"{label} {one.counts.get(label, 0):,}" for label in classes)
        results[name] = f"{one.count:,} texts: {by_class}", fields, [*map(str, one.bad), *one.notes]
    return results


def _check_text(table: dict[str, Any]) -> Results:
    from regard.data.documents import TextData, survey
    from regard.settings import from_dict

    config, results = from_dict(TextData, table, "data."), {}
    sets = {"train": config.train, "valid": config.valid, **{f"test.{name}": f for name, f in config.test.items()}}
    for name, files in sets.items():
        if files:
            one = survey(files, config)
            summary = f"{one.documents:,} documents, {one.characters:,} characters, {one.bytes:,} bytes"
            results[name] = summary, vars(one), list(one.notes)
    return results


def _check_run(args: argparse.Namespace, tables: dict[str, Any]) -> int:
    """Any other task: its data is prepared in a temporary folder, so that all of it is read once."""
    import tempfile

    import torch

    from regard.tasks.registry import task_of
    from regard.training.run import Run

    with tempfile.TemporaryDirectory() as folder:
        Run(task_of(tables)(tables, Path(folder) / "run", torch.device("cpu"))).prepare()
    message = f"{args.name}: all files of [data] can be read"
    print(json.dumps({"recipe": args.name, "readable": True}) if args.json else message)
    return 0
