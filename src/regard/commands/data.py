"""List and download public data sets (verified by SHA-256), and check the files in the [data] table of a recipe:
whether they exist, are valid UTF-8, and have matching lines.

examples:
  regard data list                        list the data sets
  regard data get multi30k                download to data/multi30k
  regard data get multi30k -o ~/corpora   download to another folder
  regard data check recipe.toml           read all files of [data] and report problems
  regard data check recipe.toml --data ~/corpora
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

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
    from regard.settings import from_dict
    from regard.tasks.registry import task_of

    tables, _ = open_recipe(args.name, args.data, skip_bad=args.skip_bad_lines)
    task = task_of(tables)
    kind = task.TABLES.get("data")
    results = {} if kind is None else _check_files(from_dict(kind, tables["data"], "data."))
    if not results:
        _prepare(task, tables)
        message = f"{args.name}: all files of [data] can be read"
        print(json.dumps({"recipe": args.name, "readable": True}) if args.json else message)
    elif args.json:
        print(json.dumps({name: fields for name, (_, fields, _) in results.items()}, ensure_ascii=False))
    else:
        for name, (summary, fields, lines) in results.items():
            skipped = f", {fields['bad']:,} skipped" if fields["bad"] else ""
            print("\n  ".join([f"{name}: {summary}{skipped}", *lines]))
    return 0


def _check_files(config: Any) -> dict[str, tuple[str, dict[str, Any], list[str]]]:
    """{set: (summary, fields of the JSON output, problems and notes)} of data in text files; {} for other data."""
    from regard.data.documents import TextData, survey
    from regard.data.labels import LabelData, check_examples, choose_classes
    from regard.data.pairs import PairData, read_pairs

    if not isinstance(config, PairData | LabelData | TextData):
        return {}
    results: dict[str, tuple[str, dict[str, Any], list[str]]] = {}
    classes = config.classes if isinstance(config, LabelData) else ()
    for name, files in {"train": config.train, **config.sets}.items():
        if isinstance(config, TextData):
            text = survey(files, config)
            summary = f"{text.documents:,} documents, {text.characters:,} characters, {text.bytes:,} bytes"
            results[name] = summary, vars(text), list(text.notes)
            continue
        fields: dict[str, Any]
        if isinstance(config, PairData):
            report = read_pairs(files, config).check()
            summary, fields = f"{report.count:,} pairs", {"pairs": report.count}
        else:
            report = check_examples(files, config, classes)
            classes = classes or choose_classes(config, report)
            by_class = ", ".join(f"{label} {report.counts.get(label, 0):,}" for label in classes)
            summary, fields = f"{report.count:,} texts: {by_class}", {"texts": report.count, "classes": report.counts}
        problems = [str(problem) for problem in report.bad]
        more = [f"and {report.bad_count - len(problems):,} more"] if report.bad_count > len(problems) else []
        fields |= {"bad": report.bad_count, "first": problems, "notes": report.notes}
        results[name] = summary, fields, [*problems, *more, *report.notes]
    return results


def _prepare(task: Any, tables: dict[str, Any]) -> None:
    """Prepare the data in a temporary folder, which reads all of it once."""
    import tempfile

    import torch

    from regard.training.run import Run

    with tempfile.TemporaryDirectory() as folder:
        Run(task(tables, Path(folder) / "run", torch.device("cpu"))).prepare()
