"""The small form of a recipe, trained as `regard train RECIPE --smoke` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from regard.cli import main
from regard.settings import read_toml

ROOT = Path(__file__).parent.parent
TEXT_ONLY = ("language-modeling", "text-to-text")  # a text is its own target, or may be


def smoke_run(recipe: str, folder: Path, *options: str) -> dict[str, Any]:
    """Train it in `folder` on the CPU; the metrics of its sets."""
    assert main(["train", str(ROOT / recipe), "--smoke", "-o", str(folder), "--device", "cpu", *options]) == 0
    inputs = json.loads((folder / "examples.json").read_text(encoding="utf-8"))["inputs"]
    assert 0 < len(inputs) <= 6 and all({"text", "pixels", "values"} & one.keys() for one in inputs)
    task = read_toml(folder / "recipe.toml").get("task")
    assert task in TEXT_ONLY or all(one["target"] for one in inputs)
    return results(folder)


def results(folder: Path) -> dict[str, Any]:
    """The metrics of every set that a run was evaluated on."""
    metrics: dict[str, Any] = json.loads((folder / "scores.json").read_text())
    return metrics
