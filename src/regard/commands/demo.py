"""`regard demo`: train a small Transformer here and look inside it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING

from regard.errors import program

if TYPE_CHECKING:
    from regard.demo import Demo

DESCRIPTION = """
Train an encoder-decoder Transformer from scratch that turns English dates and numbers into Korean, test it
on dates and numbers it has never seen, and write report.html with its loss curve, its mistakes and its
attention. Needs no data, no network and no GPU; about a minute on two cores. Ctrl-C saves; the same command
goes on from there.
"""

EXAMPLES = """
regard demo --open                               train, then open the report in the browser
regard demo --fresh                              forget the earlier run and start anew
regard demo --out runs/one-head --set heads=1    the same with one head: what does it cost?
regard demo --json                               figures for a script
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", metavar="DIR", default="runs/demo", help="folder of the run (default: runs/demo)"
    )
    parser.add_argument("--open", action="store_true", help="open the report in the browser")
    parser.add_argument("--fresh", action="store_true", help="delete the earlier run in that folder first")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (default: 1000)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of weights and data order (default: 1)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change the model, as in --set heads=1; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from regard.demo import Setup
    from regard.errors import UserError
    from regard.models.recipe import read_changes
    from regard.training.lock import hold

    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}: give 1 or more")
    changes = read_changes(args.set)
    if not args.json:
        kind = {"recurrent": "a recurrent model with attention"}.get(
            changes.get("architecture", ""), "an encoder-decoder Transformer"
        )
        print(f"English dates and numbers -> Korean: {kind}, trained from scratch.", flush=True)
    setup = Setup(Path(args.out), changes, args.steps, args.seed)
    with hold(Path(args.out)):
        setup.claim_folder(args.fresh)
        trainer = setup.trainer()
        resumed = trainer.resume()
        again = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in _given(args))
        if resumed and trainer.step >= setup.config.steps:
            print(f"{args.out} is trained already ({program()} demo{again} --fresh trains anew).", file=sys.stderr)
        elif resumed:
            print(f"going on from step {trainer.step} of {setup.config.steps}.", file=sys.stderr)
        if not trainer.run():
            print(
                f"saved at step {trainer.step} of {setup.config.steps}. To go on:  {program()} demo{again}",
                file=sys.stderr,
            )
            return 130
        done = setup.finish(trainer)
    if args.json:
        print(json.dumps(_figures(done), ensure_ascii=False, indent=1))
    else:
        _tell(done)
    if args.open:
        import webbrowser

        if not webbrowser.open(done.report.resolve().as_uri()):
            print(f"no browser found here; the report is {done.report.resolve()}", file=sys.stderr)
    return 0


def _given(args: argparse.Namespace) -> list[tuple[str, object]]:
    """The options that name the same run again."""
    given: list[tuple[str, object]] = [("out", args.out)] if args.out != "runs/demo" else []
    given += [(name, getattr(args, name)) for name in ("steps", "seed") if getattr(args, name) is not None]
    return given + [("set", assignment) for assignment in args.set]


def _figures(done: Demo) -> dict[str, object]:
    return {
        "exact_match": done.result.exact,
        "right": done.result.right,
        "tried": len(done.result.lines),
        "steps": done.steps,
        "training_seconds": round(done.seconds, 2),
        "parameters": done.parameters,
        "run": str(done.folder),
        "report": str(done.report.resolve()),
        "examples": dict(done.shown),
    }


def _tell(done: Demo) -> None:
    for source, answer in done.shown:
        print(f"  {source}  ->  {answer}")
    print(
        f"\n{done.result.right:,} of {len(done.result.lines):,} never seen before are exactly right: "
        f"{done.result.exact:.2%} ({done.parameters:,} parameters, {done.seconds:.0f} s of training)"
    )
    print(f"\nreport: {done.report.resolve()}\n\nthree things to try next:")
    folder = shlex.quote(str(done.folder))
    hints = {
        f'{program()} translate {folder} "July 4th, 1976"': "ask it yourself",
        f"{program()} demo --out runs/one-head --set heads=1": "one head instead of four: what does it cost?",
        f"{program()} cost {folder} --seq 32": "what it takes: parameters, operations, memory",
    }
    width = max(map(len, hints))
    for command, meaning in hints.items():
        print(f"  {command:<{width}}    {meaning}")
