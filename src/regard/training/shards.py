"""Sharded checkpoints: every process writes its shards, any number of processes read them back.

    shard-00001-model-00001-of-00001.safetensors      what rank 0 holds of every weight, moment and mean
    shard-00002-model-00001-of-00001.safetensors      what rank 1 holds, …

`torch.distributed.checkpoint` plans which process writes what and finds, when reading, the overlapping pieces. Its own
format stores that plan as a pickle, which can run code when it is opened; so the files have its Hugging Face format, in
which each shard is a safetensors file with the offsets of its pieces as JSON in the header. An unsharded checkpoint is
read in the same way: its tensors are pieces with offset 0.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from regard.errors import UserError
from regard.files import name_some
from regard.training.distributed import Workers


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_weight(name: str) -> bool:
    """Whether a tensor of a checkpoint is the model's: moments and means are NAME/exp_avg and so on."""
    return "/" not in name and not name.startswith("rng.")


def write(folder: Path, tensors: Mapping[str, Tensor], workers: Workers) -> dict[str, str]:
    """Save what each rank holds in a file of its own, flushed to disk; returns the SHA-256 of every file."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=workers.control)
    except CheckpointException as error:  # the same on all ranks
        raise UserError(_reason(error)) from None
    own = {path.name: digest(path) for path in folder.glob(f"shard-{workers.rank + 1:05d}-*.safetensors")}
    files = {name: value for part in workers.gather(own) for name, value in part.items()}
    workers.on_lead(lambda: _check_seen(folder, files))
    return files


def _check_seen(folder: Path, files: Iterable[str]) -> None:
    if missing := [name for name in files if not (folder / name).exists()]:
        raise UserError(
            f"this machine cannot see {name_some(missing)}: put the run on a file system that all machines share"
        )


def fill(path: Path, wanted: Mapping[str, Tensor]) -> None:
    """Fill the tensors of `wanted` from a checkpoint; a shard is filled with its part."""
    known = _known(path)
    if missing := [name for name in wanted if name not in known]:
        raise UserError(f"{path}: lacks {name_some(missing)}; the checkpoint belongs to another [model] or [train]")
    if extra := [name for name in known if is_weight(name) and name not in wanted]:
        raise UserError(f"{path}: the model has no {name_some(extra)}; the checkpoint belongs to another [model]")
    for name, tensor in wanted.items():
        if (shape := tuple(known[name].size)) != tuple(tensor.shape):
            raise UserError(f"{path}: {name} has shape {shape}, but [model] requires {tuple(tensor.shape)}")
    _read(path, dict(wanted))


def read(path: Path) -> dict[str, Tensor]:
    """The unsharded weights of a checkpoint."""
    known = {name: entry for name, entry in _known(path).items() if is_weight(name)}
    try:
        tensors = {name: torch.zeros(entry.size, dtype=entry.properties.dtype) for name, entry in known.items()}
    except RuntimeError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    _read(path, tensors)
    return tensors


def names(path: Path) -> set[str]:
    return set(_known(path))


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


def _read(path: Path, tensors: dict[str, Any]) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():  # every rank reads on its own, which causes a warning
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    except CheckpointException as error:
        raise UserError(f"{path}: cannot be read: {_reason(error)}") from None


def _reason(error: Any) -> str:
    """The first failure, as the operating system describes it."""
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    return f"rank {rank}: {getattr(cause, 'strerror', None) or cause}"
