"""Windows and texts by FlashAttention, whose kernels know both: no mask, no blocks, nothing to compile.

    query i attends to the keys i - a … i + b of its text       causal window of n: a = n - 1, b = 0

FlashAttention (Dao et al. 2022, 2023) computes the scores in tiles that never leave the chip; with a band it skips the
tiles outside. In half precision it also takes texts of any length one after another, such as those of packed rows, and
padding is a text that no other reads:

    a a a · ·        starts 0 3 5 10        q, k, v [B, H, N, D] -> [B, H, N, D]
    b b b b b

The operator of PyTorch is called, and not `torch.nn.attention.varlen.varlen_attn`, a function in Python around it that
takes longer than the kernels for up to 16,000 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.nn.mask import AttentionMask, padding, same_document
from regard.nn.tokens import Positions

forward = torch.ops.aten._flash_attention_forward


@dataclass(frozen=True)
class Bands:
    """What the kernels need to know of a mask."""

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
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, N, H, D]
    shape, length, starts = q.shape, q.shape[1], bands.starts
    if starts is not None:
        q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))  # [B · N, H, D]
    is_causal = (bands.before, bands.after) == (-1, 0)
    out: Tensor = forward(
        q, k, v, starts, starts, length, length, 0.0, is_causal, False, scale=scale,
        window_size_left=bands.before, window_size_right=bands.after,
    )[0]  # fmt: skip
    return out.view(shape).transpose(1, 2)
