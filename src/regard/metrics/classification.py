"""How good a classifier is: how often it is right, for which classes, and whether it knows when it is not.

    accuracy   share of examples whose likeliest class is the right one
    F1_c       2 P_c R_c / (P_c + R_c)                    P_c = TP / (TP + FP), R_c = TP / (TP + FN)
    macro-F1   mean of F1_c over the classes that occur, so that a rare class counts as much as a frequent one
    loss       mean of -log p(right class)
    ECE        Σ_b n_b / N · |accuracy_b - confidence_b|

For the last one the examples are put into bins by confidence, the probability of the likeliest class. Of those with a
confidence of 0.8, 80 % should be right; how far that is from the truth is the expected calibration error (Guo et al.
2017, arXiv 1706.04599). All is a function of probabilities [N, C] and right classes [N], whatever was classified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError

BINS = 15  # of equal width, as in the paper


@dataclass(frozen=True)
class ClassMetrics:
    """What `evaluate_classes` finds; plain values, so that `dataclasses.asdict` can go into scores.json."""

    accuracy: float
    macro_f1: float
    loss: float
    calibration_error: float
    examples: int
    majority: float  # accuracy of always naming the most frequent class
    classes: tuple[str, ...]
    confusion: tuple[tuple[int, ...], ...]  # [right class][class given]
    precision: tuple[float, ...]
    recall: tuple[float, ...]
    f1: tuple[float, ...]
    bins: tuple[dict[str, Any], ...]  # those with examples: confidence, accuracy, examples


def evaluate_classes(probabilities: Tensor, right: Tensor, classes: Sequence[str]) -> ClassMetrics:
    """All figures of probabilities [N, C] for examples whose classes are `right` [N]."""
    count = len(right)
    if not count or probabilities.shape != (count, len(classes)):
        raise UserError(
            f"probabilities {list(probabilities.shape)} for {count} examples and {len(classes)} classes: give one row "
            "for each example, at least one, and one column for each class"
        )
    chance, right = probabilities.detach().double().cpu(), right.cpu()
    confidence, given = chance.max(dim=1)
    size = len(classes)
    confusion = (right * size + given).bincount(minlength=size * size).view(size, size)
    hit, support, named = confusion.diagonal().double(), confusion.sum(dim=1).double(), confusion.sum(dim=0).double()
    precision, recall = hit / named.clamp_min(1), hit / support.clamp_min(1)
    f1 = 2 * hit / (named + support).clamp_min(1)
    bins = _bins(confidence, given == right)
    surprise = -chance.gather(1, right[:, None]).clamp_min(torch.finfo(torch.float32).tiny).log()
    return ClassMetrics(
        accuracy=hit.sum().item() / count,
        macro_f1=f1[named + support > 0].mean().item(),
        loss=surprise.mean().item(),
        calibration_error=sum(one["examples"] * abs(one["accuracy"] - one["confidence"]) for one in bins) / count,
        examples=count,
        majority=support.max().item() / count,
        classes=tuple(classes),
        confusion=tuple(map(tuple, confusion.tolist())),
        precision=tuple(precision.tolist()),
        recall=tuple(recall.tolist()),
        f1=tuple(f1.tolist()),
        bins=tuple(bins),
    )


def _bins(confidence: Tensor, hit: Tensor) -> list[dict[str, Any]]:
    """The examples by confidence, (0, 1/15], (1/15, 2/15], …; bins without any are left out."""
    number = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
    found = []
    for b in number.unique().tolist():
        inside = number == b
        means = {"confidence": confidence[inside].mean().item(), "accuracy": hit[inside].double().mean().item()}
        found.append({**means, "examples": int(inside.sum())})
    return found


def tell_classes(figures: dict[str, Any]) -> list[str]:
    """Figures, as a dictionary, in words: the first line says what matters."""
    return [
        f"accuracy {figures['accuracy']:.2%}  macro-F1 {figures['macro_f1']:.4f}  loss {figures['loss']:.4f}  "
        f"calibration error {figures['calibration_error']:.4f}",
        f"{figures['examples']:,} examples; always the most frequent class: {figures['majority']:.2%}",
        "F1: " + ", ".join(f"{name} {f1:.4f}" for name, f1 in zip(figures["classes"], figures["f1"], strict=True)),
    ]
