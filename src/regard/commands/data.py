"""List and download public data sets (verified by SHA-256), and check the files in the [data] table of a recipe:
whether they exist, can be read in their format and encoding, and have matching lines.

examples:
  regard data list                        list the data sets
  regard data get multi30k                download to data/multi30k
  regard data get multi30k -o ~/corpora   download to another folder
  regard data check recipe.toml           read all files of [data] and report problems
  regard data check recipe.toml --data ~/corpora
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import show
from regard.commands.train import data_hint
from regard.errors import UserError, suggest
from regard.messages import localize

if TYPE_CHECKING:
    from regard.data.fetch import Dataset

ACTIONS = ("list", "get", "check")
ARGUMENTS = {
    "ACTION": "list, get or check",
    "NAME": ("get: a data set; check: a recipe", {"nargs": "?"}),
    "-o --out DIR": "get: the output folder (default: data/NAME)",
    "--data DIR": "check: the data folder (default: the folder of the recipe)",
    "--skip-bad-lines": "check: count bad lines instead of stopping",
    "--json": "print the result as JSON",
}


def run(args: argparse.Namespace) -> None:
    if args.action not in ACTIONS:
        raise UserError(f"regard data {args.action}: unknown action; {suggest(args.action, ACTIONS)}")
    if args.action == "list" and args.name is not None:
        raise UserError(f"regard data list takes no name; download with  regard data get {args.name}")
    if args.action != "list" and args.name is None:
        missing = {"get": "name a data set, such as  regard data get multi30k", "check": "name a recipe file"}
        raise UserError(f"regard data {args.action}: {missing[args.action]}")
    for name, action in {"out": "get", "data": "check", "skip_bad_lines": "check"}.items():
        if getattr(args, name) not in (None, False) and args.action != action:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"regard data {args.action} has no option {option}: it belongs to  regard data {action}")
    with data_hint(args):
        {"list": _list, "get": _get, "check": _check}[args.action](args)


def _list(args: argparse.Namespace) -> None:
    from regard.data.fetch import DATASETS

    sets = DATASETS.values()
    lines = (f"{one.name}  ({_size(one)})\n  {one.summary}\n  licence: {one.licence}" for one in sets)
    show(args.json, [{**dataclasses.asdict(one), "bytes": one.size} for one in sets], map(localize, lines))


def _size(dataset: Dataset) -> str:
    return f"{len(dataset.files)} file{'s' * (len(dataset.files) > 1)}, {dataset.size / 1e6:.1f} MB"


def _get(args: argparse.Namespace) -> None:
    from regard.data.fetch import fetch, named

    dataset = named(args.name)
    folder = Path(args.out).expanduser() if args.out else Path("data") / dataset.name
    files = list(map(str, fetch(dataset, folder)))
    lines = [f"{dataset.name}: {_size(dataset)} in {folder}, verified by SHA-256", f"licence: {dataset.licence}"]
    show(args.json, {"name": dataset.name, "folder": str(folder), "files": files}, map(localize, lines))


def _check(args: argparse.Namespace) -> None:
    import torch

    from regard.api import open_recipe
    from regard.data.mixture import TasksData, read_tasks
    from regard.settings import from_dict
    from regard.tasks.registry import task_of
    from regard.training.run import Run

    tables, _ = open_recipe(args.name, args.data, skip_bad=args.skip_bad_lines)
    task = task_of(tables)
    kind, content, lines = task.TABLES.get("data"), dict[str, Any](), list[str]()
    if kind is TasksData:
        for name, one in read_tasks(tables["data"])[1].items():
            _check_files(one.data, f"{name}.", content, lines)
    elif kind is not None:
        _check_files(from_dict(kind, tables["data"], "data."), "", content, lines)
    if not content:
        with tempfile.TemporaryDirectory() as folder:  # prepare the data there, which reads all of it once
            Run(task(tables, Path(folder) / "run", torch.device("cpu"))).prepare()
        content, lines = {"recipe": args.name, "readable": True}, [f"{args.name}: all files of [data] can be read"]
    show(args.json, content, map(localize, lines))


def _check_files(config: Any, prefix: str, content: dict[str, Any], lines: list[str]) -> None:
    """Add what the sets of data in text files hold, for JSON and as text; nothing of other data."""
    from regard.data.documents import TextData
    from regard.data.labels import LabelData
    from regard.data.pairs import PairData
    from regard.data.sets import file_groups
    from regard.data.tags import TagData, check_sets, is_prefixed
    from regard.settings import to_dict

    if not isinstance(config, PairData | LabelData | TextData | TagData) or not config.train:
        return
    for line in config.repeated():
        print(localize(f"warning: {prefix}{line}"), file=sys.stderr)
    tagged: dict[str, Any] = {}
    if isinstance(config, TagData):
        config, tagged = check_sets(config)
    for name, files in {"train": config.train, **config.sets}.items():
        report = tagged[name][0] if tagged else config.read(files).check()
        fields: dict[str, Any] = {"pairs": report.count}
        if isinstance(config, TextData):
            fields = {**report.totals}
        elif isinstance(config, LabelData):
            config = config.with_classes(report)
            fields = {"texts": report.count, "classes": report.totals}
        elif isinstance(config, TagData):
            fields = {"sentences": report.count, "words": sum(report.totals.values()), "classes": report.totals}
        summary = ", ".join(f"{count:,} {unit}" for unit, count in fields.items() if unit != "classes")
        if tagged and is_prefixed(config.classes):
            fields["scheme"] = tagged[name][1].name
            summary += f", {fields['scheme']}"
        if isinstance(config, LabelData | TagData):
            summary += ": " + ", ".join(f"{label} {report.totals.get(label, 0):,}" for label in config.classes)
        problems = [str(problem) for problem in report.bad]
        more = [f"and {report.bad_count - len(problems):,} more"] if report.bad_count > len(problems) else []
        summary += f", {report.bad_count:,} skipped" if report.bad_count else ""
        weights = to_dict(files) if len(file_groups(files)) > 1 else []
        groups = [f"weight {one['weight']:g}: {', '.join(one['files'])}" for one in weights]
        lines.append("\n  ".join([f"{prefix}{name}: {summary}", *groups, *problems, *more, *report.notes]))
        found = {**fields, "bad": report.bad_count, "first": problems, "notes": report.notes}
        content[prefix + name] = found | ({"groups": weights} if weights else {})
