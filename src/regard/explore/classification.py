"""The report of a classifier of texts: how it learned, how often it is right, its mistakes, where it looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

import regard
from regard.explore.classes import class_sections
from regard.explore.heatmap import head_grid
from regard.explore.html import Section, attention_note, figure, page, paragraph, table, write_page
from regard.explore.translation import curves
from regard.nn.trace import trace
from regard.predict.text_classifier import TextClassifier

MISTAKES = 20  # listed, the most certain first
PICTURED = 24  # tokens whose attention is drawn


class Answer(NamedTuple):
    """One text: its class, the class given, and how probable the model holds that."""

    text: str
    right: str
    given: str
    probability: float


def write_report(
    path: Path,
    title: str,
    classifier: TextClassifier,
    metrics: Sequence[dict[str, Any]],
    scores: Mapping[str, Mapping[str, Any]],
    answers: Sequence[Answer],
) -> Path:
    """Write report.html; `answers` are those of the last set in `scores`."""
    seconds = max((line["seconds"] for line in metrics), default=0.0)
    parameters = sum(parameter.numel() for parameter in classifier.model.parameters())
    summary = [(f"accuracy on {name}", f"{found['accuracy']:.2%}") for name, found in list(scores.items())[-2:]]
    summary += [("training", f"{seconds:.0f} s"), ("parameters", f"{parameters:,}")]
    sections = [curves(metrics, "nats per text"), *class_sections(scores), *_mistakes(answers)]
    sections += _attention(classifier, answers)
    return write_page(path, page(title, summary, sections, created=datetime.now(), version=regard.__version__))


def _mistakes(answers: Sequence[Answer]) -> list[Section]:
    wrong = sorted((one for one in answers if one.right != one.given), key=lambda one: -one.probability)
    if not answers:
        return []
    told = paragraph(f"{len(wrong):,} of {len(answers):,} are wrong. Those it was most certain of:")
    rows = [[one.text, one.right, one.given, one.probability] for one in wrong[:MISTAKES]]
    return [Section("Mistakes", told + table(["text", "right", "given", "probability"], rows))]


@torch.inference_mode()
def _attention(classifier: TextClassifier, answers: Sequence[Answer]) -> list[Section]:
    """Every head of the last layer over a text that is neither very short nor too long to draw."""
    texts = [one.text for one in answers]
    rows = classifier.tokenizer.encode_batch(texts[:1000], add_bos=True, add_eos=True)
    ids = next((row for row in rows if 8 <= len(row) <= PICTURED), None)
    if ids is None:
        return []
    with trace(classifier.model, only="*.attention.weights") as seen:
        classifier.model(torch.tensor([ids], device=classifier.device))
    weights = seen.stack("encoder.*.attention.weights")[-1, 0].float().cpu()  # [heads, N, N]
    tokens = [classifier.tokenizer.token(id) for id in ids]
    grid = head_grid(weights, tokens, tokens, title="Self attention of the last layer")
    return [Section("Heads", figure(grid, "Every token may look at every other one.") + attention_note())]
