"""Sets of numbers as a model reads them: scaled, in rows of one shape, divided into training, validation and test.

    (x - mean) / std, by channel                 mean and deviation of what is learned from, never of what is tested

Pairs are divided by file or, made by rule, by seed; a series in time.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.data.batch import Tensors
from regard.data.numbers import NumberBatch, NumbersData, padded, read_pairs, rule_pairs
from regard.data.series import Windows, read_series, seasonal_series
from regard.errors import UserError


@dataclass(frozen=True)
class Scale(Tensors):
    """Between numbers as they are and as a model reads them."""

    mean: Tensor  # [channels]
    std: Tensor

    @classmethod
    def of(cls, data: NumbersData) -> Scale:
        return cls(torch.tensor(data.mean, dtype=torch.float64), torch.tensor(data.std, dtype=torch.float64))

    def shrink(self, numbers: Tensor) -> Tensor:
        return ((numbers.double() - self.mean) / self.std).float()

    def widen(self, numbers: Tensor) -> Tensor:
        return numbers.double().cpu() * self.std + self.mean


@dataclass(frozen=True)
class NumberSets:
    """The sets of a recipe; `data` is its table with the scale filled in."""

    data: NumbersData
    channels: tuple[str, ...]
    rows: dict[str, NumberBatch]  # those that are judged, and of pairs "train"
    windows: Windows | None = None  # a series, and where its training windows begin
    starts: Tensor | None = None


def make_sets(data: NumbersData) -> NumberSets:
    """Read or make everything that the table asks for."""
    return _series(data) if data.context else _pairs(data)


def _series(data: NumbersData) -> NumberSets:
    if data.seasonal is not None:
        series = [seasonal_series(data.seasonal)]
        channels = tuple(f"channel {number}" for number in range(1, data.seasonal.channels + 1))
    else:
        series, channels = read_series(data.train, data)
        print(f"note: channels: {', '.join(channels)}", file=sys.stderr)
    border, last = 1 - data.valid_fraction - data.test_share, 1 - data.test_share
    data = _with_scale(data, torch.cat([one[: int(border * len(one))] for one in series]), channels)
    scale = Scale.of(data)
    windows = Windows([scale.shrink(one) for one in series], data.context, data.horizon)
    shares = {"train": (0.0, border), "valid": (border, last), "test": (last, 1.0)}
    starts = {name: windows.starts(*share) for name, share in shares.items() if share[0] < share[1]}
    for name, found in starts.items():
        if not len(found):
            lengths = ", ".join(f"{len(one):,}" for one in series)
            raise UserError(
                f"data.{name}: no window of {data.context} + {data.horizon} steps fits into its part of {lengths} "
                "steps; give a longer series, or lower context or horizon"
            )
    learned = starts.pop("train")
    return NumberSets(data, channels, {name: windows.batch(at) for name, at in starts.items()}, windows, learned)


def _pairs(data: NumbersData) -> NumberSets:
    if data.rule is not None:
        counts = {"train": data.rule.train, "valid": data.rule.valid, "test": data.rule.test}
        pairs = {
            name: rule_pairs(data.rule, count, data.longest, len(counts) * data.rule.seed + number)
            for number, (name, count) in enumerate(counts.items())
        }
    else:
        files = {"train": data.train, "valid": data.valid, **data.test}
        pairs = {name: read_pairs(names, data) for name, names in files.items() if names}
    sets = {name: padded(found, data.longest) for name, found in pairs.items()}
    learned = sets["train"]
    numbers = torch.cat((learned.source[learned.source_is_real], learned.target[learned.target_is_real]))
    data = _with_scale(data, numbers, ("number",))
    scale = Scale.of(data)
    rows = {
        name: dataclasses.replace(one, source=scale.shrink(one.source), target=scale.shrink(one.target))
        for name, one in sets.items()
    }
    return NumberSets(data, ("number",), rows)


def _with_scale(data: NumbersData, numbers: Tensor, channels: tuple[str, ...]) -> NumbersData:
    """Mean and deviation of the numbers [n, channels] that are learned from, unless the recipe has them."""
    if not data.mean:
        mean, std = numbers.double().mean(dim=0), numbers.double().std(dim=0, correction=0)
        std = torch.where(std > 0, std, 1.0)  # a channel that never changes
        data = dataclasses.replace(data, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    if len(data.mean) != len(channels):
        raise UserError(
            f"data.mean = {list(data.mean)}: there are {len(channels)} channels ({', '.join(channels)}); give a number "
            "for each, or leave mean and std out"
        )
    return data
