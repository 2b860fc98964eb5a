"""What classifiers of texts and of images share: classes, metrics, sections of the report.

A reliability diagram (Guo et al. 2017) plots accuracy over the predicted probability. On the diagonal the probability
is calibrated; below it the model is overconfident.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from regard.metrics.classification import evaluate_classes, format_classes
from regard.predict.bundle import Bundle
from regard.training.results import Chart, Matrix, Section, Table
from regard.training.task import Evaluation, Metrics, Task
from regard.training.trainer import LOSS, Metric

DRAWN = 40  # classes of a confusion matrix; more cannot be read


class ClassificationTask(Task):
    """[data] has `classes` and `valid_fraction`."""

    METRICS: ClassVar = {
        "loss": LOSS, "accuracy": Metric("accuracy", higher=True), "f1": Metric("macro_f1", higher=True)
    }  # fmt: skip
    HEADLINE = ("accuracy", "accuracy", ".2%")
    COLUMNS: ClassVar = {
        "accuracy": "accuracy", "macro_f1": "macro-F1", "loss": "loss", "calibration_error": "calibration error",
        "majority": "most frequent class", "examples": "examples",
    }  # fmt: skip
    OPTIONS = ("test", "files")

    @property
    def sets(self) -> Sequence[str]:
        return [*(["valid"] if self.data.valid_fraction else []), *super().sets]

    def use(self, bundle: Bundle) -> None:
        super().use(bundle)
        self.data = dataclasses.replace(self.data, classes=bundle.classes)

    def measure(self, probabilities: Tensor, labels: Tensor) -> Metrics:
        """Metrics of probabilities [N, classes] with the correct classes [N]."""
        return dataclasses.asdict(evaluate_classes(probabilities, labels, self.data.classes))

    @staticmethod
    def validation(metrics: Metrics) -> dict[str, float]:
        return {"valid_loss": metrics["loss"], "accuracy": metrics["accuracy"], "macro_f1": metrics["macro_f1"]}

    @staticmethod
    def format_metrics(metrics: Metrics) -> list[str]:
        return format_classes(metrics)


def class_sections(evaluations: Mapping[str, Evaluation]) -> list[Section]:
    """The last set by class, its confusion matrix and its reliability diagram."""
    if not evaluations:
        return []
    name, metrics = [(name, one.metrics) for name, one in evaluations.items()][-1]
    classes, counts = metrics["classes"], metrics["confusion"]
    sums = [sum(row) for row in counts]
    rows = list(zip(classes, metrics["precision"], metrics["recall"], metrics["f1"], sums, strict=True))
    sections = [Section(f"Classes of {name}", [Table(["class", "precision", "recall", "F1", "examples"], rows)])]
    if len(classes) <= DRAWN:
        fractions = [[count / max(total, 1) for count in row] for row, total in zip(counts, sums, strict=True)]
        matrix = Matrix(
            f"Confusion matrix on {name}", fractions, classes, classes, "class", "predicted class",
            "Each row is a class; its cells are the fraction of it that was predicted as each class.",
        )  # fmt: skip
        table = Table(["class", *classes], [[label, *row] for label, row in zip(classes, counts, strict=True)])
        sections.append(Section("Confusion matrix", [matrix, table]))
    points = [(one["confidence"], one["accuracy"]) for one in metrics["bins"]]
    low = min(1 / len(classes), *(min(point) for point in points))
    chart = Chart(
        "Reliability", {name: points, "calibrated": [(low, low), (1.0, 1.0)]}, "predicted probability", "accuracy",
        f"Expected calibration error {metrics['calibration_error']:.4f} over {metrics['examples']:,} examples.",
    )  # fmt: skip
    return [*sections, Section("Calibration", [chart])]
