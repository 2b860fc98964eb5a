"""A smaller model for the same recipe: the largest preset whose training is estimated to fit into the time.

    time of the smaller model = measured time · 2 · FLOPs of the smaller model / FLOPs of this one

The 2 is for small matrices, which use a processor less well: measured on two cores, between "base", "small" and "tiny".

The preset belongs to the family of the recipe's own (vit-small for vit-base). A recipe without a preset, or whose
family has nothing smaller, takes the sizes of "tiny", "small" or "base": width, layers, heads, feed-forward width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from regard.cost.total import cost
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.recipe import PRESETS

SIZES = ("dim", "layers", "heads", "ff_dim")
GENERAL = ("tiny", "small", "base")
SLOWER = 2.0  # small matrices use a processor less well
FREE = (*SIZES, "dropout", "embed_dropout", "vocab_size", "logit_scale")  # what differs within a family


class Smaller(NamedTuple):
    """A preset that fits, the settings of [model] that choose it, and the estimated time."""

    preset: str
    settings: dict[str, Any]
    seconds: float


def smaller(config: ModelConfig, table: Mapping[str, Any], seq: int, seconds: float, limit: float) -> Smaller | None:
    """The largest model below `limit` seconds, if this one, described by the [model] `table`, takes `seconds`."""
    fits = [one for one in _candidates(config, table, seq, seconds) if one.seconds < limit]
    return max(fits, key=lambda one: ("preset" in one.settings, one.seconds), default=None)


def _candidates(config: ModelConfig, table: Mapping[str, Any], seq: int, seconds: float) -> Iterator[Smaller]:
    own = None if {*SIZES} & {*table} else table.get("preset")
    family = [name for name in PRESETS if own is not None and _family(name) == _family(own)]
    for name in dict.fromkeys((*family, *GENERAL)):
        sizes = {field: PRESETS[name][field] for field in SIZES if PRESETS[name].get(field) is not None}
        try:
            ratio = _operations(replace(config, **sizes), seq) / _operations(config, seq)
        except UserError:  # such as kv_heads that do not divide these heads
            continue
        if SLOWER * ratio < 1:
            yield Smaller(name, {"preset": name} if name in family else sizes, seconds * SLOWER * ratio)


def _family(name: str) -> dict[str, Any]:
    return {field: value for field, value in PRESETS[name].items() if field not in FREE}


def _operations(config: ModelConfig, seq: int) -> int:
    """FLOPs of training on one row; those of attention recomputed in the backward pass included."""
    result = cost(config, seq=None if config.input == "patches" else min(seq, config.max_length))
    return result.train + result.recomputed
