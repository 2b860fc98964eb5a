"""Windows and texts by FlashAttention, whose kernels know both: no mask, no blocks, nothing to compile.

    query i attends to the keys i - a … i + b of its text       causal window of n: a = n - 1, b = 0

FlashAttention (Dao et al. 2022, 2023) computes the scores in tiles that never leave the chip; with a band it skips the
tiles outside. PyTorch offers this in `varlen_attn`, for texts of any length one after another, in half precision. The
rows of a batch are such texts, and so are the texts of a packed row; the padding of a row is one that nothing reads:

    a a a · ·        starts 0 3 5 10        q, k, v [B, H, N, D] -> [B, H, N, D]
    b b b b b
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.nn.mask import AttentionMask, padding, same_document
from regard.nn.tokens import Positions


@dataclass(frozen=True)
class Bands:
    """What `varlen_attn` needs to know of a mask."""

    before: int  # keys before the query; -1: all of its text
    after: int
    starts: Tensor | None  # int32 [texts + 1], where each text begins in the tokens of the batch; None: with its row


def flash_can(dtype: torch.dtype, key_dim: int, val_dim: int) -> bool:
    """Whether there are kernels for this type and these sizes."""
    return dtype in (torch.bfloat16, torch.float16) and key_dim == val_dim and key_dim % 8 == 0 and key_dim <= 256


def find_bands(own: AttentionMask) -> Bands | None:
    """The bands of a mask, where the queries are the keys and indices differ as positions do; once for all layers.

    With padding or several texts per row it reads tensors, which a recorded or compiled step cannot do.
    """
    found: Bands | None = own.bands
    if found is not None or own.q is not own.k or own.order is not None:
        return found
    if own.q.start is not None:
        band, starts = own.mask.band, None
    elif own.is_recorded or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    else:
        band = own.mask.without(padding).without(same_document).band
        starts = None if band is None else find_texts(own.q)
    if band is not None and (starts is not None or own.q.start is not None):
        before, after = (-1 if side >= own.q.length else int(side) for side in band)
        own.bands = found = Bands(before, after, starts)
    return found


def find_texts(tokens: Positions) -> Tensor | None:
    """Where each text of the batch begins, and each run of padding; None: the tokens of a text are no neighbours."""
    shape = tokens.rows, tokens.length
    text = tokens.pos.new_zeros(shape) if tokens.document is None else tokens.document.expand(shape)
    is_padding = text.new_zeros(shape, dtype=torch.bool) if tokens.is_real is None else ~tokens.is_real.expand(shape)
    begins = torch.ones_like(is_padding)
    begins[:, 1:] = (text.diff(dim=1) != 0) | (is_padding[:, 1:] != is_padding[:, :-1])
    highest = text.masked_fill(is_padding, torch.iinfo(text.dtype).min).cummax(dim=1).values
    is_again = begins[:, 1:] & (text[:, 1:] <= highest[:, :-1])  # a text may have begun before
    is_jump = ~begins[:, 1:] & (tokens.pos.diff(dim=1) != 1)
    if bool(((is_again | is_jump) & ~is_padding[:, 1:]).any()):
        return None
    end = torch.full((1,), begins.numel(), device=begins.device)
    return torch.cat((begins.flatten().nonzero()[:, 0], end)).int()


def attend_flash(q: Tensor, k: Tensor, v: Tensor, bands: Bands, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # here, since it imports PyTorch's compiler, for a second

    rows, heads, length, size = q.shape
    starts = bands.starts
    if starts is None:
        starts = torch.arange(0, (rows + 1) * length, length, device=q.device, dtype=torch.int32)
    q, k, v = (x.transpose(1, 2).reshape(rows * length, heads, size) for x in (q, k, v))
    band = bands.before, bands.after
    out = varlen_attn(q, k, v, starts, starts, length, length, scale=scale, window_size=band)
    assert isinstance(out, Tensor)
    return out.view(rows, length, heads, size).transpose(1, 2)
