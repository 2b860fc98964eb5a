"""`regard runs`: what has been trained, side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = "A table of the runs in a folder: steps, training time, last loss, best validation figure, test BLEU."

EXAMPLES = """
regard runs                  those in runs/
regard runs elsewhere --json
"""

HEADERS = ("run", "steps", "seconds", "loss", "best", "BLEU")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", nargs="?", default="runs", help="where the runs are (default: runs)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    from regard.errors import UserError

    folder = Path(args.folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; name the one that holds the runs")
    found = [told for path in sorted(folder.iterdir()) if (told := read(path)) is not None]
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    if not found:
        print(f"{folder}: no runs yet; start with  regard train RECIPE", file=sys.stderr)
        return 0
    rows = [HEADERS, *(row(told) for told in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        name, *numbers = (
            cell.ljust(w) if i in (0, 5) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        print("  ".join((name, *numbers)).rstrip())
    return 0


def read(folder: Path) -> dict[str, Any] | None:
    """What the files of a run tell; None for any other folder."""
    from regard.errors import UserError
    from regard.run import load_recipe
    from regard.train.trainer import read_metrics

    try:
        train = load_recipe(folder).get("train")
        lines = read_metrics(folder)
    except (UserError, OSError):
        return None
    if not isinstance(train, dict):
        return None
    metric = "bleu" if train.get("metric") == "bleu" else "valid_loss"
    judged = [line[metric] for line in lines if _number(line.get(metric))]
    losses = [line["loss"] for line in lines if _number(line.get("loss"))]
    return {
        "run": folder.name,
        "step": max((line["step"] for line in lines if _number(line["step"])), default=0),
        "steps": train.get("steps"),
        "seconds": max((line["seconds"] for line in lines if _number(line["seconds"])), default=0.0),
        "loss": losses[-1] if losses else None,
        "metric": metric,
        "best": (max if metric == "bleu" else min)(judged, default=None),
        "bleu": _bleu(folder / "scores.json"),
    }


def row(told: dict[str, Any]) -> tuple[str, ...]:
    best = "–" if told["best"] is None else f"{told['metric'].replace('_', ' ')} {told['best']:.4g}"
    return (
        told["run"],
        f"{told['step']:,}"
        + (f" of {told['steps']:,}" if isinstance(told["steps"], int) and told["steps"] > told["step"] else ""),
        f"{told['seconds']:,.0f}",
        "–" if told["loss"] is None else f"{told['loss']:.4f}",
        best,
        ", ".join(f"{name} {value:.2f}" for name, value in told["bleu"].items()) or "–",
    )


def _bleu(path: Path) -> dict[str, float]:
    """BLEU of every set in scores.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: float(figures["bleu"]) for name, figures in content.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
