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
from regard.decode.translate import Translator, framed
from regard.explore.report import (
    Section,
    attention_note,
    examples_table,
    figure,
    page,
    paragraph,
    write_page,
)
from regard.explore.svg import head_grid, heat_map, line_chart
from regard.nn.trace import trace


@dataclass(frozen=True)
class Attention:
    """Weights of one translation: [layers, heads, queries, keys] each, with the tokens they belong to."""

    source: list[str]
    read: list[str]  # what the decoder has read: <s> and the tokens before
    written: list[str]  # what it writes: the same, shifted by one, and </s>
    encoder: torch.Tensor
    decoder: torch.Tensor
    cross: torch.Tensor


@torch.inference_mode()
def attention_of(translator: Translator, line: str, answer: str) -> Attention:
    """Where every head looks while `line` is turned into `answer`."""
    source, target = translator.source, translator.target
    ids, (*read, end) = framed(source, [line])[0], framed(target, [answer], begin=True)[0]
    with trace(translator.model, only="*.weights") as seen:
        translator.model(torch.tensor([ids], device=translator.device), torch.tensor([read], device=translator.device))
    encoder, decoder, cross = (
        seen.stack(f"{name}.weights")[:, 0].float().cpu()
        for name in ("encoder.*.attention", "decoder.*.attention", "decoder.*.cross")
    )
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
    path: Path, title: str, translator: Translator, metrics: Sequence[dict[str, Any]], result: Result, shown: str
) -> Path:
    """Write report.html: the curve, examples right and wrong, and the attention of the line `shown`."""
    answer = translator.translate([shown])[0]
    seen = attention_of(translator, shown, answer)
    wrong = [line for line in result.lines if line[1] != line[2]]
    right = [line for line in result.lines if line[1] == line[2]]
    last = metrics[-1] if metrics else {"loss": float("nan"), "seconds": 0.0, "step": 0}
    parameters = sum(parameter.numel() for parameter in translator.model.parameters())
    summary = [
        ("exact match, never seen in training", f"{result.exact:.2%}"),
        ("tried", f"{len(result.lines):,}"),
        ("training", f"{last['seconds']:.0f} s"),
        ("parameters", f"{parameters:,}"),
    ]
    curve = line_chart(
        {"training loss": [(line["step"], line["loss"]) for line in metrics]},
        title="Loss", x_label="step", y_label="nats per token", log_y=True,
    )  # fmt: skip
    missed = (
        examples_table(wrong[:12])
        if wrong
        else paragraph(f"None: all {len(result.lines):,} lines came out exactly as expected.")
    )
    alignment = heat_map(
        seen.cross[-1].mean(dim=0), seen.written, seen.source,
        title=f"{shown} → {answer}", row_label="written", column_label="source",
    )  # fmt: skip
    sections = [
        Section("How it learned", figure(curve, f"{last['step']:,} steps; the last loss is {last['loss']:.4f}.")),
        Section(f"Wrong ({len(wrong):,})", missed),
        Section(f"Right ({len(right):,})", examples_table(right[:12])),
        Section(
            "Alignment",
            figure(
                alignment, "Cross attention of the last layer, mean of its heads: each row is a token being written."
            )
            + attention_note(),
        ),
        Section(
            "Heads of the decoder, looking at the source",
            figure(
                head_grid(seen.cross, seen.written, seen.source, title="Cross attention"),
                "Rows write, columns are read.",
            ),
        ),
        Section(
            "Heads of the encoder",
            figure(
                head_grid(seen.encoder, seen.source, seen.source, title="Encoder self attention"), "Source to source."
            ),
        ),
        Section(
            "Heads of the decoder, looking back",
            figure(
                head_grid(seen.decoder, seen.read, seen.read, title="Decoder self attention"),
                "Nothing lies above the diagonal: the future is masked.",
            ),
        ),
    ]
    return write_page(path, page(title, summary, sections, created=datetime.now(), version=regard.__version__))
