"""Versions of the training pairs: the same sentences, each version cut into other pieces.

Version 0 is the plain one, the others are random (`regard.text.regularise`, `regard.text.lattice`); epoch e reads
version e mod k, so a model sees a word in many cuts at no cost while it trains, and a resumed run reads just what it
would have read.
Every version and side has a generator of its own, seeded by (seed, version, side): a source is cut independently
of its target, and version 3 is the same whether there are 4 versions or 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regard.data.read import Pair
from regard.text.frame import frame
from regard.text.lattice import LatticeSampling
from regard.text.regularise import MergeDropout, Segmenter
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sampling:
    """How many versions, and how those after the first are cut: with merges left out, or drawn by P^alpha."""

    dropout: float
    versions: int
    seed: int
    alpha: float | None = None


class Sampler:
    """Draws the versions of a stream of pairs, chunk by chunk."""

    def __init__(self, sampling: Sampling, source: Tokenizer, target: Tokenizer) -> None:
        self.tokenizers = source, target
        first = self._cutter(source, sampling)
        self.cutters = first, first if source is target else self._cutter(target, sampling)
        self.bits = [
            np.random.PCG64([sampling.seed, version, side])
            for version in range(1, sampling.versions)
            for side in (0, 1)
        ]

    @staticmethod
    def _cutter(tokenizer: Tokenizer, sampling: Sampling) -> Segmenter:
        if sampling.alpha is not None:
            return LatticeSampling(tokenizer, sampling.alpha)
        return MergeDropout(tokenizer, sampling.dropout)

    def draw(self, chunk: Sequence[Pair]) -> list[list[list[int]]]:
        """[sources of version 1, its targets, sources of version 2, …], each [rows] of ids, framed."""
        sides = [pair.source for pair in chunk], [pair.target for pair in chunk]
        words = [cutter.cut(lines) for cutter, lines in zip(self.cutters, sides, strict=True)]
        drawn = []
        for i, bits in enumerate(self.bits):
            side = i % 2
            ids = self.cutters[side].draw(words[side], bits)
            drawn.append(frame(self.tokenizers[side], ids, begin=side == 1))
        return drawn
