"""The report of a text-to-text model: how it learned, how well it does each task, what it writes, where it looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import regard
from regard.explore.html import Section, examples_table, page, table, write_page
from regard.explore.translation import Result, attention_of, attention_sections, curves
from regard.predict.translator import Translator

SHOWN = 8  # examples of each set
PICTURED = 60  # letters of a text whose attention is drawn


def write_report(
    path: Path,
    title: str,
    translator: Translator,
    metrics: Sequence[dict[str, Any]],
    scores: Mapping[str, Mapping[str, Any]],
    results: Mapping[str, Result],
) -> Path:
    """Write report.html; `results` are what was written for the sets in `scores` that have a right answer."""
    parameters = sum(parameter.numel() for parameter in translator.model.parameters())
    seconds = max((line["seconds"] for line in metrics), default=0.0)
    summary = [(f"exact on {name}", f"{found['exact']:.2%}") for name, found in scores.items() if "exact" in found][-2:]
    summary = summary or [(f"loss on {name}", f"{found['loss']:.4f}") for name, found in scores.items()][-2:]
    summary += [("training", f"{seconds:.0f} s"), ("parameters", f"{parameters:,}")]
    sections = [curves(metrics), *_figures(scores)]
    for name, result in results.items():
        if not name.endswith(".valid"):
            sections.append(Section(f"Answers: {name}", examples_table(result.lines[:SHOWN], graded=False)))
    sections += _attention(translator, results)
    return write_page(path, page(title, summary, sections, created=datetime.now(), version=regard.__version__))


def _figures(scores: Mapping[str, Mapping[str, Any]]) -> list[Section]:
    names = {"loss": "loss", "exact": "exact", "bleu": "BLEU", "chrf": "chrF", "tokens": "target tokens"}
    rows = [[name, *(found.get(one) for one in names)] for name, found in scores.items()]
    return [Section("Task by task", table(["set", *names.values()], rows))] if rows else []


def _attention(translator: Translator, results: Mapping[str, Result]) -> list[Section]:
    sources = (source for result in results.values() for source, *_ in result.lines)
    shown = next((source for source in sources if len(source) <= PICTURED), None)
    if shown is None:
        return []
    answer = translator.translate([shown])[0]
    return attention_sections(attention_of(translator, shown, answer), f"{shown} → {answer}")
