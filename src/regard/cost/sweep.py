"""How the cost grows when one size changes: a sweep is a name and the values it takes.

    seq=128:65536       128, 256, 512, …, 65536: each twice the one before, and the end
    seq=128:1024:128    128, 256, 384, …, 1024: in steps
    heads=1,2,4,8       these values

The size is `seq`, `target_seq` or `batch`, or any setting of a model that is an integer, such as `heads` or `layers`.
Doubling suits the formulas: on logarithmic axes, what grows with N is a line of slope 1 and what grows with N² one of
slope 2, so a plot shows which part of a model dominates at which length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from regard.cost.total import Cost, cost
from regard.errors import UserError, suggest
from regard.models.config import ModelConfig
from regard.settings import field_types

WORKLOAD = ("seq", "target_seq", "batch")  # of the batch, not of the model
MOST = 1_000  # values of a sweep
LARGEST = 10**15
FORMS = "write a range (seq=128:4096), a range with a step (seq=128:1024:128) or a list (heads=1,2,4)"


class Sweep(NamedTuple):
    """The size that changes, and its values."""

    name: str
    values: tuple[int, ...]


def read_sweep(text: str) -> Sweep:
    """A sweep from `name=values`."""
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals or not name:
        raise UserError(f"--sweep {text}: {FORMS}")
    if name not in (names := sizes_of_a_model()):
        raise UserError(f"--sweep {text}: {name!r} is not a size; {suggest(name, names)}")
    return Sweep(name, _values(text, values))


def sizes_of_a_model() -> tuple[str, ...]:
    """What can be swept: the sizes of a batch, and the settings of a model that are integers."""
    settings = [name for name, kind in field_types(ModelConfig).items() if kind is int or int in get_args(kind)]
    return (*WORKLOAD, *settings)


def _values(text: str, values: str) -> tuple[int, ...]:
    separator = ":" if ":" in values else ","
    try:
        numbers = [int(part) for part in values.split(separator)]
    except ValueError:
        raise UserError(f"--sweep {text}: {FORMS}") from None
    if max(map(abs, numbers)) > LARGEST:
        raise UserError(f"--sweep {text}: sizes are at most {LARGEST:.0e}")
    if separator == ",":
        return tuple(numbers)
    if len(numbers) > 3:
        raise UserError(f"--sweep {text}: {FORMS}")
    first, last, *step = numbers
    if first < 1 or last < first:
        raise UserError(f"--sweep {text}: a range begins at 1 or more and ends no lower than it begins")
    if step and step[0] < 1:
        raise UserError(f"--sweep {text}: the step must be 1 or more")
    if step and (last - first) // step[0] >= MOST:
        raise UserError(f"--sweep {text}: more than {MOST} values; use a larger step")
    if step:
        return tuple(range(first, last + 1, step[0]))
    doubled = [first]
    while doubled[-1] < last:
        doubled.append(min(2 * doubled[-1], last))
    return tuple(doubled)


def sweep(
    sizes: Sweep,
    model: Callable[[Mapping[str, Any]], ModelConfig],
    *,
    seq: int | None = None,
    batch: int = 1,
    target_seq: int | None = None,
    dtype: str = "bf16",
) -> list[tuple[ModelConfig, Cost]]:
    """The model and its cost at each value; `model` makes the config with the settings that change."""
    results = []
    for value in sizes.values:
        work: dict[str, Any] = {"seq": seq, "batch": batch, "target_seq": target_seq, "dtype": dtype}
        changes = {sizes.name: value}
        if sizes.name in WORKLOAD:
            work, changes = work | changes, {}
        config = model(changes)
        results.append((config, cost(config, **work)))
    return results
