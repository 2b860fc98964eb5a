"""Snapshots: the weights at some steps of training, to see afterwards how they formed (`regard explore`, *Training*).

    RUN/snapshots/step-00000100.safetensors      the weights in half precision, without optimizer state

Attention patterns form early, so the n snapshots of a run with S steps lie closer together there: at the steps
S · (i / (n - 1))², i = 0 … n - 1. The first has the initial weights, the last those after the last step. A weight in
half precision has a relative error of at most 2^-11, and takes a sixth of the space of a checkpoint under Adam.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import UserError
from regard.files import make_folder

if TYPE_CHECKING:  # the page lists snapshots before PyTorch is loaded
    from torch import Tensor, nn

FOLDER = "snapshots"


def snapshot_steps(count: int, steps: int) -> frozenset[int]:
    """The steps after which a snapshot is saved; 0 is before the first."""
    return frozenset(round(steps * (i / (count - 1)) ** 2) for i in range(count)) if count else frozenset()


def write_snapshot(run: Path, step: int, weights: Mapping[str, Tensor]) -> None:
    from regard.models.folder import write_weights

    make_folder(run / FOLDER)
    half = {name: tensor.detach().half() for name, tensor in weights.items()}
    write_weights(run / FOLDER / f"step-{step:08d}.safetensors", half)


def saved_steps(run: Path) -> list[int]:
    """The steps of the snapshots that a run has, ascending; reading the list opens no file."""
    names = (re.fullmatch(r"step-([0-9]{8,})\.safetensors", path.name) for path in (run / FOLDER).glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def read_snapshot(run: Path, step: int) -> dict[str, Tensor]:
    """The weights after `step` steps, in single precision."""
    from regard.models.folder import read_weights

    steps = saved_steps(run)
    if step not in steps:
        remedy = f"it has those of steps {', '.join(map(str, steps))}" if steps else "train with  train.snapshots = 20"
        raise UserError(f"step = {step}: the run has no snapshot of it; {remedy}")
    weights = read_weights(run / FOLDER / f"step-{step:08d}.safetensors")
    return {name: tensor.float() for name, tensor in weights.items()}


def fill_snapshot(model: nn.Module, run: Path, step: int) -> None:
    """Give a model of the run the weights that it had after `step` steps."""
    from regard.models.folder import fill

    fill(model, read_snapshot(run, step), f"{run / FOLDER}, step {step}")
