"""`regard runs`: what has been trained, side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = "A table of the runs in a folder: steps, training time, last loss, best validation figure, test figures."

EXAMPLES = """
regard runs                  those in runs/
regard runs elsewhere --json
"""

HEADERS = ("run", "task", "steps", "seconds", "loss", "best", "test")


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
            cell.ljust(w) if i in (0, 1, 6) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        print("  ".join((name, *numbers)).rstrip())
    return 0


def read(folder: Path) -> dict[str, Any] | None:
    """What the files of a run tell; None for any other folder."""
    from regard.errors import UserError
    from regard.models.folder import load_recipe
    from regard.tasks.registry import task_of
    from regard.train.metric import LOSS
    from regard.train.trainer import read_metrics

    try:
        tables = load_recipe(folder)
        train, task = tables.get("train"), task_of(tables)
        lines = read_metrics(folder)
    except (UserError, OSError):
        return None
    if not isinstance(train, dict):
        return None
    metric = task.METRICS.get(str(train.get("metric")), LOSS)
    judged = [line[metric.figure] for line in lines if _number(line.get(metric.figure))]
    losses = [line["loss"] for line in lines if _number(line.get("loss"))]
    return {
        "run": folder.name,
        "task": task.NAME,
        "step": max((line["step"] for line in lines if _number(line["step"])), default=0),
        "steps": train.get("steps"),
        "seconds": max((line["seconds"] for line in lines if _number(line["seconds"])), default=0.0),
        "loss": losses[-1] if losses else None,
        "metric": metric.figure,
        "best": (max if metric.higher else min)(judged, default=None),
        "figure": task.HEADLINE[1],
        "test": _scores(folder / "scores.json", task.HEADLINE[0]),
    }


def row(told: dict[str, Any]) -> tuple[str, ...]:
    best = "–" if told["best"] is None else f"{told['metric'].replace('_', ' ')} {told['best']:.4g}"
    return (
        told["run"],
        told["task"],
        f"{told['step']:,}"
        + (f" of {told['steps']:,}" if isinstance(told["steps"], int) and told["steps"] > told["step"] else ""),
        f"{told['seconds']:,.0f}",
        "–" if told["loss"] is None else f"{told['loss']:.4f}",
        best,
        f"{told['figure']} " + ", ".join(f"{name} {value:.4g}" for name, value in told["test"].items())
        if told["test"]
        else "–",
    )


def _scores(path: Path, figure: str) -> dict[str, float]:
    """One figure of every set in scores.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: float(figures[figure]) for name, figures in content.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
