"""The training loop: batch, loss, gradient, step; and nothing lost when it stops.

    θ ← θ - lr(t) · m̂ / (sqrt(v̂) + ε)          Adam: Kingma & Ba 2015; decoupled decay: Loshchilov & Hutter 2019

A run is a folder. `Trainer.run` goes on from the newest checkpoint in it, bit for bit as if it had never
stopped: weights, moments, place in the data and random generators are all restored. Ctrl-C (or SIGTERM)
lets the step under way finish, saves, and returns; a second Ctrl-C does not wait.

    RUN/metrics.jsonl       a line every `log_every` steps (loss, lr, speed) and one an evaluation
    RUN/checkpoints/        see `regard.train.checkpoint`
    RUN/model.safetensors   the best weights so far, where an evaluation chooses
    RUN/tensorboard/        see `regard.train.board`
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.batch import Batches
from regard.data.pack import Packs
from regard.errors import UserError
from regard.nn.block import Stack
from regard.run import WEIGHTS, make_folder, weights_of, write_weights
from regard.settings import write_whole
from regard.train import checkpoint
from regard.train.board import Board
from regard.train.config import TrainConfig
from regard.train.graph import Graph, Update
from regard.train.progress import Progress
from regard.train.schedule import rate

Objective = Callable[[Any, Any], tuple[Tensor, Tensor]]  # (model, batch) -> (summed loss, how many it sums)
Evaluate = Callable[[Any], dict[str, float]]  # model in eval mode -> "valid_loss", "bleu", …


class Trainer:
    """Trains `model` on `batches` in `folder` until `config.steps` steps are done."""

    loss: Tensor  # what the next line of the log tells: the summed loss,
    tokens: Tensor  # how many tokens it sums,
    began: float  # and `seconds` at the line before

    def __init__(
        self,
        model: nn.Module,
        batches: Batches | Packs,
        objective: Objective,
        config: TrainConfig,
        folder: Path,
        evaluate: Evaluate | None = None,
    ) -> None:
        self.model, self.batches, self.objective, self.config, self.folder = model, batches, objective, config, folder
        self.device = next(model.parameters()).device
        if config.graph and self.device.type != "cuda":
            raise UserError(f"graph = true: a CUDA graph needs an NVIDIA GPU, not {self.device}; set graph = false")
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=torch.tensor(config.lr, device=self.device) if config.graph else config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
            capturable=config.graph,
        )
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            stack.checkpoint = config.recompute
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.mean = [p.detach().clone() for p in model.parameters()] if config.ema else []  # see `TrainConfig.ema`
        self.compute = torch.compile(objective) if config.compile else objective
        self.update: Update = Graph(lambda batch: self._update([batch])) if config.graph else self._update
        self.evaluate = evaluate
        self.best: dict[str, Any] = {"step": 0, "stale": 0}  # and "value", once there is one
        self.step = 0
        self.seconds = 0.0  # spent training, over all runs
        self.metrics = folder / "metrics.jsonl"
        self.board = Board(folder / "tensorboard") if config.tensorboard else None
        self._begin_line(0.0, 0)

    def resume(self) -> bool:
        """Take up the newest checkpoint of the folder, if there is one."""
        found, passed = checkpoint.newest(self.folder / "checkpoints")
        for line in passed:
            print(f"warning: {line}", file=sys.stderr)
        if found is None:
            if passed:
                print("warning: no checkpoint is whole: starting from step 0", file=sys.stderr)
            self._keep_metrics(0)
            return False
        found.restore(self.model, self.optimizer, self.mean)
        self.batches.seek(found.state["data"])
        self.step, self.seconds, self.best = found.step, float(found.state["seconds"]), found.state["best"]
        self.scaler.load_state_dict(found.state["scaler"])
        self._begin_line(**found.state["line"])
        self._keep_metrics(self.step)
        return True

    def save(self, every: int = 1) -> Path:
        """Write a checkpoint; `every` is the rhythm of those that stay, see `checkpoint.write`."""
        line = {"loss": self.loss.item(), "tokens": int(self.tokens), "began": self.began}
        state = {"step": self.step, "seconds": self.seconds, "data": self.batches.position, "line": line}
        state |= {"best": self.best, "scaler": self.scaler.state_dict()}
        folder, keep = self.folder / "checkpoints", self.config.keep
        return checkpoint.write(folder, state, self.model, self.optimizer, keep, self.mean, every)

    def run(self) -> bool:
        """Train to the end; False if it was interrupted (a checkpoint is there then)."""
        make_folder(self.folder)
        config, stream, mark = self.config, iter(self.batches), time.monotonic()
        self.model.train()
        with interruptible() as stop, Progress(config.steps, self.step) as progress:
            while not self.finished:
                self._set_rate(rate(self.step + 1, config))
                loss, count = self.update(self._next(stream))
                self.loss, self.tokens, self.step = self.loss + loss, self.tokens + count, self.step + 1
                last, stopped = self.step == config.steps, stop()
                log = last or self.step % config.log_every == 0
                save = last or stopped or self.step % config.save_every == 0
                judge = self.evaluate is not None and (last or self._due(config.evaluate_every))
                if log or save or judge:
                    self._check_finite()
                    now = time.monotonic()
                    self.seconds, mark = self.seconds + now - mark, now
                if judge:
                    self._evaluate(progress)
                    mark = time.monotonic()  # `seconds` are those of training
                if log:
                    self._log(progress)
                if save or self.finished:
                    self.save(config.save_every)
                if stopped:
                    break
        self.model.eval()
        if self.board is not None:
            self.board.close()
        return self.finished

    @property
    def finished(self) -> bool:
        """All steps are done, or the validation figure has not become better for too long."""
        patience = self.config.patience
        return self.step >= self.config.steps or bool(patience and self.best["stale"] >= patience)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _next(self, stream: Iterator[Any]) -> Any:
        """What a step learns from: one batch where it is recorded as a graph, else `accumulate` of them."""
        if self.config.graph:
            return next(stream).to(self.device)
        return [next(stream).to(self.device) for _ in range(self.config.accumulate)]

    def _set_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def _begin_line(self, began: float, tokens: int, loss: float = 0.0) -> None:
        self.began = began
        self.tokens = torch.tensor(tokens, device=self.device)
        self.loss = torch.tensor(loss, device=self.device)

    def _update(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """One step of the optimizer; (summed loss, tokens) of its batches."""
        config, counts = self.config, [batch.tokens for batch in batches]
        count = torch.stack(counts).sum()
        total = torch.zeros((), device=self.device)
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)
        for batch in batches:
            # no cache of cast weights: it would outlive the step that a graph records
            with torch.autocast(self.device.type, dtype=half, enabled=half is not None, cache_enabled=not config.graph):
                loss, _ = self.compute(self.model, batch)
            self.scaler.scale(loss / count).backward()
            total = total + loss.detach()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        if config.nonfinite == "skip" and not bool(norm.isfinite() & total.isfinite()):
            print(f"warning: step {self.step + 1}: the gradient is not finite; its batch is left out", file=sys.stderr)
            total, count = torch.zeros_like(total), torch.zeros_like(count)
        else:
            self.scaler.step(self.optimizer)
        if config.nonfinite == "stop" and config.precision != "fp16":  # loss scaling leaves them out by itself
            total = torch.where(norm.isfinite(), total, norm)  # the weights are spoilt: `_check_finite` will tell
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not config.graph)
        if self.mean:
            with torch.no_grad():
                torch._foreach_lerp_(self.mean, list(self.model.parameters()), 1 - config.ema)
        return total, count

    def _check_finite(self) -> None:
        """Nothing that is not a number is ever logged or saved."""
        if not math.isfinite(total := self.loss.item()):
            raise UserError(
                f"loss = {total} at step {self.step}: training has diverged, and the last checkpoint is as it was. "
                f"Lower train.lr = {self.config.lr} or raise train.warmup = {self.config.warmup}, and start anew"
            )

    def _log(self, progress: Progress) -> None:
        tokens, spent = int(self.tokens), self.seconds - self.began
        if not tokens:  # nonfinite = "skip" has left out every batch since the last line
            return
        loss, speed, learning_rate = self.loss.item() / tokens, tokens / max(spent, 1e-9), rate(self.step, self.config)
        line = {
            "step": self.step,
            "loss": round(loss, 6),
            "lr": learning_rate,
            "tokens_per_second": round(speed, 1),
            "seconds": round(self.seconds, 3),
        }
        self._write(line)
        self._begin_line(self.seconds, 0)
        progress.update(self.step, loss, learning_rate, speed)

    def _evaluate(self, progress: Progress) -> None:
        """Judge the weights; keep them as model.safetensors where they are the best so far."""
        assert self.evaluate is not None
        with self.judged_weights():
            figures = self.evaluate(self.model)
            name, higher = ("bleu", True) if self.config.metric == "bleu" else ("valid_loss", False)
            if name not in figures:
                raise UserError(f"train.metric = {self.config.metric!r}: the evaluation gives only {sorted(figures)}")
            value, best = figures[name], self.best.get("value")
            if best is None or (value > best if higher else value < best):
                self.best = {"step": self.step, "stale": 0, "value": value}
                write_weights(self.folder / WEIGHTS, weights_of(self.model))
            else:
                self.best = {**self.best, "stale": self.best["stale"] + 1}
        self._write({"step": self.step, "seconds": round(self.seconds, 3), **figures})
        progress.tell(figures)

    @contextmanager
    def judged_weights(self) -> Iterator[None]:
        """Inside, the model is in eval mode and holds the running mean of its weights, where there is one."""
        own = [parameter.detach().clone() for parameter in self.model.parameters()] if self.mean else []
        self._put(self.mean)
        self.model.eval()
        try:
            yield
        finally:
            self._put(own)
            self.model.train()

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self.model.parameters(), weights, strict=False):
            parameter.copy_(weight)

    def _write(self, line: dict[str, Any]) -> None:
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            if self.board is not None:
                self.board.write(line)
        except OSError as error:
            raise UserError(
                f"{self.metrics}: cannot be written ({error.strerror}). Make room and run the same command again: "
                "it goes on from the last checkpoint"
            ) from error

    def _keep_metrics(self, step: int) -> None:
        """Forget what was logged after the checkpoint: it is about to happen again."""
        if self.metrics.exists():
            kept = [line for line in read_metrics(self.folder) if line["step"] <= step]
            write_whole(self.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that a crash has cut short is left out."""
    lines = []
    path = folder / "metrics.jsonl"
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"step", "seconds"} <= line.keys():
                lines.append(line)
    return lines


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C or SIGTERM only sets a flag; a second Ctrl-C interrupts at once.

    A signal that is ignored stays so, as Ctrl-C is in a shell script's background jobs. Only the main thread
    can listen; in another one nothing changes.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        with suppress(OSError):  # not print: its buffer may be in the middle of another line
            os.write(2, b"\nstopping after this step; Ctrl-C again to stop at once\n")

    main = threading.current_thread() is threading.main_thread()
    wanted = [
        number for number in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, ask) for number in wanted}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
