"""`regard data`: download public data sets, and check your own before training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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
    from regard.commands.train import pointing
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
    with pointing(args):
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
    from regard.data.config import read_data
    from regard.data.read import check
    from regard.models.recipe import read_recipe

    task = read_recipe(args.name).get("task", "translation")
    if task in ("language", "masked"):
        return _check_text(args)
    if task == "classification":
        return _check_labels(args)
    if task != "translation":
        return _check_run(args)
    config = read_data(args.name, args.data)
    sets = {"train": config.train, "valid": config.valid}
    sets |= {f"test.{name}": files for name, files in config.test.items()}
    reports = {
        name: check(files, config, skip_bad=args.skip_bad_lines or config.skip_bad)
        for name, files in sets.items()
        if files
    }
    if args.json:
        rows = {
            name: {"pairs": one.count, "bad": one.bad_count, "first": [str(p) for p in one.bad], "notes": one.notes}
            for name, one in reports.items()
        }
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    for name, one in reports.items():
        print(f"{name}: {one.count:,} pairs{f', {one.bad_count:,} left out' if one.bad_count else ''}")
        for line in (*map(str, one.bad), *one.notes):
            print(f"  {line}")
        if one.bad_count > len(one.bad):
            print(f"  and {one.bad_count - len(one.bad):,} more")
    return 0


def _check_run(args: argparse.Namespace) -> int:
    """Any other task: its data is prepared in a temporary folder, which reads all of it once."""
    import tempfile

    import torch

    from regard.commands.train import read
    from regard.tasks.registry import task_of

    given = {"recipe": args.name, "data": args.data, "skip_bad_lines": args.skip_bad_lines}
    tables, _ = read(argparse.Namespace(**given, out=None, set=[], smoke=False))
    with tempfile.TemporaryDirectory() as place:
        task_of(tables)(tables, Path(place) / "run", torch.device("cpu")).prepare()
    message = f"{args.name}: all files of [data] can be read"
    print(json.dumps({"recipe": args.name, "readable": True}) if args.json else message)
    return 0


def _check_labels(args: argparse.Namespace) -> int:
    from regard.commands.train import read
    from regard.data.labels import LabelData, check_examples, settle_classes
    from regard.settings import from_dict

    given = {"recipe": args.name, "data": args.data, "skip_bad_lines": args.skip_bad_lines}
    tables, _ = read(argparse.Namespace(**given, out=None, set=[], smoke=False))
    config = from_dict(LabelData, {"train": (), **tables["data"]}, "data.")  # type: ignore[dict-item]
    found = {"train": check_examples(config.train, config, config.classes)}
    classes = settle_classes(config, found["train"])
    found |= {name: check_examples(files, config, classes) for name, files in config.sets.items()}
    if args.json:
        rows = {
            name: {"texts": one.count, "classes": one.counts, "bad": one.bad_count, "notes": one.notes}
            for name, one in found.items()
        }
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    for name, one in found.items():
        by_class = ", ".join(f"{label} {one.counts.get(label, 0):,}" for label in classes)
        print(f"{name}: {one.count:,} texts: {by_class}{f'; {one.bad_count:,} left out' if one.bad_count else ''}")
        for line in (*map(str, one.bad), *one.notes):
            print(f"  {line}")
    return 0


def _check_text(args: argparse.Namespace) -> int:
    from regard.data.documents import survey
    from regard.data.text import read_text

    config = read_text(args.name, args.data, skip_bad=args.skip_bad_lines)
    sets = {"train": config.train, "valid": config.valid}
    sets |= {f"test.{name}": files for name, files in config.test.items()}
    found = {name: survey(files, config) for name, files in sets.items() if files}
    if args.json:
        print(json.dumps({name: vars(one) for name, one in found.items()}, ensure_ascii=False))
        return 0
    for name, one in found.items():
        left_out = f", {one.bad:,} left out" if one.bad else ""
        print(f"{name}: {one.documents:,} documents, {one.characters:,} characters, {one.bytes:,} bytes{left_out}")
        for line in one.notes:
            print(f"  {line}")
    return 0
