"""Word alignment from counts alone: IBM model 1.

    p(f_1 … f_m | e_1 … e_l)  ∝  Π_j Σ_i t(f_j | e_i)                     Brown et al. 1993, section 4.2

Words that translate each other occur in the same pairs more often than by chance. Expectation maximisation finds t:
distribute every target word over the source words of its pair in proportion to t, count, normalise, repeat. The
likelihood is concave, so any start reaches the maximum. The result is independent of the model whose cross-attention
is compared with it.

Subwords are aligned as the model sees them, </s> included. A subword that occurs twice in a sentence is one word to
this model; both positions count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDS = 10


class Lexicon:
    """t(f | e) for the pairs (e, f) that occur together."""

    def __init__(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], rounds: int = ROUNDS
    ) -> None:
        e, f, pair = [], [], []  # one entry for each source word with each target word of its pair
        at = 0
        for source, target in zip(sources, targets, strict=True):
            kinds = sorted(set(source))
            e.append(np.tile(kinds, len(target)))
            f.append(np.repeat(target, len(kinds)))
            pair.append(at + np.repeat(np.arange(len(target)), len(kinds)))
            at += len(target)
        self._e, self._f = np.concatenate(e), np.concatenate(f)
        where = np.concatenate(pair)
        self._width = int(self._f.max(initial=0)) + 1
        keys, self._index = np.unique(self._e * self._width + self._f, return_inverse=True)
        self._keys = keys
        owner = keys // self._width  # the e of every entry of t
        t = np.ones(len(keys))
        for _ in range(rounds):
            fraction = t[self._index]
            fraction = fraction / np.bincount(where, fraction, minlength=at)[where]  # sums to 1 per target word
            counts = np.bincount(self._index, fraction, minlength=len(keys))
            t = counts / np.bincount(owner, counts)[owner]
        self._t = t

    def probability(self, e: int, f: int) -> float:
        """t(f | e); 0 for words that never occur together."""
        at = int(np.searchsorted(self._keys, e * self._width + f))
        known = f < self._width and at < len(self._keys) and self._keys[at] == e * self._width + f
        return float(self._t[at]) if known else 0.0

    def align(self, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
        """bool [len(target), len(source)]: the source positions whose word best explains each target word."""
        kinds = sorted(set(source))
        table = np.array([[self.probability(e, f) for e in kinds] for f in target])  # [m, kinds]
        best = np.array(kinds)[table.argmax(axis=1)]
        aligned: np.ndarray = (best[:, None] == np.array(source)[None]) & (table.max(axis=1) > 0)[:, None]
        return aligned
