"""Series: numbers over time, in several channels, cut into what is read and what is foretold.

    x_c(t) = sin(2π t / 24 + φ_c) + a_c sin(2π t / 168 + ψ_c) + b_c t / T + r_c(t)       a seasonal series by rule
    r_c(t) = 0.8 r_c(t - 1) + noise · e(t),  e half its own, half shared by all channels  noise that lingers

A window at t reads steps t - context … t - 1 and foretells t … t + horizon - 1. Training, validation and test windows
follow each other in time: no step that is foretold in a test was ever seen in training. Two simple forecasts to beat:

    last value   x(t - 1) for every step          seasonal   x(t + i - period), the last season again
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.data.config import expand_all
from regard.data.lines import Notes, Problem, read_lines
from regard.data.numbers import NumberBatch, NumbersData, Seasonal, check_numbers
from regard.errors import UserError, suggest

DAY, WEEK = 24, 168  # the two periods of a seasonal series
LINGER = 0.8
ENDINGS = {".csv": ",", ".tsv": "\t"}


def seasonal_series(rule: Seasonal) -> Tensor:
    """[steps, channels]"""
    generator = torch.Generator().manual_seed(rule.seed)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rule.channels, generator=generator, dtype=torch.float64)

    time = torch.arange(rule.steps, dtype=torch.float64)[:, None]
    turn = 2 * math.pi
    waves = (turn * time / DAY + draw(0, turn)).sin() + draw(0.3, 0.8) * (turn * time / WEEK + draw(0, turn)).sin()
    fresh = torch.randn(rule.steps, rule.channels + 1, generator=generator, dtype=torch.float64)
    fresh = rule.noise * (fresh[:, 1:] + fresh[:, :1]) / math.sqrt(2)
    rest, lingering = torch.zeros(rule.channels, dtype=torch.float64), []
    for step in fresh:
        rest = LINGER * rest + math.sqrt(1 - LINGER**2) * step  # its deviation stays `noise`
        lingering.append(rest)
    return waves + draw(-0.5, 0.5) * time / rule.steps + torch.stack(lingering)


def read_series(files: Sequence[str], config: NumbersData) -> tuple[list[Tensor], tuple[str, ...]]:
    """Each file as [steps, channels], and the names of the channels, which all files share."""
    found: list[Tensor] = []
    names: tuple[str, ...] = config.columns
    for path in (path for paths in expand_all(files, config.folder) for path in paths):
        series, names = read_table(path, names)
        found.append(series)
    return found, names


def read_table(path: Path, columns: tuple[str, ...] = ()) -> tuple[Tensor, tuple[str, ...]]:
    """The columns of one file, [steps, channels]; () means every column whose first value is a number."""
    ending = Path(path.name.lower().removesuffix(".gz")).suffix
    if ending not in ENDINGS:
        raise UserError(f"{path}: a series stands in a file ending in {' or '.join(ENDINGS)}, with a header")
    notes: Notes = Counter()
    lines = list(read_lines(path, notes))
    for line in lines:
        if isinstance(line, Problem):
            raise UserError(f"{line}; mend the file: a series must have no gaps")
    rows = [str(line).split(ENDINGS[ending]) for line in lines]
    while rows and rows[-1] == [""]:  # line ends at the end
        rows.pop()
    if len(rows) < 2:
        raise UserError(f"{path}: has {len(rows)} lines; a header with the names of the columns, then a row a step")
    header = [cell.strip() for cell in rows[0]]
    columns = columns or tuple(name for name, cell in zip(header, rows[1], strict=False) if _is_number(cell))
    if not columns:
        raise UserError(f"{path}, line 2: no column holds a number; the file has {', '.join(header)}")
    for name in columns:
        if header.count(name) != 1:
            how = "twice" if name in header else "nowhere"
            raise UserError(f"{path}, line 1: column {name!r} is {how}; {suggest(name, header)}")
    at = [header.index(name) for name in columns]
    steps = [_row(path, number, row, header, at) for number, row in enumerate(rows[1:], 2)]
    return torch.tensor(steps, dtype=torch.float64), columns


def _row(path: Path, number: int, row: list[str], header: list[str], at: list[int]) -> list[float]:
    if len(row) != len(header):
        raise UserError(f"{path}, line {number:,}: has {len(row)} columns, but the header names {len(header)}; mend it")
    numbers = []
    for column in at:
        try:
            numbers += check_numbers([row[column].strip()])
        except UserError as error:
            what = str(error).removeprefix("number 1 is ")
            raise UserError(f"{path}, line {number:,}, column {header[column]!r}: {what}, or fill the gap") from None
    return numbers


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


class Windows:
    """Several series end to end, and the windows that can be cut out of them."""

    def __init__(self, series: Sequence[Tensor], context: int, horizon: int) -> None:
        self.flat = torch.cat(list(series)).float()  # [all steps, channels]
        self.lengths = [len(one) for one in series]
        self.context, self.horizon = context, horizon

    def to(self, device: torch.device) -> Windows:
        moved = copy.copy(self)
        moved.flat = self.flat.to(device)
        return moved

    def starts(self, begin: float, end: float) -> Tensor:
        """Steps t in `flat` whose horizon lies between these shares of each series, context before it included."""
        found, before = [torch.zeros(0, dtype=torch.long)], 0
        for length in self.lengths:
            first, last = max(int(begin * length), self.context), int(end * length) - self.horizon
            found.append(torch.arange(first, max(first, last + 1)) + before)
            before += length
        return torch.cat(found)

    def batch(self, starts: Tensor) -> NumberBatch:
        """Windows at `starts` [B]."""
        flat, at = self.flat, starts.to(self.flat.device)[:, None]
        source = flat[at + torch.arange(-self.context, 0, device=flat.device)]
        return NumberBatch(source, None, flat[at + torch.arange(self.horizon, device=flat.device)], None)


def last_value(source: Tensor, horizon: int) -> Tensor:
    """[B, context, channels] -> [B, horizon, channels]"""
    return source[:, -1:].expand(-1, horizon, -1)


def last_season(source: Tensor, horizon: int, period: int) -> Tensor:
    """The last `period` steps, again and again."""
    season = source[:, -period:]
    return season.repeat(1, -(-horizon // period), 1)[:, :horizon]
