"""Continue a run from its last checkpoint, exactly as if it had not stopped. The recipe in the folder decides; --set
changes its table [train] from now on, for example to train a finished run for more steps.

examples:
  regard resume runs/multi30k-en-de
  regard resume runs/multi30k-en-de --data ~/moved/multi30k-tok
  regard resume runs/multi30k-en-de --set train.steps=20000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from regard.commands import DEVICE, REPEATABLE
from regard.commands.train import train_folder
from regard.errors import UserError

ARGUMENTS = {
    "RUN": "folder of the run",
    "--data DIR": "folder of the data files, where they have moved",
    "--set train.NAME=VALUE": ("change a setting of [train]; repeatable", REPEATABLE),
    **DEVICE,
    "--json": "print the final metrics as JSON",
}


def run(args: argparse.Namespace) -> int:
    from regard.models.recipe import RECIPE, override, read_recipe
    from regard.settings import write_toml
    from regard.tasks.registry import task_of
    from regard.training.distributed import join

    with join(args.device) as workers:
        tables, folder = read_recipe(args.run, saved=True), Path(args.run)
        if not isinstance(tables.get("data"), dict) or "train" not in tables:
            raise UserError(f"{args.run}: its recipe has no tables [data] and [train], so it cannot be resumed")
        if other := [one for one in args.set if "." in one and not one.startswith("train.")]:
            raise UserError(f"--set {other[0]}: only settings of [train] can change in a run; train a new one")
        tables = override(tables, args.set)
        if args.data is not None:
            tables["data"] = {**tables["data"], "folder": str(Path(args.data).resolve())}
        if args.data is not None or args.set:
            task_of(tables)(tables, folder, workers.device).find_files()
            workers.on_lead(lambda: write_toml(folder / RECIPE, tables))  # unchanged unless the files exist
        return train_folder(args, tables, folder, workers)
