"""Frames: a response as one string of bytes, a JSON header and then the arrays that it names.

    "RGRD"  length of the header (uint32)  header (UTF-8)  padding to a multiple of 8  array  padding  array  …

The browser views the bytes as typed arrays, so a map is never converted to text and back. A weight w lies between 0
and 1, so 16 bits of fixed point hold it, n = round(65535 w), with an error of at most 1 / 131070 = 8e-6: half the size
of float32, and equally exact near 1, where float16 is coarsest.

    12 layers · 12 heads · 128 · 128 weights · 2 bytes = 4.7 MB
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UserError

ONE = 65535  # the integer for a weight of 1
KINDS = {np.dtype("uint16"): "u2", np.dtype("float32"): "f4"}


def pack(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """A frame; `header` gets a field `arrays` with the name, type, shape and offset of each one."""
    listed, chunks, offset = [], [], 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
        listed.append({"name": name, "type": KINDS[array.dtype], "shape": list(array.shape), "offset": offset})
        chunks.append(data + bytes(-len(data) % 8))
        offset += len(chunks[-1])
    # JSON has no NaN: raise here instead of sending something else
    text = json.dumps({**header, "arrays": listed}, ensure_ascii=True, allow_nan=False).encode()
    return b"".join((b"RGRD", len(text).to_bytes(4, "little"), text, bytes(-(8 + len(text)) % 8), *chunks))


def fixed(weights: Tensor, where: str) -> np.ndarray:
    """Weights between 0 and 1 as 16-bit fixed point; `where` names them in the error message for NaN."""
    if not bool(torch.isfinite(weights).all()):
        raise UserError(
            f"{where}: the attention weights are not numbers (NaN), so there is nothing to show: the model's "
            "parameters are damaged, or training has diverged; choose an earlier checkpoint"
        )
    scaled: np.ndarray = (weights.clamp(0, 1) * ONE).round().numpy().astype(np.uint16)
    return scaled


def overview(weights: Tensor, side: int) -> Tensor:
    """Maps [heads, Nq, Nk] reduced to at most `side` cells per side, each the largest weight of its block."""
    rows, columns = weights.shape[-2:]
    size = (min(rows, side), min(columns, side))
    return weights if size == (rows, columns) else F.adaptive_max_pool2d(weights[None], size)[0]
