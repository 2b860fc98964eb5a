"""A run that is stopped in the middle, as Ctrl-C does, and the weights of two runs compared."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.models.folder import read_weights
from regard.training.trainer import Trainer


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The next run that reaches `step` is asked to stop; later ones go through."""
    real, sent = Trainer._update, []

    def update(self: Trainer, batches: Any) -> Any:
        if self.step == step and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)
        return real(self, batches)

    monkeypatch.setattr(Trainer, "_update", update)


def assert_same_weights(one: str | Path, other: str | Path) -> None:
    first, second = (read_weights(Path(run) / "model.safetensors") for run in (one, other))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
