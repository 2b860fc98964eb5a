"""Numbers to learn from: the [data] table of a recipe with task = "numbers".

    pairs     train = ["pairs.tsv"]          1 2 3<tab>3 4 5   or in .jsonl  {"source": [1, 2, 3], "target": [3, 4, 5]}
              [data.rule]                    made by rule: y = multiply · x + add, x between low and high
    series    train = ["load.csv"]           a column a channel, a row a step; with context > 0:
              context = 96, horizon = 24     96 steps are read, the 24 after them foretold
              [data.seasonal]                made by rule: see `regard.data.series`

Both come to the same: sequences of vectors, source [S, channels] and target [T, channels]. They are scaled by mean and
deviation of the training data, (x - mean) / std, which travel in the recipe of the run.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from regard.data.batch import Tensors
from regard.data.config import Files, check_list, check_tests, expand_all
from regard.data.lines import Notes, Problem, left_out, read_lines, refusal
from regard.data.read import SHOWN, remedy_for
from regard.errors import UserError
from regard.settings import check_types

Pair = tuple[list[float], list[float]]
ENDINGS = (".tsv", ".jsonl")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Pairs y = multiply · x + add of sequences that nothing else is known about."""

    multiply: float = 1.0
    add: float = 2.0
    low: float = 0.0  # x is drawn evenly between low
    high: float = 100.0  # and high
    shortest: int = 2
    train: int = 20_000  # sequences
    valid: int = 500
    test: int = 2_000
    seed: int = 1  # of what is drawn; train.seed changes nothing about it

    def __post_init__(self) -> None:
        check_types(self)
        if not self.low < self.high:
            raise UserError(f"low = {self.low}: must be below high = {self.high}")
        for name, least in {"shortest": 1, "train": 1, "valid": 1, "test": 1, "seed": 0}.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: must be {least} or more")


@dataclass(frozen=True, kw_only=True)
class Seasonal:
    """A series made by rule: waves of two periods, a trend, and noise that lingers; see `regard.data.series`."""

    steps: int = 6_000
    channels: int = 3
    noise: float = 0.3  # its deviation, beside waves of height 1
    seed: int = 1  # of what is drawn; train.seed changes nothing about it

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in {"steps": 100, "channels": 1, "noise": 0, "seed": 0}.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: must be {least} or more")


@dataclass(frozen=True, kw_only=True)
class NumbersData:
    train: Files = ()
    valid: Files = ()  # pairs
    test: dict[str, Files] = field(default_factory=dict)  # pairs
    rule: Rule | None = None
    seasonal: Seasonal | None = None
    # pairs
    longest: int = 32  # most numbers of a source or target; rows are padded to it
    tolerance: float = 0.1  # within it a number counts as right
    # series
    context: int = 0  # steps that are read; 0: the data are pairs
    horizon: int = 24  # steps that are foretold
    period: int = 24  # steps after which a season returns: the baseline says what was then
    columns: Files = ()  # channels; left out: every column of numbers
    valid_fraction: float = 0.1  # the steps before the last part: they choose the best weights
    test_share: float = 0.2  # the last part
    # both
    mean: tuple[float, ...] = ()  # of the channels; left out: those of the training data
    std: tuple[float, ...] = ()
    skip_bad: bool = False  # leave out pairs that cannot be used
    folder: str = "."  # where relative names start

    def __post_init__(self) -> None:
        for name, files in (("train", self.train), ("valid", self.valid), ("columns", self.columns)):
            check_list(name, files)
        check_tests(self.test, "new.tsv")
        check_types(self)
        self._check_origin()
        for name, least in {"longest": 1, "context": 0, "horizon": 1, "period": 1}.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: must be {least} or more")
        if not self.tolerance > 0:
            raise UserError(f"tolerance = {self.tolerance}: must be greater than 0")
        for name in ("valid_fraction", "test_share"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: must be at least 0 and below 1, such as 0.1")
        if self.valid_fraction + self.test_share >= 1:
            raise UserError(
                f"valid_fraction + test_share = {self.valid_fraction + self.test_share}: leaves nothing to learn"
            )
        if len(self.mean) != len(self.std) or any(not scale > 0 for scale in self.std):
            raise UserError(f"std = {list(self.std)}: give one number above 0 for each of mean = {list(self.mean)}")

    def _check_origin(self) -> None:
        """One origin: files, a rule, or a seasonal series."""
        given = [name for name in ("train", "rule", "seasonal") if getattr(self, name)]
        if len(given) != 1:
            raise UserError(
                f"{' and '.join(given) or 'train'}: {'choose one of them' if given else 'there are no numbers'}; write "
                'train = ["pairs.tsv"], or a table [data.rule] or [data.seasonal]'
            )
        if self.rule is not None and self.context:
            raise UserError(f"context = {self.context}: is for a series, but [data.rule] makes pairs; leave one out")
        if self.seasonal is not None and not self.context:
            raise UserError("context = 0: a series needs it: how many steps are read, such as context = 96")
        if self.context and self.period > self.context:
            raise UserError(
                f"period = {self.period}: the seasonal forecast needs a whole season in the context = {self.context} "
                "steps that are read; raise that"
            )
        if self.context and (self.valid or self.test):
            raise UserError("valid and test: a series is divided in time; use valid_fraction and test_share")
        if self.rule is not None and self.longest < self.rule.shortest:
            raise UserError(f"longest = {self.longest}: must be rule.shortest = {self.rule.shortest} or more")


@dataclass(frozen=True)
class NumberBatch(Tensors):
    """Scaled numbers; what is not real (`is_real` False) is padding."""

    source: Tensor  # [B, S, channels]
    source_is_real: Tensor | None  # [B, S]
    target: Tensor  # [B, T, channels]
    target_is_real: Tensor | None  # [B, T]

    @property
    def tokens(self) -> Tensor:
        """How many numbers are to be learned."""
        steps = self.target.shape[:2].numel() if self.target_is_real is None else self.target_is_real.sum()
        return torch.as_tensor(steps * self.target.shape[2], device=self.target.device)

    @property
    def read(self) -> Tensor:
        """What the decoder reads: zeros to begin with, then each number before the one it shall write."""
        return torch.cat((torch.zeros_like(self.target[:, :1]), self.target[:, :-1]), dim=1)


def padded(pairs: Sequence[Pair], longest: int) -> NumberBatch:
    """All pairs as one batch, each side as long as `longest`."""
    sides = []
    for side in zip(*pairs, strict=True):
        rows = torch.zeros(len(side), longest, 1)
        is_real = torch.zeros(len(side), longest, dtype=torch.bool)
        for row, numbers in enumerate(side):
            rows[row, : len(numbers), 0] = torch.tensor(numbers)
            is_real[row, : len(numbers)] = True
        sides += [rows, is_real]
    return NumberBatch(*sides)


def rule_pairs(rule: Rule, count: int, longest: int, seed: int) -> list[Pair]:
    """`count` pairs; other seeds, other sequences."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(rule.shortest, longest + 1, (count,), generator=generator)
    numbers = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64)
    flat = rule.low + (rule.high - rule.low) * numbers
    return [(x.tolist(), (rule.multiply * x + rule.add).tolist()) for x in flat.split(lengths.tolist())]


def read_pairs(files: Sequence[str], config: NumbersData) -> list[Pair]:
    """The pairs of all files; what is wrong becomes one UserError, or is left out where `skip_bad`."""
    found: list[Pair] = []
    wrong: list[Problem] = []
    notes: Notes = Counter()
    for path in (path for paths in expand_all(files, config.folder) for path in paths):
        for item in _scan(path, config.longest, notes):
            if isinstance(item, Problem):
                wrong.append(item)
            else:
                found.append(item)
    fatal = any(problem.fatal for problem in wrong)
    if fatal or (wrong and not config.skip_bad):
        raise refusal(files, f"{len(found):,} good pairs", wrong[:SHOWN], len(wrong), remedy_for(fatal))
    if wrong:
        print(left_out(files, wrong[:SHOWN], len(wrong)), file=sys.stderr)
    if not found:
        raise UserError(f"{', '.join(files)}: no pairs of numbers; put  1 2 3<tab>3 4 5  in a line")
    return found


def _scan(path: Path, longest: int, notes: Notes) -> Iterator[Pair | Problem]:
    kind = next((ending for ending in ENDINGS if path.name.lower().removesuffix(".gz").endswith(ending)), None)
    if kind is None:
        yield Problem(str(path), None, f"pairs of numbers stand in files ending in {' or '.join(ENDINGS)}", fatal=True)
        return
    for number, line in enumerate(read_lines(path, notes), 1):
        if isinstance(line, Problem):
            yield line
            continue
        try:
            yield _pair(line, kind, longest)
        except UserError as error:
            yield Problem(str(path), number, str(error))


def _pair(line: str, kind: str, longest: int) -> Pair:
    if kind == ".tsv":
        sides = line.split("\t")
        if len(sides) != 2:
            raise UserError(f"has {len(sides)} columns, not 2: write  1 2 3<tab>3 4 5")
        source, target = (parse_numbers(side) for side in sides)
    else:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"is not JSON: {error}") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(name), list) for name in ("source", "target")):
            raise UserError('write  {"source": [1, 2, 3], "target": [3, 4, 5]}')
        source, target = (check_numbers(row[name]) for name in ("source", "target"))
    for name, side in (("source", source), ("target", target)):
        if not 1 <= len(side) <= longest:
            raise UserError(f"the {name} has {len(side)} numbers; 1 to data.longest = {longest} are possible")
    return source, target


def parse_numbers(text: str) -> list[float]:
    """Numbers with blanks, commas or both between them, in brackets or not."""
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    return check_numbers([] if words == [""] else words)


def check_numbers(values: Sequence[object]) -> list[float]:
    """Finite numbers, or an error that says which is not."""
    found = []
    for at, value in enumerate(values, 1):
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError
            number = float(value)
        except (ValueError, OverflowError):
            raise UserError(f"number {at} is {str(value)[:40]!r}: is no number; write it like 12 or 3.5") from None
        if not math.isfinite(number) or abs(number) > 1e30:
            raise UserError(f"number {at} is {value}: only finite numbers (up to 1e30) can be learned; replace it")
        found.append(number)
    return found
