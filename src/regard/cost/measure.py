"""The real cost of a forward and a backward pass on this machine, to set beside the formula.

    time      the median of a few passes after a first one that is not counted
    memory    the peak of the bytes in tensors: weights, gradients and Adam's moments, which exist before the pass, and
              what it allocates. On a GPU the allocator keeps account of it; on a CPU one more pass runs under PyTorch's
              profiler, which records every allocation.

A sweep to long sequences would sooner or later take hours or more memory than there is. A `Budget` bounds it: a pass
that is expected to exceed the time or the memory left is not started. The time of a pass is expected from the one
before and the ratio of the FLOPs; that of the first from the speed of one large matmul, which no model exceeds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.cost.total import Cost
from regard.models.config import ModelConfig
from regard.models.folder import cudnn_attention
from regard.models.transformer import build
from regard.terminal import size

PASSES, LEAST = 7, 0.3  # at most so many passes; fewer once they have taken LEAST seconds together
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Measurement:
    """A forward and a backward pass."""

    seconds: float
    peak: int  # bytes

    def to_dict(self) -> dict[str, float]:
        return {"seconds": self.seconds, "peak": self.peak}


class Budget:
    """Seconds for all measurements together, and bytes for each of them."""

    def __init__(self, device: torch.device, seconds: float = 60.0, memory: int | None = None) -> None:
        self.device, self.seconds = device, seconds
        self.memory = int(0.8 * free_memory(device)) if memory is None else memory
        self.fastest = 3 * matmul_pace(device)  # a pass that is not counted, one that is, one for the memory
        self.began = time.perf_counter()
        self.paces: dict[str, float] = {}  # seconds per FLOP that the last measurement of each kind took in all

    def measure(self, kind: str, operations: int, memory: float, run: Callable[[], Measurement]) -> Measurement | str:
        """What `run` measures, passes with this many FLOPs and bytes; or why it is not started, or has no result."""
        if refusal := self._refusal(operations, memory, self.paces.get(kind)):
            return refusal
        began = time.perf_counter()
        try:
            with cudnn_attention():
                return run()
        except torch.OutOfMemoryError:
            return "the memory of the device is exhausted"
        finally:
            self.paces[kind] = (time.perf_counter() - began) / operations

    def _refusal(self, operations: int, memory: float, pace: float | None) -> str:
        """Why passes are not started, empty if they fit; without a `pace`, by that of a matmul."""
        if memory > self.memory:
            return f"it needs {size(memory)} of memory, and {size(self.memory)} are allowed (--max-memory)"
        needed = operations * (self.fastest if pace is None else pace)
        left = self.seconds - (time.perf_counter() - self.began)
        if needed > left:
            return (
                f"it would take {needed:.1f} s, and {max(left, 0):.1f} s of {self.seconds:g} are left (--max-seconds)"
            )
        return ""


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        kibibytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable"))
        return 1024 * int(kibibytes)
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 8 * 2**30


def matmul_pace(device: torch.device) -> float:
    """Seconds per FLOP of one matmul."""
    width = 768
    x = torch.randn(width, width, device=device)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        x @ x
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds) / (2 * width**3)


def measure_model(config: ModelConfig, found: Cost, device: torch.device) -> Measurement:
    """Training of this model on the batch of `found`, whose dtype it has: 16 bits by autocast."""
    before = _allocated(device)
    torch.manual_seed(0)
    dtype = DTYPES[found.dtype]
    model = build(config).to(device, torch.float64 if found.dtype == "fp64" else torch.float32)
    inputs = random_inputs(config, found, device, next(model.parameters()).dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def run() -> None:
        with torch.autocast(device.type, dtype, enabled=found.dtype in ("bf16", "fp16")):
            loss_of(config, model(*inputs)).backward()

    run()
    optimizer.step()  # makes Adam's moments
    state = [x for values in optimizer.state.values() for x in values.values() if isinstance(x, Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    kept = sum(x.nbytes for x in (*model.parameters(), *model.buffers(), *gradients, *state, *inputs))
    return _measured(run, device, before, kept)


def measure_layer(layer: nn.Module, batch: int, n: int, dim: int, device: torch.device, dtype: str) -> Measurement:
    """A layer on [batch, n, dim]; its memory is without its parameters and their gradients."""
    kind = torch.float64 if dtype == "fp64" else torch.float32
    torch.manual_seed(0)
    layer = layer.to(device, kind)
    x = torch.randn(batch, n, dim, device=device, dtype=kind, requires_grad=True)
    gradient = torch.randn(batch, n, dim, device=device, dtype=kind)

    def run() -> None:
        with torch.autocast(device.type, DTYPES[dtype], enabled=dtype in ("bf16", "fp16")):
            output: Tensor = layer(x)
        output.backward(gradient.to(output.dtype))

    run()
    return _measured(run, device, _allocated(device), 0)


def _measured(run: Callable[[], None], device: torch.device, before: int, kept: int) -> Measurement:
    """`run` has run once, so that workspaces and gradients exist; `before` and `kept`: bytes before it, and of what it
    keeps."""
    seconds: list[float] = []
    while len(seconds) < PASSES and sum(seconds) < LEAST:
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return Measurement(statistics.median(seconds), _peak(run, device, before, kept))


def _peak(run: Callable[[], None], device: torch.device, before: int, kept: int) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print two lines
    gc.disable()  # older garbage is not part of this pass
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    finally:
        gc.enable()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return kept + most


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()  # what earlier measurements left
    return torch.cuda.memory_allocated(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_inputs(
    config: ModelConfig, found: Cost, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Random inputs of the sizes of `found`."""
    numbers = partial(torch.randn, device=device, dtype=dtype)
    tokens = partial(torch.randint, device=device)
    match config.input:
        case "tokens":
            source = tokens(config.vocab_size or 1, (found.batch, found.seq))
        case "patches":
            source = numbers(found.batch, config.channels, config.image_size, config.image_size)
        case "features":
            source = numbers(found.batch, found.seq, config.feature_dim)
    if not found.target_seq:
        return (source,)
    if config.output_head == "values":
        return source, numbers(found.batch, found.target_seq, config.feature_dim)
    return source, tokens(config.target_size, (found.batch, found.target_seq))


def loss_of(config: ModelConfig, output: Tensor) -> Tensor:
    """The loss of the model's output head; of one without labels, the sum."""
    if config.output_head in ("none", "pooled"):
        return output.sum()
    if config.output_head == "values":
        return F.mse_loss(output, torch.zeros_like(output))
    logits = output.flatten(0, -2)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=output.device))
