"""How a step is computed: one model on several processes with PyTorch's engines, or recorded as a CUDA graph.

Every rank r has a part of the batch, with the loss L_r summed over its tokens; all ranks together have n = Σ_r n_r:

    g = ∇ Σ_r L_r / n = 1/W Σ_r ∇ (W L_r / n)

Both engines average the gradients of the W ranks, so each rank computes W L_r / n, and the gradient is that of one
process with the whole batch.

    ddp    all ranks hold all weights; gradients are averaged during the backward pass
           (`DistributedDataParallel`, Li et al. 2020)
    fsdp   a rank holds 1/W of every weight, gradient and moment; the weights of a block are gathered before it is
           computed and freed after it (`fully_shard`; Rajbhandari et al. 2020, Zhao et al. 2023)
    context as ddp, but all ranks have the same batch, and each a part of the tokens of every sequence: L_r is the loss
           of these tokens, and attention gathers the keys and values of the others (`regard.nn.parts`)

An engine wraps a module that is called as a whole, but a task calls encoder and decoder separately; so the engine wraps
one module that contains model and loss.
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
from torch.nn.parallel import DistributedDataParallel

from regard.data.streams import BlockBatch
from regard.errors import UserError
from regard.models.folder import weights_of
from regard.nn.block import Block, Stack
from regard.nn.feedforward import Experts
from regard.nn.parts import Part, check_split
from regard.nn.position import Learned
from regard.training.config import TrainConfig
from regard.training.distributed import Workers

Objective = Callable[[Any, Any], tuple[Tensor, Tensor]]  # (model, batch) -> (summed loss, number of tokens)
Update = Callable[[Sequence[Any]], tuple[Tensor, Tensor]]  # a step of the optimizer on these batches
BALANCE = 0.01  # weight of the load-balancing loss (Fedus et al. 2021)
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ModelWithLoss(nn.Module):
    """A model and its objective as one module.

    The load-balancing loss of mixtures of experts is added, without which a few experts would get all tokens.
    """

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss, tokens = self.objective(self.model, batch)
        parts = [module.balance for module in self.model.modules() if isinstance(module, Experts)]
        return loss + BALANCE * tokens * sum(part for part in parts if part is not None), tokens


class Engine:
    """All weights on every rank: the model on one process, or wrapped in DDP. `compute` is the objective of a batch."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        self.model = model
        self.compute: nn.Module = ModelWithLoss(model, objective)
        self.part: Part | None = None  # of every sequence, where ranks share them

    def take(self, batch: Any) -> Any:
        """The part of a batch that this rank computes."""
        if self.part is None:
            return batch
        if not isinstance(batch, BlockBatch):
            raise UserError("train.parallel = 'context': only rows of text are split; use parallel = 'ddp' or 'fsdp'")
        return batch.part(partial(self.part.take, dim=1))

    def exchange(self, last: bool) -> AbstractContextManager[object]:
        """Encloses forward and backward pass of a batch: gradients are exchanged with the last batch of a step."""
        engine = self.compute
        return nullcontext() if last or not isinstance(engine, DistributedDataParallel) else engine.no_sync()

    @contextmanager
    def evaluation_model(self, weights: Sequence[Tensor]) -> Iterator[nn.Module]:
        """The model in eval mode with these parameters or (if empty) its own; for rank 0, without any other rank."""
        self._exchange_weights(weights)
        try:
            yield self.model.eval()
        finally:
            self._exchange_weights(weights)
            self.model.train()

    def _exchange_weights(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self.model.parameters(), weights, strict=False):
            parameter.data, weight.data = weight.data, parameter.data


class Sharded(Engine):
    """FSDP: a part of every weight on each rank. Rank 0 has a second model in main memory, for evaluation."""

    def __init__(self, model: nn.Module, objective: Objective, workers: Workers, half: torch.dtype | None) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__(model, objective)
        self.device, self.copy = workers.device, copy.deepcopy(model).cpu() if workers.leads else None
        mesh = init_device_mesh(self.device.type, (workers.world,))
        # Under autocast alone, each block's cast weights would stay in memory until the backward pass; so they are
        # gathered in half precision. Gradients are averaged in float32.
        policy = MixedPrecisionPolicy(half, torch.float32, cast_forward_inputs=False)
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.compute, mesh=mesh, mp_policy=policy)

    @contextmanager
    def evaluation_model(self, weights: Sequence[Tensor]) -> Iterator[nn.Module]:
        """Collective: all ranks must enter, since each holds a part."""
        try:
            yield self.fill(weights).eval()
        finally:
            self.model.train()
            if self.copy is not None:
                self.copy.cpu()

    def fill(self, weights: Sequence[Tensor]) -> nn.Module:
        """Rank 0's second model with these parameters or (if empty) those of the first."""
        changed = dict(zip((name for name, _ in self.model.named_parameters()), weights, strict=False))
        copies = {} if self.copy is None else weights_of(self.copy)
        for name, tensor in {**weights_of(self.model), **changed}.items():
            gathered = full(tensor)  # collective
            if copies:
                copies[name].copy_(gathered)
        return self.model if self.copy is None else self.copy.to(self.device)


def is_sharded(model: nn.Module) -> bool:
    """Whether other ranks hold the rest of its parameters."""
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def full(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered from all ranks; others as they are."""
    return getattr(tensor, "full_tensor", lambda: tensor)()  # type: ignore[no-any-return]


def distribute(
    model: nn.Module, objective: Objective, config: TrainConfig, device: torch.device, workers: Workers
) -> Engine:
    """Move `model`, or a shard of it, to `device`, as `config.parallel` says."""
    if workers.world > 1 and config.parallel == "fsdp":  # block by block: it may not fit as a whole
        return Sharded(model, objective, workers, HALF.get(config.precision))
    engine = Engine(model.to(device), objective)
    if workers.world > 1 and config.parallel == "context":
        engine.part = Part(workers.rank, workers.world, config.compile)
        engine.part.check_length(config.pack)
        split(model, engine.part)
    if workers.world > 1:
        with warnings.catch_warnings():  # torch 2.13 renamed the argument
            warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
            engine.compute = DistributedDataParallel(
                engine.compute, broadcast_buffers=False, gradient_as_bucket_view=True
            )
    return engine


def split(model: nn.Module, part: Part) -> None:
    """In training, `model` is given a part of every sequence from now on."""
    for stack in [module for module in model.modules() if isinstance(module, Stack)]:
        check_split(stack.config)
        if any(isinstance(block, Block) and block.cross is not None for block in stack.blocks):
            raise UserError("train.parallel = 'context': cross-attention is not divided; use parallel = 'ddp'")
        stack.part = part


class Graph:
    """`update([batch])` for batches of one shape, recorded once, then replayed; the next call overwrites the result.

    The step of a small model is a thousand kernels of a few microseconds each, and Python needs longer to launch a
    kernel than the GPU to run it. A graph launches all of them at once. In return every tensor keeps its shape and its
    address, so batches must have one shape (`train.pack`) and are copied into the recorded ones.
    """

    WARM_UP = 3  # calls before recording, for allocator and libraries; they are real steps

    def __init__(self, update: Update, model: nn.Module) -> None:
        self.update, self.calls = update, 0
        self.learned = [part for part in model.modules() if isinstance(part, Learned)]
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batches: Sequence[Any]) -> tuple[Tensor, Tensor]:
        (batch,) = batches
        self.calls += 1
        if self.calls <= self.WARM_UP:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                result = self.update([batch])
            torch.cuda.current_stream().wait_stream(stream)
            return result
        if self.graph is None:
            self.batch = batch.clone()
            self.graph = torch.cuda.CUDAGraph()
            for position in self.learned:  # that would read a tensor; the warm-up steps were checked
                position.checks_length = False
            with torch.cuda.graph(self.graph):  # records without running
                self.result = self.update([self.batch])
            for position in self.learned:
                position.checks_length = True
        self.batch.copy_(batch)
        self.graph.replay()
        return self.result
