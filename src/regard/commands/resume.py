"""`regard resume`: go on with a run that was stopped."""

from __future__ import annotations

import argparse
import shlex

DESCRIPTION = "Go on with a run from its last checkpoint, as if it had never stopped. The recipe in the folder decides."

EXAMPLES = """
regard resume runs/multi30k-en-de
regard resume runs/multi30k-en-de --data ~/moved/multi30k-tok
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--data", metavar="DIR", help="folder of the data files, where they have moved")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print the final figures as JSON")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from regard.commands import program
    from regard.commands.train import carry_out, pointing
    from regard.errors import UserError
    from regard.models.folder import RECIPE, load_recipe
    from regard.settings import write_toml
    from regard.tasks.registry import task_of
    from regard.train.distributed import join

    with join(args.device) as workers:
        tables = load_recipe(args.run)
        if not isinstance(tables.get("data"), dict) or "train" not in tables:
            raise UserError(f"{args.run}: its recipe has no [data] and [train], so there is nothing to go on with")
        if isinstance(tables["data"].get("train"), int):
            raise UserError(f"{args.run}: is a demo; go on with  {program()} demo --out {shlex.quote(args.run)}")
        if args.data is not None:
            tables["data"] = {**tables["data"], "folder": str(Path(args.data).resolve())}
            task_of(tables)(tables, Path(args.run), workers.device).find_data()
            workers.on_lead(lambda: write_toml(Path(args.run) / RECIPE, tables))  # untouched unless they are there
        with pointing(args):
            return carry_out(tables, Path(args.run), workers, args.json)
