"""`regard train`: a model from a recipe."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from regard.commands import program

if TYPE_CHECKING:
    from pathlib import Path

    from regard.train.distributed import Workers

DESCRIPTION = """
Train a model as a recipe says: check the data, make the tokenizer, train, test. The run is a folder with
everything in it. Ctrl-C saves; `regard resume RUN` (or the same command again) goes on from there.
"""

EXAMPLES = """
regard train recipes/multi30k-en-de.toml --data multi30k-tok      data from that folder
regard train recipes/multi30k-en-de.toml --smoke                  its small form, on sample data
regard train mine.toml -o runs/mine --set train.steps=2000        any setting, by table and name
regard train mine.toml --set model.position=rope --device cuda
torchrun --nproc-per-node 8 -m regard train mine.toml             on eight GPUs; see docs/distributed.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="TOML file with [data], [model], [train], …")
    parser.add_argument("-o", "--out", metavar="RUN", help="folder of the run (default: runs/NAME-OF-THE-RECIPE)")
    parser.add_argument("--data", metavar="DIR", help="folder of the data, or sample:NAME (default: the recipe's)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.NAME=VALUE", help="change a setting; repeatable"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="the recipe's small form, on sample data: does it learn, in a minute?"
    )
    parser.add_argument("--skip-bad-lines", action="store_true", help="leave out lines that cannot be used, and say so")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print the final figures as JSON")


def run(args: argparse.Namespace) -> int:
    from regard.train.distributed import join

    with join(args.device) as workers:
        tables, folder = read(args)
        with pointing(args):
            return carry_out(tables, folder, workers, args.json)


@contextmanager
def pointing(args: argparse.Namespace) -> Iterator[None]:
    """Add to an error about missing data that --data says where they are, unless it was given."""
    from regard.errors import MissingFiles, UserError

    try:
        yield
    except MissingFiles as error:
        from regard.models.recipe import read_recipe

        ways = [] if args.data or "--data DIR" in str(error) else ["Name the folder of the data with  --data DIR."]
        if not args.data and not getattr(args, "smoke", True) and "smoke" in read_recipe(args.recipe):
            ways.append("The recipe's small form has sample data:  --smoke")
        raise UserError("\n".join([str(error), *ways])) from None


def read(args: argparse.Namespace) -> tuple[dict[str, object], Path]:
    """The recipe as the arguments change it, and the folder of the run."""
    from pathlib import Path

    from regard.errors import UserError
    from regard.models.presets import PRESETS
    from regard.models.recipe import override, read_recipe, recipe_path, smoke
    from regard.samples import sample_folder
    from regard.tasks.registry import task_of

    if args.recipe in PRESETS and not Path(args.recipe).exists():
        raise UserError(
            f"{args.recipe}: is a preset of a model, without data: write a recipe with  [data]  and  [model]  "
            f'preset = "{args.recipe}"'
        )
    path = recipe_path(args.recipe)
    tables = read_recipe(path)
    tables = smoke(tables, path) if args.smoke else {name: table for name, table in tables.items() if name != "smoke"}
    tables = override(tables, args.set)
    data = tables.get("data")
    if not isinstance(data, dict):
        raise UserError(f"{path}: has no table [data]; write one, such as  [data]  with  {task_of(tables).EXAMPLE}")
    given = args.data or data.get("folder", ".")
    if isinstance(given, str) and "\0" not in given:
        base = sample_folder(given) or (Path(given) if args.data else path.parent / Path(given).expanduser())
        data["folder"] = str(base.resolve())
    train = tables.get("train")
    if isinstance(train, dict) and isinstance(train.get("init_from"), str):
        train["init_from"] = str(Path(train["init_from"]).expanduser().resolve())
    if args.skip_bad_lines:
        data["skip_bad"] = True
    name = path.stem + "-smoke" * args.smoke
    return tables, Path(args.out) if args.out else Path("runs") / name


def carry_out(tables: dict[str, object], folder: Path, workers: Workers, as_json: bool) -> int:
    """Prepare, train (from the last checkpoint on), test, tell."""
    from regard.tasks.registry import task_of
    from regard.train.lock import hold

    task = task_of(tables)(tables, folder, workers.device)
    with workers.leading(hold(folder)):
        workers.on_lead(task.prepare)
        if not workers.leads:
            task.open()
        workers.gather(None)  # all have it open, before an error may take it away
        trainer = task.trainer()
        if trainer.resume() and workers.leads:
            print(f"going on from step {trainer.step} of {task.config.steps}.", file=sys.stderr)
        if not trainer.run():
            if workers.leads:
                again = f"{program()} resume {shlex.quote(str(folder))}"
                print(f"saved at step {trainer.step} of {task.config.steps}. To go on:  {again}", file=sys.stderr)
            return 130
        scores = workers.on_lead(lambda: task.finish(trainer))
    if not workers.leads:
        return 0
    if as_json:
        print(json.dumps({"run": str(folder), "steps": trainer.step, "seconds": trainer.seconds, "scores": scores}))
        return 0
    if trainer.step < task.config.steps:
        patience = f"train.patience = {task.config.patience}"
        print(f"stopped before step {task.config.steps:,}: {patience} evaluations brought no better figure")
    print(f"{trainer.step:,} steps in {trainer.seconds:.0f} s; the model is in {folder}, with a report.html")
    for name, figures in scores.items():
        print(f"  {name:16} {task.tell(figures)[0]}")
    return 0
