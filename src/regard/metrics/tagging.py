"""Tagging metrics: how many entities are found, and how many words have the correct tag.

    precision  TP / (TP + FP)                 TP: an entity whose type, beginning and end are all correct
    recall     TP / (TP + FN)
    F1         2 P R / (P + R)                over the entities of all types (micro average)
    accuracy   fraction of words with the correct tag
    macro-F1   mean of the F1 of each tag     `regard.metrics.classification`, with words as examples

Precision, recall and F1 of entities are those of seqeval (Nakayama 2018), which follows conlleval, the script of the
CoNLL shared tasks. Most words are O, so accuracy is high even where no entity is found. Tags without B- and I-, such as
parts of speech, mark no entities: there F1 is macro-F1.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.data.tags import is_prefixed
from regard.errors import MissingExtra, UserError
from regard.metrics.classification import evaluate_classes


def require_seqeval() -> Any:
    """seqeval's report on entities; a MissingExtra where the package is not installed."""
    try:
        from seqeval.metrics import classification_report
    except ImportError:
        raise MissingExtra("seqeval", "seqeval", "evaluating entities") from None
    return classification_report


def evaluate_tags(
    probabilities: Sequence[Tensor], tags: Sequence[Sequence[str]], classes: Sequence[str]
) -> dict[str, Any]:
    """All metrics of probabilities [words, classes] of each sentence with these tags, as plain values."""
    if not probabilities or any(len(rows) != len(each) for rows, each in zip(probabilities, tags, strict=True)):
        raise UserError("give one row of probabilities for each word, and at least one sentence")
    numbers = {name: number for number, name in enumerate(classes)}
    labels = torch.tensor([numbers[tag] for each in tags for tag in each])
    words = evaluate_classes(torch.cat([*probabilities]), labels, classes)
    metrics: dict[str, Any] = {
        name: words[name] for name in ("accuracy", "macro_f1", "loss", "majority", "classes", "confusion")
    }
    metrics |= {"tag_f1": words["f1"], "words": words["examples"], "sentences": len(probabilities)}
    if not is_prefixed(classes):
        return {"f1": metrics["macro_f1"], **metrics}
    predicted = [[classes[number] for number in rows.argmax(dim=-1).tolist()] for rows in probabilities]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a mean over no types, where there are no entities
        report = require_seqeval()([[*each] for each in tags], predicted, output_dict=True, zero_division=0)
    types = {
        name: {key: float(one[key]) for key in ("precision", "recall")}
        | {"f1": float(one["f1-score"]), "entities": int(one["support"])}
        for name, one in report.items()
        if name not in ("micro avg", "macro avg", "weighted avg")
    }
    every = report["micro avg"]
    entities = {
        "f1": float(every["f1-score"]),
        "precision": float(every["precision"]),
        "recall": float(every["recall"]),
    }
    return {**entities, "entities": int(every["support"]), "types": types, **metrics}


def format_tags(metrics: dict[str, Any]) -> list[str]:
    """Metrics as text: the first line has the most important ones."""
    words = f"accuracy {metrics['accuracy']:.2%}  loss {metrics['loss']:.4f}"
    counts = f"{metrics['sentences']:,} sentences, {metrics['words']:,} words"
    majority = f"always the most frequent tag: {metrics['majority']:.2%}"
    if "types" not in metrics:
        f1 = ", ".join(f"{name} {f1:.4f}" for name, f1 in zip(metrics["classes"], metrics["tag_f1"], strict=True))
        return [f"{words}  macro-F1 {metrics['macro_f1']:.4f}", f"{counts}; {majority}", f"F1: {f1}"]
    f1 = ", ".join(f"{name} {one['f1']:.4f}" for name, one in metrics["types"].items())
    return [
        f"F1 {metrics['f1']:.4f}  precision {metrics['precision']:.4f}  recall {metrics['recall']:.4f}  {words}",
        f"{counts}, {metrics['entities']:,} entities; {majority}",
        f"F1: {f1 or 'no entities'}",
    ]
