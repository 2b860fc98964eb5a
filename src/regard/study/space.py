"""The settings that `regard tune` searches, and the values that they may have.

    train.lr=1e-4:1e-2:log              a range, sampled on a logarithmic scale: as many below 1e-3 as above
    model.dropout=0:0.3                 a range of numbers
    model.layers=1:4                    integers, both ends included
    model.dim=64:512:64                 every 64th of them
    model.position=rope,learned,none    one of these values

In a file, the same under [search]; choices may also be lists:

    [search]
    train.lr = "1e-4:1e-2:log"
    model.position = ["rope", "learned"]
"""

from __future__ import annotations

import json
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.recipe import override
from regard.settings import field_types, read_toml
from regard.study.definition import make_task
from regard.tasks.registry import task_of
from regard.training.config import TrainConfig

EXAMPLES = "train.lr=1e-4:1e-2:log, model.layers=1:4 or model.position=rope,learned"
Number = int | float


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; all of them are integers, or none."""

    low: Number
    high: Number
    step: Number | None = None
    log: bool = False

    def suggest(self, trial: Any, name: str) -> str:
        """The value that the trial has for this setting, as `--set` takes it."""
        if isinstance(self.low, int):
            return str(trial.suggest_int(name, self.low, self.high, step=self.step or 1, log=self.log))
        return repr(trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log))

    def extremes(self) -> tuple[str, ...]:
        return repr(self.low), repr(self.high)

    def find(self, value: Any) -> Number | None:
        """`value` if it is in the range."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high or (self.step and (value - self.low) % self.step):
            return None
        return value if isinstance(self.low, int) else float(value)


@dataclass(frozen=True)
class Choice:
    """One of several values, each as `--set` takes it."""

    values: tuple[str, ...]

    def suggest(self, trial: Any, name: str) -> str:
        return str(trial.suggest_categorical(name, self.values))

    def extremes(self) -> tuple[str, ...]:
        return self.values

    def find(self, value: Any) -> str | None:
        """The choice that means `value`."""
        return next((text for text in self.values if _values(text) == [value] or (text, value) == ("none", None)), None)


Space = dict[str, Range | Choice]  # by the name of the setting: "train.lr"


def read_search(options: Iterable[str]) -> dict[str, str]:
    """The values of --search, `NAME=VALUES` or the name of a file with a table [search]: name and values."""
    search: dict[str, str] = {}
    for option in options:
        name, equals, text = (part.strip() for part in option.partition("="))
        if equals:
            pairs = [(name, text)]
        elif name.endswith(".toml"):
            pairs = [*_file(Path(name))]
        else:
            raise UserError(f"--search {option}: write NAME=VALUES, such as {EXAMPLES}; or name a .toml file")
        for name, text in pairs:
            if name in search:
                raise UserError(f"--search {name}: is there twice; remove one")
            search[name] = text
    if not search:
        raise UserError(f"no settings to search: name them with --search, such as {EXAMPLES}")
    return search


def _file(path: Path) -> Iterable[tuple[str, str]]:
    table = read_toml(path).get("search")
    if not isinstance(table, dict):
        raise UserError(
            f'{path}: has no table [search]; write one, such as  [search]  with  train.lr = "1e-4:1e-2:log"'
        )
    return _flat(table)


def _flat(table: Mapping[str, Any], where: str = "") -> Iterable[tuple[str, str]]:
    """The settings in nested tables by their whole names; a list becomes choices."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{where}{key}.")
        else:
            yield where + key, ",".join(map(_text, value)) if isinstance(value, list) else _text(value)


def _text(value: Any) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def make_space(search: Mapping[str, str], tables: Mapping[str, Any]) -> Space:
    """What `read_search` has found, checked against the recipe."""
    space: Space = {}
    for name, text in search.items():
        where = f"--search {name}={text}"
        if "." not in name:
            raise UserError(f"{where}: name the table of the setting, such as train.{name}")
        space[name] = _range(where, text, _is_float(tables, name)) if _is_range(text) else _choice(where, text)
        for value in space[name].extremes():
            try:
                check(override(tables, [f"{name}={value}"]))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
    return space


def check(tables: Mapping[str, Any]) -> None:
    """Raise a UserError where a recipe cannot be trained, as far as that shows without its data."""
    task = make_task(tables)
    task.make_model_config(task.PLACEHOLDERS)


def _is_range(text: str) -> bool:
    return ":" in text and not re.search(r"[\"',\[{]", text)


def _range(where: str, text: str, is_float: bool) -> Range:
    low, high, *rest = (part.strip() for part in text.split(":"))
    log = rest == ["log"]
    try:
        numbers = [_number(part) for part in (low, high, *([] if log else rest))]
    except ValueError:
        raise UserError(f"{where}: write LOW:HIGH, LOW:HIGH:STEP or LOW:HIGH:log, such as {EXAMPLES}") from None
    if len(numbers) > 3:
        raise UserError(f"{where}: has more than LOW:HIGH:STEP")
    if is_float or not all(isinstance(number, int) for number in numbers):
        numbers = [*map(float, numbers)]
    first, last, step = (*numbers, None)[:3]
    assert first is not None and last is not None
    if not first < last:
        raise UserError(f"{where}: the first number must be lower than the second")
    if log and first <= 0:
        raise UserError(f"{where}: a logarithmic scale starts above 0")
    if step is not None and not 0 < step <= last - first:
        raise UserError(f"{where}: the step must be above 0 and at most {last - first:g}")
    if step is not None and isinstance(step, int):
        last = first + (last - first) // step * step  # the last value that the steps reach
    return Range(first, last, step, log)


def _number(text: str) -> Number:
    """An integer or a finite number."""
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    number = float(text)
    if not abs(number) < float("inf"):
        raise ValueError(text)
    return number


def _choice(where: str, text: str) -> Choice:
    values = tuple(map(_text, _values(text)))
    if len(values) < 2:
        raise UserError(f"{where}: is one value; name more, such as {EXAMPLES}, or set it with --set")
    if len({*values}) < len(values):
        raise UserError(f"{where}: has a value twice")
    return Choice(values)


def _values(text: str) -> list[Any]:
    """The values in a list without brackets, as in TOML; strings need no quotes."""
    with suppress(ValueError, RecursionError):
        return list(tomllib.loads(f"value = [{text}]")["value"])
    values: list[Any] = []
    for part in (part.strip() for part in text.split(",")):
        try:
            values += tomllib.loads(f"value = [{part}]")["value"] if part else [""]
        except (ValueError, RecursionError):
            values.append(part)
    return values


def _is_float(tables: Mapping[str, Any], name: str) -> bool:
    """Whether a setting takes numbers that are no integers; False where only its task knows."""
    table, *path = name.split(".")
    kind: Any = {"model": ModelConfig, "train": TrainConfig, **task_of(tables).TABLES}.get(table)
    for key in path:
        kind = next((one for one in _parts(kind) if is_dataclass(one)), None)
        kind = field_types(kind).get(key) if isinstance(kind, type) else None
    return float in _parts(kind)


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
