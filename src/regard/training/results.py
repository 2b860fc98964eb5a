"""What a finished run reports, as plain values: numbers, texts and tensors, without any layout.

A task fills `Results` after the evaluation; `regard.explore.report` renders any `Results` as report.html. A section is
a heading with parts, in the order in which a reader meets them:

    str        a paragraph                          Chart      lines over a common x axis
    Table      columns and rows                     Matrix     a heat map, such as a confusion matrix
    Examples   (input, expected, predicted) rows    Images     images with captions

The learning curve is drawn from `history`, and attention maps from the model itself, for each of `attention`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]  # text, numbers, booleans, or None for a missing value
    fixed: int | None = None  # the first columns have names of ours, the others names from the data; None: all are ours
    preformatted: bool = False  # text cells keep their blanks and use a fixed-width font


@dataclass(frozen=True)
class Examples:
    rows: Sequence[tuple[str, str, str]]  # (input, expected, predicted)
    graded: bool = True  # False: an output that differs from the reference need not be wrong, as in translation


@dataclass(frozen=True)
class Chart:
    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    x_label: str
    y_label: str
    caption: str = ""


@dataclass(frozen=True)
class Matrix:
    title: str
    values: Sequence[Sequence[float]]  # [rows, columns]
    rows: Sequence[str]
    columns: Sequence[str]
    row_label: str
    column_label: str
    caption: str = ""


@dataclass(frozen=True)
class Images:
    title: str
    pixels: Tensor  # [n, channels, height, width] between 0 and 1
    captions: Sequence[str]  # one per image, may have several lines, may be empty
    caption: str = ""


Part = str | Table | Examples | Chart | Matrix | Images


@dataclass(frozen=True)
class Section:
    heading: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class AttentionInput:
    """An input whose attention maps are worth drawing, as the predictor of the task takes it."""

    input: str | Tensor  # a text; an image [channels, height, width] between 0 and 1; features [regions, dim]
    output: str | None = None  # the text that the decoder reads, where there is an encoder and a decoder
    title: str = ""  # such as the class of an image; default: the input


@dataclass(frozen=True)
class Results:
    title: str
    headline: Sequence[tuple[str, str]]  # the metrics that matter most, formatted: ("accuracy on test", "91.20%")
    history: Sequence[Mapping[str, Any]]  # the lines of metrics.jsonl
    loss_unit: str = "nats per token"
    sections: Sequence[Section] = ()
    attention: Sequence[AttentionInput] = ()
