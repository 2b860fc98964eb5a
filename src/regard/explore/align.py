"""Alignment without a neural network: which word translates which, from counts alone (IBM model 1).

    p(f_1 … f_m | e_1 … e_l)  ∝  Π_j Σ_i t(f_j | e_i)                     Brown et al. 1993, section 4.2

Words that translate each other stand in the same pairs more often than chance. Expectation maximisation finds t:
share every target word among the source words beside it by the present t, count, divide, repeat. The likelihood
has one maximum, so it needs no luck to find. The result knows nothing of the model whose cross attention is
compared with it, which is its use here: a witness of its own.

Pieces of words are aligned as the model sees them, </s> too. A piece that occurs twice in a sentence is one
word to this model; both of its places count.
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
        e, f, place = [], [], []  # one entry for each source word beside each target word
        at = 0
        for source, target in zip(sources, targets, strict=True):
            kinds = sorted(set(source))
            e.append(np.tile(kinds, len(target)))
            f.append(np.repeat(target, len(kinds)))
            place.append(at + np.repeat(np.arange(len(target)), len(kinds)))
            at += len(target)
        self._e, self._f = np.concatenate(e), np.concatenate(f)
        where = np.concatenate(place)
        self._width = int(self._f.max(initial=0)) + 1
        keys, self._index = np.unique(self._e * self._width + self._f, return_inverse=True)
        self._keys = keys
        owner = keys // self._width  # the e of every entry of t
        t = np.ones(len(keys))
        for _ in range(rounds):
            share = t[self._index]
            share = share / np.bincount(where, share, minlength=at)[where]  # of each target word
            counts = np.bincount(self._index, share, minlength=len(keys))
            t = counts / np.bincount(owner, counts)[owner]
        self._t = t

    def probability(self, e: int, f: int) -> float:
        """t(f | e); 0 for words that never stood together."""
        at = int(np.searchsorted(self._keys, e * self._width + f))
        found = f < self._width and at < len(self._keys) and self._keys[at] == e * self._width + f
        return float(self._t[at]) if found else 0.0

    def align(self, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
        """bool [len(target), len(source)]: the source places whose word best explains each target word."""
        kinds = sorted(set(source))
        table = np.array([[self.probability(e, f) for e in kinds] for f in target])  # [m, kinds]
        best = np.array(kinds)[table.argmax(axis=1)]
        aligned: np.ndarray = (best[:, None] == np.array(source)[None]) & (table.max(axis=1) > 0)[:, None]
        return aligned
