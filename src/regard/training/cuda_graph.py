"""CUDA graphs: a training step recorded once, then replayed.

The step of a small model is a thousand kernels of a few microseconds each, and Python needs longer to launch a kernel
than the GPU to run it. A graph launches all of them at once. In return every tensor keeps its shape and its address, so
batches must have one shape (`train.pack`) and are copied into the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn.position import Learned

Update = Callable[[Any], tuple[Tensor, Tensor]]


class Graph:
    """`update(batch)` for batches of one shape. The result is overwritten by the next call."""

    WARM_UP = 3  # calls before recording, for allocator and libraries; they are real steps

    def __init__(self, update: Update, model: nn.Module) -> None:
        self.update, self.calls = update, 0
        self.learned = [part for part in model.modules() if isinstance(part, Learned)]
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls <= self.WARM_UP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = self.update(batch)
            torch.cuda.current_stream().wait_stream(stream)
            return result
        if self.graph is None:
            self.batch = batch.clone()
            self.graph = torch.cuda.CUDAGraph()
            self._check_lengths(False)  # that would read a tensor; the warm-up steps were checked
            with torch.cuda.graph(self.graph):  # records without running
                self.result = self.update(self.batch)
            self._check_lengths(True)
        self.batch.copy_(batch)
        self.graph.replay()
        return self.result

    def _check_lengths(self, checks: bool) -> None:
        for position in self.learned:
            position.checks_length = checks
