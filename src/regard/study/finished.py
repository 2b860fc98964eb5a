"""A finished run as a comparison reads it: its recipe, scores, predictions and learning curve, from files alone.

Nothing here loads the model, so PyTorch is not needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from regard.cost.operations import count_parameters
from regard.cost.total import cost
from regard.errors import UserError
from regard.files import read_json
from regard.models.config import ModelConfig
from regard.models.recipe import read_recipe
from regard.settings import from_dict
from regard.training.history import read_metrics

SEED = "train.seed"
# Metrics of scores.json: their names and formats
NAMES = {
    "bleu": ("BLEU", ".2f"), "chrf": ("chrF", ".2f"), "tokenised_bleu": ("tokenised BLEU", ".2f"),
    "exact": ("exact match", ".2%"), "accuracy": ("accuracy", ".2%"), "macro_f1": ("macro-F1", ".4f"),
    "f1": ("F1", ".4f"), "mae": ("MAE", ".4f"), "rmse": ("RMSE", ".4f"),
}  # fmt: skip
HIGHER = {"bleu", "chrf", "tokenised_bleu", "exact", "accuracy", "macro_f1", "f1", "precision", "recall", "inside"}


@dataclass(frozen=True)
class Metric:
    """A metric of scores.json."""

    key: str
    name: str  # as people write it
    unit: str  # how a value is formatted
    higher: bool  # whether more is better


def metric_of(key: str, name: str | None = None) -> Metric:
    known, unit = NAMES.get(key, (key.replace("_", " "), ".4f"))
    return Metric(key, name or known, unit, key in HIGHER)


@dataclass(frozen=True)
class FinishedRun:
    """The folder of a run; what it lacks, being unfinished, is empty."""

    folder: Path

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return read_recipe(self.folder, saved=True)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings: {"model.heads": 4}."""
        return flat(self.recipe)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """The task, the name of its validation metric and of its most important test metric."""
        return read_json(self.folder / "summary.json")

    @cached_property
    def scores(self) -> Mapping[str, Mapping[str, Any]]:
        """The metrics of each set."""
        return read_json(self.folder / "scores.json")

    @property
    def seed(self) -> int:
        return int(self.settings.get(SEED, 0))

    def score(self, test: str, key: str) -> float | None:
        """A metric of a set; None if it is missing or not finite."""
        value = self.scores.get(test, {}).get(key)
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    def missing(self, test: str, key: str) -> str:
        """Why there is no `score`."""
        if not self.scores:
            return "not evaluated: scores.json is missing"
        value = self.scores.get(test, {}).get(key)
        return f"not evaluated on {test}" if value is None else f"{key} is {value}"

    def records(self, test: str) -> list[dict[str, Any]]:
        """The prediction for each item of a set; [] if the task saves none."""
        path = self.folder / "predictions" / f"{test}.jsonl"
        if not path.is_file():
            return []
        try:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        except ValueError:
            raise UserError(
                f"{path}: damaged; make it again:  regard evaluate {self.folder} -o {path.parent}"
            ) from None

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return read_metrics(self.folder)

    @property
    def seconds(self) -> float | None:
        """Training time."""
        return max((line["seconds"] for line in self.history), default=None)

    def curve(self, key: str) -> list[tuple[int, float]]:
        """A validation metric over steps."""
        points = ((line["step"], line.get(key)) for line in self.history)
        return [(step, float(value)) for step, value in points if isinstance(value, int | float)]

    @cached_property
    def config(self) -> ModelConfig | None:
        with suppress(UserError):  # of another version
            return from_dict(ModelConfig, self.recipe["model"], "model.")
        return None

    @property
    def parameters(self) -> int | None:
        return None if self.config is None else sum(count_parameters(self.config).values())

    @property
    def flops(self) -> float | None:
        """FLOPs of training by formula, with rows of the mean length of the training data; None if that is unknown."""
        config, train = self.config, self.recipe.get("train", {})
        source, target = self._lengths()
        if config is None or not train.get("batch_tokens") or (config.input != "patches" and not source):
            return None
        steps = max((line["step"] for line in self.history), default=train["steps"])
        two = config.architecture in ("encoder-decoder", "recurrent")
        with suppress(UserError):
            seq = None if config.input == "patches" else source
            row = cost(replace(config, pruned=None), seq=seq, target_seq=target or None if two else None)
            rows = train["batch_tokens"] * train.get("gradient_accumulation", 1) / max(row.seq, row.target_seq)
            return row.train * rows * steps
        return None

    def _lengths(self) -> tuple[int, int]:
        """Mean tokens per row of source and target in the training data; 0 where unknown."""
        index = read_json(self.folder / "data" / "train" / "index.json")
        rows, columns = index.get("rows", 0), index.get("columns", {})
        counts = [column["values"] for column in columns.values() if column["shape"] is None]  # sequences of tokens
        if rows and len(counts) in (1, 2):
            source, *target = (max(1, round(count / rows)) for count in counts)
            return source, sum(target)
        return self.recipe.get("train", {}).get("pack", 0), 0


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one: {"model": {"heads": 1}} becomes {"model.heads": 1}."""
    settings: dict[str, Any] = {}
    for name, value in tables.items():
        settings |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return settings


def choose_test(runs: Iterable[FinishedRun]) -> str | None:
    """The first test set that all these runs were evaluated on, or their validation set."""
    found = [[*run.scores] for run in runs if run.scores]
    common = [name for name in found[0] if all(name in names for names in found)] if found else []
    return next((name for name in common if not name.endswith("valid")), common[0] if common else None)
