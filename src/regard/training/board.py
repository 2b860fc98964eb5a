"""TensorBoard: the metrics of metrics.jsonl as events.

    tensorboard --logdir runs        http://localhost:6006, all runs side by side

Events are only ever appended. A resumed run opens a new file that first discards whatever was logged after its
checkpoint (`purge_step`), so the curves are those of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import MissingExtra


class Board:
    """Events in `folder`, which is created with the first line."""

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
