"""The texts of packed rows as rows of their own, for mixers whose weights depend on the length of a text.

    a a a b b c        ─→   a a a ·    d d d d        texts of similar length together, each from the first column on
    d d d d e ·             b b · ·
                            …

Lengths are rounded up to a power of two, so that a batch of hundreds of texts needs about ten calls, and at most half
of what these compute is padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor


class Texts:
    groups: list[Tensor]  # [T, L] each: which of the B · N tokens of the batch it is; B · N where there is none

    def __init__(self, real: Tensor, number: Tensor) -> None:
        """Which tokens [B, N] are real, and the number of the text that each belongs to in the batch."""
        self.shape, self.none, device = real.shape, real.numel(), real.device
        at = real.flatten().nonzero()[:, 0]
        counts = torch.bincount(number.flatten()[at])
        counts = counts[counts > 0]
        first, sizes = counts.cumsum(dim=0) - counts, counts.tolist()
        octaves = defaultdict[int, list[int]](list)
        for text, size in enumerate(sizes):
            octaves[(size - 1).bit_length()].append(text)
        self.groups = []
        for octave, texts in sorted(octaves.items()):
            step, chosen = torch.arange(min(1 << octave, max(sizes)), device=device), torch.tensor(texts, device=device)
            index = at[(first[chosen, None] + step).clamp_max(len(at) - 1)]
            self.groups.append(torch.where(step < counts[chosen, None], index, self.none))
        if not sizes:  # nothing but padding
            self.groups = [torch.full((1, 1), self.none, device=device)]
        flat = torch.cat([group.flatten() for group in self.groups])
        places = torch.full((self.none + 1,), len(flat), device=device)
        places[flat] = torch.arange(len(flat), device=device)
        self.places = places[:-1]  # of the tokens in the groups, one after another; len(flat) for padding

    def split(self, x: Tensor) -> list[Tensor]:
        """[B, N, D] -> [T, L, D] for each group, 0 where there is no token."""
        flat = _with_zero(x.flatten(0, 1))
        return [flat.index_select(0, group.flatten()).view(*group.shape, -1) for group in self.groups]

    def join(self, parts: Iterable[Tensor]) -> Tensor:
        """[T, L, D] for each group -> [B, N, D], 0 for padding."""
        flat = _with_zero(torch.cat([part.flatten(0, 1) for part in parts]))
        return flat.index_select(0, self.places).view(*self.shape, -1)


def _with_zero(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 1))
