"""The report of a language model: how it learned, what a longer context gives it, what it writes, where it looks.

The loss at position p is the mean over tokens that were given p others: it falls as the context grows, and where it
stops falling the model has no more use for it. Beyond the length that a model was trained on it may rise again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import regard
from regard.explore.chart import line_chart
from regard.explore.heatmap import head_grid
from regard.explore.html import Section, attention_note, figure, page, paragraph, table, write_page
from regard.explore.translation import curves
from regard.nn.trace import trace
from regard.predict.generator import Generator

SAMPLES = 2
WRITTEN = 150  # tokens of a sample
PICTURED = 24  # tokens whose attention is drawn
POINTS = 200  # of a curve over positions


def write_report(
    path: Path,
    title: str,
    generator: Generator,
    metrics: Sequence[dict[str, Any]],
    scores: Mapping[str, Mapping[str, Any]],
    start: str,
) -> Path:
    """Write report.html; samples go on from `start`, whose attention is drawn too."""
    parameters = sum(parameter.numel() for parameter in generator.model.parameters())
    seconds = max((line["seconds"] for line in metrics), default=0.0)
    summary = [(f"bits per byte on {name}", f"{found['bits_per_byte']:.4f}") for name, found in scores.items()][:2]
    summary += [("training", f"{seconds:.0f} s"), ("parameters", f"{parameters:,}")]
    sections = [curves(metrics), *_figures(scores), *_samples(generator, start), *_attention(generator, start)]
    return write_page(path, page(title, summary, sections, created=datetime.now(), version=regard.__version__))


def _figures(scores: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    if not scores:
        return []
    names = ("loss", "perplexity", "bits_per_character", "bits_per_byte", "tokens")
    rows = [[name, *(found[figure] for figure in names)] for name, found in scores.items()]
    listed = table(["text", *(name.replace("_", " ") for name in names)], rows)
    series = {name: _points(found["loss_per_position"]) for name, found in scores.items()}
    chart = line_chart(series, title="Loss by position", x_label="tokens given", y_label="nats per token")
    told = "What a token costs, given so many others before it."
    return [Section("How well it foresees a text", listed + figure(chart, told))]


def _points(losses: Sequence[float | None]) -> list[tuple[float, float]]:
    """(tokens given, loss), neighbours joined into one point where there are many."""
    known = [(position + 1, loss) for position, loss in enumerate(losses) if loss is not None]
    width = max(1, -(-len(known) // POINTS))
    groups = (known[at : at + width] for at in range(0, len(known), width))
    return [(group[len(group) // 2][0], sum(loss for _, loss in group) / len(group)) for group in groups]


def _samples(generator: Generator, start: str) -> list[Section]:
    limit = min(WRITTEN, generator.config.max_length or WRITTEN)
    config = replace(generator.config, n_best=SAMPLES, max_length=limit, min_length=0)
    found = generator.generate(start, config=config, overflow="slide")
    rows = [[number, start + sample.text] for number, sample in enumerate(found, 1)]
    drawn = f"temperature {config.temperature:g}, top-k {config.top_k or 'off'}, top-p {config.top_p:g}"
    told = paragraph(f"The first {len(start):,} characters are given ({drawn}):")
    return [Section("What it writes", told + table(["sample", "text"], rows, classes=["number", "token"]))]


@torch.inference_mode()
def _attention(generator: Generator, start: str) -> list[Section]:
    """Every head of the last layer over the first tokens of `start`."""
    ids = generator.tokenizer.encode(start)[:PICTURED]
    with trace(generator.model, only="*.attention.weights") as seen:
        generator.model(torch.tensor([ids], device=generator.device))
    weights = seen.stack("decoder.*.attention.weights")[-1, 0].float().cpu()  # [heads, N, N]
    tokens = [generator.tokenizer.token(id) for id in ids]
    grid = head_grid(weights, tokens, tokens, title="Self attention of the last layer")
    told = "Nothing lies above the diagonal: the future is masked."
    return [Section("Heads, looking back", figure(grid, told) + attention_note())]
