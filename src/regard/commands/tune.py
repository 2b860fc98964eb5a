"""Search for settings: train a recipe many times with other values of the settings that --search names, and find those
with the best validation metric (`train.metric`). Trials that do worse than most others are stopped early. The complete
recipe of the best trial is FOLDER/best.toml. Needs the extra `tune`.

Ctrl-C saves a checkpoint; the same command continues the search, and more --trials extend it. Several processes, on one
machine or on several that share a folder, work on one search: start the same command in each.

examples:
  regard tune mine.toml --trials 30 --search train.lr=1e-4:1e-2:log --search model.dropout=0:0.3
  regard tune mine.toml --trials 30 --search space.toml --jobs 4       settings from a file with a table [search]
  regard tune studies/tune-mine --trials 60                            continue a search, here with more trials
  regard train studies/tune-mine/best.toml -o runs/best                train the best recipe, with its test sets

values of --search:
  train.lr=1e-4:1e-2:log              from … to, on a logarithmic scale
  model.layers=1:4                    integers
  model.dim=64:512:64                 in steps
  model.position=rope,learned,none    one of these
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import DEVICE, REPEATABLE, aligned, positive, show
from regard.errors import UserError, program

if TYPE_CHECKING:
    from regard.study.search import Search

SHOWN = 10  # trials in the table
ARGUMENTS = {
    "RECIPE": "TOML file with [data], [model], [train], …, or the folder of a search, to continue it",
    "--trials N": ("number of trials, over all processes (default: 20)", {"type": positive, "default": 20}),
    "--search NAME=VALUES": ("a setting and its values, or a file with a table [search]; repeatable", REPEATABLE),
    "-o --out FOLDER": "folder of the search (default: studies/tune-NAME-OF-THE-RECIPE)",
    "--data DIR": "folder of the data, or sample:NAME (default: the recipe's)",
    "--set TABLE.NAME=VALUE": ("change a setting for all trials; repeatable", REPEATABLE),
    "--smoke": "the recipe's small form, on sample data",
    "--jobs N": ("processes on this machine (default: 1)", {"type": positive, "default": 1}),
    "--seed N": ("seed of the choice of values (default: 1)", {"type": int, "default": 1}),
    **DEVICE,
    "--json": "print all trials as JSON",
}


def run(args: argparse.Namespace) -> int:
    from regard.commands.train import data_hint
    from regard.study.processes import follow_parent, is_worker
    from regard.study.search import work, work_in_processes
    from regard.training.distributed import join

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "regard tune: several processes need no torchrun; use --jobs, or start the command several times"
        )
    follow_parent()
    with join(args.device) as workers:
        with data_hint(args):
            search = open_folder(args)
        before = [one for one in search.results if one.status != "running"]
        if before:
            print(f"{search.folder}: {len(before)} of {args.trials} trials are done", file=sys.stderr)

        def report(number: int) -> None:
            print(search.line(number, args.trials, args.jobs), file=sys.stderr, flush=True)

        if args.jobs > 1:
            finished = work_in_processes(search, args.trials, args.device, args.jobs, report)
        else:
            finished = work(search, args.trials, workers.device, report)
    if not finished:
        command = f"{program()} tune {shlex.quote(str(search.folder))} --trials {args.trials}"
        print(f"saved. To continue:  {command}", file=sys.stderr)
        return 130
    if is_worker():
        return 0
    search.write()
    show(args.json, search.summary(), table(search, args.trials))
    return 0 if search.ranked() else 1


def open_folder(args: argparse.Namespace) -> Search:
    """The search that the arguments describe, or the one in the folder that they name."""
    from regard.api import open_recipe
    from regard.study.search import SEARCH, Search, open_search
    from regard.study.space import read_search

    folder = Path(args.recipe)
    if (folder / SEARCH).is_file():
        given = [name for name in ("search", "set", "data", "out", "smoke") if getattr(args, name)]
        if given:
            raise UserError(f"--{given[0]}: {folder} is a search, which has its recipe; remove --{given[0]}")
        return Search(folder)
    if args.search == [] and not folder.is_file():
        raise UserError(f"{folder}: holds no search ({SEARCH}); name a recipe and settings with --search")
    tables, run = open_recipe(args.recipe, args.data, smoke=args.smoke, assignments=args.set)
    out = Path(args.out) if args.out else Path("studies") / f"tune-{run.name}"
    return open_search(out, tables, read_search(args.search), args.seed)


def table(search: Search, trials: int) -> list[str]:
    """The best trials, what became of the others, and where the best recipe is."""
    from regard.progress import duration
    from regard.study.search import BEST, shorten

    results, ranked = search.results, search.ranked()
    counts = {status: [one for one in results if one.status == status] for status in ("done", "stopped", "failed")}
    running = len(results) - sum(map(len, counts.values()))
    parts = [f"{len(some)} {status}" for status, some in counts.items() if some]
    parts += [f"{running} still trained by other processes"] * (running > 0)
    parts += ["all combinations were tried"] * (len(results) < trials)
    seconds = sum(one.seconds for one in results)
    lines: list[str] = []
    if ranked:
        rows: list[Any] = [("trial", search.name, *search.space)]
        rows += [
            (str(one.number), f"{one.value:.5g}", *(shorten(one.settings.get(name, "")) for name in search.space))
            for one in ranked[:SHOWN]
        ]
        lines += [*aligned(rows, right=range(2)), ""]
    lines.append(f"{len(results)} trials: {', '.join(parts)}; {duration(seconds)} of training")
    lines += [f"  trial {one.number} failed: {one.reason}" for one in counts["failed"][:SHOWN]]
    if importance := search.importance():
        lines.append("importance: " + ", ".join(f"{name} {part:.0%}" for name, part in importance.items()))
    if ranked:
        best = shlex.quote(str(search.folder / BEST))
        lines.append(f"best recipe: {best}; train it with  {program()} train {best} -o RUN")
    else:
        lines.append("no trial is done: there is no best recipe")
    return lines
