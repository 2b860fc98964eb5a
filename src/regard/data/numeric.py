"""Number sequences: the [data] table of a regression recipe, and its data as normalised tensors.

    pairs     train = ["pairs.tsv"]          1 2 3<tab>3 4 5   or in .jsonl  {"source": [1, 2, 3], "target": [3, 4, 5]}
              [data.rule]                    generated: y = multiply · x + add, x between low and high
    series    train = ["load.csv"]           one column per channel, one row per time step; with context > 0:
              context = 96, horizon = 24     96 steps are the input, the next 24 are forecast; a column of time
                                             stamps is checked, not learned (`regard.data.times`)
              [data.seasonal]                generated:
    x_c(t) = sin(2π t / 24 + φ_c) + a_c sin(2π t / 168 + ψ_c) + b_c t / T + r_c(t)
    r_c(t) = 0.8 r_c(t - 1) + noise · e(t),  e half its own, half shared by all channels  autocorrelated noise

Both give sequences of vectors, source [S, channels] and target [T, channels], normalised per channel:

    (x - mean) / std        mean and standard deviation of the training data, never of what is tested

The two are saved in the recipe of the run. Pairs are split by file (or, generated, by seed), a series in time: no
target of a test was seen in training. A window at t has the steps t - context … t - 1 as input and
t … t + horizon - 1 as target. Two baselines for it:

    last value   x(t - 1) for every step          seasonal   x(t + i - period), the last season again
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.batch import Tensors, pad_rows
from regard.data.lines import Notes
from regard.data.sets import Files, TextFiles, check_columns, file_names
from regard.data.tables import Row, Table, read_rows
from regard.data.times import Clock, parse_stamp, read_clock
from regard.errors import UserError
from regard.settings import check_fields

Pair = tuple[list[float], list[float]]
DAY, WEEK = 24, 168  # the two periods of a seasonal series
AUTOCORRELATION = 0.8
DECIMAL = re.compile(r"[+-]?\d+,\d+")  # a number with a comma for the decimal point


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Generated pairs y = multiply · x + add."""

    multiply: float = 1.0  # the factor of x
    add: float = 2.0  # the constant
    low: float = 0.0  # lower limit of x, which is uniformly distributed
    high: float = 100.0  # upper limit of x
    shortest: int = 2  # minimum number of elements of a sequence
    train: int = 20_000  # number of sequences for training
    valid: int = 500  # number of sequences for evaluation during training
    test: int = 2_000  # number of sequences for the test
    seed: int = 1  # seed of the data; it does not depend on train.seed

    def __post_init__(self) -> None:
        check_fields(self, shortest=1, train=1, valid=1, test=1, seed=0)
        if not self.low < self.high:
            raise UserError(f"low = {self.low}: must be below high = {self.high}")


@dataclass(frozen=True, kw_only=True)
class Seasonal:
    """A generated series: waves of two periods, a trend, and autocorrelated noise."""

    steps: int = 6_000  # number of time steps
    channels: int = 3  # number of channels: series over the same time
    noise: float = 0.3  # standard deviation of the noise; the waves have amplitude 1
    seed: int = 1  # seed of the data; it does not depend on train.seed

    def __post_init__(self) -> None:
        check_fields(self, steps=100, channels=1, noise=0, seed=0)


@dataclass(frozen=True, kw_only=True)
class NumberData(TextFiles):
    """Where the numbers are: pairs of sequences, or time series."""

    rule: Rule | None = None  # generated pairs, instead of files
    seasonal: Seasonal | None = None  # a generated series, instead of files
    # pairs
    source: str | None = None  # name of the source column in a table
    target: str | None = None  # name of the target column in a table
    longest: int = 32  # maximum number of elements of a source or target; rows are padded to it
    tolerance: float = 0.1  # a prediction within it counts as correct
    # series
    context: int = 0  # number of input steps; 0: the data are pairs
    horizon: int = 24  # number of steps to forecast
    period: int = 24  # number of steps of a season; the seasonal baseline repeats the last season
    columns: Files = ()  # names of the columns that are the channels; empty: every column of numbers
    time: str | None = None  # column of time stamps; none: the first column with time stamps, if any
    valid_fraction: float = 0.1  # fraction of the steps, before the test part, for evaluation during training
    test_fraction: float = 0.2  # fraction of the steps, at the end, for the test
    # both
    mean: tuple[float, ...] = ()  # means of the channels, subtracted from them; empty: those of the training data
    std: tuple[float, ...] = ()  # standard deviations of the channels, divided out; empty: those of the training data

    GENERATORS: ClassVar[tuple[str, ...]] = ("rule", "seasonal")
    EXAMPLE: ClassVar[str] = "pairs.tsv"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_columns(self.source, self.target)
        self._check_kind()
        check_fields(self, ("valid_fraction", "test_fraction"), longest=1, context=0, horizon=1, period=1)
        if not self.tolerance > 0:
            raise UserError(f"tolerance = {self.tolerance}: must be greater than 0")
        if (held := self.valid_fraction + self.test_fraction) >= 1:
            raise UserError(f"valid_fraction + test_fraction = {held}: leaves nothing to learn from")
        if len(self.mean) != len(self.std) or any(not scale > 0 for scale in self.std):
            raise UserError(f"std = {list(self.std)}: give one number above 0 for each of mean = {list(self.mean)}")

    def _check_kind(self) -> None:
        """What a rule, a series and pairs need."""
        if self.rule is not None and self.context:
            raise UserError(f"context = {self.context}: is for a series, but [data.rule] makes pairs; remove one")
        if self.seasonal is not None and not self.context:
            raise UserError("context = 0: a series needs the number of steps to read, such as context = 96")
        if self.context and self.period > self.context:
            raise UserError(
                f"period = {self.period}: the seasonal forecast needs a whole season within context = {self.context} "
                "steps; raise context"
            )
        if self.context and self.source is not None:
            raise UserError(f"source = {self.source!r}: is for pairs; set columns to the channels of the series")
        if self.context and (self.valid or self.test):
            raise UserError("valid and test: a series is split in time; use valid_fraction and test_fraction")
        if self.rule is not None and self.longest < self.rule.shortest:
            raise UserError(f"longest = {self.longest}: must be rule.shortest = {self.rule.shortest} or more")

    @property
    def scale(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, [channels] each."""
        return torch.tensor(self.mean, dtype=torch.float64), torch.tensor(self.std, dtype=torch.float64)

    def normalize(self, numbers: Tensor) -> Tensor:
        mean, std = self.scale
        return ((numbers.double() - mean) / std).float()

    def denormalize(self, numbers: Tensor) -> Tensor:
        mean, std = self.scale
        return numbers.double().cpu() * std + mean


def number_text(series: Tensor) -> str:
    """[steps, channels] as text, which `parse_numbers` reads: channels separated by blanks, steps by commas."""
    return ", ".join(" ".join(f"{value:.4g}" for value in step) for step in series.tolist())


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


class Windows:
    """Several series, concatenated, and the windows of each."""

    def __init__(self, series: Sequence[Tensor], context: int, horizon: int) -> None:
        self.flat = torch.cat(list(series)).float()  # [all steps, channels]
        self.lengths = [len(one) for one in series]
        self.context, self.horizon = context, horizon

    def to(self, device: torch.device) -> Windows:
        return Windows(self.flat.to(device).split(self.lengths), self.context, self.horizon)

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


@dataclass(frozen=True)
class NumberSets:
    """The sets of a recipe; `data` is its table with mean and std filled in."""

    data: NumberData
    channels: tuple[str, ...]
    rows: dict[str, NumberBatch]  # the sets that are evaluated, and for pairs "train"
    windows: Windows | None = None  # a series, and where its training windows begin
    starts: Tensor | None = None


def make_sets(data: NumberData) -> NumberSets:
    """Read or generate everything that the table asks for."""
    if not data.context:
        return _pairs(data)
    if data.seasonal is not None:
        series = [seasonal_series(data.seasonal)]
        channels = tuple(f"channel {number}" for number in range(1, data.seasonal.channels + 1))
    else:
        tables = read_series(data.find(data.train), data.columns, data.time, **data.format)
        series, channels = [one.values for one in tables], tables[0].channels
        print(f"note: channels: {', '.join(channels)}", file=sys.stderr)
        if tables[0].others and not data.columns:
            why = "neither numbers nor the time stamps"
            print(f"note: not read: {', '.join(tables[0].others)} ({why})", file=sys.stderr)
        if (clock := tables[0].clock) is not None:
            print(f"note: time stamps: {tables[0].time}, a step is {clock}", file=sys.stderr)
    border, last = 1 - data.valid_fraction - data.test_fraction, 1 - data.test_fraction
    data = _with_scale(data, torch.cat([one[: int(border * len(one))] for one in series]), channels)
    windows = Windows([data.normalize(one) for one in series], data.context, data.horizon)
    parts = {"train": (0.0, border), "valid": (border, last), "test": (last, 1.0)}
    starts = {name: windows.starts(*part) for name, part in parts.items() if part[0] < part[1]}
    if empty := [name for name, at in starts.items() if not len(at)]:
        raise UserError(
            f"data.{empty[0]}: no window of {data.context} + {data.horizon} steps fits into its part of "
            f"{', '.join(f'{len(one):,}' for one in series)} steps; give a longer series, or lower context or horizon"
        )
    rows = {name: windows.batch(at) for name, at in starts.items() if name != "train"}
    return NumberSets(data, channels, rows, windows, starts["train"])


def _pairs(data: NumberData) -> NumberSets:
    if data.rule is not None:
        counts = {"train": data.rule.train, "valid": data.rule.valid, "test": data.rule.test}
        pairs = {
            name: rule_pairs(data.rule, count, data.longest, len(counts) * data.rule.seed + number)
            for number, (name, count) in enumerate(counts.items())
        }
    else:
        files = {"train": file_names(data.train), **data.sets}
        pairs = {name: read_number_pairs(names, data) for name, names in files.items()}
    sets = {name: padded(rows, data.longest) for name, rows in pairs.items()}
    train = sets["train"]
    numbers = torch.cat((train.source[train.source_is_real], train.target[train.target_is_real]))
    data = _with_scale(data, numbers, ("number",))
    rows = {
        name: dataclasses.replace(one, source=data.normalize(one.source), target=data.normalize(one.target))
        for name, one in sets.items()
    }
    return NumberSets(data, ("number",), rows)


def _with_scale(data: NumberData, numbers: Tensor, channels: tuple[str, ...]) -> NumberData:
    """Mean and standard deviation of the training numbers [n, channels], unless the recipe has them."""
    if not data.mean:
        mean, std = numbers.double().mean(dim=0), numbers.double().std(dim=0, correction=0)
        std = torch.where(std > 0, std, 1.0)  # a constant channel
        data = dataclasses.replace(data, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    if len(data.mean) != len(channels):
        raise UserError(
            f"data.mean = {list(data.mean)}: there are {len(channels)} channels ({', '.join(channels)}); give a number "
            "for each, or remove mean and std"
        )
    return data


def padded(pairs: Sequence[Pair], longest: int) -> NumberBatch:
    """All pairs as one batch, each side as long as `longest`."""
    source, target = (
        pad_rows([torch.tensor(numbers, dtype=torch.float)[:, None] for numbers in side], longest)
        for side in zip(*pairs, strict=True)
    )
    return NumberBatch(*source, *target)


def rule_pairs(rule: Rule, count: int, longest: int, seed: int) -> list[Pair]:
    """`count` generated pairs."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(rule.shortest, longest + 1, (count,), generator=generator)
    numbers = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64)
    flat = rule.low + (rule.high - rule.low) * numbers
    return [(x.tolist(), (rule.multiply * x + rule.add).tolist()) for x in flat.split(lengths.tolist())]


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


def read_number_pairs(files: Sequence[str], config: NumberData) -> list[Pair]:
    """The pairs of all files, in their named columns, or in 1 and 2 of TSV and CSV, "source" and "target" of others."""
    columns = (config.source or "source", config.target or "target")

    def sequence(value: Any) -> list[float]:
        try:
            numbers = parse_numbers(value)
        except (UserError, TypeError) as error:
            raise ValueError(f"is not a list of numbers: {error}") from None
        if not 1 <= len(numbers) <= config.longest:
            raise ValueError(f"has {len(numbers)} numbers; 1 to data.longest = {config.longest} are possible")
        return numbers

    how: dict[str, Any] = {"convert": dict.fromkeys(columns, sequence), "make": lambda row, notes: row.cells}
    how |= {"header": config.source is not None, "remedy": "Set source and target in [data]", **config.format}
    rows = read_rows(files, columns, config.folder, config.skip_bad, **how)
    return dataclasses.replace(rows, what="pairs", remedy="put  1 2 3<tab>3 4 5  in a line").read()


@dataclass(frozen=True)
class Series:
    """A time series of a table: values [steps, channels], and its column of time stamps, if there is one."""

    values: Tensor
    channels: tuple[str, ...]
    time: str | None
    clock: Clock | None
    others: tuple[str, ...]  # columns that are not read


def read_series(
    paths: Sequence[Path], columns: Sequence[str] = (), time: str | None = None, **how: Any
) -> list[Series]:
    """The series of each file, with the same channels.

    Without `columns`, every column of the first file whose first value is a number is a channel; without `time`, the
    first of the other columns whose first value is a time stamp has the stamps.
    """
    series: list[Series] = []
    for path in paths:
        series.append(_read_table(path, series[0].channels if series else columns, time, how))
    return series


def _read_table(path: Path, columns: Sequence[str], time: str | None, how: Mapping[str, Any]) -> Series:
    header, cells, line = _first_row(path, how)
    if not columns and (duplicates := [name for name in header if header.count(name) > 1]):
        raise UserError(f"{path}, line 1: column {duplicates[0]!r} is there twice; rename one")
    names = tuple(columns) or tuple(name for name in header if _is_number(cells.get(name)))
    if cells and not names:
        comma = next((f"; write {cell} with a point" for cell in cells.values() if DECIMAL.fullmatch(str(cell))), "")
        raise UserError(f"{path}, line {line}: no column is a number; the file has {', '.join(header)}{comma}")
    names = names or tuple(header)
    others = (name for name in header if name not in names and _is_stamp(cells.get(name)))
    time = time or next(others, None)
    convert = {**dict.fromkeys(names, _number), **({time: parse_stamp} if time else {})}
    rows = read_rows(
        [str(path)], tuple(convert), convert=convert, remedy="Set columns and time in [data]", **how
    ).read()
    values = torch.tensor([row.cells[: len(names)] for row in rows], dtype=torch.float64)
    notes = Notes()
    clock = read_clock(str(path), [(row.line, row.cells[-1]) for row in rows], notes) if time else None
    for (file, what), count in notes.items():
        print(f"note: {file}: {count:,} x {what}", file=sys.stderr)
    return Series(values, names, time, clock, tuple(name for name in header if name not in convert))


def _first_row(path: Path, how: Mapping[str, Any]) -> tuple[list[str], dict[str, Any], int]:
    """The columns of a table, the cells of its first row by column (none: there is no row), and its line."""
    header = Table(path, (), Notes(), **how).names()
    values = dict.fromkeys(header, lambda value: value)
    first = next(iter(Table(path, header, Notes(), convert=values, **how)), None)
    if not isinstance(first, Row):
        return header, {}, 0
    return header, dict(zip(header, first.cells, strict=True)), first.line


def _is_stamp(cell: Any) -> bool:
    try:
        parse_stamp(cell)
    except ValueError:
        return False
    return True


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return not isinstance(cell, bool)


def parse_numbers(values: str | Sequence[object]) -> list[float]:
    """Finite numbers, or those in a text, separated by blanks, commas or both, in brackets or not."""
    if isinstance(values, str):
        values = re.findall(r"[^\s,]+", values.strip().removeprefix("[").removesuffix("]"))
    numbers = []
    for at, value in enumerate(values, 1):
        try:
            numbers.append(_number(value))
        except ValueError as error:
            raise UserError(f"number {at} {error}") from None
    return numbers


def _number(value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"is {str(value)[:40]!r}, not a number; write it like 12 or 3.5") from None
    if not math.isfinite(number) or abs(number) > 1e30:
        raise ValueError(
            f"is {value}: only finite numbers (up to 1e30) can be learned; replace it, or in a series fill the gap"
        )
    return number


def last_value(source: Tensor, horizon: int) -> Tensor:
    """[B, context, channels] -> [B, horizon, channels]"""
    return source[:, -1:].expand(-1, horizon, -1)


def last_season(source: Tensor, horizon: int, period: int) -> Tensor:
    """The last `period` steps, repeated."""
    season = source[:, -period:]
    return season.repeat(1, -(-horizon // period), 1)[:, :horizon]
