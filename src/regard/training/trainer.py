"""The training loop: batch, loss, gradient, step; nothing is lost when it is interrupted.

    θ ← θ - lr(t) · m̂ / (sqrt(v̂) + ε)          Adam: Kingma & Ba 2015; decoupled decay: Loshchilov & Hutter 2019

A run is a folder. `Trainer.resume` restores its newest checkpoint, and training continues bit for bit as if it had
never stopped: weights, moments, position in the data and random generators. Ctrl-C (or SIGTERM) lets the current step
finish, saves a checkpoint, and returns; a second Ctrl-C stops at once.

    RUN/metrics.jsonl       a line every `log_every` steps (loss, lr, speed) and one per evaluation
    RUN/checkpoints/        see `regard.training.checkpoint`
    RUN/model.safetensors   the best weights so far, where there is validation data
    RUN/tensorboard/, RUN/wandb/    see `regard.training.progress`
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.data.streams import Batches, Stream, prefetch
from regard.errors import UserError, listed
from regard.files import write_atomically
from regard.messages import localize
from regard.models.folder import WEIGHTS, cudnn_attention, weights_of, write_weights
from regard.nn.block import Stack, run_block
from regard.nn.compiled import compiled
from regard.progress import duration, rounded, running, stage
from regard.training import checkpoint
from regard.training.config import TrainConfig
from regard.training.distributed import current
from regard.training.history import METRICS, read_metrics
from regard.training.lock import hold
from regard.training.optimizer import make_optimizer, rate
from regard.training.parallel import HALF, Engine, Graph, Objective, Sharded, Update, distribute, full
from regard.training.progress import Board, Pace, Progress, WeightsAndBiases
from regard.training.snapshots import snapshot_steps, write_snapshot

Evaluate = Callable[[Any], dict[str, float]]  # model in eval mode -> "valid_loss" and other metrics by name
LEAST_SCALE = 2.0**-14  # of an fp16 loss: infinite gradients have halved it 30 times, starting from 2^16


class Metric(NamedTuple):
    """A validation metric that can choose the best weights (`train.metric`)."""

    key: str  # in metrics.jsonl
    higher: bool = False  # whether higher is better


LOSS = Metric("valid_loss")


class Trainer:
    """Trains `model` on `batches` in `folder` until `config.steps` steps are done."""

    loss: Tensor  # since the last line of the log: the summed loss,
    tokens: Tensor  # the number of tokens (or whatever `unit` says) that it is a sum over,
    skipped: Tensor  # the number of skipped steps
    began: float  # `seconds` at that line
    advise: Callable[[float], str] | None = None  # from the estimated seconds of a run to a line about them, or none
    watch: Callable[[int, dict[str, float]], None] | None = (
        None  # of step and metrics, after each evaluation; may raise
    )

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
                "cuda_graph = true: a recorded step cannot communicate with other processes; set cuda_graph = false"
            )
        self.step = self.started = 0  # steps done, and those at the start of this process
        self.engine = distribute(model, objective, config, self.device, self.workers)
        if self.engine.part is None:
            batches.shard(self.workers.rank, self.workers.world)
        self._seed_rank()
        self.optimizer = make_optimizer(model, config, self.device)
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            stack.checkpoint, stack.is_recorded = config.activation_checkpointing, config.cuda_graph
            stack.compute = compiled(run_block) if config.compile else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.mean = [p.detach().clone() for p in model.parameters()] if config.ema else []  # `TrainConfig.ema`
        self.update: Update = Graph(self._update, model) if config.cuda_graph else self._update
        self.evaluate, self.metric, self.unit = evaluate, metric, unit
        self.best: dict[str, Any] = {"step": 0, "stale": 0}  # and "value", once there is one
        self.seconds = 0.0  # spent training, over all runs
        self.metrics = folder / METRICS
        self.boards: list[Board | WeightsAndBiases] = []
        if self.workers.leads:
            self.boards += [Board(folder / "tensorboard")] if config.tensorboard else []
            self.boards += [WeightsAndBiases(folder, config)] if config.wandb else []
        self._begin_line(0.0, 0)

    def resume(self) -> bool:
        """Restore the newest checkpoint of the folder, if there is one."""
        with self.workers.leading(hold(self.folder)):
            newest = self.workers.on_lead(self._find_checkpoint)
        if newest is None:
            return False
        state, self.step = newest.state, newest.step
        self.started = newest.step
        self._seed_rank()
        newest.restore(self.model, self.optimizer, self.mean)
        self.batches.seek(state["data"])
        self.seconds, self.best = float(state["seconds"]), state["best"]
        self.scaler.load_state_dict(state["scaler"])
        self._begin_line(**state["line"])
        return True

    def _find_checkpoint(self) -> checkpoint.Checkpoint | None:
        """The newest checkpoint; what was logged after it is removed, since these steps will be repeated."""
        newest, damaged = checkpoint.newest(self.folder / "checkpoints")
        for line in damaged:
            print(localize(f"warning: {line}"), file=sys.stderr)
        if newest is None and damaged:
            print(localize("warning: no checkpoint is complete: starting from step 0"), file=sys.stderr)
        now, before = self._batches_per_step(), None if newest is None else newest.state.get("batches")
        if before not in (None, now):
            line = f"note: a step now uses {now} batches, not {before}: see train.gradient_accumulation"
            print(localize(line), file=sys.stderr)
        if self.metrics.exists():
            step = 0 if newest is None else newest.step
            kept = [line for line in read_metrics(self.folder) if line["step"] <= step]
            write_atomically(self.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return newest

    def _batches_per_step(self) -> int:
        ranks = 1 if self.engine.part is not None else self.workers.world  # that have batches of their own
        return ranks * self.config.gradient_accumulation

    def _seed_rank(self) -> None:
        """Dropout differs between ranks; rank 0 keeps the generator that initialized the weights."""
        if not self.workers.leads:
            torch.manual_seed(random.Random(f"{self.config.seed} {self.workers.rank} {self.step}").getrandbits(63))

    def save(self, every: int = 1) -> Path:
        """Save a checkpoint; those at multiples of `every` are kept, see `checkpoint.write`."""
        line = {"loss": self.loss.item(), "tokens": int(self.tokens), "began": self.began, "skipped": int(self.skipped)}
        state = {"step": self.step, "seconds": self.seconds, "data": self.batches.position, "line": line}
        state |= {"best": self.best, "scaler": self.scaler.state_dict(), "batches": self._batches_per_step()}
        folder, keep = self.folder / "checkpoints", self.config.keep
        return checkpoint.write(folder, state, self.model, self.optimizer, keep, self.mean, every)

    def _snapshot(self) -> None:
        with self.engine.evaluation_model(self.mean) as model:
            self.workers.on_lead(lambda: write_snapshot(self.folder, self.step, weights_of(model)))

    def run(self) -> bool:
        """Train to the end; False if it was interrupted (then there is a checkpoint)."""
        config, workers, pace = self.config, self.workers, self._pace()
        snapshots = snapshot_steps(config.snapshots, config.steps)
        self.model.train()
        with (
            workers.leading(hold(self.folder)),
            closing(self._stream()) as stream,
            interruptible(quiet=not workers.leads) as interrupted,
            workers.agreement(interrupted) as stop,
            closing(Progress(config.steps, self.step, workers.leads, self.unit)) as progress,
            running(progress),
            ExitStack() as boards,
        ):
            for board in self.boards:
                boards.callback(board.close)
                if not self.finished:
                    board.open()
            if self.step == 0 and snapshots:
                self._snapshot()
            mark = time.monotonic()
            while not self.finished:
                self._take_step(stream)
                progress.advance(self.step)
                if (seconds := pace.step()) is not None and workers.leads:
                    progress.note(self._estimate(seconds))
                last, stopped = self.step == config.steps, stop()
                log = last or self.step % config.log_every == 0
                snapshot = self.step in snapshots
                save = last or stopped or self.step % config.save_every == 0
                due = config.evaluation_interval > 0 and self.step % config.evaluation_interval == 0
                evaluate = self.evaluate is not None and (last or due)
                if log or save or evaluate or snapshot:
                    self._check_finite()
                    now = time.monotonic()
                    self.seconds, mark = self.seconds + now - mark, now
                if evaluate:
                    with self.engine.evaluation_model(self.mean) as model, stage("evaluating"):
                        metrics, self.best = workers.on_lead(partial(self._evaluate, model))
                    progress.show_metrics(metrics)
                    mark = time.monotonic()  # `seconds` count training only
                if log:
                    self._log(progress)
                if snapshot:
                    self._snapshot()
                if save or self.finished:
                    self.save(config.save_every)
                if evaluate and not stopped and self.watch is not None:
                    self.watch(self.step, metrics)
                if evaluate or save:
                    pace.restart()
                if stopped:
                    break
        if self.finished and isinstance(self.engine, Sharded):  # the rest is done by rank 0 alone
            self.model, self.mean = self.engine.fill(self.mean), []
            self.engine = Engine(self.model, self.objective)
        self.model.eval()
        return self.finished

    def measure(self) -> float:
        """Seconds per step, from a few steps that are neither logged nor saved; the trainer is discarded then."""
        pace, seconds = self._pace(), None
        self.model.train()
        with closing(self._stream()) as stream, stage("measuring a few steps"):
            while seconds is None:
                self._take_step(stream)
                seconds = pace.step()
        return seconds

    @property
    def epochs(self) -> float:
        """How often all steps read the training data; known after the first step."""
        return self.config.steps * self._batches_per_step() / self.batches.per_epoch

    def _stream(self) -> Any:
        if self.config.pack:  # packs are ready
            return iter(self.batches)
        return prefetch(self.batches, self.device.type == "cuda")

    def _pace(self) -> Pace:
        on_gpu, slow_start = self.device.type == "cuda", self.config.compile or self.config.cuda_graph
        return Pace(10 if slow_start else 1, partial(torch.cuda.synchronize, self.device) if on_gpu else lambda: None)

    def _take_step(self, stream: Iterator[Any]) -> None:
        for group in self.optimizer.param_groups:  # of a CUDA graph, a tensor that it reads
            lr, value = group["lr"], rate(self.step + 1, self.config)
            group["lr"] = lr.fill_(value) if isinstance(lr, Tensor) else value
        batches = [self.engine.take(next(stream).to(self.device)) for _ in range(self.config.gradient_accumulation)]
        with cudnn_attention(allowed=not isinstance(self.batches, Batches)):
            loss, count = self.update(batches)
        self.loss, self.tokens, self.step = self.loss + loss, self.tokens + count, self.step + 1

    def _estimate(self, seconds: float) -> str:
        """The line about the time that the remaining steps take."""
        steps, left = self.config.steps, self.config.steps - self.step
        what = f"{steps:,} steps ({rounded(self.epochs)} epochs)"
        rest = f", the remaining {left:,}" if self.started else ""
        line = f"{what}{rest}: about {duration(left * seconds)} on this machine, {seconds:.2g} s per step"
        advice = self.advise(left * seconds) if self.advise is not None else ""
        return f"{line}\n{advice}" if advice else line

    @property
    def finished(self) -> bool:
        """All steps are done, or the validation metric has not improved for `patience` evaluations."""
        patience = self.config.patience
        return self.step >= self.config.steps or bool(patience and self.best["stale"] >= patience)

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
                # no cache of cast weights: it would outlive the recorded step
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
        finite = norm.isfinite() & total.isfinite() if skip else norm.isfinite()
        if not skip or bool(finite):
            self.scaler.step(self.optimizer)  # with a loss scale, skipped unless finite
        elif self.workers.leads:
            line = f"warning: step {self.step + 1}: the gradient is not finite; its batch is skipped"
            print(localize(line), file=sys.stderr)
        if skip or scaled:
            total, count = torch.where(finite, total, 0.0), torch.where(finite, count, 0)
            self.skipped = self.skipped + ~finite
        else:
            total = torch.where(finite, total, norm)  # the weights are lost: `_check_finite` raises
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.mean:
            with torch.no_grad():
                torch._foreach_lerp_(self.mean, list(self.model.parameters()), 1 - config.ema)
        return total, count

    def _check_finite(self) -> None:
        """A loss that is not finite is never logged, and its weights are never saved."""
        total, scale = self.loss.item(), self.scaler.get_scale()  # 1 if not fp16
        if math.isfinite(total) and scale > LEAST_SCALE:
            return
        what = f"loss scale = {scale:g}, after infinite gradients," if math.isfinite(total) else f"loss = {total}"
        raise UserError(
            f"{what} at step {self.step}: training has diverged; the last checkpoint is unchanged. Lower "
            f"train.lr = {self.config.lr} or raise train.warmup = {self.config.warmup_steps}, and start again"
        )

    def _log(self, progress: Progress) -> None:
        tokens, skipped, spent = int(self.tokens), int(self.skipped), self.seconds - self.began
        line: dict[str, Any] = {"step": self.step}
        if skipped:
            line["skipped"] = skipped
        if skipped and self.scaler.is_enabled():
            line["scale"] = scale = self.scaler.get_scale()
            if self.workers.leads:
                what = f"{skipped} skipped since the last line: infinite gradients; the loss scale is now {scale:g}"
                print(localize(f"note: step {self.step}: {what}"), file=sys.stderr)
        if not tokens:  # every batch since the last line was skipped
            return
        loss, speed, learning_rate = self.loss.item() / tokens, tokens / max(spent, 1e-9), rate(self.step, self.config)
        line |= {"loss": round(loss, 6), "lr": learning_rate, "tokens_per_second": round(speed, 1)}
        line["seconds"] = round(self.seconds, 3)
        self.workers.on_lead(lambda: self._write(line))
        self._begin_line(self.seconds, 0)
        progress.update(loss, learning_rate, speed)

    def _evaluate(self, model: nn.Module) -> tuple[dict[str, float], dict[str, Any]]:
        """The metrics of `model` and what is best now; its weights are saved if they are the best so far."""
        assert self.evaluate is not None
        metrics = self.evaluate(model)
        if self.metric.key not in metrics:
            raise UserError(
                f"train.metric = {self.config.metric!r}: the evaluation gives only {listed(sorted(metrics))}"
            )
        value, best = metrics[self.metric.key], self.best.get("value")
        better = best is None or (value > best if self.metric.higher else value < best)
        if better:
            write_weights(self.folder / WEIGHTS, weights_of(model))
        self._write({"step": self.step, "seconds": round(self.seconds, 3), **metrics})
        newest = {"step": self.step, "stale": 0, "value": value}
        return metrics, newest if better else {**self.best, "stale": self.best["stale"] + 1}

    def _write(self, line: dict[str, Any]) -> None:
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            for board in self.boards:
                board.write(line)
        except OSError as error:
            raise UserError(
                f"{self.metrics}: cannot be written ({error.strerror}). Free some space and run the same command "
                "again: it resumes from the last checkpoint"
            ) from error


_blocks: list[Callable[[], bool]] = []  # the outermost `interruptible` of the main thread


@contextmanager
def interruptible(quiet: bool = False) -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C or SIGTERM only sets a flag; a second one interrupts at once.

    A signal that is ignored stays ignored, as Ctrl-C in the background jobs of a shell script. Signals can only be
    handled in the main thread; in another one nothing changes. Of two blocks, one inside the other, both see the flag.
    """
    requested = False

    def request(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        if quiet:
            return
        with suppress(OSError):  # not print: its buffer may be in the middle of another line
            os.write(2, b"\nstopping after this step; Ctrl-C again to stop at once\n")

    main = threading.current_thread() is threading.main_thread()
    if main and _blocks:
        yield _blocks[0]
        return
    handled = [
        number for number in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, request) for number in handled}
    if main:
        _blocks.append(lambda: requested)
    try:
        yield lambda: requested
    finally:
        if main:
            _blocks.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
