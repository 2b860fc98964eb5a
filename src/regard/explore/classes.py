"""Sections of a report on any classifier: figures, what is taken for what, and how far to trust a probability.

A reliability diagram (Guo et al. 2017) draws the share of right answers over the probability that the model gave
them. On the diagonal, a probability means what it says; below it the model is too sure of itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regard.explore.chart import line_chart
from regard.explore.heatmap import heat_map
from regard.explore.html import Section, figure, table

DRAWN = 40  # classes of a confusion matrix; more cannot be read


def class_sections(scores: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    """For the sets by name, their figures as `dataclasses.asdict(ClassMetrics)` gives them; the last one is drawn."""
    if not scores:
        return []
    names = {"accuracy": "accuracy", "macro_f1": "macro-F1", "loss": "loss", "calibration_error": "calibration error",
             "majority": "most frequent class", "examples": "examples"}  # fmt: skip
    rows = [[name, *(found[figure] for figure in names)] for name, found in scores.items()]
    name, found = list(scores.items())[-1]
    sections = [Section("How often it is right", table(["set", *names.values()], rows) + _by_class(name, found))]
    if len(found["classes"]) <= DRAWN:
        sections.append(Section("What it takes for what", _confusion(name, found)))
    return [*sections, Section("How far to trust its probabilities", _reliability(name, found))]


def _by_class(name: str, found: Mapping[str, Any]) -> str:
    support = [sum(row) for row in found["confusion"]]
    columns: Sequence[Sequence[Any]] = [found["classes"], found["precision"], found["recall"], found["f1"], support]
    rows = [list(row) for row in zip(*columns, strict=True)]
    return table([f"class ({name})", "precision", "recall", "F1", "examples"], rows)


def _confusion(name: str, found: Mapping[str, Any]) -> str:
    counts = np.array(found["confusion"], dtype=float)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    classes, title = list(found["classes"]), f"Confusion on {name}"
    drawn = heat_map(shares, classes, classes, title=title, row_label="right class", column_label="class given")
    return figure(drawn, "Each row is a class; its cells say which share of it was given which class.") + table(
        ["right class", *classes], [[label, *row] for label, row in zip(classes, found["confusion"], strict=True)]
    )


def _reliability(name: str, found: Mapping[str, Any]) -> str:
    points = [(one["confidence"], one["accuracy"]) for one in found["bins"]]
    low = min(1 / len(found["classes"]), *(min(point) for point in points))
    chart = line_chart(
        {name: points, "as sure as it is right": [(low, low), (1.0, 1.0)]},
        title="Reliability", x_label="probability of its answer", y_label="share of right answers",
    )  # fmt: skip
    told = f"Expected calibration error {found['calibration_error']:.4f} over {found['examples']:,} examples."
    return figure(chart, told)
