"""A table of the runs in a folder: steps, training time, last loss, best validation metric, test metrics.

examples:
  regard runs                  the runs in runs/
  regard runs elsewhere --json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from regard.commands import aligned, show
from regard.errors import UserError

HEADERS = ("run", "task", "steps", "seconds", "loss", "best", "test")

ARGUMENTS = {
    "DIR": ("where the runs are (default: runs)", {"nargs": "?", "default": "runs"}),
    "--json": "print everything as JSON",
}


def run(args: argparse.Namespace) -> None:
    folder = Path(args.dir)
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; name the one that holds the runs")
    runs = [run for path in sorted(folder.iterdir()) if (run := read(path)) is not None]
    if runs or args.json:
        show(args.json, runs, aligned([HEADERS, *map(row, runs)], right=range(2, 6)))
    else:
        print(f"{folder}: no runs yet; start with  regard train RECIPE", file=sys.stderr)


def read(folder: Path) -> dict[str, Any] | None:
    """A summary of the files of a run; None for any other folder."""
    from regard.models.recipe import read_recipe
    from regard.tasks.registry import task_of
    from regard.training.trainer import LOSS, read_metrics

    try:
        tables = read_recipe(folder, saved=True)
        train, task = tables.get("train"), task_of(tables)
        lines = read_metrics(folder)
    except (UserError, OSError):
        return None
    if not isinstance(train, dict):
        return None
    metric = task.METRICS.get(str(train.get("metric")), LOSS)

    def values(key: str) -> list[Any]:
        return [line[key] for line in lines if isinstance(line.get(key), int | float)]

    losses = values("loss")
    return {
        "run": folder.name,
        "task": task.NAME,
        "step": max(values("step"), default=0),
        "steps": train.get("steps"),
        "seconds": max(values("seconds"), default=0.0),
        "loss": losses[-1] if losses else None,
        "metric": metric.key,
        "best": (max if metric.higher else min)(values(metric.key), default=None),
        "headline": task.HEADLINE[1],
        "test": _scores(folder / "scores.json", task.HEADLINE[0]),
    }


def row(summary: dict[str, Any]) -> tuple[str, ...]:
    step, steps, loss, best, test = (summary[name] for name in ("step", "steps", "loss", "best", "test"))
    of = f" of {steps:,}" if isinstance(steps, int) and steps > step else ""
    return (
        summary["run"],
        summary["task"],
        f"{step:,}{of}",
        f"{summary['seconds']:,.0f}",
        "–" if loss is None else f"{loss:.4f}",
        "–" if best is None else f"{summary['metric'].replace('_', ' ')} {best:.4g}",
        f"{summary['headline']} " + ", ".join(f"{name} {value:.4g}" for name, value in test.items()) if test else "–",
    )


def _scores(path: Path, metric: str) -> dict[str, float]:
    """One metric of every set in scores.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: float(metrics[metric]) for name, metrics in content.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}
