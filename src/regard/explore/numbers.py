"""The report of a model of numbers: how it learned, how far off it is, and beside which simple forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import regard
from regard.explore.chart import line_chart
from regard.explore.html import Section, figure, page, paragraph, table, write_page
from regard.explore.translation import curves

BEFORE = 96  # steps before the forecast that are drawn


@dataclass(frozen=True)
class Shown:
    """One example: the numbers given, those that follow, and those written. A series has a channel's name."""

    channel: str
    source: list[float]
    expected: list[float]
    written: list[float]


def write_report(
    path: Path,
    title: str,
    model: Any,
    metrics: Sequence[dict[str, Any]],
    scores: Mapping[str, Mapping[str, Any]],
    shown: Sequence[Shown],
) -> Path:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = max((line["seconds"] for line in metrics), default=0.0)
    summary = [(f"mean error on {name}", f"{found['mae']:.4f}") for name, found in scores.items()][:2]
    summary += [("training", f"{seconds:.0f} s"), ("parameters", f"{parameters:,}")]
    series = any(one.channel for one in shown)
    figures = (_forecasts if series else _errors)(scores) if scores else []
    examples = [_chart(one) for one in shown] if series else [_examples(shown)]
    sections = [curves(metrics, unit="squared error, scaled"), *figures, *examples]
    return write_page(path, page(title, summary, sections, created=datetime.now(), version=regard.__version__))


def _errors(scores: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    names = ("mae", "largest", "within", "forced_mae", "naive_mae", "sequences")
    heads = ("set", "mean error", "largest", "within tolerance", "given the truth", "unlearned", "sequences")
    rows = [[name, *(found[key] for key in names)] for name, found in scores.items()]
    told = paragraph(
        "Free-running: each number that is written is read before the next, errors and all. Given the truth: the mean "
        "error where the right numbers are read instead. Unlearned: that of repeating what was given, or of the mean."
    )
    return [Section("How far off it is", told + table(heads, rows))]


def _forecasts(scores: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    """The model beside the two simple forecasts: over all, by channel, by step."""
    kinds = {"": "this model", "last_": "last value", "seasonal_": "last season"}
    sections = []
    for name, found in scores.items():
        heads = ("forecast", "mean error", "squared error", *found["channels"])
        rows = [
            [kind, *(found[f"{key}{one}"] for one in ("mae", "mse")), *found[f"{key}mae_by_channel"]]
            for key, kind in kinds.items()
        ]
        steps = {kind: list(enumerate(found[f"{key}mae_by_step"], 1)) for key, kind in kinds.items()}
        chart = line_chart(steps, title="Mean error by step", x_label="steps ahead", y_label="deviations")
        told = paragraph(f"{found['windows']:,} windows; errors in units of each channel's deviation, lower is better.")
        body = told + table(heads, rows) + figure(chart, "Further ahead is harder.")
        sections.append(Section(f"Forecasts of {name}", body))
    return sections


def _chart(one: Shown) -> Section:
    before = one.source[-BEFORE:]
    lines = {
        "given": list(enumerate(before, 1 - len(before))),
        "what came": list(enumerate(one.expected, 1)),
        "foretold": list(enumerate(one.written, 1)),
    }
    chart = line_chart(lines, title=one.channel, x_label="step", y_label="value")
    return Section(f"A window: {one.channel}", figure(chart, "Step 0 is the last that was given."))


def _examples(shown: Sequence[Shown]) -> Section:
    def told(numbers: Sequence[float]) -> str:
        return " ".join(f"{number:.2f}" for number in numbers)

    rows = [[told(one.source), told(one.expected), told(one.written)] for one in shown]
    return Section("Sequences", table(["given", "expected", "written"], rows, classes=["token"] * 3))
