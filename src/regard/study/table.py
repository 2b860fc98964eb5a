"""The results of a study as plain values: what `regard ablate` and `regard compare` print, and what the report draws.

A row is a group of runs that differ in the seed alone; the first row is the base. Its difference to the base is paired
by seed (`regard.metrics.significance`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.metrics.significance import Difference


@dataclass(frozen=True)
class RowResult:
    """One row; the figures of a failed run are missing, and its reason is in `failed`."""

    name: str
    changes: Mapping[str, Any]  # settings that differ from the base: {"model.heads": 1}
    parameters: int | None
    flops: float | None  # of training, all steps
    seconds: float | None  # of training, the mean over seeds
    scores: Mapping[int, float]  # by seed
    failed: Mapping[int, str] = field(default_factory=dict)  # by seed: why there is no score
    pending: Sequence[int] = ()  # seeds that are not trained yet
    mean: float | None = None
    sd: float | None = None
    difference: Difference | None = None  # to the base; None for the base itself
    p_holm: float | None = None
    verdict: str = ""  # better, worse, not decided; "" for the base
    seeds_needed: int | None = None  # where the difference is not decided
    paper: float | None = None  # the same row in a paper
    curves: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)  # (step, validation metric) by seed


@dataclass(frozen=True)
class Disagreement:
    """A test item that the rows answer differently."""

    input: str
    reference: str
    outputs: Mapping[str, str]  # by row
    scores: Mapping[str, float]


@dataclass(frozen=True)
class StudyTable:
    title: str
    metric: str  # as people write it: BLEU
    unit: str  # how a value is formatted: ".2f"
    higher: bool  # whether more is better
    test: str  # the name of the set
    rows: Sequence[RowResult]  # the base first
    curve: str = "valid_loss"  # the metric of the curves
    disagreements: Sequence[Disagreement] = ()
    item_metric: str = ""  # of the scores of disagreements, between 0 and 100: chrF, % correct
    notes: Sequence[str] = ()
