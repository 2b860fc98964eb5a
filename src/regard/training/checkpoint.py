"""Checkpoints: everything needed to resume training exactly.

    checkpoints/step-00001000/
        model.safetensors       the weights
        optimizer.safetensors   Adam's two moments and step counts, the mean weights, the random generators
        state.json              step, position in the data, training time, and the SHA-256 of all three

Where the weights are sharded over processes (`parallel = "fsdp"`), each process writes its shards of both as one file:

    shard-00001-model-00001-of-00001.safetensors      what rank 0 holds of every weight, moment and mean, …

`torch.distributed.checkpoint` plans which process writes what and finds, when reading, the overlapping pieces. Its own
format stores that plan as a pickle, which can run code when it is opened; so the files have its Hugging Face format, in
which each shard is a safetensors file with the offsets of its pieces as JSON in the header. Either kind can be read by
any number of processes, sharded or not: the tensors of an unsharded checkpoint are pieces with offset 0.

A checkpoint is complete or absent: it is written into a hidden folder, flushed to disk and renamed. If one is damaged
later (its checksums do not match), a warning names it and the one before is used.

The mean of the last checkpoints, θ = (θ_1 + … + θ_k) / k, is often better than each of them (Vaswani et al. 2017,
section 6.1; why it works: Izmailov et al. 2018).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from regard.errors import UserError
from regard.files import make_folder, name_some, write_atomically
from regard.models.folder import fill, read_weights, weights_of, write_weights
from regard.training.distributed import PeerError, Workers, current
from regard.training.parallel import is_sharded

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
        parameters = dict(model.named_parameters())
        if (self.path / FILES[0]).exists() and not is_sharded(model):
            fill(model, read_weights(self.path / FILES[0]), str(self.path / FILES[0]))
            tensors = read_weights(self.path / FILES[1])
        else:
            tensors = _blank(parameters, mean)
            saved = _known(self.path)
            tensors |= {name: state for name, state in _generators(model).items() if name in saved}
            _fill_shards(self.path, {**weights_of(model), **tensors})
        for name in _generators(model).keys() & tensors.keys():  # a rank without a saved state keeps its own
            if name.startswith("rng.cpu"):
                torch.set_rng_state(tensors[name])
            else:
                torch.cuda.set_rng_state(tensors[name], next(model.parameters()).device)
        for name, running in zip(parameters, mean, strict=False):
            if f"{name}/mean" not in tensors:
                raise UserError(f"{self.path}: has no mean weights: it was saved with train.ema = 0; keep that setting")
            running.copy_(tensors.pop(f"{name}/mean"))
        for name, parameter in parameters.items():
            optimizer.state[parameter] = {  # the fused optimizer needs its step count on the device, too
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
    """Save a checkpoint under `folder`; of those up to this step, all but the newest `keep` are deleted.

    One whose step is not a multiple of `every` comes from an interruption and is deleted at the next: the checkpoints
    that are kept, and so their mean, are those of an uninterrupted run.
    """
    workers = current()
    target = folder / f"step-{state['step']:08d}"
    fresh = folder / f".{target.name}"
    workers.on_lead(lambda: _begin(folder, fresh))
    try:
        tensors = _optimizer_tensors(model, optimizer, mean)
        if is_sharded(model):
            parts: dict[str, dict[str, Tensor]] = {}
            shards = _write_shards(fresh, {**weights_of(model), **tensors}, workers)
        else:
            generators = workers.gather(_generators(model))
            tensors |= {name: generator for part in generators[1:] for name, generator in part.items()}
            parts, shards = dict(zip(FILES, (weights_of(model), tensors), strict=True)), {}
        workers.on_lead(lambda: _complete(fresh, target, state, parts, shards))
    except PeerError:
        raise
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f"{target}: cannot be written ({reason}). Free some space and run the same command again: "
            "it resumes from the last complete checkpoint"
        ) from error
    finally:
        if workers.leads:
            shutil.rmtree(fresh, ignore_errors=True)
    if workers.leads:
        _remove_old(folder, state["step"], keep, every)
    return target


def _begin(folder: Path, fresh: Path) -> None:
    make_folder(folder)
    for left_over in folder.glob(".step-*"):  # of a process that was killed while writing
        shutil.rmtree(left_over, ignore_errors=True)
    make_folder(fresh)


def _complete(
    fresh: Path, target: Path, state: dict[str, Any], parts: dict[str, dict[str, Tensor]], shards: dict[str, str]
) -> None:
    """Write the files that are not sharded, then the state; `shards` are those of all ranks, with their SHA-256."""
    if missing := [name for name in shards if not (fresh / name).exists()]:
        raise UserError(
            f"this machine cannot see {name_some(missing)}: put the run on a file system that all machines share"
        )
    for name, tensors in parts.items():
        write_weights(fresh / name, tensors)
    content = {**state, "files": {**shards, **{name: _digest(fresh / name) for name in parts}}}
    write_atomically(fresh / STATE, json.dumps({**content, "sha256": _sum(content)}, indent=1).encode())
    _flush(fresh)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(fresh, target)
    _flush(target.parent)


def _remove_old(folder: Path, step: int, keep: int, every: int) -> None:
    # A later one exists only if it is damaged and was skipped; it must not count.
    earlier = [path for path in _folders(folder) if _step(path) < step]
    regular = [path for path in earlier if _step(path) % every == 0]
    for old in {*earlier} - {*regular[::-1][: keep - 1]}:
        shutil.rmtree(old, ignore_errors=True)


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint, and a line for each damaged one that was skipped."""
    damaged: list[str] = []
    return next(complete_checkpoints(folder, damaged), None), damaged


def complete_checkpoints(folder: Path, damaged: list[str] | None = None) -> Iterator[Checkpoint]:
    """The checkpoints that are complete and undamaged, newest first; `damaged` gets a line for each of the others."""
    damaged = [] if damaged is None else damaged
    for path in reversed(_folders(folder)):
        try:
            yield Checkpoint(path, _read(path))
        except OSError as error:
            damaged.append(f"{path}: skipped: {Path(error.filename or STATE).name}: {error.strerror or error}")
        except (ValueError, RecursionError) as error:
            damaged.append(f"{path}: skipped: {error}")


def _read(path: Path) -> dict[str, Any]:
    """The state of a complete checkpoint; otherwise an error that names the damaged file."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        known = content.pop("sha256")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{STATE} is not that of a checkpoint") from None
    if known != _sum(content):
        raise ValueError(f"{STATE} is damaged")
    files = content.pop("files")
    for name, known in files.items():
        if _digest(path / name) != known:
            raise ValueError(f"{name} is damaged")
    if extra := [file.name for file in path.glob("*.safetensors") if file.name not in files]:
        raise ValueError(f"{extra[0]} does not belong to it")
    return dict(content)


def average(folder: Path, last: int) -> dict[str, Tensor]:
    """The mean weights of the newest `last` complete checkpoints of a run."""
    found = [*islice(complete_checkpoints(folder / "checkpoints"), last)]
    if len(found) < last:
        raise UserError(
            f"{folder}: has {len(found)} complete checkpoints, not {last}: use fewer, or train with keep = {last}"
        )
    total: dict[str, Tensor] = {}
    for path in (one.path for one in reversed(found)):
        weights = read_weights(path / FILES[0]) if (path / FILES[0]).exists() else read_shards(path)
        for name, tensor in weights.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    return {name: (tensor / last).to(torch.float32) for name, tensor in total.items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, mean: Sequence[Tensor]) -> dict[str, Tensor]:
    tensors = {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }
    names = (name for name, _ in model.named_parameters())
    tensors |= {f"{name}/mean": running for name, running in zip(names, mean, strict=False)}
    return tensors | _generators(model)


def _blank(parameters: dict[str, nn.Parameter], mean: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors for the state of the optimizer, to be filled."""
    tensors = {f"{name}/mean": running for name, running in zip(parameters, mean, strict=False)}
    for name, parameter in parameters.items():
        tensors[f"{name}/step"] = torch.zeros((), device=parameter.device)
        tensors |= {f"{name}/{moment}": torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
    return tensors


def _generators(model: nn.Module) -> dict[str, Tensor]:
    """The state of this rank's random generators: rng.cpu, rng.cuda on rank 0, rng.cpu.1, … on the others."""
    states, device, rank = {"rng.cpu": torch.get_rng_state()}, next(model.parameters()).device, current().rank
    if device.type == "cuda":
        states["rng.cuda"] = torch.cuda.get_rng_state(device)
    return {f"{name}.{rank}" if rank else name: state for name, state in states.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folders(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,}", path.name))
    return sorted((path for path in named if path.is_dir()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _sum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flush(folder: Path) -> None:
    """Flush the directory entries to disk."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- shards


def _is_weight(name: str) -> bool:
    """Whether a tensor of a checkpoint is the model's: moments and means are NAME/exp_avg and so on."""
    return "/" not in name and not name.startswith("rng.")


def _write_shards(folder: Path, tensors: Mapping[str, Tensor], workers: Workers) -> dict[str, str]:
    """Save what each rank holds in a file of its own, flushed to disk; returns the SHA-256 of every file."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=workers.control)
    except CheckpointException as error:  # the same on all ranks
        raise UserError(_reason(error)) from None
    own = {path.name: _digest(path) for path in folder.glob(f"shard-{workers.rank + 1:05d}-*.safetensors")}
    return {name: value for part in workers.gather(own) for name, value in part.items()}


def _fill_shards(path: Path, wanted: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `wanted` from a checkpoint; a shard is filled with its part."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    known = _known(path)
    if missing := [name for name in wanted if name not in known]:
        raise UserError(f"{path}: lacks {name_some(missing)}; the checkpoint belongs to another [model] or [train]")
    if extra := [name for name in known if _is_weight(name) and name not in wanted]:
        raise UserError(f"{path}: the model has no {name_some(extra)}; the checkpoint belongs to another [model]")
    for name, tensor in wanted.items():
        if (shape := tuple(known[name].size)) != tuple(tensor.shape):
            raise UserError(f"{path}: {name} has shape {shape}, but [model] requires {tuple(tensor.shape)}")
    try:
        with warnings.catch_warnings():  # every rank reads on its own, which causes a warning
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(dict(wanted), storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    except CheckpointException as error:
        raise UserError(f"{path}: cannot be read: {_reason(error)}") from None


def read_shards(path: Path) -> dict[str, Tensor]:
    """The unsharded weights of a checkpoint."""
    known = {name: entry for name, entry in _known(path).items() if _is_weight(name)}
    try:
        tensors = {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in known.items()}
    except RuntimeError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    _fill_shards(path, tensors)
    return tensors


def _known(path: Path) -> dict[str, Any]:
    """Name, size and pieces of every tensor; the pieces must be complete."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    try:
        known: dict[str, Any] = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
        for name, entry in known.items():
            if sum(piece.sizes.numel() for piece in entry.chunks) != entry.size.numel():
                raise ValueError(f"{name} is incomplete")
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    return known


def _reason(error: Any) -> str:
    """The first failure, as the operating system describes it."""
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    return f"rank {rank}: {getattr(cause, 'strerror', None) or cause}"
