"""Checkpoints: everything needed to go on as if nothing had happened.

    checkpoints/step-00001000/
        model.safetensors       the weights
        optimizer.safetensors   Adam's two moments and step counts, the mean weights, the random generators
        state.json              step, place in the data, time spent, and the SHA-256 of all three

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
from regard.run import fill, make_folder, read_weights, weights_of, write_weights
from regard.settings import write_whole

FILES = ("model.safetensors", "optimizer.safetensors")
STATE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, mean: Sequence[Tensor] = ()) -> None:
        fill(model, read_weights(self.path / FILES[0]), str(self.path / FILES[0]))
        tensors = read_weights(self.path / FILES[1])
        torch.set_rng_state(tensors.pop("rng.cpu"))
        if "rng.cuda" in tensors and _device(model).type == "cuda":
            torch.cuda.set_rng_state(tensors.pop("rng.cuda"), _device(model))
        for (name, _), running in zip(model.named_parameters(), mean, strict=False):
            running.copy_(tensors.pop(f"{name}/mean"))
        for name, parameter in model.named_parameters():
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
    make_folder(folder)
    target = folder / f"step-{state['step']:08d}"
    fresh = folder / f".{target.name}"
    for left_over in folder.glob(".step-*"):  # by a run that was killed while it wrote
        shutil.rmtree(left_over, ignore_errors=True)
    make_folder(fresh)
    try:
        write_weights(fresh / FILES[0], weights_of(model))
        write_weights(fresh / FILES[1], _optimizer_tensors(model, optimizer, mean))
        content = {**state, "files": {name: _digest(fresh / name) for name in FILES}}
        write_whole(fresh / STATE, json.dumps({**content, "sha256": _sum(content)}, indent=1).encode())
        _flush(fresh)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)
        _flush(folder)
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{target}: cannot be written ({reason}). Make room and run the same command again: "
            "it goes on from the last checkpoint that was"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    # A later one is there only if it is damaged and was passed over; it must not count in this one's place.
    earlier = [path for path in _folders(folder) if _step(path) < state["step"]]
    regular = [path for path in earlier if _step(path) % every == 0]
    for old in {*earlier} - {*regular[::-1][: keep - 1]}:
        shutil.rmtree(old, ignore_errors=True)
    return target


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
    for name, digest in content.pop("files").items():
        if _digest(path / name) != digest:
            raise ValueError(f"{name} is damaged")
    return dict(content)


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, mean: Sequence[Tensor]) -> dict[str, Tensor]:
    tensors = {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    names = (name for name, _ in model.named_parameters())
    tensors |= {f"{name}/mean": running for name, running in zip(names, mean, strict=False)}
    tensors["rng.cpu"] = torch.get_rng_state()
    if _device(model).type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(_device(model))
    return tensors


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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    """The names in it reach the disk, too."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
