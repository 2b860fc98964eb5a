"""Fourier mixing: tokens are mixed by a Fourier transform instead of attention, without any parameters.

    y = Re(F_N x F_dim)          F_n[a, b] = exp(-2πi · ab / n)              FNet: Lee-Thorp et al. 2021, eq. 3

One transform over the dimensions, one over the tokens, of which the real part is kept. Every output depends on every
token with fixed weights, so nothing is learned about which tokens matter: the feed-forward layers do the rest. The
fast Fourier transform takes O(N log N) operations.

    x [B, N, dim] -> [B, N, dim]

Each text is transformed over its own real tokens, n of them: padding and the other documents of a packed row change
nothing, and the output of padding is zero. Texts of different length are transformed together, as a convolution
(Bluestein 1970), since 2ab = a² + b² - (a - b)²:

    Σ_b x_b exp(-2πi · ab / n) = w_a Σ_b (x_b w_b) / w_{a-b}        w_k = exp(-πi · k² / n)

A token sees later ones, so only an encoder can use it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn.multihead import Context
from regard.nn.texts import Texts
from regard.nn.trace import Traceable


def fourier(x: Tensor) -> Tensor:
    """Re(F_N x F_dim), computed in float32 or float64."""
    if not x.numel():  # MKL refuses a transform of nothing
        return x
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    mixed: Tensor = torch.fft.fft2(exact, dim=(-2, -1)).real
    return mixed.to(x.dtype)


class FourierMixing(Traceable):
    """A replacement of self-attention in an encoder."""

    stages = ("output",)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        positions = context.attention_mask.q
        if positions.document is not None:
            out = fourier_texts(x, positions.texts)
        elif positions.is_real is not None and x.numel():
            out = fourier_rows(x, positions.is_real.expand(x.shape[:2]), positions.pos)
        else:
            out = fourier(x)
        return self.mark("output", out)


def fourier_texts(x: Tensor, texts: Texts) -> Tensor:
    """`fourier` of each text of packed rows, 0 for padding."""
    parts = []
    for group, own in zip(texts.groups, texts.split(x), strict=True):
        count, length = group.shape
        # each size that the FFT has not seen takes it a millisecond, so there are few: 1 to 8, 10, 12, …
        missing = -count % (1 << max(0, count.bit_length() - 3))
        is_real = F.pad(group < texts.none, (0, 0, 0, missing))
        pos = torch.arange(length, device=x.device)[None]
        parts.append(fourier_rows(F.pad(own, (0, 0, 0, 0, 0, missing)), is_real, pos)[:count])
    return texts.join(parts)


def fourier_rows(x: Tensor, is_real: Tensor, pos: Tensor) -> Tensor:
    """`fourier` of the real tokens [B, N] of each row, 0 elsewhere; `pos` [B|1, N]: real tokens before each one."""
    length, count = x.shape[1], is_real.sum(dim=1, keepdim=True).clamp_min(1)
    index = pos.clamp_max(length - 1)[..., None].expand_as(x)
    real = torch.where(is_real[..., None], x, 0).to(torch.promote_types(x.dtype, torch.float32))
    rows = torch.zeros_like(real).scatter_add(1, index, real)  # without padding between or before the tokens
    k = torch.arange(length, device=x.device)
    angle = -torch.pi * (k * k % (2 * count)).to(real.dtype) / count
    w = torch.polar(torch.ones_like(angle), angle)  # [B, N]
    size = 1 << (2 * length - 1).bit_length()  # of a convolution that does not wrap around
    inverse = torch.cat((w.conj(), w.new_zeros(len(x), size - 2 * length + 1), w[:, 1:].conj().flip(1)), dim=1)
    product = torch.fft.fft(torch.fft.fft(rows, dim=-1) * w[..., None], size, dim=1) * torch.fft.fft(inverse)[..., None]
    mixed = (torch.fft.ifft(product, dim=1)[:, :length] * w[..., None]).real
    return torch.where(is_real[..., None], mixed.gather(1, index).to(x.dtype), 0)
