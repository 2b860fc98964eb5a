"""What the processes of tests/test_distributed.py do:  torchrun --nproc-per-node 2 workers.py SCENES FOLDER

Each scene trains on the task of reversal.py, and what a rank has to tell goes to FOLDER/report-NAME-RANK.json. Scenes
share one start of the processes, which takes longer than all of them.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from regard.cli import report
from regard.data.pack import Packs
from regard.data.streams import Batches, BlockBatch, Blocks
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.nn.block import Stack
from regard.nn.config import StackConfig
from regard.nn.parts import Part
from regard.nn.tokens import Positions
from regard.tasks.language_modeling import next_token
from regard.training.config import TrainConfig
from regard.training.distributed import current, join
from regard.training.objective import translation
from regard.training.parallel import split
from regard.training.trainer import Objective, Trainer
from reversal import MODEL, TRAIN, reversal_pairs

# Without dropout nothing is drawn, so curves can be compared. The gradient of a key's bias is 0 but for rounding, which
# Adam makes large: so there is none.
STILL = replace(MODEL, dropout=0.0, embed_dropout=0.0, bias=False)
BASE = replace(TRAIN, steps=12, log_every=1, save_every=6, evaluate_every=6, label_smoothing=0.1)
CASES: dict[str, TrainConfig] = {
    "plain": BASE,
    "accumulated": replace(BASE, gradient_accumulation=3, clip=0.1),
    "everything": replace(
        BASE, pack=12, gradient_accumulation=2, ema=0.9, r_drop=1.0, nonfinite="skip", activation_checkpointing=True
    ),
}
ENGINES = ("ddp", "fsdp")
VALID = reversal_pairs(8, seed=9)


def valid_loss(model) -> dict[str, float]:
    with torch.inference_mode():
        loss, count = translation(model, VALID.batch(torch.arange(len(VALID))))
    return {"valid_loss": loss.item() / int(count)}


def make(folder: Path, config: TrainConfig, model: ModelConfig = STILL, objective: Objective | None = None) -> Trainer:
    torch.manual_seed(config.seed)
    pairs = reversal_pairs()
    packed = config.pack and Packs(pairs, config.batch_tokens // config.pack, config.pack, config.seed)
    usual = partial(translation, label_smoothing=config.label_smoothing, r_drop=config.r_drop)
    stream = packed or Batches(pairs, config.batch_tokens, config.seed)
    return Trainer(build(model), stream, objective or usual, config, folder, valid_loss)


def go_on(folder: Path, config: TrainConfig, model: ModelConfig = STILL, objective: Objective | None = None) -> Trainer:
    trainer = make(folder, config, model, objective)
    trainer.resume()
    trainer.run()
    return trainer


# --- a language model whose sequences are divided (parallel = "context")

TEXT = torch.randint(4, 12, (700,), generator=torch.Generator().manual_seed(1))
LANGUAGE = replace(STILL, architecture="decoder", layers=2)
SPLIT: dict[str, tuple[TrainConfig, dict[str, object]]] = {  # settings of [train] and of [model]
    "full": (replace(BASE, pack=16), {}),
    "window": (
        replace(
            BASE, pack=24, gradient_accumulation=2, ema=0.9, r_drop=1.0, loss_chunk=7, activation_checkpointing=True
        ),
        {"mixer": "window(5), full", "position": "alibi", "kv_heads": 1},
    ),
}
# documents, padding, masks and positions of a stack: of long sequences, too, whose masks are planned in blocks
STACKS: dict[str, dict[str, object]] = {
    "causal": {"position": "rope"},
    "documents": {"position": "t5", "window": 4},
    "padding": {"position": "learned", "max_length": 24, "global_tokens": 2, "window": 3},
    "encoder": {"position": "relative", "mixer": "bigbird(3)", "block_size": 4, "random_blocks": 1},
    "long": {"position": "none", "layers": 1},
    "long window": {"position": "rope", "window": 100, "layers": 1},
}


def make_text(folder: Path, name: str, parallel: str = "context") -> Trainer:
    config, fields = SPLIT[name]
    config = replace(config, parallel=parallel)
    torch.manual_seed(config.seed)
    stream = Blocks(TEXT, config.batch_tokens // config.pack, config.pack, config.seed)
    loss = partial(
        next_token, label_smoothing=config.label_smoothing, r_drop=config.r_drop, loss_chunk=config.loss_chunk
    )

    def valid(model) -> dict[str, float]:
        with torch.inference_mode():
            total, count = next_token(model, BlockBatch(TEXT[: 3 * (config.pack + 1)].view(3, -1)))
        return {"valid_loss": total.item() / int(count)}

    return Trainer(build(replace(LANGUAGE, **fields)), stream, loss, config, folder, valid)


def stack_outputs(name: str, part: Part | None) -> dict[str, torch.Tensor]:
    """Output and gradients of a stack; those of all tokens, put together from all processes."""
    length = 4096 if "long" in name else 24
    torch.manual_seed(0)
    fields = {"dim": 16, "heads": 2, "ff_dim": 16, "layers": 2, "dropout": 0.0, "embed_dropout": 0.0, **STACKS[name]}
    stack = Stack(StackConfig(**fields), causal=name != "encoder").train()
    x, weight = torch.randn(2, 2, length, 16)
    is_real = torch.arange(length) < torch.tensor([[length], [length - 7]]) if name == "padding" else None
    document = (torch.arange(length)[None] // 9).expand(2, -1) if name == "documents" else None
    if part is not None:
        split(stack, part)
        x, weight = part.take(x, 1), part.take(weight, 1)
        is_real, document = (None if one is None else part.take(one, 1) for one in (is_real, document))
    x.requires_grad_()
    make_positions = Positions.of if part is None else part.positions
    out = stack(x, make_positions(x.shape[1], x.device, is_real, document))
    if is_real is not None:
        weight = weight * is_real[..., None]
        out = out * is_real[..., None]
    (out * weight).sum().backward()
    tokens = {"output": out.detach(), "input": x.grad}
    gradients = {f"gradient of {key}": one.grad for key, one in stack.named_parameters() if one.grad is not None}
    if part is not None:
        tokens = {key: part.gather(one, 1) for key, one in tokens.items()}
        gradients = {key: current().total(one) for key, one in gradients.items()}
    return tokens | gradients


def contexts(folder: Path) -> None:
    part = Part(current().rank, current().world)
    for name in SPLIT:
        make_text(folder / f"text-{name}-context", name).run()
    for name in STACKS:
        found = stack_outputs(name, part)
        if current().leads:
            save_file({key: one.contiguous() for key, one in found.items()}, folder / f"{name}.safetensors")


def doing(act: Callable[[], float], rank: int, at: int) -> Objective:
    """The usual loss times what `act` gives on one rank in one of its steps."""
    steps = 0

    def objective(model, batch):
        nonlocal steps
        steps += 1
        loss, count = translation(model, batch, TRAIN.label_smoothing)
        return loss * (act() if (current().rank, steps) == (rank, at) else 1.0), count

    return objective


def half_way(source: Path, target: Path) -> Path:
    """A copy of a run as it was after 6 steps."""
    if current().leads:
        shutil.copytree(source, target)
        shutil.rmtree(target / "checkpoints" / "step-00000012", ignore_errors=True)
    current().gather(None)
    return target


# --- scenes


def curves(folder: Path) -> None:
    for engine in ENGINES:
        for name, config in CASES.items():
            make(folder / f"{name}-{engine}", replace(config, parallel=engine)).run()
        make(folder / f"dropout-{engine}", replace(BASE, parallel=engine), MODEL).run()


def resumed(folder: Path) -> None:
    """From every engine, and from one process, to the others."""
    for source in ("one", *ENGINES):
        for engine in ENGINES:
            place = half_way(folder / f"everything-{source}", folder / f"{source}-to-{engine}")
            go_on(place, replace(CASES["everything"], parallel=engine))


def stopped(folder: Path) -> None:
    """Only rank 1 is asked to stop."""
    for engine in ENGINES:
        ask = doing(lambda: signal.raise_signal(signal.SIGTERM) or 1.0, rank=1, at=4)
        trainer = make(folder / f"stopped-{engine}", replace(BASE, parallel=engine), objective=ask)
        ended = trainer.run()
        tell(folder, f"stopped-{engine}", [ended, trainer.step])


def diverged(folder: Path) -> None:
    for engine in ENGINES:
        objective = doing(lambda: float("nan"), rank=1, at=8)
        expect_error(
            folder, f"diverged-{engine}", make(folder / f"diverged-{engine}", with_engine(engine), STILL, objective)
        )


def full_disk(folder: Path) -> None:
    """Of rank 1 alone where both write, of rank 0 where only that one does; after the first checkpoint."""
    real = os.fsync

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_disk() -> float:
        os.fsync = fail
        return 1.0

    for engine, rank in zip(ENGINES, (0, 1), strict=True):
        objective = doing(fill_disk, rank, at=8)
        trainer = make(
            folder / f"full-{engine}", replace(with_engine(engine), evaluate_every=0, steps=100), STILL, objective
        )
        expect_error(folder, f"full-{engine}", trainer)
        os.fsync = real


def killed(folder: Path) -> None:
    """Rank 1 is killed in the first of every engine's runs; torchrun starts both again."""
    for number, engine in enumerate(ENGINES):
        first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == number
        act = doing(lambda: os.kill(os.getpid(), signal.SIGKILL) or 1.0, rank=1, at=9 if first else -1)
        go_on(folder / f"killed-{engine}", with_engine(engine), MODEL, act)


def broken(folder: Path) -> None:
    """An error that only one rank knows of, while the other waits for its part of the gradient."""

    def fail() -> float:
        raise UserError("the data of rank 1 cannot be read")

    make(folder / "broken", BASE, STILL, doing(fail, rank=1, at=3)).run()


def with_engine(engine: str) -> TrainConfig:
    return replace(BASE, parallel=engine)


def expect_error(folder: Path, name: str, trainer: Trainer) -> None:
    try:
        trainer.run()
    except UserError as error:
        tell(folder, name, [type(error).__name__, str(error)])
    current().gather(None)


def tell(folder: Path, name: str, content: object) -> None:
    (folder / f"report-{name}-{current().rank}.json").write_text(json.dumps(content))


def main(scenes: str, folder: str) -> int:
    torch.set_num_threads(1)
    try:
        with join("cpu"):
            for scene in scenes.split(","):
                globals()[scene](Path(folder))
    except Exception as error:
        return report(error, debug=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
