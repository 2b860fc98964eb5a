"""How a model is trained, as values: the [train] table of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regard.errors import UserError
from regard.settings import check_types


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = 10_000
    batch_tokens: int = 4096  # rows x longest side of a batch, filler included
    lr: float = 1e-3  # the highest learning rate of the schedule
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = "inverse-sqrt"
    warmup: int = 4000  # steps from 0 to lr
    betas: tuple[float, ...] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: float = 0.0
    label_smoothing: float = 0.1
    clip: float = 1.0  # largest norm of the gradient
    seed: int = 1
    log_every: int = 10
    save_every: int = 1000
    keep: int = 2  # checkpoints; a damaged newest one falls back to the one before

    def __post_init__(self) -> None:
        check_types(self)
        for name, least in {
            "steps": 1,
            "batch_tokens": 1,
            "warmup": 0,
            "log_every": 1,
            "save_every": 1,
            "keep": 1,
        }.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} = {getattr(self, name)}: must be {least} or more")
        for name in ("lr", "eps", "clip"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} = {getattr(self, name)}: must be greater than 0")
        for name, value in {"label_smoothing": self.label_smoothing, **{"betas": max(self.betas)}}.items():
            if not 0 <= value < 1:
                raise UserError(f"{name} = {value}: must be at least 0 and below 1")
        if len(self.betas) != 2 or min(self.betas) < 0:
            raise UserError(f"betas = {list(self.betas)}: give two numbers from 0 to below 1, such as [0.9, 0.98]")
        if self.weight_decay < 0:
            raise UserError(f"weight_decay = {self.weight_decay}: must be 0 or more")
