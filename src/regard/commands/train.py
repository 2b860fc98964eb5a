"""Train a model from a recipe: check the data, learn the tokenizer, train, evaluate. The run is a folder that contains
everything. Ctrl-C saves a checkpoint; `regard resume RUN` (or the same command again) continues from there.

examples:
  regard train recipes/multi30k-en-de.toml --data multi30k-tok      data from that folder
  regard train recipes/multi30k-en-de.toml --smoke                  its small form, on sample data
  regard train mine.toml -o runs/mine --set train.steps=2000        any setting, by table and name
  regard train mine.toml --set model.position=rope --device cuda
  torchrun --nproc-per-node 8 -m regard train mine.toml             on eight GPUs; see docs/distributed.md
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from regard.errors import MissingFiles, UserError, program

if TYPE_CHECKING:
    from regard.api import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="TOML file with [data], [model], [train], …")
    parser.add_argument("-o", "--out", metavar="RUN", help="folder of the run (default: runs/NAME-OF-THE-RECIPE)")
    parser.add_argument("--data", metavar="DIR", help="folder of the data, or sample:NAME (default: the recipe's)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.NAME=VALUE", help="change a setting; repeatable"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="the recipe's small form, on sample data: a test of a minute"
    )
    parser.add_argument("--skip-bad-lines", action="store_true", help="skip unusable lines of the data, with a note")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print the final metrics as JSON")


def run(args: argparse.Namespace) -> int:
    from regard.api import open_recipe, train_run
    from regard.training.distributed import join

    with join(args.device) as workers:
        tables, folder = open_recipe(
            args.recipe, args.data, args.out, smoke=args.smoke, assignments=args.set, skip_bad=args.skip_bad_lines
        )
        with data_hint(args):
            outcome = train_run(tables, folder, workers)
        return print_outcome(outcome, args.json) if workers.leads else 130 * (outcome.metrics is None)


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


def print_outcome(outcome: Outcome, as_json: bool) -> int:
    """Print how training ended; the exit code."""
    run, config, folder = outcome.run, outcome.run.config, outcome.run.folder
    if outcome.metrics is None:
        command = f"{program()} resume {shlex.quote(str(folder))}"
        print(f"saved at step {outcome.step} of {config.steps}. To continue:  {command}", file=sys.stderr)
        return 130
    if as_json:
        content = {"run": str(folder), "steps": outcome.step, "seconds": outcome.seconds, "scores": outcome.metrics}
        print(json.dumps(content))
        return 0
    if outcome.step < config.steps:
        patience = f"train.patience = {config.patience}"
        print(f"stopped before step {config.steps:,}: {patience} evaluations brought no improvement")
    print(f"{outcome.step:,} steps in {outcome.seconds:.0f} s; the model is in {folder}, with a report.html")
    for name, metrics in outcome.metrics.items():
        print(f"  {name:16} {run.task.format_metrics(metrics)[0]}")
    return 0
