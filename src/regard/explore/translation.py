"""The report of a translation model: how it learned, what it gets right, where it looks.

Cross attention is the alignment of a translation: row t is the token being written, column s the source
token, and the weight says how much of s went into t (Bahdanau et al. 2015, figure 3). The decoder's input
is shifted by one, so the row that writes token t is the one that has read token t - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import regard
from regard.explore.chart import line_chart
from regard.explore.heatmap import head_grid, heat_map
from regard.explore.html import (
    Section,
    attention_note,
    examples_table,
    figure,
    page,
    paragraph,
    write_page,
)
from regard.metrics.bleu import Scores
from regard.nn.trace import trace
from regard.predict.translator import Translator


@dataclass(frozen=True)
class Attention:
    """Weights of one translation: [layers, heads, queries, keys] each, with the tokens they belong to.

    `encoder` and `decoder` look within a side; a recurrent model has only `cross`.
    """

    source: list[str]
    read: list[str]  # what the decoder has read: <s> and the tokens before
    written: list[str]  # what it writes: the same, shifted by one, and </s>
    encoder: torch.Tensor | None
    decoder: torch.Tensor | None
    cross: torch.Tensor


@torch.inference_mode()
def attention_of(translator: Translator, line: str, answer: str) -> Attention:
    """Where every head looks while `line` is turned into `answer`."""
    source, target = translator.source, translator.target
    begin = translator.bundle.target_frame[0]
    ids, (*tokens, end) = source.encode_batch([line], add_eos=True)[0], target.encode_batch([answer], add_eos=True)[0]
    read = [begin, *tokens]
    with trace(translator.model, only="*.weights") as seen:
        translator.model(torch.tensor([ids], device=translator.device), torch.tensor([read], device=translator.device))

    def stacked(pattern: str) -> torch.Tensor:
        return seen.stack(pattern)[:, 0].float().cpu()

    within = translator.model.config.architecture != "recurrent"
    encoder = stacked("encoder.*.attention.weights") if within else None
    decoder = stacked("decoder.*.attention.weights") if within else None
    cross = stacked("decoder.*cross.weights")
    reads = [target.token(token) for token in read]
    return Attention(
        [source.token(token) for token in ids], reads, [*reads[1:], target.token(end)], encoder, decoder, cross
    )


@dataclass(frozen=True)
class Result:
    """What a test gave: (source, expected, got) of each line."""

    lines: Sequence[tuple[str, str, str]]

    @property
    def right(self) -> int:
        return sum(expected == got for _, expected, got in self.lines)

    @property
    def exact(self) -> float:
        """The share of lines that came out exactly as expected."""
        return self.right / len(self.lines)


def write_report(
    path: Path,
    title: str,
    translator: Translator,
    metrics: Sequence[dict[str, Any]],
    result: Result,
    shown: str,
    scores: Scores | None = None,
    test: str = "test",
) -> Path:
    """Write report.html: the curves, examples, and the attention of the line `shown`.

    Where every line has one right answer, the share of exact ones is the figure; else `scores` of the set `test`.
    """
    answer = translator.translate([shown])[0]
    seen = attention_of(translator, shown, answer)
    seconds = max((line["seconds"] for line in metrics), default=0.0)
    parameters = sum(parameter.numel() for parameter in translator.model.parameters())
    if scores is not None:
        quality = [(f"BLEU on {test}", f"{scores.bleu:.2f}"), (f"chrF on {test}", f"{scores.chrf:.2f}")]
    else:
        quality = [("exact match, never seen in training", f"{result.exact:.2%}")] if result.lines else []
    summary = [
        *quality,
        *([("tried", f"{len(result.lines):,}")] if result.lines else []),
        ("training", f"{seconds:.0f} s"),
        ("parameters", f"{parameters:,}"),
    ]
    sections = [curves(metrics), *_examples(result, scores), *attention_sections(seen, f"{shown} → {answer}")]
    return write_page(path, page(title, summary, sections, created=datetime.now(), version=regard.__version__))


def curves(metrics: Sequence[dict[str, Any]], unit: str = "nats per token") -> Section:
    """Losses over the steps; a step may have been logged, judged, or both."""
    names = {"loss": "training loss", "valid_loss": "validation loss"}
    series = {title: [(line["step"], line[name]) for line in metrics if name in line] for name, title in names.items()}
    series = {title: points for title, points in series.items() if points}
    chart = line_chart(series, title="Loss", x_label="step", y_label=unit, log_y=True)
    told = [f"the last {title} is {points[-1][1]:.4f}" for title, points in series.items()]
    steps = max((line["step"] for line in metrics), default=0)
    return Section("How it learned", figure(chart, f"{steps:,} steps; {', '.join(told) or 'nothing was logged'}."))


def _examples(result: Result, scores: Scores | None) -> list[Section]:
    if not result.lines:
        return []
    if scores is not None:
        exact = paragraph(f"{result.right:,} of {len(result.lines):,} are the reference to the letter. The first ones:")
        note = paragraph(
            f"BLEU signature: {scores.signature}. Over the text as it is split: {scores.tokenised_bleu:.2f}."
        )
        return [Section("Translations", exact + examples_table(result.lines[:12], graded=False) + note)]
    wrong = [line for line in result.lines if line[1] != line[2]]
    right = [line for line in result.lines if line[1] == line[2]]
    missed = (
        examples_table(wrong[:12])
        if wrong
        else paragraph(f"None: all {len(result.lines):,} lines came out exactly as expected.")
    )
    return [Section(f"Wrong ({len(wrong):,})", missed), Section(f"Right ({len(right):,})", examples_table(right[:12]))]


def attention_sections(seen: Attention, title: str) -> list[Section]:
    """The alignment, then every head that there is."""
    alignment = heat_map(
        seen.cross[-1].mean(dim=0), seen.written, seen.source, title=title, row_label="written", column_label="source"
    )
    caption = "Cross attention of the last layer, mean of its heads: each row is a token being written."
    sections = [Section("Alignment", figure(alignment, caption) + attention_note())]
    grids = [
        ("Heads of the decoder, looking at the source", seen.cross, seen.written, seen.source,
         "Cross attention", "Rows write, columns are read."),
        ("Heads of the encoder", seen.encoder, seen.source, seen.source, "Encoder self attention", "Source to source."),
        ("Heads of the decoder, looking back", seen.decoder, seen.read, seen.read,
         "Decoder self attention", "Nothing lies above the diagonal: the future is masked."),
    ]  # fmt: skip
    for heading, weights, rows, columns, name, told in grids:
        single = weights is seen.cross and seen.cross.shape[:2].numel() == 1  # it is the alignment above
        if weights is not None and not single:
            sections.append(Section(heading, figure(head_grid(weights, rows, columns, title=name), told)))
    return sections
