"""One tool in training: the complete step, in real target tokens/s.

A step is: forward pass, cross-entropy with label smoothing 0.1 over the vocabulary, backward pass, gradient
clipping at norm 1, Adam. Padding is computed but not counted.

    Padded   another library's model. Batches are rectangles of similar lengths, ready on the device before the clock
             starts; the optimizer is the same fused Adam as ours. For a compiled model the axes are marked as
             dynamic, so that it is compiled once and not for each shape (lengths are not rounded up: that would add
             padding), and it is warmed up on every batch that is timed.
    Ours     the step of `regard.training.trainer.Trainer`, as a recipe would set it up. The time to make a batch
             counts. With `pack` on a GPU a sample is a complete epoch, so that packing is counted too; on a CPU an
             epoch takes minutes and is packed in a fraction of a second, which is measured separately.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import peer_models
import torch
import torch.nn.functional as F
from sentences import Corpus, even_choice, target_tokens
from torch import Tensor, nn

from regard.data.batch import PairBatch
from regard.data.pack import Packs
from regard.data.streams import Batches
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.training.config import TrainConfig
from regard.training.objective import translation
from regard.training.trainer import Trainer

SMOOTHING, CLIP, RATE, BETAS, SEED = 0.1, 1.0, 1e-4, (0.9, 0.98), 1


@dataclass(frozen=True)
class Task:
    """The input of every tool."""

    config: ModelConfig
    corpus: Corpus
    budget: int  # tokens of a batch: rows x longest side, padding included
    pack: int  # tokens of a packed row
    steps: int  # of a sample, in padded batches
    device: str
    folder: Path  # of our Trainer, which saves nothing before a checkpoint

    @property
    def half(self) -> bool:
        return self.device == "cuda"  # bf16 there, fp32 on a CPU

    def rows(self) -> list[Tensor]:
        """The pairs in the padded batches of a sample, the same for every tool."""
        batches = Batches(self.corpus.pairs, self.budget, SEED)
        return even_choice(batches.plan(0), self.corpus.pairs, self.steps)


@dataclass(frozen=True)
class Sample:
    """Real target tokens, and the seconds they took."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Learner(Protocol):
    parameters: int  # that are trained
    filled: float  # fraction of the target positions that are real

    def warm_up(self) -> None: ...

    def run(self) -> Sample: ...


class Padded:
    """A peer's model in a plain training loop."""

    def __init__(self, name: str, task: Task, compiled: bool) -> None:
        torch.manual_seed(SEED)
        self.task, self.compiled = task, compiled
        self.model = peer_models.MODELS[name](task.config).to(task.device).train()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.parameters = sum(parameter.numel() for parameter in trained)
        self.optimizer = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, eps=1e-9, weight_decay=0.0, fused=True)
        self.loss = torch.compile(self._loss) if compiled else self._loss
        data, rows = task.corpus.pairs, task.rows()
        self.batches = [with_mask(data.batch(some)).to(torch.device(task.device)) for some in rows]
        self.tokens = sum(target_tokens(data, some) for some in rows)
        self.filled = self.tokens / sum(batch.target.numel() for batch in self.batches)

    def _loss(self, batch: PairBatch) -> Tensor:
        logits = self.model(batch.source, batch.source_is_real, batch.target)
        return F.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=PairBatch.IGNORE, label_smoothing=SMOOTHING
        )

    def step(self, batch: PairBatch) -> None:
        with torch.autocast(self.task.device, dtype=torch.bfloat16, enabled=self.task.half):
            loss = self.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self) -> None:
        """Run every shape once if that matters, so that nothing is compiled or allocated while timing."""
        batches = self.batches if self.compiled or self.task.device == "cuda" else self.batches[:1]
        if self.compiled:  # axes of equal length would be identified: start where they differ
            batches = sorted(batches, key=lambda batch: batch.source.shape[1] == batch.target.shape[1])
            for tensor in (x for batch in batches for x in vars(batch).values()):
                torch._dynamo.maybe_mark_dynamic(tensor, [0, 1])
        for batch in batches:
            self.step(batch)
        clock(self.task.device)

    def run(self) -> Sample:
        begin = clock(self.task.device)
        for batch in self.batches:
            self.step(batch)
        return Sample(self.tokens, clock(self.task.device) - begin)


class Ours:
    """Our trainer's own step; `settings` are fields of [train] in a recipe."""

    def __init__(self, task: Task, settings: dict[str, Any]) -> None:
        torch.manual_seed(SEED)
        self.task, data = task, task.corpus.pairs
        config = TrainConfig(
            batch_tokens=task.budget, lr=RATE, label_smoothing=SMOOTHING, clip=CLIP, betas=BETAS, seed=SEED,
            precision="bf16" if task.half else "fp32", **settings,
        )  # fmt: skip
        device = torch.device(task.device)
        model = build(task.config).to(device).train()
        self.stream: Batches | Packs
        if config.pack:
            self.stream = Packs(data, config.batch_tokens // config.pack, config.pack, config.seed, device)
        else:
            self.stream = Batches(data, config.batch_tokens, config.seed)
        loss = {name: getattr(config, name) for name in ("label_smoothing", "r_drop", "loss_chunk")}
        self.trainer = Trainer(model, self.stream, partial(translation, **loss), config, task.folder)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.packed = iter(self.stream) if config.pack else None
        self.rows = [] if config.pack else task.rows()
        self.layout_seconds = 0.0

    def step(self, batch: Any) -> Tensor:
        """The number of target tokens, on the device."""
        given = batch.to(self.trainer.device)
        _, count = self.trainer.update([given])
        return count

    def warm_up(self) -> None:
        begin = time.perf_counter()
        first = next(self._batches())
        self.layout_seconds = time.perf_counter() - begin
        self.filled = int(first.tokens) / first.target.numel()
        for _ in range(6 if self.task.device == "cuda" else 1):  # a graph is captured at the fourth step
            self.step(first)
        clock(self.task.device)

    def run(self) -> Sample:
        tokens, places = torch.zeros((), dtype=torch.long, device=self.task.device), 0
        begin = clock(self.task.device)
        for batch in self._batches():
            tokens += self.step(batch)
            places += batch.target.numel()
        learned, seconds = int(tokens), clock(self.task.device) - begin
        self.filled = learned / places
        return Sample(learned, seconds)

    def _batches(self) -> Iterator[Any]:
        """Those of one sample: the padded ones of all tools, or the next ones of the packed stream."""
        if self.packed is None:
            yield from (self.task.corpus.pairs.batch(rows) for rows in self.rows)
            return
        epoch, steps = self.stream.position["epoch"], 0
        while steps < self.task.steps if self.task.device == "cpu" else self.stream.position["epoch"] == epoch:
            yield next(self.packed)
            steps += 1


def with_mask(batch: PairBatch) -> PairBatch:
    """The batch, always with a source mask, so that a compiled model sees one kind of batch."""
    is_real = torch.ones_like(batch.source, dtype=torch.bool) if batch.source_is_real is None else batch.source_is_real
    return replace(batch, source_is_real=is_real)


def clock(device: str) -> float:
    """The current time after the device has finished."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def padded_ids(task: Task) -> Sequence[tuple[list[list[int]], list[list[int]]]]:
    """The padded batches of a sample as plain lists, for a tool in another process: targets are <s> … </s>."""
    data = task.corpus.pairs
    return [(ids_of(data.sources, rows), ids_of(data.targets, rows)) for rows in task.rows()]


def ids_of(side: Any, rows: Tensor) -> list[list[int]]:
    ids, is_real = side.pad(rows)
    return [line[real].tolist() for line, real in zip(ids, is_real, strict=True)]
