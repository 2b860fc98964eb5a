"""Checkpoints: everything needed to go on as if nothing had happened.

    checkpoints/step-00001000/
        model.safetensors       the weights
        optimizer.safetensors   Adam's two moments and step counts, the mean weights, the random generators
        state.json              step, place in the data, time spent, and the SHA-256 of all three

Where the weights are spread over processes (`parallel = "fsdp"`), each writes what it holds of both as one file
(`regard.train.shards`). Either kind can be read by any number of processes, spread or not.

A checkpoint is whole or absent: it is written into a hidden neighbour, flushed to disk and renamed. One
that is damaged later (its sums do not fit) is recognised, named, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.files import make_folder, write_atomically
from regard.models.folder import fill, read_weights, weights_of, write_weights
from regard.train import shards
from regard.train.distributed import PeerError, current
from regard.train.parallel import is_part
from regard.train.shards import digest

FILES = ("model.safetensors", "optimizer.safetensors")
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, mean: Sequence[Tensor] = (), rank: int = 0
    ) -> None:
        parameters = dict(model.named_parameters())
        if (self.path / FILES[0]).exists() and not _is_spread(model):
            fill(model, read_weights(self.path / FILES[0]), str(self.path / FILES[0]))
            tensors = read_weights(self.path / FILES[1])
        else:
            tensors = _blank(parameters, mean)
            found = shards.names(self.path)
            tensors |= {name: state for name, state in _generators(model, rank).items() if name in found}
            shards.fill(self.path, {**weights_of(model), **tensors})
        _set_generators(model, rank, tensors)
        for name, running in zip(parameters, mean, strict=False):
            if f"{name}/mean" not in tensors:
                raise UserError(f"{self.path}: holds no mean weights: it was written with train.ema = 0; keep to that")
            running.copy_(tensors.pop(f"{name}/mean"))
        for name, parameter in parameters.items():
            optimizer.state[parameter] = {  # the fused optimizer wants its step count on the device, too
                key.removeprefix(f"{name}/"): value.to(parameter.device)
                for key, value in tensors.items()
                if key.startswith(f"{name}/")
            }


def write(
    folder: Path,
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    keep: int,
    mean: Sequence[Tensor] = (),
    every: int = 1,
) -> Path:
    """Write a checkpoint under `folder`; of those up to this step, all but the newest `keep` are removed.

    One whose step is no multiple of `every`, which an interruption has left, gives way to the next: what is kept,
    and so its mean, is that of a run that never stopped.
    """
    workers = current()
    target = folder / f"step-{state['step']:08d}"
    fresh = folder / f".{target.name}"
    workers.on_lead(lambda: _begin(folder, fresh))
    try:
        tensors = _optimizer_tensors(model, optimizer, mean)
        if _is_spread(model):
            files = shards.write(fresh, {**weights_of(model), **tensors}, workers)
        else:
            generators = workers.gather(_generators(model, workers.rank))
            tensors |= {name: generator for part in generators[1:] for name, generator in part.items()}
            files = workers.on_lead(lambda: _write_files(fresh, model, tensors))
        workers.on_lead(lambda: _complete(fresh, target, {**state, "files": files}))
    except PeerError:
        raise
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{target}: cannot be written ({reason}). Make room and run the same command again: "
            "it goes on from the last checkpoint that was"
        ) from error
    finally:
        if workers.leads:
            shutil.rmtree(fresh, ignore_errors=True)
    if workers.leads:
        _remove_old(folder, state["step"], keep, every)
    return target


def _begin(folder: Path, fresh: Path) -> None:
    make_folder(folder)
    for left_over in folder.glob(".step-*"):  # by a run that was killed while it wrote
        shutil.rmtree(left_over, ignore_errors=True)
    make_folder(fresh)


def _write_files(fresh: Path, model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, str]:
    write_weights(fresh / FILES[0], weights_of(model))
    write_weights(fresh / FILES[1], tensors)
    return {name: digest(fresh / name) for name in FILES}


def _complete(fresh: Path, target: Path, content: dict[str, Any]) -> None:
    write_atomically(fresh / STATE, json.dumps({**content, "sha256": _sum(content)}, indent=1).encode())
    _flush(fresh)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(fresh, target)
    _flush(target.parent)


def _remove_old(folder: Path, step: int, keep: int, every: int) -> None:
    # A later one is there only if it is damaged and was passed over; it must not count in this one's place.
    earlier = [path for path in _folders(folder) if _step(path) < step]
    regular = [path for path in earlier if _step(path) % every == 0]
    for old in {*earlier} - {*regular[::-1][: keep - 1]}:
        shutil.rmtree(old, ignore_errors=True)


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line for each damaged one that was passed over."""
    passed: list[str] = []
    for path in reversed(_folders(folder)):
        try:
            return Checkpoint(path, _read(path)), passed
        except OSError as error:
            passed.append(f"{path}: passed over: {Path(error.filename or STATE).name}: {error.strerror or error}")
        except (ValueError, RecursionError) as error:
            passed.append(f"{path}: passed over: {error}")
    return None, passed


def whole(folder: Path) -> list[Path]:
    """The checkpoints that are complete and undamaged, oldest first."""
    found = []
    for path in _folders(folder):
        with suppress(OSError, ValueError, RecursionError):
            _read(path)
            found.append(path)
    return found


def _read(path: Path) -> dict[str, Any]:
    """The state of a whole checkpoint; anything else is an error that says which file is wrong."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        known = content.pop("sha256")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{STATE} is not a checkpoint's") from None
    if known != _sum(content):
        raise ValueError(f"{STATE} is damaged")
    files = content.pop("files")
    for name, known in files.items():
        if digest(path / name) != known:
            raise ValueError(f"{name} is damaged")
    if strange := [file.name for file in path.glob("*.safetensors") if file.name not in files]:
        raise ValueError(f"{strange[0]} does not belong to it")
    return dict(content)


def read_model(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint of either kind."""
    return read_weights(path / FILES[0]) if (path / FILES[0]).exists() else shards.read(path)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, mean: Sequence[Tensor]) -> dict[str, Tensor]:
    tensors = {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    names = (name for name, _ in model.named_parameters())
    tensors |= {f"{name}/mean": running for name, running in zip(names, mean, strict=False)}
    return tensors | _generators(model, current().rank)


def _blank(parameters: dict[str, nn.Parameter], mean: Sequence[Tensor]) -> dict[str, Tensor]:
    """What the optimizer will hold, to be filled."""
    tensors = {f"{name}/mean": running for name, running in zip(parameters, mean, strict=False)}
    for name, parameter in parameters.items():
        tensors[f"{name}/step"] = torch.zeros((), device=parameter.device)
        tensors |= {f"{name}/{moment}": torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
    return tensors


def _generators(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """The state of this rank's random generators: rng.cpu, rng.cuda on rank 0, rng.cpu.1, … on the others."""
    states = {"rng.cpu": torch.get_rng_state()}
    if _device(model).type == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state(_device(model))
    return {f"{name}.{rank}" if rank else name: state for name, state in states.items()}


def _set_generators(model: nn.Module, rank: int, tensors: dict[str, Tensor]) -> None:
    """As `tensors` have them; a rank that was not there when they were saved keeps its own."""
    for name in _generators(model, rank):
        if name in tensors and name.startswith("rng.cpu"):
            torch.set_rng_state(tensors[name])
        elif name in tensors:
            torch.cuda.set_rng_state(tensors[name], _device(model))


def _is_spread(model: nn.Module) -> bool:
    return any(is_part(parameter) for parameter in model.parameters())


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _folders(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if path.is_dir() and _step(path) >= 0), key=_step)


def _step(path: Path) -> int:
    """The step that a checkpoint's name gives; -1 for any other folder."""
    named = re.fullmatch(r"step-([0-9]{8,})", path.name)
    return int(named[1]) if named else -1


def _sum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flush(folder: Path) -> None:
    """The names in it reach the disk, too."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
