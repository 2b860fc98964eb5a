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
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.batch import Stream
from regard.data.prefetch import prefetch
from regard.errors import UserError
from regard.files import write_atomically
from regard.models.folder import WEIGHTS, weights_of, write_weights
from regard.nn.block import Stack, run_block
from regard.train import checkpoint
from regard.train.board import Board
from regard.train.config import TrainConfig
from regard.train.cuda_graph import Graph, Update
from regard.train.distributed import current
from regard.train.interrupt import interruptible
from regard.train.lock import hold
from regard.train.metric import LOSS, Metric
from regard.train.optimizer import make_optimizer
from regard.train.parallel import HALF, Alone, Objective, Sharded, distribute, full
from regard.train.progress import Progress
from regard.train.schedule import rate

Evaluate = Callable[[Any], dict[str, float]]  # model in eval mode -> "valid_loss" and other figures by name
LEAST_SCALE = 2.0**-14  # of an fp16 loss: infinite gradients have halved it 30 times, and it began at 2^16


class Trainer:
    """Trains `model` on `batches` in `folder` until `config.steps` steps are done."""

    loss: Tensor  # what the next line of the log tells: the summed loss,
    tokens: Tensor  # how many tokens it sums, or whatever `unit` says,
    skipped: Tensor  # how many steps were left out,
    began: float  # and `seconds` at the line before

    def __init__(
        self,
        model: nn.Module,
        batches: Stream,
        objective: Objective,
        config: TrainConfig,
        folder: Path,
        evaluate: Evaluate | None = None,
        metric: Metric = LOSS,
        device: torch.device | None = None,
        unit: str = "tokens",
    ) -> None:
        self.model, self.batches, self.objective, self.config, self.folder = model, batches, objective, config, folder
        self.workers, self.device = current(), device or next(model.parameters()).device
        if config.cuda_graph and self.device.type != "cuda":
            raise UserError(
                f"cuda_graph = true: a CUDA graph needs an NVIDIA GPU, not {self.device}; set cuda_graph = false"
            )
        if config.cuda_graph and self.workers.world > 1:
            raise UserError(
                "cuda_graph = true: a recorded step cannot wait for other processes; set cuda_graph = false"
            )
        self.step = 0
        self.engine = distribute(model, objective, config, self.device, self.workers)
        batches.share(self.workers.rank, self.workers.world)
        self._draw_apart()
        self.optimizer = make_optimizer(model, config, self.device)
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            stack.checkpoint = config.activation_checkpointing
            stack.compute = torch.compile(run_block) if config.compile else run_block
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.mean = [p.detach().clone() for p in model.parameters()] if config.ema else []  # see `TrainConfig.ema`
        self.update: Update = Graph(lambda batch: self._update([batch]), model) if config.cuda_graph else self._update
        self.evaluate, self.metric, self.unit = evaluate, metric, unit
        self.best: dict[str, Any] = {"step": 0, "stale": 0}  # and "value", once there is one
        self.seconds = 0.0  # spent training, over all runs
        self.metrics = folder / "metrics.jsonl"
        self.board = Board(folder / "tensorboard") if config.tensorboard and self.workers.leads else None
        self._begin_line(0.0, 0)

    def resume(self) -> bool:
        """Take up the newest checkpoint of the folder, if there is one."""
        with self.workers.leading(hold(self.folder)):
            found = self.workers.on_lead(self._find)
        if found is None:
            return False
        state, self.step = found.state, found.step
        self._draw_apart()
        found.restore(self.model, self.optimizer, self.mean, self.workers.rank)
        self.batches.seek(state["data"])
        self.seconds, self.best = float(state["seconds"]), state["best"]
        self.scaler.load_state_dict(state["scaler"])
        self._begin_line(**state["line"])
        return True

    def _find(self) -> checkpoint.Checkpoint | None:
        """The newest checkpoint; what was logged after it is forgotten, since it is about to happen again."""
        found, passed = checkpoint.newest(self.folder / "checkpoints")
        for line in passed:
            print(f"warning: {line}", file=sys.stderr)
        if found is None and passed:
            print("warning: no checkpoint is whole: starting from step 0", file=sys.stderr)
        now, before = self._batches_a_step(), None if found is None else found.state.get("batches")
        if before not in (None, now):
            print(
                f"note: a step now learns from {now} batches, not {before}: see train.gradient_accumulation",
                file=sys.stderr,
            )
        if self.metrics.exists():
            step = 0 if found is None else found.step
            kept = [line for line in read_metrics(self.folder) if line["step"] <= step]
            write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return found

    def _batches_a_step(self) -> int:
        return self.workers.world * self.config.gradient_accumulation

    def _draw_apart(self) -> None:
        """Dropout on one rank is not that on another; rank 0 goes on with the generator that made the weights."""
        if not self.workers.leads:
            torch.manual_seed(random.Random(f"{self.config.seed} {self.workers.rank} {self.step}").getrandbits(63))

    def save(self, every: int = 1) -> Path:
        """Write a checkpoint; `every` is the rhythm of those that stay, see `checkpoint.write`."""
        line = {"loss": self.loss.item(), "tokens": int(self.tokens), "began": self.began, "skipped": int(self.skipped)}
        state = {"step": self.step, "seconds": self.seconds, "data": self.batches.position, "line": line}
        state |= {"best": self.best, "scaler": self.scaler.state_dict(), "batches": self._batches_a_step()}
        folder, keep = self.folder / "checkpoints", self.config.keep
        return checkpoint.write(folder, state, self.model, self.optimizer, keep, self.mean, every)

    def run(self) -> bool:
        """Train to the end; False if it was interrupted (a checkpoint is there then)."""
        config, workers, mark = self.config, self.workers, time.monotonic()
        self.model.train()
        with (
            workers.leading(hold(self.folder)),
            closing(self._stream()) as stream,
            interruptible(quiet=not workers.leads) as asked,
            workers.agreement(asked) as stop,
            Progress(config.steps, self.step, show=workers.leads, unit=self.unit) as progress,
        ):
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
        if self.finished and isinstance(self.engine, Sharded):  # what is left to do is rank 0's alone
            self.model, self.mean = self.engine.fill(self.mean), []
            self.engine = Alone(self.model, self.objective)
        self.model.eval()
        if self.board is not None:
            self.board.close()
        return self.finished

    def _stream(self) -> Generator[Any]:
        """The batches, made ready ahead; those of a packed epoch lie ready as they are."""
        return iter(self.batches) if self.config.pack else prefetch(self.batches, self.device.type == "cuda")

    @property
    def finished(self) -> bool:
        """All steps are done, or the validation figure has not become better for too long."""
        patience = self.config.patience
        return self.step >= self.config.steps or bool(patience and self.best["stale"] >= patience)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _next(self, stream: Iterator[Any]) -> Any:
        """What a step learns from: one batch where it is recorded as a graph, else `gradient_accumulation` of them."""
        if self.config.cuda_graph:
            return next(stream).to(self.device)
        return [next(stream).to(self.device) for _ in range(self.config.gradient_accumulation)]

    def _set_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def _begin_line(self, began: float, tokens: int, loss: float = 0.0, skipped: int = 0) -> None:
        self.began = began
        self.tokens, self.skipped = torch.tensor([tokens, skipped], device=self.device)
        self.loss = torch.tensor(loss, device=self.device)

    def _update(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """One step of the optimizer; (summed loss, tokens) of its batches, on all ranks."""
        config, world, half = self.config, self.workers.world, HALF.get(self.config.precision)
        count = self.workers.total(torch.stack([batch.tokens for batch in batches]).sum())
        total = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, 1):
            with self.engine.exchange(last=number == len(batches)):
                # no cache of cast weights: it would outlive the step that a graph records
                with torch.autocast(
                    self.device.type, half, enabled=half is not None, cache_enabled=not config.cuda_graph
                ):
                    loss, _ = self.engine.compute(batch)
                self.scaler.scale(loss / (count if world == 1 else count / world)).backward()
            total = total + loss.detach()
        total = self.workers.total(total)
        self.scaler.unscale_(self.optimizer)
        norm = full(nn.utils.clip_grad_norm_(self.model.parameters(), config.clip))
        skip, scaled = config.nonfinite == "skip", self.scaler.is_enabled()
        sound = norm.isfinite() & total.isfinite() if skip else norm.isfinite()
        if not skip or bool(sound):
            self.scaler.step(self.optimizer)  # with a loss scale, left out unless sound
        elif self.workers.leads:
            print(f"warning: step {self.step + 1}: the gradient is not finite; its batch is left out", file=sys.stderr)
        if skip or scaled:
            total, count = torch.where(sound, total, 0.0), torch.where(sound, count, 0)
            self.skipped = self.skipped + ~sound
        else:
            total = torch.where(sound, total, norm)  # the weights are spoilt: `_check_finite` will tell
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.mean:
            with torch.no_grad():
                torch._foreach_lerp_(self.mean, list(self.model.parameters()), 1 - config.ema)
        return total, count

    def _check_finite(self) -> None:
        """Nothing that is not a number is ever logged or saved."""
        total, scale = self.loss.item(), self.scaler.get_scale()  # 1 if not fp16
        if math.isfinite(total) and scale > LEAST_SCALE:
            return
        told = f"loss scale = {scale:g}, for infinite gradients," if math.isfinite(total) else f"loss = {total}"
        raise UserError(
            f"{told} at step {self.step}: training has diverged, and the last checkpoint is as it was. "
            f"Lower train.lr = {self.config.lr} or raise train.warmup = {self.config.warmup}, and start anew"
        )

    def _log(self, progress: Progress) -> None:
        tokens, skipped, spent = int(self.tokens), int(self.skipped), self.seconds - self.began
        line: dict[str, Any] = {"step": self.step}
        if skipped:
            line["skipped"] = skipped
        if skipped and self.scaler.is_enabled():
            line["scale"] = scale = self.scaler.get_scale()
            if self.workers.leads:
                told = f"{skipped} left out since the last line: infinite gradients; the loss scale is now {scale:g}"
                print(f"note: step {self.step}: {told}", file=sys.stderr)
        if not tokens:  # every batch since the last line was left out
            return
        loss, speed, learning_rate = self.loss.item() / tokens, tokens / max(spent, 1e-9), rate(self.step, self.config)
        line |= {
            "loss": round(loss, 6),
            "lr": learning_rate,
            "tokens_per_second": round(speed, 1),
            "seconds": round(self.seconds, 3),
        }
        self.workers.on_lead(lambda: self._write(line))
        self._begin_line(self.seconds, 0)
        progress.update(self.step, loss, learning_rate, speed)

    def _evaluate(self, progress: Progress) -> None:
        """Judge the weights; keep them as model.safetensors where they are the best so far."""
        with self.judged_weights() as model:
            figures, self.best = self.workers.on_lead(lambda: self._judge(model))
        progress.tell(figures)

    def _judge(self, model: nn.Module) -> tuple[dict[str, float], dict[str, Any]]:
        assert self.evaluate is not None
        figures = self.evaluate(model)
        if self.metric.figure not in figures:
            raise UserError(f"train.metric = {self.config.metric!r}: the evaluation gives only {sorted(figures)}")
        value, best = figures[self.metric.figure], self.best.get("value")
        better = best is None or self.metric.better(value, best)
        if better:
            write_weights(self.folder / WEIGHTS, weights_of(model))
        self._write({"step": self.step, "seconds": round(self.seconds, 3), **figures})
        found = {"step": self.step, "stale": 0, "value": value}
        return figures, found if better else {**self.best, "stale": self.best["stale"] + 1}

    @contextmanager
    def judged_weights(self) -> Iterator[nn.Module]:
        """Inside, a model in eval mode with the running mean of the weights, where there is one; for rank 0 to use."""
        with self.engine.whole(self.mean) as model:
            model.eval()
            try:
                yield model
            finally:
                model.train()

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
