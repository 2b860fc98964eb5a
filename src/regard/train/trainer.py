"""The training loop: batch, loss, gradient, step; and nothing lost when it stops.

    θ ← θ - lr(t) · m̂ / (sqrt(v̂) + ε)          Adam: Kingma & Ba 2015; decoupled decay: Loshchilov & Hutter 2019

A run is a folder. `Trainer.run` goes on from the newest checkpoint in it, bit for bit as if it had never
stopped: weights, moments, place in the data and random generators are all restored. Ctrl-C (or SIGTERM)
lets the step under way finish, saves, and returns; a second Ctrl-C does not wait.

    RUN/metrics.jsonl   one line every `log_every` steps: step, loss, lr, tokens per second, seconds
    RUN/checkpoints/    see `regard.train.checkpoint`
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.batch import Batches
from regard.errors import UserError
from regard.run import make_folder
from regard.settings import write_whole
from regard.train import checkpoint
from regard.train.config import TrainConfig
from regard.train.progress import Progress
from regard.train.schedule import rate

Objective = Callable[[Any, Any], tuple[Tensor, Tensor]]  # (model, batch) -> (summed loss, how many it sums)


class Trainer:
    """Trains `model` on `batches` in `folder` until `config.steps` steps are done."""

    def __init__(
        self, model: nn.Module, batches: Batches, objective: Objective, config: TrainConfig, folder: Path
    ) -> None:
        self.model, self.batches, self.objective, self.config, self.folder = model, batches, objective, config, folder
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.step = 0
        self.seconds = 0.0  # spent training, over all runs
        self.metrics = folder / "metrics.jsonl"

    def resume(self) -> bool:
        """Take up the newest checkpoint of the folder, if there is one."""
        found, passed = checkpoint.newest(self.folder / "checkpoints")
        for line in passed:
            print(f"warning: {line}", file=sys.stderr)
        if found is None:
            self._keep_metrics(0)
            return False
        found.restore(self.model, self.optimizer)
        self.batches.seek(found.state["data"])
        self.step, self.seconds = found.step, float(found.state["seconds"])
        self._keep_metrics(self.step)
        return True

    def save(self) -> Path:
        state = {"step": self.step, "seconds": round(self.seconds, 3), "data": self.batches.position}
        return checkpoint.write(self.folder / "checkpoints", state, self.model, self.optimizer, self.config.keep)

    def run(self) -> bool:
        """Train to the end; False if it was interrupted (a checkpoint is there then)."""
        make_folder(self.folder)
        config, total, tokens = self.config, torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        stream, mark = iter(self.batches), time.monotonic()
        self.model.train()
        with interruptible() as stop, Progress(config.steps, self.step) as progress:
            while self.step < config.steps:
                loss, count = self._update(next(stream))
                total, tokens, self.step = total + loss, tokens + count, self.step + 1
                if self.step % config.log_every == 0 or self.step == config.steps:
                    now = time.monotonic()
                    self.seconds, spent, mark = self.seconds + now - mark, now - mark, now
                    self._log(total.item() / tokens.item(), tokens.item() / spent, progress)
                    total, tokens = torch.zeros_like(total), torch.zeros_like(tokens)
                if stop() or self.step % config.save_every == 0 or self.step == config.steps:
                    self.seconds, mark = self.seconds + time.monotonic() - mark, time.monotonic()
                    self.save()
                if stop():
                    break
        self.model.eval()
        return self.step >= config.steps

    def _update(self, batch: Any) -> tuple[Tensor, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.step + 1, self.config)
        loss, count = self.objective(self.model, batch.to(self.device))
        (loss / count).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), count

    def _log(self, loss: float, speed: float, progress: Progress) -> None:
        if not math.isfinite(loss):
            raise UserError(
                f"loss = {loss} at step {self.step}: training has diverged, and the last checkpoint is as it was. "
                f"Lower train.lr = {self.config.lr} or raise train.warmup = {self.config.warmup}, and start anew"
            )
        learning_rate = rate(self.step, self.config)
        line = {
            "step": self.step,
            "loss": round(loss, 6),
            "lr": learning_rate,
            "tokens_per_second": round(speed, 1),
            "seconds": round(self.seconds, 3),
        }
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        progress.update(self.step, loss, learning_rate, speed)

    def _keep_metrics(self, step: int) -> None:
        """Forget what was logged after the checkpoint: it is about to happen again."""
        if self.metrics.exists():
            kept = [line for line in read_metrics(self.folder) if line["step"] <= step]
            write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line cut short by a crash is left out."""
    lines = []
    path = folder / "metrics.jsonl"
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C or SIGTERM only sets a flag; a second Ctrl-C interrupts at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("\nstopping after this step; Ctrl-C again to stop at once", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
