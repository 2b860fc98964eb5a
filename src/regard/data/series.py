"""Time series: numbers over time in several channels, as windows of input and forecast.

    x_c(t) = sin(2π t / 24 + φ_c) + a_c sin(2π t / 168 + ψ_c) + b_c t / T + r_c(t)       a generated seasonal series
    r_c(t) = 0.8 r_c(t - 1) + noise · e(t),  e half its own, half shared by all channels  autocorrelated noise

A window at t has the steps t - context … t - 1 as input and t … t + horizon - 1 as target. Training, validation and
test windows follow each other in time: no target of a test was seen in training. Two baselines:

    last value   x(t - 1) for every step          seasonal   x(t + i - period), the last season again
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.data.batch import Tensors
from regard.data.lines import Notes
from regard.data.tables import Row, Table, column_names, read_rows
from regard.errors import UserError
from regard.settings import check_types

DAY, WEEK = 24, 168  # the two periods of a seasonal series
AUTOCORRELATION = 0.8


@dataclass(frozen=True, kw_only=True)
class Seasonal:
    """A generated series: waves of two periods, a trend, and autocorrelated noise."""

    steps: int = 6_000
    channels: int = 3
    noise: float = 0.3  # its standard deviation, beside waves of amplitude 1
    seed: int = 1  # of the data; it does not depend on train.seed

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in {"steps": 100, "channels": 1, "noise": 0, "seed": 0}.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: must be {least} or more")


@dataclass(frozen=True)
class NumberBatch(Tensors):
    """Normalised numbers; where `is_real` is False, it is padding."""

    source: Tensor  # [B, S, channels]
    source_is_real: Tensor | None  # [B, S]
    target: Tensor  # [B, T, channels]
    target_is_real: Tensor | None  # [B, T]

    @property
    def tokens(self) -> Tensor:
        """The number of targets."""
        if self.target_is_real is None:
            return torch.full((), self.target.numel(), device=self.target.device)  # no copy: CUDA graphs record it
        return self.target_is_real.sum() * self.target.shape[2]

    @property
    def read(self) -> Tensor:
        """The input of the decoder: zeros first, then the target shifted by one."""
        return torch.cat((torch.zeros_like(self.target[:, :1]), self.target[:, :-1]), dim=1)


def seasonal_series(rule: Seasonal) -> Tensor:
    """[steps, channels]"""
    generator = torch.Generator().manual_seed(rule.seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rule.channels, generator=generator, dtype=torch.float64)

    time = torch.arange(rule.steps, dtype=torch.float64)[:, None]
    turn = 2 * math.pi
    daily = (turn * time / DAY + uniform(0, turn)).sin()
    waves = daily + uniform(0.3, 0.8) * (turn * time / WEEK + uniform(0, turn)).sin()
    innovations = torch.randn(rule.steps, rule.channels + 1, generator=generator, dtype=torch.float64)
    innovations = rule.noise * (innovations[:, 1:] + innovations[:, :1]) / math.sqrt(2)
    state, noise = torch.zeros(rule.channels, dtype=torch.float64), []
    for step in innovations:
        # with this factor the standard deviation stays `noise`
        state = AUTOCORRELATION * state + math.sqrt(1 - AUTOCORRELATION**2) * step
        noise.append(state)
    return waves + uniform(-0.5, 0.5) * time / rule.steps + torch.stack(noise)


def read_series(paths: Sequence[Path], columns: Sequence[str] = ()) -> tuple[list[Tensor], tuple[str, ...]]:
    """Each file as [steps, channels], and the names of the channels, which all files share.

    Without `columns`, every column of the first file whose first value is a number is a channel.
    """
    names, series = tuple(columns), []
    for path in paths:
        names = names or _number_columns(path)
        convert, remedy = dict.fromkeys(names, _number), "Set columns in [data]"
        rows = read_rows([str(path)], names, convert=convert, remedy=remedy).read()
        series.append(torch.tensor([row.cells for row in rows], dtype=torch.float64))
    return series, names


def _number_columns(path: Path) -> tuple[str, ...]:
    header = column_names(path)
    duplicate = next((name for name in header if header.count(name) > 1), None)
    if duplicate is not None:
        raise UserError(f"{path}, line 1: column {duplicate!r} is there twice; rename one")
    values = dict.fromkeys(header, lambda value: value)
    first = next(iter(Table(path, header, Notes(), convert=values)), None)
    cells = first.cells if isinstance(first, Row) else ()
    names = tuple(name for name, cell in zip(header, cells, strict=False) if _is_number(cell))
    if isinstance(first, Row) and not names:
        raise UserError(f"{path}, line {first.line}: no column is a number; the file has {', '.join(header)}")
    return names or tuple(header)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"is {str(value)[:40]!r}, not a number: a series must have no gaps") from None
    if isinstance(value, bool) or not math.isfinite(number) or abs(number) > 1e30:
        raise ValueError(f"is {value}: only finite numbers (up to 1e30) can be learned; fill the gap")
    return number


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return not isinstance(cell, bool)


class Windows:
    """Several series, concatenated, and the windows of each."""

    def __init__(self, series: Sequence[Tensor], context: int, horizon: int) -> None:
        self.flat = torch.cat(list(series)).float()  # [all steps, channels]
        self.lengths = [len(one) for one in series]
        self.context, self.horizon = context, horizon

    def to(self, device: torch.device) -> Windows:
        moved = copy.copy(self)
        moved.flat = self.flat.to(device)
        return moved

    def starts(self, begin: float, end: float) -> Tensor:
        """Steps t in `flat` whose horizon is between these fractions of each series, with a whole context before."""
        starts, before = [torch.zeros(0, dtype=torch.long)], 0
        for length in self.lengths:
            first, last = max(int(begin * length), self.context), int(end * length) - self.horizon
            starts.append(torch.arange(first, max(first, last + 1)) + before)
            before += length
        return torch.cat(starts)

    def batch(self, starts: Tensor) -> NumberBatch:
        """The windows at `starts` [B]."""
        flat, at = self.flat, starts.to(self.flat.device)[:, None]
        source = flat[at + torch.arange(-self.context, 0, device=flat.device)]
        return NumberBatch(source, None, flat[at + torch.arange(self.horizon, device=flat.device)], None)


def last_value(source: Tensor, horizon: int) -> Tensor:
    """[B, context, channels] -> [B, horizon, channels]"""
    return source[:, -1:].expand(-1, horizon, -1)


def last_season(source: Tensor, horizon: int, period: int) -> Tensor:
    """The last `period` steps, repeated."""
    season = source[:, -period:]
    return season.repeat(1, -(-horizon // period), 1)[:, :horizon]
