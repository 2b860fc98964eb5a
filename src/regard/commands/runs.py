"""A table of the runs in a folder: steps, training time, last loss, best validation metric, test metrics.

examples:
  regard runs                  the runs in runs/
  regard runs elsewhere --json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from regard.commands import aligned, show
from regard.errors import UserError
from regard.files import read_json
from regard.messages import localize
from regard.training.history import read_metrics

FIELDS = {"task", "steps", "metric", "higher", "headline", "test"}  # of `regard.training.task.Task.summary`
HEADERS = "run, task, steps, seconds, loss, best, test"

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
        show(args.json, runs, aligned([localize(HEADERS).split(", "), *map(row, runs)], right=range(2, 6)))
    else:
        print(localize(f"{folder}: no runs yet; start with  regard train RECIPE"), file=sys.stderr)


def read(folder: Path) -> dict[str, Any] | None:
    """A summary of the files of a run; None for any other folder."""
    try:
        task = _summary(folder)
        history = read_metrics(folder)
    except (UserError, OSError, ValueError, RecursionError):
        return None
    if task is None:
        return None
    losses = _values(history, "loss")
    return {
        "run": folder.name,
        "task": task["task"],
        "step": max(_values(history, "step"), default=0),
        "steps": task["steps"],
        "seconds": max(_values(history, "seconds"), default=0.0),
        "loss": losses[-1] if losses else None,
        "metric": task["metric"],
        "best": (max if task["higher"] else min)(_values(history, task["metric"]), default=None),
        "headline": task["headline"],
        "test": _scores(folder / "scores.json", task["test"]),
    }


def _summary(folder: Path) -> dict[str, Any] | None:
    """The summary.json of a run; if an earlier version has trained it, the same from its recipe."""
    if (folder / "summary.json").is_file():
        saved = read_json(folder / "summary.json")
        return saved if saved.keys() >= FIELDS else None
    if not (folder / "recipe.toml").is_file():
        return None
    from regard.settings import read_toml

    tables = read_toml(folder / "recipe.toml")
    if not isinstance(tables.get("train"), dict) or not isinstance(tables.get("data"), dict):
        return None
    import torch

    from regard.tasks.registry import task_of

    return task_of(tables)(tables, folder, torch.device("cpu")).summary


def _values(lines: Iterable[dict[str, Any]], key: str) -> list[Any]:
    return [line[key] for line in lines if isinstance(line.get(key), int | float)]


def row(summary: dict[str, Any]) -> tuple[str, ...]:
    step, steps, loss, best, test = (summary[name] for name in ("step", "steps", "loss", "best", "test"))
    of = f" of {steps:,}" if isinstance(steps, int) and steps > step else ""
    sets = ", ".join(f"{name} {value:.4g}" for name, value in test.items())
    return (
        summary["run"],
        summary["task"],
        f"{step:,}{of}",
        f"{summary['seconds']:,.0f}",
        "–" if loss is None else f"{loss:.4f}",
        "–" if best is None else f"{localize(summary['metric'].replace('_', ' '))} {best:.4g}",
        f"{localize(summary['headline'])} {sets}" if test else "–",
    )


def _scores(path: Path, metric: str) -> dict[str, float]:
    """One metric of every set in scores.json."""
    try:
        return {name: float(metrics[metric]) for name, metrics in read_json(path).items()}
    except (ValueError, TypeError, KeyError):
        return {}
