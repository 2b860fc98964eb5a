"""Fourier mixing: tokens are mixed by a Fourier transform instead of attention, without any parameters.

    y = Re(F_N x F_dim)          F_n[a, b] = exp(-2πi · ab / n)              FNet: Lee-Thorp et al. 2021, eq. 3

One transform over the dimensions, one over the tokens, of which the real part is kept. Every output depends on every
token with fixed weights, so nothing is learned about which tokens matter: the feed-forward layers do the rest. The
fast Fourier transform takes O(N log N) operations.

    x [B, N, dim] -> [B, N, dim]

Each text is transformed over its own real tokens, those of one length together: padding and the other documents of a
packed row change nothing, and the output of padding is zero. A token sees later ones, so only an encoder can use it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.nn.multihead import Context
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
        if positions.is_real is None and positions.document is None:
            return self.mark("output", fourier(x))
        out = torch.zeros_like(x)
        for chosen, length in positions.by_length():
            out[chosen] = fourier(x[chosen].view(-1, length, x.shape[2])).flatten(0, 1)
        return self.mark("output", out)
