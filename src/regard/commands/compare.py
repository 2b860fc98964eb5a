"""Compare finished runs on the same test set. Runs that differ in train.seed alone form a row, and the first row is the
base. Over several seeds: mean and standard deviation, the difference to the base, paired by seed, with its t-interval,
a bootstrap interval over seeds and test items, the p-value of sign flips, and that of the t-test after Holm's
correction, by which a row is better, worse or not decided. With one run each, the two models are compared over the
items of the test set (paired bootstrap, approximate randomisation), without the randomness of training. Below: the
test items whose outputs differ most.

examples:
  regard compare runs/base runs/rope                            two models: over test items
  regard compare runs/base-* runs/rope-*                        several seeds of each
  regard compare studies/heads/runs/base studies/heads/runs/heads-1    folders of runs
  regard compare runs/base runs/rope --test flickr2017 --metric chrf --examples 20
  regard compare runs/base-* runs/rope-* --json
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from regard.commands import aligned, show
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.study.table import StudyTable

ARGUMENTS = {
    "RUN": ("folders of finished runs, or folders with several; the first is the base", {"nargs": "+"}),
    "--test NAME": "the test set (default: the first of [data] test)",
    "--metric NAME": "a metric of scores.json (default: the most important one of the task)",
    "--examples N": ("how many of the items that differ most are shown (default: 5)", {"type": int, "default": 5}),
    "--json": "print everything as JSON",
}


def run(args: argparse.Namespace) -> None:
    from regard.study.finished import FinishedRun
    from regard.study.formats import lines, to_json
    from regard.study.groups import check_seeds, group_runs
    from regard.study.rows import compare_rows

    if args.examples < 0:
        raise UserError(f"--examples {args.examples}: must be 0 or more")
    rows = group_runs(args.run)
    if len(rows) < 2:
        one = next(iter(rows.values()))
        what = "this is one run" if len(one) == 1 else f"these {len(one)} runs differ in train.seed alone"
        raise UserError(f"{args.run[0]}: {what}; name at least two runs with different settings")
    check_seeds(rows)
    base = next(iter(rows))
    table = compare_rows(
        f"compared with {base}", rows, test=args.test, metric=args.metric, over_items=True, examples=args.examples
    )
    if args.json:
        folders = {name: {seed: str(folder) for seed, folder in row.items()} for name, row in rows.items()}
        show(True, {**to_json(table), "folders": folders}, ())
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    settings = FinishedRun(next(iter(rows[base].values()))).settings
    plain = replace(table, rows=[replace(row, changes={}) for row in table.rows])
    print("\n".join([*settings_table(table, settings), "", *lines(plain, width), *examples(table)]))


def settings_table(table: StudyTable, base: dict[str, object]) -> list[str]:
    """The settings in which some row differs from the base."""
    from regard.study.formats import setting

    names = dict.fromkeys(name for row in table.rows for name in row.changes)
    if not names:
        return ["all runs have the same settings"]
    values = {name: [row.changes.get(name, base.get(name)) for row in table.rows] for name in names}
    cells = ([name, *("–" if one is None else setting(one) for one in row)] for name, row in values.items())
    return aligned([["setting", *(row.name for row in table.rows)], *cells])


def examples(table: StudyTable) -> Iterator[str]:
    """The items that differ most."""
    if not table.disagreements:
        return
    several = any(len(row.scores) > 1 for row in table.rows)
    means = ": means over seeds; the outputs are those of the first" * several
    yield from ("", f"items that differ most ({table.item_metric}{means})")
    for one in table.disagreements:
        rows = [[name, f"{one.scores[name]:.1f}", text] for name, text in one.outputs.items()]
        inputs = [["input", "", one.input]] if one.input else []
        yield from ("", *aligned([*inputs, ["reference", "", one.reference], *rows], right=(1,)))
