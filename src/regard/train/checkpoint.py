"""Checkpoints: everything needed to go on as if nothing had happened.

    checkpoints/step-00001000/
        model.safetensors       the weights
        optimizer.safetensors   Adam's two moments and step counts, and the random generators
        state.json              step, place in the data, time spent, and the SHA-256 of the other two

A checkpoint is whole or absent: it is written into a hidden neighbour, flushed to disk and renamed. One
that is damaged later (its sums do not fit) is recognised, named, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.run import fill, make_folder, read_weights, weights_of, write_weights
from regard.settings import write_whole

FILES = ("model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        fill(model, read_weights(self.path / FILES[0]), str(self.path / FILES[0]))
        tensors = read_weights(self.path / FILES[1])
        torch.set_rng_state(tensors.pop("rng.cpu"))
        if "rng.cuda" in tensors:
            torch.cuda.set_rng_state(tensors.pop("rng.cuda"))
        for name, parameter in model.named_parameters():
            found = {
                key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")
            }
            optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in found.items()
            }


def write(folder: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Write a checkpoint under `folder` and remove all but the newest `keep`."""
    make_folder(folder)
    target = folder / f"step-{state['step']:08d}"
    fresh = folder / f".{target.name}"
    shutil.rmtree(fresh, ignore_errors=True)
    make_folder(fresh)
    try:
        write_weights(fresh / FILES[0], weights_of(model))
        write_weights(fresh / FILES[1], _optimizer_tensors(model, optimizer))
        sums = {name: _digest(fresh / name) for name in FILES}
        write_whole(fresh / "state.json", json.dumps({**state, "sha256": sums}, indent=1).encode())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)
        _flush(folder)
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written: {error.strerror or error}. Make room and run the same command again: "
            "it goes on from the checkpoint before"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    for old in _folders(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a line for each damaged one that was passed over."""
    passed = []
    for path in reversed(_folders(folder)):
        try:
            state = json.loads((path / "state.json").read_text(encoding="utf-8"))
            broken = [name for name in FILES if _digest(path / name) != state["sha256"][name]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            passed.append(f"{path} is incomplete ({error}); using the one before it")
            continue
        if not broken:
            return Checkpoint(path, state), passed
        passed.append(f"{path / broken[0]} is damaged; using the checkpoint before it")
    return None, passed


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    return tensors


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.is_dir()) if folder.is_dir() else []


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    """The rename itself reaches the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
