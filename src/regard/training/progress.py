"""The progress of training: a bar in a terminal, lines in a log, events for TensorBoard, metrics for Weights & Biases.

tensorboard --logdir runs        http://localhost:6006, all runs side by side
WANDB_MODE=offline               Weights & Biases without a network: `wandb sync RUN/wandb/offline-run-…` later
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from regard.errors import MissingExtra, UserError
from regard.files import make_folder, write_atomically
from regard.messages import localize
from regard.models.recipe import RECIPE
from regard.progress import Stage, duration
from regard.settings import read_toml, to_dict
from regard.training.config import TrainConfig

MEASURED = 2.0, 2  # seconds and steps after which the time of a step is known


class Pace:
    """The mean time of a step, measured over the first steps of a run without the very first.

    These are slower: memory is allocated, blocks are compiled, CUDA graphs are captured. Call `step` after each step
    and `restart` after what is not part of one; `synchronize` waits for a GPU, where steps run asynchronously.
    """

    def __init__(self, skipped: int, synchronize: Callable[[], object]) -> None:
        self.skipped, self.synchronize, self.known = skipped, synchronize, False
        self.count, self.began = 0, 0.0

    def step(self) -> float | None:
        """Seconds per step, once, as soon as they are known."""
        if self.known:
            return None
        if self.skipped:
            self.skipped -= 1
            self.restart()
            return None
        self.count += 1
        seconds, least = MEASURED
        if self.count < least or time.monotonic() - self.began < seconds:
            return None
        self.synchronize()
        self.known = True
        return (time.monotonic() - self.began) / self.count

    def restart(self) -> None:
        if not self.known:
            self.synchronize()
            self.count, self.began = 0, time.monotonic()


class Progress(Stage):
    """Steps done, loss, speed and time left, on standard error."""

    def __init__(self, steps: int, done: int = 0, show: bool = True, unit: str = "tokens") -> None:
        super().__init__("training", unit, steps, done)
        self.first, self.metrics, self.last, self.visible = done, "", "", show
        hidden = not (show and sys.stderr.isatty() and done < steps)
        tqdm.monitor_interval = 0  # no thread of its own: see `regard.predict.workers`
        self.bar = tqdm(
            total=steps,
            initial=done,
            desc=localize("training"),
            unit=localize("step"),
            dynamic_ncols=True,
            disable=hidden,
        )

    def text(self, now: float) -> str:
        if not (self.visible and self.bar.disable):
            return ""
        done = self.count - self.first
        left = localize(f"{duration((now - self.began) / done * (self.total - self.count))} left") if done else ""
        return ", ".join([localize(f"training: step {self.count}/{self.total}") + self.last, *[left] * bool(left)])

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        self.count = step
        self.bar.update(step - self.bar.n)

    def update(self, loss: float, rate: float, speed: float) -> None:
        """Show these values of the last steps from now on."""
        values = (f"loss {loss:.4f}", f"lr {rate:.1e}", f"{speed:,.0f} {self.unit}/s")
        self.last = "".join(f", {localize(value)}" for value in values) + self.metrics
        self.bar.set_postfix_str(self.last[2:], refresh=False)
        if self.count == self.total:
            self.due = 0.0
            self.show(time.monotonic())

    def show_metrics(self, metrics: Mapping[str, float]) -> None:
        """Show the metrics of the last evaluation from now on."""
        self.metrics = "".join(f", {localize(name.replace('_', ' '))} {value:.4g}" for name, value in metrics.items())

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self.visible:
            tqdm.write(localize(text), file=sys.stderr)
            sys.stderr.flush()

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
        self.folder, self.make = folder, SummaryWriter
        self.writer: Any = None

    def open(self) -> None:
        """Training starts; the file is opened with the first line."""

    def write(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl: every metric under its name, at its step."""
        if self.writer is None:
            self.writer = self.make(str(self.folder), purge_step=line["step"])
        for name, value in line.items():
            if name != "step":
                self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class WeightsAndBiases:
    """The same metrics in a run of Weights & Biases, with the recipe as its config.

    RUN/wandb/id holds the id of that run: a resumed run continues it. Metrics that were logged after the checkpoint
    are not sent again: W&B accepts increasing steps only, and the repeated steps have the same values.
    """

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtra("wandb", "wandb", "train.wandb = true") from None
        self.wandb, self.folder, self.config = wandb, folder, config
        self.run: Any = None

    def open(self) -> None:
        """Start or continue the run, before training: an account that is missing shows at once."""
        path, recipe = self.folder / "wandb" / "id", self.folder / RECIPE
        if not path.exists():
            make_folder(path.parent)
            write_atomically(path, uuid.uuid4().hex[:12].encode())
        try:
            self.run = self.wandb.init(
                project=os.environ.get("WANDB_PROJECT", "regard"), name=self.folder.resolve().name,
                id=path.read_text().strip(), resume="allow", dir=str(self.folder.resolve()),
                config=read_toml(recipe) if recipe.exists() else {"train": to_dict(self.config)},
            )  # fmt: skip
        except Exception as error:  # of many classes: no account, no network
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            remedy = "log in with  wandb login , or set WANDB_MODE=offline"
            raise UserError(f"train.wandb = true: Weights & Biases does not start ({reason}); {remedy}") from error
        self.next = self.run.step  # after the last step that the run has; 0 if it is new or offline

    def write(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl: every metric under its name, at its step."""
        if self.run is not None and line["step"] >= self.next:
            self.run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()
            self.run = None
