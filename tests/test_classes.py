"""Figures of a classifier against their formulas, written out, and against scikit-learn where it is installed."""

from __future__ import annotations

import json

import pytest
import torch

from regard.errors import UserError
from regard.metrics.classification import BINS, evaluate_classes, format_classes
from regard.tasks.text_classification import class_sections
from regard.training.task import Evaluation

CLASSES = ["bad", "fair", "good", "never"]


def drawn(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities over four classes, of which the last is never right and never given."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, 4, generator=generator, dtype=torch.float64) * 2
    logits[:, 3] = -50
    right = torch.randint(3, (count,), generator=generator)
    logits[torch.arange(count), right] += 1.0
    return logits.softmax(dim=1), right


@pytest.mark.parametrize("count", [1, 7, 400])
def test_figures_are_their_formulas(count):
    probabilities, right = drawn(count)
    found = evaluate_classes(probabilities, right, CLASSES)
    given, truth = probabilities.argmax(dim=1).tolist(), right.tolist()
    for a in range(4):
        for b in range(4):
            assert found["confusion"][a][b] == sum(t == a and g == b for t, g in zip(truth, given, strict=True))
    f1 = []
    for label in range(4):
        hit = sum(t == g == label for t, g in zip(truth, given, strict=True))
        precision = hit / given.count(label) if label in given else 0.0
        recall = hit / truth.count(label) if label in truth else 0.0
        both = 2 * precision * recall / (precision + recall) if hit else 0.0
        assert (found["precision"][label], found["recall"][label], found["f1"][label]) == pytest.approx(
            (precision, recall, both)
        )
        if label in given or label in truth:
            f1.append(both)
    assert found["macro_f1"] == pytest.approx(sum(f1) / len(f1))
    assert found["accuracy"] == pytest.approx(sum(t == g for t, g in zip(truth, given, strict=True)) / count)
    assert found["majority"] == max(truth.count(label) for label in range(4)) / count
    assert found["loss"] == pytest.approx(-sum(probabilities[i, t].log().item() for i, t in enumerate(truth)) / count)


def test_calibration_is_the_gap_between_confidence_and_accuracy_in_bins_of_equal_width():
    probabilities, right = drawn(500, seed=3)
    error = 0.0
    for b in range(BINS):
        inside = [
            (float(row.max()), int(row.argmax()) == int(t))
            for row, t in zip(probabilities, right, strict=True)
            if b / BINS < float(row.max()) <= (b + 1) / BINS
        ]
        if inside:
            confidence, accuracy = (sum(part) / len(inside) for part in zip(*inside, strict=True))
            error += len(inside) / 500 * abs(confidence - accuracy)
    assert evaluate_classes(probabilities, right, CLASSES)["calibration_error"] == pytest.approx(error)


def test_who_is_as_sure_as_right_is_calibrated():
    probabilities = torch.tensor([[0.75, 0.25]]).repeat(4, 1)
    sure = evaluate_classes(probabilities, torch.tensor([0, 0, 0, 1]), ["a", "b"])
    assert sure["calibration_error"] == pytest.approx(0.0) and sure["accuracy"] == 0.75
    too_sure = evaluate_classes(torch.tensor([[1.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 1, 1]), ["a", "b"])
    assert too_sure["calibration_error"] == pytest.approx(0.5) and too_sure["loss"] < 100  # finite where p is 0


def test_scikit_learn_says_the_same():
    metrics = pytest.importorskip("sklearn.metrics")
    probabilities, right = drawn(300, seed=5)
    found, given = evaluate_classes(probabilities, right, CLASSES), probabilities.argmax(dim=1)
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(right, given, average="macro"))
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(right, given))
    assert found["loss"] == pytest.approx(metrics.log_loss(right, probabilities, labels=range(4)))
    confusion = metrics.confusion_matrix(right, given, labels=range(4))
    assert [list(row) for row in found["confusion"]] == confusion.tolist()


def test_figures_travel_through_json_into_words_and_pictures():
    probabilities, right = drawn(50)
    figures = json.loads(json.dumps(evaluate_classes(probabilities, right, CLASSES)))
    assert f"accuracy {figures['accuracy']:.2%}" in format_classes(figures)[0]
    sections = class_sections({name: Evaluation(None, figures, None) for name in ("valid", "test")})
    table, (matrix, _), (chart,) = (section.parts for section in sections)
    first = [figures[name][0] for name in ("precision", "recall", "f1", "confusion")]
    assert table[0].rows[0] == ("bad", *first[:3], sum(first[3]))
    assert matrix.title == "Confusion matrix on test" and chart.caption.startswith("Expected calibration error")
    assert [sum(row) for row in matrix.values] == pytest.approx([1, 1, 1, 0])
    assert class_sections({}) == []


def test_what_does_not_fit_is_refused():
    for probabilities, right in ((torch.rand(3, 2), torch.zeros(3).long()), (torch.rand(0, 4), torch.zeros(0).long())):
        with pytest.raises(UserError, match="one column for each class"):
            evaluate_classes(probabilities, right, CLASSES)
