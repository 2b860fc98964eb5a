"""Features from another model: a few vectors per image, such as 36 regions x 2048 (Anderson et al. 2018).

    image.npy                       [regions, size]
    all.npy, key 7                  [images, regions, size]: number 7, from 0
    all.safetensors, key "img-7"    the tensor of that name; a file with one tensor needs no key

An .npy file with objects is a pickle, which can run code when it is opened, so it is rejected.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.data.batch import pad_rows
from regard.errors import UserError, suggest

ENDINGS = (".npy", ".safetensors")


def open_features(path: str | Path, key: str | int | None = None, size: int | None = None) -> Tensor:
    """The vectors [regions, size] of one image, as float32; `size` is what a model expects."""
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise UserError(f"{path}: features are in files ending in {' or '.join(ENDINGS)}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    features = _from_numpy(path, key) if path.suffix == ".npy" else _from_safetensors(path, key)
    if features.dim() != 2 or 0 in features.shape:
        raise UserError(f"{path}: has shape {tuple(features.shape)}; give [regions, size], a vector for each region")
    if size is not None and features.shape[1] != size:
        raise UserError(
            f"{path}: each region has {features.shape[1]:,} numbers, but the model reads feature_dim = {size:,}; use "
            "features of the same kind as in training"
        )
    if not bool(features.isfinite().all()):
        region, at = (~features.isfinite()).nonzero()[0].tolist()
        raise UserError(
            f"{path}: region {region}, number {at} is {float(features[region, at])}; make the features again"
        )
    return features


def pad_features(features: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Features of several images, padded to [B, regions, size], and which are real; None: all."""
    rows, is_real = pad_rows(features)
    return rows, None if bool(is_real.all()) else is_real


def _from_numpy(path: Path, key: str | int | None) -> Tensor:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        message = str(error)
        pickled = "pickle" in message.lower() or "objects" in message
        reason = "it contains objects, a pickle" if pickled else message
        raise UserError(
            f"{path}: cannot be read as features ({reason}); save them with numpy.save as plain numbers"
        ) from None
    if not np.issubdtype(array.dtype, np.number) or np.issubdtype(array.dtype, np.complexfloating):
        raise UserError(f"{path}: contains {array.dtype}, not numbers; save them as float32")
    if array.ndim == 3:
        if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < len(array):
            which = f'choose one (0 to {len(array) - 1}) with  "key": 0  in a table, or  regard caption --key 0'
            raise UserError(f"{path}: contains {len(array):,} images; {which}")
        array = array[key]
    elif key is not None:
        raise UserError(f"{path}: contains one image, so key = {key!r} has no meaning; remove it")
    return torch.from_numpy(np.array(array, dtype=np.float32))


def _from_safetensors(path: Path, key: str | int | None) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            name = str(key) if key is not None else names[0] if len(names) == 1 else None
            if not names:
                raise UserError(f"{path}: contains no tensors; make the features again")
            if name is None:
                raise UserError(
                    f'{path}: contains {len(names):,} tensors; choose one with  "key": "{names[0]}"  in a table, or  '
                    f"regard caption --key {shlex.quote(names[0])}"
                )
            if name not in names:
                raise UserError(f"{path}: has no tensor {name!r}; {suggest(name, names[:50])}")
            return file.get_tensor(name).float()
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: damaged or incomplete ({error}); copy or make it again") from None
