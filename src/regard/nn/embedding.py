"""Input embeddings: tokens, images and feature vectors as vectors of width dim.

    tokens    E[id] · sqrt(dim)      [B, N]              -> [B, N, dim]       Vaswani et al. 2017, section 3.4
    patches   W · pixels of a patch  [B, C, Hpx, Wpx]    -> [B, N (+1), dim]  Dosovitskiy et al. 2021
              or strided convolutions                                         Xiao et al. 2021 (arXiv 2106.14881)
    features  W · vector + b         [B, N, features]    -> [B, N, dim]       regions of a CNN, Anderson et al. 2018

An embedding matrix that is also the output layer is initialised with standard deviation dim^-0.5; the factor sqrt(dim)
brings its rows to the scale of the position encodings that are added to them.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from regard.errors import UserError


class Tokens(nn.Module):
    """One embedding per token, and optionally one per token type (BERT's sentences A and B)."""

    def __init__(self, vocab_size: int, dim: int, *, scaled: bool, token_types: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.token_types = nn.Embedding(token_types, dim) if token_types else None
        self.scale = dim**0.5 if scaled else 1.0

    def forward(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise UserError(
                f"token ids have dtype {ids.dtype} and shape {tuple(ids.shape)}: pass integers [batch, length]"
            )
        try:
            x: Tensor = self.tokens(ids)
        except IndexError:  # on a CPU; a GPU reports it later, as a CUDA error
            size, ends = self.tokens.num_embeddings, (int(ids.min()), int(ids.max()))
            raise UserError(f"token ids are {ends[0]} to {ends[1]}: the vocabulary has 0 to {size - 1}") from None
        if self.scale != 1.0:
            x = x * self.scale
        if self.token_types is not None:
            x = x + self.token_types(torch.zeros_like(ids) if types is None else types)
        return x


class Patches(nn.Module):
    """An image as a sequence of patches, each projected by one matrix; optionally a learned [CLS] vector first.

    With a `stem`, patches overlap: 3 x 3 convolutions with these widths and stride 2 reduce a patch to one position
    before the projection. Pixels are between 0 and 1 and are normalised to (pixel - mean) / std.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        channels: int,
        dim: int,
        *,
        cls: bool,
        stem: tuple[int, ...] = (),
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
    ) -> None:
        super().__init__()
        self.image_size, self.channels, self.mean, self.std = image_size, channels, mean, std
        self.stem = nn.Sequential(*(downsample(*widths) for widths in itertools.pairwise((channels, *stem))))
        side = 1 if stem else patch_size
        self.project = nn.Conv2d(stem[-1] if stem else channels, dim, kernel_size=side, stride=side)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim)) if cls else None

    def forward(self, images: Tensor) -> Tensor:
        channels, size = self.channels, self.image_size
        if images.dim() != 4 or images.shape[1:] != (channels, size, size):
            raise UserError(f"images have shape {tuple(images.shape)}: pass [batch, {channels}, {size}, {size}]")
        x = self.project(self.stem(self._normalised(images))).flatten(2).transpose(1, 2)  # [B, N, dim]
        return x if self.cls is None else torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1)

    def _normalised(self, images: Tensor) -> Tensor:
        if len(self.mean) == 1:
            return images if (self.mean, self.std) == ((0.0,), (1.0,)) else (images - self.mean[0]) / self.std[0]
        # one channel at a time: Python numbers, because a CUDA graph cannot record the creation of a tensor
        parts = [(images[:, c] - mean) / std for c, (mean, std) in enumerate(zip(self.mean, self.std, strict=True))]
        return torch.stack(parts, dim=1)


def downsample(width: int, new_width: int) -> nn.Sequential:
    """A convolution with stride 2, [B, width, n, n] -> [B, new_width, n / 2, n / 2]."""
    return nn.Sequential(nn.Conv2d(width, new_width, 3, stride=2, padding=1), nn.GroupNorm(1, new_width), nn.ReLU())


class Features(nn.Module):
    """Feature vectors from another model, such as 36 image regions x 2048."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(size, dim)

    def forward(self, features: Tensor) -> Tensor:
        if features.dim() != 3 or features.shape[-1] != self.project.in_features:
            raise UserError(
                f"features have shape {tuple(features.shape)}: pass [batch, regions, {self.project.in_features}]"
            )
        return self.project(features)  # type: ignore[no-any-return]
