"""Train a model from a recipe: check the data, learn the tokenizer, train, evaluate. The run is a folder that contains
everything. Ctrl-C saves a checkpoint; `regard resume RUN` (or the same command again) continues from there.

examples:
  regard train recipes/multi30k-en-de.toml --data multi30k-tok      data from that folder
  regard train recipes/multi30k-en-de.toml --smoke                  its small form, on sample data
  regard train mine.toml -o runs/mine --set train.steps=2000        any setting, by table and name
  regard train mine.toml --set model.position=rope --device cuda
  regard train mine.toml --dry-run                                  how large, and how long on this machine?
  torchrun --nproc-per-node 8 -m regard train mine.toml             on eight GPUs; see docs/distributed.md
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands import DEVICE, REPEATABLE, show
from regard.errors import MissingFiles, UserError, program
from regard.messages import localize

if TYPE_CHECKING:
    from regard.training.distributed import Workers

ARGUMENTS = {
    "RECIPE": "TOML file with [data], [model], [train], …",
    "-o --out RUN": "folder of the run (default: runs/NAME-OF-THE-RECIPE)",
    "--data DIR": "folder of the data, or sample:NAME (default: the recipe's)",
    "--set TABLE.NAME=VALUE": ("change a setting; repeatable", REPEATABLE),
    "--smoke": "the recipe's small form, on sample data: a test of a minute",
    "--dry-run": "measure a few steps and print sizes and estimated time; nothing is kept",
    "--skip-bad-lines": "skip unusable lines of the data, with a note",
    **DEVICE,
    "--json": "print the final metrics (with --dry-run: the estimate) as JSON",
}


def run(args: argparse.Namespace) -> int:
    from regard.api import export_note, open_recipe
    from regard.models.recipe import RECIPE
    from regard.tasks.registry import task_of
    from regard.training.distributed import join

    with join(args.device) as workers:
        tables, folder = open_recipe(
            args.recipe, args.data, args.out, smoke=args.smoke, assignments=args.set, skip_bad=args.skip_bad_lines
        )
        if args.dry_run:
            return show_estimate(args, tables, workers)
        task = task_of(tables)(tables, folder, workers.device)
        if workers.leads and not (folder / RECIPE).exists() and (note := export_note(task)):
            print(localize(note), file=sys.stderr)
        return train_folder(args, tables, folder, workers)


def show_estimate(args: argparse.Namespace, tables: dict[str, Any], workers: Workers) -> int:
    """With --dry-run: sizes and time, and nothing is left behind."""
    from regard.api import estimate, format_size
    from regard.progress import duration, rounded

    with data_hint(args):
        found = estimate(tables, workers)
    device = {"cpu": "CPU", "cuda": "GPU"}.get(found["device"], found["device"])
    time = f"about {duration(found['seconds'])} on this {device}, {found['seconds_per_step']:.2g} s per step"
    steps = f"{found['steps']:,} steps ({rounded(found['epochs'])} epochs): {time}"
    notes = [note for name in ("advice", "export") if (note := found[name])]
    show(args.json, found, map(localize, [format_size(found), steps, *notes]))
    return 0


@contextmanager
def data_hint(args: argparse.Namespace) -> Iterator[None]:
    """Add to an error about missing files that --data says where they are, unless it was given."""
    try:
        yield
    except MissingFiles as error:
        from regard.models.recipe import read_recipe

        hints = [] if args.data or "--data DIR" in str(error) else ["Name the folder of the data with  --data DIR."]
        if not args.data and not getattr(args, "smoke", True) and "smoke" in read_recipe(args.recipe):
            hints.append("The recipe's small form has sample data:  --smoke")
        raise UserError("\n".join([str(error), *hints])) from None


def train_folder(args: argparse.Namespace, tables: dict[str, Any], folder: Path, workers: Workers) -> int:
    """Train, then print how it ended; the exit code."""
    from regard.api import train_run

    with data_hint(args):
        outcome = train_run(tables, folder, workers)
    config, code = outcome.run.config, 130 if outcome.metrics is None else 0
    if not workers.leads:
        return code
    if outcome.metrics is None:
        command = f"{program()} resume {shlex.quote(str(folder))}"
        line = f"saved at step {outcome.step} of {config.steps}. To continue:  {command}"
        print(localize(line), file=sys.stderr)
        return code
    if args.json:
        content = {"run": str(folder), "steps": outcome.step, "seconds": outcome.seconds, "scores": outcome.metrics}
        print(json.dumps(content))
        return code
    if outcome.step < config.steps:
        patience = f"train.patience = {config.patience}"
        print(localize(f"stopped before step {config.steps:,}: {patience} evaluations brought no improvement"))
    line = f"{outcome.step:,} steps in {outcome.seconds:.0f} s; the model is in {folder}, with a report.html"
    print(localize(line))
    for name, metrics in outcome.metrics.items():
        print(f"  {name:16} {localize(outcome.run.task.format_metrics(metrics)[0])}")
    return code
