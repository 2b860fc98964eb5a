"""The mean of the last checkpoints: often better than each of them.

θ = (θ_1 + … + θ_k) / k             Vaswani et al. 2017, section 6.1; why it works: Izmailov et al. 2018
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from regard.errors import UserError
from regard.train.checkpoint import read_model, whole


def average(folder: Path, last: int) -> dict[str, Tensor]:
    """The mean weights of the newest `last` whole checkpoints of a run."""
    found = whole(folder / "checkpoints")[-last:]
    if len(found) < last:
        raise UserError(
            f"{folder}: has {len(found)} whole checkpoints, not {last}: ask for fewer, or train with keep = {last}"
        )
    total: dict[str, Tensor] = {}
    for path in found:
        for name, tensor in read_model(path).items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / last).to(torch.float32) for name, tensor in total.items()}
