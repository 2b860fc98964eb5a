"""Checkpoint averaging: the mean of the last checkpoints is often better than each of them.

θ = (θ_1 + … + θ_k) / k             Vaswani et al. 2017, section 6.1; why it works: Izmailov et al. 2018
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from regard.errors import UserError
from regard.training.checkpoint import complete_checkpoints, read_model


def average(folder: Path, last: int) -> dict[str, Tensor]:
    """The mean weights of the newest `last` complete checkpoints of a run."""
    paths = complete_checkpoints(folder / "checkpoints")[-last:]
    if len(paths) < last:
        raise UserError(
            f"{folder}: has {len(paths)} complete checkpoints, not {last}: use fewer, or train with keep = {last}"
        )
    total: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in read_model(path).items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / last).to(torch.float32) for name, tensor in total.items()}
