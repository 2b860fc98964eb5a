"""Classification metrics: how often a classifier is correct, for which classes, and how well it is calibrated.

    accuracy   fraction of examples whose most probable class is the correct one
    F1_c       2 P_c R_c / (P_c + R_c)                    P_c = TP / (TP + FP), R_c = TP / (TP + FN)
    macro-F1   mean of F1_c over the classes that occur, so that a rare class counts as much as a frequent one
    loss       cross-entropy: mean of -log p(correct class)
    ECE        Σ_b n_b / N · |accuracy_b - confidence_b|

For the last one the examples are put into bins by confidence, the probability of the most probable class. Of those
with a confidence of 0.8, 80 % should be correct; the mean distance is the expected calibration error (Guo et al. 2017,
arXiv 1706.04599). All are functions of probabilities [N, C] and labels [N], whatever was classified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError

BINS = 15  # of equal width, as in the paper


def evaluate_classes(probabilities: Tensor, labels: Tensor, classes: Sequence[str]) -> dict[str, Any]:
    """All metrics of probabilities [N, C] for examples with these `labels` [N], as plain values."""
    count = len(labels)
    if not count or probabilities.shape != (count, len(classes)):
        shapes = f"probabilities {list(probabilities.shape)} for {count} examples and {len(classes)} classes"
        raise UserError(f"{shapes}: give one row for each example, at least one, and one column for each class")
    probabilities, labels = probabilities.detach().double().cpu(), labels.cpu()
    (confidence, predicted), size = probabilities.max(dim=1), len(classes)
    confusion = (labels * size + predicted).bincount(minlength=size * size).view(size, size)
    hit, support, named = confusion.diagonal().double(), confusion.sum(dim=1).double(), confusion.sum(dim=0).double()
    precision, recall = hit / named.clamp_min(1), hit / support.clamp_min(1)
    f1 = 2 * hit / (named + support).clamp_min(1)
    bins = _bins(confidence, predicted == labels)
    losses = -probabilities.gather(1, labels[:, None]).clamp_min(torch.finfo(torch.float32).tiny).log()
    return {
        "accuracy": hit.sum().item() / count,
        "macro_f1": f1[named + support > 0].mean().item(),
        "loss": losses.mean().item(),
        "calibration_error": sum(one["examples"] * abs(one["accuracy"] - one["confidence"]) for one in bins) / count,
        "examples": count,
        "majority": support.max().item() / count,  # accuracy of always predicting the most frequent class
        "classes": list(classes),
        "confusion": confusion.tolist(),  # [label][predicted class]
        "precision": precision.tolist(),
        "recall": recall.tolist(),
        "f1": f1.tolist(),
        "bins": bins,
    }


def _bins(confidence: Tensor, hit: Tensor) -> list[dict[str, Any]]:
    """The examples by confidence, (0, 1/15], (1/15, 2/15], …; empty bins are left out."""
    number = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    bins = []
    for b in number.unique().tolist():
        inside = number == b
        means = {"confidence": confidence[inside].mean().item(), "accuracy": hit[inside].double().mean().item()}
        bins.append({**means, "examples": int(inside.sum())})
    return bins


def format_classes(metrics: dict[str, Any]) -> list[str]:
    """Metrics as text: the first line has the most important ones."""
    root = f"; by the first operator alone: {metrics['root_operator']:.2%}" if "root_operator" in metrics else ""
    return [
        f"accuracy {metrics['accuracy']:.2%}  macro-F1 {metrics['macro_f1']:.4f}  loss {metrics['loss']:.4f}  "
        f"calibration error {metrics['calibration_error']:.4f}",
        f"{metrics['examples']:,} examples; always the most frequent class: {metrics['majority']:.2%}{root}",
        "F1: " + ", ".join(f"{name} {f1:.4f}" for name, f1 in zip(metrics["classes"], metrics["f1"], strict=True)),
    ]
