"""`regard train`: a translation model from a recipe."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING

from regard.commands import program

if TYPE_CHECKING:
    from pathlib import Path

DESCRIPTION = """
Train a model as a recipe says: check the data, make the tokenizer, train, test. The run is a folder with
everything in it. Ctrl-C saves; `regard resume RUN` (or the same command again) goes on from there.
"""

EXAMPLES = """
regard train recipes/multi30k-en-de.toml --data multi30k-tok      data from that folder
regard train mine.toml -o runs/mine --set train.steps=2000        any setting, by table and name
regard train mine.toml --set model.position=rope --device cuda
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="TOML file with [data], [model], [train], …")
    parser.add_argument("-o", "--out", metavar="RUN", help="folder of the run (default: runs/NAME-OF-THE-RECIPE)")
    parser.add_argument("--data", metavar="DIR", help="folder of the data files (default: the recipe's)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="TABLE.NAME=VALUE", help="change a setting; repeatable"
    )
    parser.add_argument("--skip-bad-lines", action="store_true", help="leave out lines that cannot be used, and say so")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="print the final figures as JSON")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from regard.errors import UserError
    from regard.presets import PRESETS
    from regard.recipe import override, read_recipe, recipe_path

    if args.recipe in PRESETS and not Path(args.recipe).exists():
        raise UserError(
            f"{args.recipe}: is a preset of a model, without data: write a recipe with  [data]  and  [model]  "
            f'preset = "{args.recipe}"'
        )
    path = recipe_path(args.recipe)
    tables = override(read_recipe(path), args.set)
    data = tables.get("data")
    if not isinstance(data, dict):
        raise UserError(f'{path}: has no table [data]; write one, such as  [data]  with  train = ["a.en", "a.de"]')
    if args.data or isinstance(data.get("folder", "."), str):
        base = Path(args.data) if args.data else path.parent / Path(data.get("folder", ".")).expanduser()
        data["folder"] = str(base.resolve())
    if args.skip_bad_lines:
        data["skip_bad"] = True
    folder = Path(args.out) if args.out else Path("runs") / path.stem
    return carry_out(tables, folder, args.device, args.json)


def carry_out(tables: dict[str, object], folder: Path, device: str | None, as_json: bool) -> int:
    """Prepare, train (from the last checkpoint on), test, tell."""
    import dataclasses

    from regard.run import find_device
    from regard.train.translation import TranslationRun

    task = TranslationRun(tables, folder, find_device(device))
    task.prepare()
    trainer = task.trainer()
    if trainer.resume():
        print(f"going on from step {trainer.step} of {task.config.steps}.", file=sys.stderr)
    if not trainer.run():
        again = f"{program()} resume {shlex.quote(str(folder))}"
        print(f"saved at step {trainer.step} of {task.config.steps}. To go on:  {again}", file=sys.stderr)
        return 130
    scores = task.finish(trainer)
    if as_json:
        figures = {name: dataclasses.asdict(found) for name, found in scores.items()}
        print(json.dumps({"run": str(folder), "steps": trainer.step, "seconds": trainer.seconds, "scores": figures}))
        return 0
    print(f"{trainer.step:,} steps in {trainer.seconds:.0f} s; the model is in {folder}, with a report.html")
    for name, found in scores.items():
        print(f"  {name:16} BLEU {found.bleu:.2f}  tokenised {found.tokenised_bleu:.2f}  chrF {found.chrf:.2f}")
    return 0
