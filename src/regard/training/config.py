"""How a model is trained, as values: the [train] table of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from regard.errors import UserError
from regard.settings import check_fields


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained: batches, optimizer, learning rate, checkpoints, evaluation."""

    steps: int = 10_000
    batch_tokens: int = 4096  # rows x longest side of a batch, padding included
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the blocks; AdamW for the rest
    lr: float = 1e-3  # the peak of the learning rate schedule
    schedule: Literal["inverse-sqrt", "cosine", "linear", "constant"] = "inverse-sqrt"
    warmup: int | None = None  # steps from 0 to lr; None: a tenth of `steps`, at most 4,000
    betas: tuple[float, ...] = (0.9, 0.98)
    eps: float = 1e-9
    weight_decay: float = 0.0
    label_smoothing: float = 0.1
    loss_chunk: int = 0  # tokens whose logits are in memory at once; 0: a default for the device; -1: all
    r_drop: float = 0.0  # weight of the divergence between two dropout masks (R-Drop, Liang et al. 2021)
    clip: float = 1.0  # maximum norm of the gradient
    gradient_accumulation: int = 1  # batches per step
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of matrix multiplications; weights stay fp32
    nonfinite: Literal["stop", "skip"] = "stop"  # a gradient that is not finite ends training, or is skipped
    pack: int = 0  # tokens of a packed row: batches of one shape without padding; 0: padded sentences
    cuda_graph: bool = False  # record a step as a CUDA graph; needs pack
    compile: bool = False  # blocks and loss through torch.compile
    activation_checkpointing: bool = False  # store one activation per block, recompute the rest
    ema: float = 0.0  # decay of a running mean of the weights, which is then evaluated and saved; 0: none
    # under torchrun: weights replicated on every process, or sharded; context: replicated, and every sequence divided
    parallel: Literal["ddp", "fsdp", "context"] = "ddp"
    init_from: str | None = None  # folder of a run whose tokenizer and weights training starts from
    seed: int = 1
    log_every: int = 10
    save_every: int = 1000
    keep: int = 2  # checkpoints; if the newest is damaged, the one before is used
    snapshots: int = 0  # copies of the weights over the whole training, to look at how they form; 0: none
    evaluate_every: int | None = None  # steps; None: a tenth of `steps`; 0: at the end only
    metric: str = "loss"  # the validation metric that chooses the best weights; each task has its own
    patience: int = 0  # evaluations without improvement before training stops; 0: never
    average: int = 1  # the final model is the mean of so many checkpoints
    tensorboard: bool = False  # metrics also as events for TensorBoard
    wandb: bool = False  # metrics also in Weights & Biases

    def __post_init__(self) -> None:
        check_fields(
            self, ("label_smoothing", "ema"), steps=1, batch_tokens=1, log_every=1, save_every=1, keep=1, average=1,
            gradient_accumulation=1, loss_chunk=-1, pack=0, warmup=0, evaluate_every=0, patience=0, weight_decay=0,
            r_drop=0, snapshots=0,
        )  # fmt: skip
        for name in ("lr", "eps", "clip"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} = {getattr(self, name)}: must be greater than 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"betas = {list(self.betas)}: must be two numbers from 0 to below 1, such as [0.9, 0.98]")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed = {self.seed}: must be an integer from 0 to {2**32 - 1}")
        if self.ema and self.average > 1:
            raise UserError(f"average = {self.average}: ema = {self.ema} is also a mean of the weights; choose one")
        if self.average > self.keep:
            raise UserError(f"average = {self.average}: needs as many checkpoints; set keep >= {self.average}")
        if self.snapshots == 1:
            raise UserError("snapshots = 1: at least 2 are needed, before the first and after the last step; 0: none")
        if self.pack > self.batch_tokens:
            raise UserError(
                f"pack = {self.pack}: must be at most batch_tokens = {self.batch_tokens}; raise batch_tokens"
            )
        one_step = self.gradient_accumulation == 1 and self.precision != "fp16" and self.nonfinite == "stop"
        if self.cuda_graph and not (self.pack and one_step):
            raise UserError(
                f"cuda_graph = true records one step of one shape: it needs pack > 0 (pack = {self.pack}), "
                "gradient_accumulation = 1, precision fp32 or bf16, and nonfinite = 'stop'"
            )
        if self.optimizer == "muon" and self.parallel == "fsdp":
            raise UserError(
                "optimizer = 'muon': needs unsharded matrices; set parallel = 'ddp', or optimizer = 'adamw'"
            )
        if self.patience and self.evaluate_every == 0:
            raise UserError(f"patience = {self.patience}: counts evaluations; set evaluate_every, such as 500")

    @property
    def warmup_steps(self) -> int:
        return min(4000, self.steps // 10) if self.warmup is None else self.warmup

    @property
    def evaluation_interval(self) -> int:
        """Steps between two evaluations; 0: only at the end."""
        return max(1, self.steps // 10) if self.evaluate_every is None else self.evaluate_every

    def warnings(self) -> Iterator[str]:
        """Settings that are allowed, but likely to spoil the result of a run."""
        checkpoints = -(-self.steps // self.save_every)
        if self.warmup_steps >= self.steps > 1:
            yield (
                f"train.warmup = {self.warmup} >= train.steps = {self.steps}: the learning rate never reaches "
                f"train.lr = {self.lr}; remove train.warmup (a tenth of the steps by default)"
            )
        if self.average > checkpoints:
            yield (
                f"train.average = {self.average}: train.steps = {self.steps} with train.save_every = {self.save_every} "
                f"saves {checkpoints}; set train.save_every = {max(1, self.steps // self.average)} or lower"
            )
        if self.ema and self.steps * (1 - self.ema) < 1:
            yield (
                f"train.ema = {self.ema}: the mean covers about {1 / (1 - self.ema):,.0f} steps, more than train.steps "
                f"= {self.steps}, so it would remain near the initial weights; lower train.ema"
            )
