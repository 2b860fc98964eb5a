"""The learning rate over the steps, as a fraction of its peak.

    inverse-sqrt   min(step / warmup, sqrt(warmup / step))                     Vaswani et al. 2017, eq. 3
    cosine         (1 + cos(π (step - warmup) / (steps - warmup))) / 2         Loshchilov & Hutter 2017
    linear         1 - (step - warmup) / (steps - warmup)                      down to 0: Bergsma et al. 2025
    constant       1

each after a linear warmup over `warmup` steps. The paper writes  d^-0.5 · min(step^-0.5, step · warmup^-1.5);
its peak, at step = warmup, is lr = (d · warmup)^-0.5.
"""

from __future__ import annotations

import math

from regard.training.config import TrainConfig


def rate(step: int, config: TrainConfig) -> float:
    """The learning rate of update number `step`, counted from 1."""
    if step < config.warmup:
        return config.lr * step / config.warmup
    match config.schedule:
        case "inverse-sqrt":
            return config.lr * math.sqrt(max(config.warmup, 1) / step)
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * _done(step, config))) / 2
        case "linear":
            return config.lr * (1 - _done(step, config))
        case "constant":
            return config.lr


def _done(step: int, config: TrainConfig) -> float:
    """The fraction of the steps after the warmup that are done."""
    return min((step - config.warmup) / max(config.steps - config.warmup, 1), 1.0)


def paper_rate(dim: int, warmup: int) -> float:
    """The peak of the paper's schedule for a model of width `dim`."""
    return float((dim * warmup) ** -0.5)
