"""One model on several processes, by PyTorch's own engine.

Every rank r has its share of the batch, with loss L_r summed over its tokens, of which there are n = Σ_r n_r:

    g = ∇ Σ_r L_r / n = 1/W Σ_r ∇ (W L_r / n)

Both engines give the mean over the W ranks of what each computes, so each computes W L_r / n, and the gradient is
that of one process with the whole batch.

    ddp    all ranks hold all weights; gradients are averaged while the backward pass is still under way
           (`DistributedDataParallel`, Li et al. 2020)
    fsdp   a rank holds 1/W of every weight, gradient and moment; a block's weights are fetched from the others when
           its turn comes, and let go after it (`fully_shard`; Rajbhandari et al. 2020, Zhao et al. 2023)

What is wrapped must be called as a whole, and a task calls encoder and decoder as it likes; so model and loss are
made one module, and that is wrapped.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.models.folder import weights_of
from regard.nn.block import Block
from regard.train.config import TrainConfig
from regard.train.distributed import Workers

Objective = Callable[[Any, Any], tuple[Tensor, Tensor]]  # (model, batch) -> (summed loss, how many it sums)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Learner(nn.Module):
    """A model and what it shall make small."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self.objective(self.model, batch)


class Alone:
    """The model on one process."""

    compute: Callable[[Any], tuple[Tensor, Tensor]]  # the objective of a batch

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self.model, self.compute = model, partial(objective, model)

    def exchange(self, last: bool) -> AbstractContextManager[object]:
        """Around the two passes over a batch: the gradient is exchanged after the last one of a step."""
        return nullcontext()

    @contextmanager
    def whole(self, weights: Sequence[Tensor]) -> Iterator[nn.Module]:
        """Inside, a model that needs no other rank, with these parameters; none: its own. Only rank 0 may use it."""
        own = [parameter.detach().clone() for parameter in self.model.parameters()] if weights else []
        self._put(weights)
        try:
            yield self.model
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self.model.parameters(), weights, strict=False):
            parameter.copy_(weight)


class Replicated(Alone):
    """All weights on every rank."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__(model, objective)
        with warnings.catch_warnings():  # torch 2.13 has another name for it, which 2.11 does not know
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            self.compute = self.engine = nn.parallel.DistributedDataParallel(
                Learner(model, objective), broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def exchange(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.engine.no_sync()


class Sharded(Alone):
    """A part of every weight on each rank; rank 0 has a second model in main memory, to be filled for a test."""

    def __init__(self, model: nn.Module, objective: Objective, workers: Workers, half: torch.dtype | None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(model, objective)
        self.device, self.filled = workers.device, copy.deepcopy(model).cpu() if workers.leads else None
        mesh = init_device_mesh(self.device.type, (workers.world,))
        # Under autocast alone, each block's cast weights would stay until the backward pass; so they are fetched in
        # half precision to begin with. Gradients are averaged in float32.
        policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        learner = Learner(model, objective)
        fully_shard(learner, mesh=mesh, mp_policy=policy)
        self.compute = learner

    @contextmanager
    def whole(self, weights: Sequence[Tensor]) -> Iterator[nn.Module]:
        """All ranks enter together: each gives its part."""
        try:
            yield self.fill(weights)
        finally:
            if self.filled is not None:
                self.filled.cpu()

    def fill(self, weights: Sequence[Tensor]) -> nn.Module:
        """Rank 0's second model with these parameters; none: those of the first."""
        given = dict(zip((name for name, _ in self.model.named_parameters()), weights, strict=False))
        positions = {} if self.filled is None else weights_of(self.filled)
        for name, tensor in {**weights_of(self.model), **given}.items():
            whole = full(tensor)  # all ranks take part
            if positions:
                positions[name].copy_(whole)
        return self.model if self.filled is None else self.filled.to(self.device)


def is_part(tensor: Tensor) -> bool:
    """Whether other ranks hold the rest of it."""
    return hasattr(tensor, "full_tensor")


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor of which each rank holds a part."""
    return getattr(tensor, "full_tensor", lambda: tensor)()  # type: ignore[no-any-return]


def distribute(
    model: nn.Module, objective: Objective, config: TrainConfig, device: torch.device, workers: Workers
) -> Alone:
    """Bring `model` to `device`, or a part of it, as `config.parallel` says."""
    if workers.world == 1:
        return Alone(model.to(device), objective)
    if config.parallel == "ddp":
        return Replicated(model.to(device), objective)
    return Sharded(model, objective, workers, HALF.get(config.precision))  # block by block: it may not fit as a whole
