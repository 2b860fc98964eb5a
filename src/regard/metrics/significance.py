"""Is a difference between two models larger than chance?

Training with another seed gives another model, and its score moves. Two recipes are therefore compared over several
seeds, each pair trained with the same seed, that is with the same order of the data and, as far as the shapes are the
same, the same initial weights; what is common to a pair cancels in its difference d_i = row_i - base_i:

    t-interval     mean(d) ± t(1 - α/2, n - 1) · sd(d) / √n                       Student 1908
    sign-flip p    fraction of the 2ⁿ ways to flip the signs of d whose |mean| is at least as large; it assumes only
                   that without an effect d and -d are equally probable                        Fisher 1935
    bootstrap      seeds and test items are sampled with replacement; the 2.5 % and 97.5 % quantiles of the difference.
                   It contains the randomness of the choice of test items too, but with few seeds too little of that
                   of training, so it decides nothing                                          Efron 1979; Koehn 2004

With one run each, only the test items are random: the same bootstrap, and approximate randomisation (`randomize`).

With n seeds the smallest two-sided sign-flip p is 2 / 2ⁿ: 0.25 for three, 0.031 for six. Of many rows some differ by
chance, so the p-values of a table are corrected by Holm's method (1979), which keeps the probability of any false
claim in the table below α. A row is called better or worse if the p-value of its t-test, corrected, is below α;
otherwise the difference is not decided, which is not the same as "no difference". Where all differences are equal, as
of a metric with few possible values, there is no spread to compute t from, and the sign-flip p takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from regard.errors import MissingExtra

ALPHA = 0.05
RESAMPLES = 1000  # of the bootstrap
TRIALS = 10_000  # of approximate randomisation
CHUNK = 2**21  # resamples · items at once: 16 MB
MOST_SEEDS = 1000  # beyond which `seeds_needed` gives up

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """Paired differences row - base over n seeds; with one seed there is no spread."""

    mean: float
    n: int
    sd: float | None = None
    low: float | None = None  # the t-interval
    high: float | None = None
    p: float | None = None  # of the t-test; over items, of approximate randomisation
    p_sign: float | None = None  # of the sign flips
    boot_low: float | None = None  # the bootstrap interval over seeds and items
    boot_high: float | None = None
    over: Literal["seeds", "items"] = "seeds"  # "items": two single models, compared on this test set


def _stats() -> Any:
    try:
        from scipy import stats
    except ModuleNotFoundError:
        raise MissingExtra("study", "scipy", "comparisons over seeds") from None
    return stats


def paired(base: Sequence[float], row: Sequence[float]) -> Difference:
    """The difference between scores of the same seeds."""
    differences = np.asarray(row, float) - np.asarray(base, float)
    n, mean = len(differences), float(np.mean(differences))
    if n < 2:
        return Difference(mean, n)
    sd = float(np.std(differences, ddof=1))
    p_sign = sign_flip(differences)
    if sd <= 1e-12 * max(1.0, abs(mean)):  # no spread, so no t
        return Difference(mean, n, 0.0, p=p_sign, p_sign=p_sign)
    stats = _stats()
    half = float(stats.t.ppf(1 - ALPHA / 2, n - 1)) * sd / math.sqrt(n)
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


def verdict(difference: Difference, p_holm: float | None, higher: bool) -> str:
    """ "better", "worse" or "not decided"."""
    if p_holm is None or p_holm >= ALPHA or difference.mean == 0:
        return "not decided"
    return "better" if (difference.mean > 0) == higher else "worse"


def seeds_needed(difference: Difference, rows: int) -> int | None:
    """How many seeds would decide, if mean and spread stay as they are; None: more than a thousand, or unknown.

    At the level that Holm's method requires of the smallest of `rows` p-values.
    """
    if difference.sd is None or difference.mean == 0:
        return None
    n, level = np.arange(2, MOST_SEEDS + 1), ALPHA / max(1, rows)
    if difference.sd > 0:
        half = _stats().t.ppf(1 - level / 2, n - 1) * difference.sd / np.sqrt(n)  # it falls with n
        enough = n[half < abs(difference.mean)]
    else:
        enough = n[0.5 ** (n - 1) < level]  # sign flips
    return int(enough[0]) if len(enough) else None


def resample(
    base: Array, row: Array, metric: Callable[[Array], Array], resamples: int = RESAMPLES, seed: int = 0
) -> Array:
    """Differences [resamples] between the means over seeds of `metric`, row - base, each of another resample.

    base, row [seeds, items, k]: what `metric` is computed from, summed over items; metric [..., k] -> [...]. Seeds and
    items are sampled with replacement, the same for both; with one seed it is the paired bootstrap of sacrebleu.
    """
    item_generator, seed_generator = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    seeds, items, k = base.shape
    table = np.stack([base, row]).transpose(2, 0, 1, 3).reshape(items, -1)  # [items, 2 · seeds · k]
    differences = []
    for size in _chunks(resamples, items):
        sampled = item_generator.integers(items, size=(size, items)) + items * np.arange(size)[:, None]
        counts = np.bincount(sampled.ravel(), minlength=size * items).reshape(size, items)
        scores = metric((counts.astype(float) @ table).reshape(size, 2, seeds, k))  # [size, 2, seeds]
        chosen = seed_generator.integers(seeds, size=(size, seeds))
        differences.append(np.take_along_axis(scores[:, 1] - scores[:, 0], chosen, axis=1).mean(axis=1))
    return np.concatenate(differences)


def bootstrap(
    base: Array, row: Array, metric: Callable[[Array], Array], resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The interval that contains 95 % of the differences of `resample`."""
    low, high = np.quantile(resample(base, row, metric, resamples, seed), [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)


def randomize(base: Array, row: Array, metric: Callable[[Array], Array], trials: int = TRIALS, seed: int = 0) -> float:
    """The two-sided p-value of approximate randomisation: base and row [items, k] exchange their outputs at random.

    The fraction of `trials` whose difference is at least as large as the true one (Noreen 1989; Riezler and Maxwell
    2005).
    """
    generator, change = np.random.default_rng(seed), row - base
    first, last = base.sum(axis=0), row.sum(axis=0)
    observed = abs(float(metric(last) - metric(first)))
    larger = 0
    for size in _chunks(trials, len(base)):
        moved = generator.integers(2, size=(size, len(base)), dtype=np.int8).astype(float) @ change  # [size, k]
        larger += int((np.abs(metric(last - moved) - metric(first + moved)) >= observed - 1e-12).sum())
    return (larger + 1) / (trials + 1)


def _chunks(count: int, items: int) -> Iterator[int]:
    """`count` resamples in parts that need little memory."""
    size = max(1, CHUNK // max(1, items))
    for begin in range(0, count, size):
        yield min(size, count - begin)
