"""Is a difference between two models larger than chance?

Training with another seed gives another model, and its score moves. Two recipes are therefore compared over several
seeds, each pair trained with the same seed, that is with the same order of the data and, as far as the shapes are the
same, the same initial weights; what is common to a pair cancels in its difference d_i = row_i - base_i:

    t-interval     mean(d) ± t(1 - α/2, n - 1) · sd(d) / √n                       Student 1908
    sign-flip p    the share of the 2ⁿ ways to flip the signs of d whose |mean| is at least as large; it assumes only
                   that without an effect d and -d are equally likely                            Fisher 1935
    bootstrap      seeds and test items are both drawn with replacement; the 2.5 % and 97.5 % points of the difference.
                   It also contains the chance in which sentences the test set has             Efron 1979; Koehn 2004

With n seeds the smallest two-sided sign-flip p is 2 / 2ⁿ: 0.25 for three, 0.031 for six. Of many rows some differ by
chance, so the p-values of a table are corrected by Holm's method (1979), which keeps the probability of any false
claim in the table below α. A row is called better or worse if the p-value of its t-test, corrected, is below α;
otherwise the difference is not decided, which is not the same as "no difference".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import MissingExtra

ALPHA = 0.05
RESAMPLES = 1000
MOST_SEEDS = 1000  # beyond which `seeds_needed` gives up

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """Paired differences row - base over n seeds; with one seed only the mean is known."""

    mean: float
    n: int
    sd: float | None = None
    low: float | None = None  # the t-interval
    high: float | None = None
    p: float | None = None  # of the t-test
    p_sign: float | None = None  # of the sign flips
    boot_low: float | None = None  # the bootstrap interval over seeds and items
    boot_high: float | None = None


def _stats() -> Any:
    try:
        from scipy import stats
    except ModuleNotFoundError:
        raise MissingExtra("study", "scipy", "comparisons over seeds") from None
    return stats


def paired(base: Sequence[float], row: Sequence[float], alpha: float = ALPHA) -> Difference:
    """The difference between scores of the same seeds."""
    differences = np.asarray(row, float) - np.asarray(base, float)
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return Difference(mean, n)
    sd = float(np.std(differences, ddof=1))
    p_sign = sign_flip(differences)
    if sd <= 1e-12 * max(1.0, abs(mean)):  # no spread: every pair is the same
        return Difference(mean, n, 0.0, mean, mean, float(abs(mean) <= 1e-12), p_sign)
    stats = _stats()
    half = float(stats.t.ppf(1 - alpha / 2, n - 1)) * sd / math.sqrt(n)
    p = float(2 * stats.t.sf(abs(mean) / (sd / math.sqrt(n)), n - 1))
    return Difference(mean, n, sd, mean - half, mean + half, p, p_sign)


def sign_flip(differences: Sequence[float] | Array) -> float:
    """The two-sided p-value of all sign flips; of 10,000 random ones beyond 13 pairs."""
    stats = _stats()
    found = stats.permutation_test(
        (np.asarray(differences, float),), np.mean, permutation_type="samples", n_resamples=9_999, vectorized=True,
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(found.pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction; a row without a p-value has none afterwards and is not counted."""
    order = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, at) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        corrected[at] = highest
    return corrected


def verdict(difference: Difference, p_holm: float | None, higher: bool, alpha: float = ALPHA) -> str:
    """ "better", "worse" or "not decided"."""
    if p_holm is None or p_holm >= alpha or difference.mean == 0:
        return "not decided"
    return "better" if (difference.mean > 0) == higher else "worse"


def seeds_needed(difference: Difference, rows: int, alpha: float = ALPHA) -> int | None:
    """How many seeds would decide, if mean and spread stay as they are; None: more than a thousand, or unknown.

    At the level that Holm's method asks of the smallest of `rows` p-values.
    """
    if difference.sd is None or difference.mean == 0:
        return None
    stats, level = _stats(), alpha / max(1, rows)
    for n in range(2, MOST_SEEDS + 1):
        if difference.sd == 0 or abs(difference.mean) >= stats.t.ppf(1 - level / 2, n - 1) * difference.sd / math.sqrt(
            n
        ):
            return n
    return None


def bootstrap(
    base: Array, row: Array, metric: Callable[[Array], Array], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The bootstrap interval of the difference between the means over seeds of `metric`.

    base, row [seeds, items, statistics]: what `metric` is computed from, summed over items; metric [..., statistics] ->
    [...]. Seeds and items are drawn for both alike.
    """
    generator = np.random.default_rng(seed)
    seeds, items = base.shape[:2]
    found = np.empty(resamples)
    for at in range(resamples):
        counts = np.bincount(generator.integers(items, size=items), minlength=items).astype(float)
        drawn = generator.integers(seeds, size=seeds)
        sums = (np.einsum("i,sik->sk", counts, table) for table in (base, row))
        before, after = (metric(one)[drawn].mean() for one in sums)
        found[at] = after - before
    low, high = np.quantile(found, [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)
