"""Train an encoder-decoder Transformer from scratch that translates English dates and numbers into Korean, evaluate it
on dates and numbers it has never seen, and write report.html with its loss curve, its errors and its attention. It is
an ordinary run of the recipe regard/recipes/demo.toml and needs no data, no network and no GPU; about a minute on two
cores. Ctrl-C saves a checkpoint; the same command continues from there.

examples:
  regard demo --open                               train, then open the report in the browser
  regard demo --explore                            train, then open the model in the browser, with a guided tour
  regard demo --fresh                              delete the earlier run and start again
  regard demo --out runs/one-head --set heads=1    the same with one head: how much accuracy does it cost?
  regard demo --json                               metrics for a script
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import webbrowser
from pathlib import Path
from typing import Any

import regard
from regard.commands import REPEATABLE, aligned, positive
from regard.commands.explore import check_page, open_page
from regard.errors import program
from regard.messages import localize

SHOWN = ("March 3rd, 2021", "three hundred forty-two thousand", "Friday, August 15th, 1947", "seven hundred five")

ARGUMENTS = {
    "-o --out DIR": ("folder of the run (default: runs/demo)", {"default": "runs/demo"}),
    "--open": "open the report in the browser",
    "--explore": "open the model in the browser at the end, as regard explore does, at the start of its tour",
    "--fresh": "delete the earlier run in that folder first",
    "--steps N": ("training steps (default: 1000)", {"type": positive}),
    "--seed N": ("seed of weights and data order (default: 1)", {"type": int}),
    "--set NAME=VALUE": ("change the model: heads=1; repeatable", REPEATABLE),
    "--json": "print the metrics as JSON",
}


def run(args: argparse.Namespace) -> int:
    from regard.api import open_recipe, train_run
    from regard.models.recipe import read_changes
    from regard.training.distributed import join

    if args.explore:
        check_page()  # not after a minute of training
    train = {name: value for name in ("steps", "seed") if (value := getattr(args, name)) is not None}
    warmup = {} if args.steps is None else {"warmup": min(200, args.steps // 5)}
    changes = {"model": read_changes(args.set), "train": {**train, **warmup}}
    recipe = Path(regard.__file__).parent / "recipes" / "demo.toml"
    tables, folder = open_recipe(recipe, out=args.out, changes=changes)
    if not args.json:
        recurrent = tables["model"].get("architecture") == "recurrent"
        kind = "a recurrent model with attention" if recurrent else "an encoder-decoder Transformer"
        print(localize(f"English dates and numbers -> Korean: {kind}, trained from scratch."), flush=True)
    with join("cpu") as workers:
        outcome = train_run(tables, folder, workers, fresh=args.fresh)
    steps, command = tables["train"]["steps"], f"{program()} demo"
    options = [("out", args.out)] * (args.out != "runs/demo") + [*train.items()] + [("set", one) for one in args.set]
    command += "".join(f" --{name} {shlex.quote(str(value))}" for name, value in options)
    if outcome.metrics is None:
        print(localize(f"saved at step {outcome.step} of {steps}. To continue:  {command}"), file=sys.stderr)
        return 130
    if outcome.resumed_from == outcome.step:
        print(localize(f"{args.out} was already trained ({command} --fresh trains again)."), file=sys.stderr)
    report, bundle, test = (folder / "report.html").resolve(), outcome.run.bundle, outcome.metrics["test"]
    result = {
        "exact_match": test["exact"],
        "correct": round(test["exact"] * test["lines"]),
        "tested": test["lines"],
        "steps": outcome.step,
        "training_seconds": round(outcome.seconds, 2),
        "parameters": sum(parameter.numel() for parameter in bundle.model.parameters()),
        "run": str(folder),
        "report": str(report),
        "examples": dict(zip(SHOWN, (prediction.text for prediction in bundle.predict(SHOWN)), strict=True)),
    }
    print(json.dumps(result, ensure_ascii=False, indent=1)) if args.json else _print(result)
    if args.open and not webbrowser.open(report.as_uri()):
        print(localize(f"no browser found; the report is {report}"), file=sys.stderr)
    if args.explore:
        open_page(str(folder), "cpu", fragment="tour=1")
    return 0


def _print(result: dict[str, Any]) -> None:
    for source, translation in result["examples"].items():
        print(f"  {source}  ->  {translation}")
    correct = f"{result['correct']:,} of {result['tested']:,} unseen examples are exactly correct"
    size = f"{result['parameters']:,} parameters, {result['training_seconds']:.0f} s of training"
    print("\n" + localize(f"{correct}: {result['exact_match']:.2%} ({size})"))
    print("\n" + localize(f"report: {result['report']}") + "\n\n" + localize("three things to try next:"))
    folder = shlex.quote(result["run"])
    hints = [
        (f'  {program()} translate {folder} "July 4th, 1976"', "translate your own input"),
        (f"  {program()} demo --out runs/one-head --set heads=1", "one head instead of four: how much is lost?"),
        (f"  {program()} cost {folder} --seq 32", "parameters, operations, memory"),
    ]
    print("\n".join(aligned((command, f"  {localize(what)}") for command, what in hints)))
