"""The progress of training: a bar in a terminal, a line every few seconds in a log, events for TensorBoard.

tensorboard --logdir runs        http://localhost:6006, all runs side by side
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from regard.errors import MissingExtra

LINE_EVERY = 10.0  # seconds between lines where there is no terminal


class Progress:
    """Steps done, loss, speed and time left, on standard error."""

    def __init__(self, steps: int, done: int = 0, show: bool = True, unit: str = "tokens") -> None:
        self.unit, self.steps, self.first, self.metrics, self.show = unit, steps, done, "", show
        self.began = self.spoke = time.monotonic()
        hidden = not (show and sys.stderr.isatty() and done < steps)
        self.bar = tqdm(total=steps, initial=done, desc="training", unit="step", dynamic_ncols=True, disable=hidden)

    def update(self, step: int, loss: float, rate: float, speed: float) -> None:
        """Show the progress after `step` steps."""
        text = f"loss {loss:.4f}, lr {rate:.1e}, {speed:,.0f} {self.unit}/s{self.metrics}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(step - self.bar.n)
        now = time.monotonic()
        if self.bar.disable and self.show and (now - self.spoke >= LINE_EVERY or step == self.steps):
            left = (now - self.began) / max(step - self.first, 1) * (self.steps - step)
            print(f"training: step {step}/{self.steps}, {text}, {left:.0f} s left", file=sys.stderr, flush=True)
            self.spoke = now

    def show_metrics(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of the last evaluation from now on."""
        self.metrics = "".join(f", {name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())

    def close(self) -> None:
        self.bar.close()


class Board:
    """TensorBoard events in `folder`, which is created with the first line.

    Events are only ever appended. A resumed run opens a new file that first discards whatever was logged after its
    checkpoint (`purge_step`), so the curves are those of an uninterrupted run.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtra("tensorboard", "tensorboard", "train.tensorboard = true") from None
        self.folder, self.open = folder, SummaryWriter
        self.writer: Any = None

    def write(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl: every metric under its name, at its step."""
        if self.writer is None:
            self.writer = self.open(str(self.folder), purge_step=line["step"])
        for name, value in line.items():
            if name != "step":
                self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
