"""Statistics: the same numbers as scipy's and sacrebleu's, known values, and false positives as rare as promised."""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finished_runs import corrupted, sentences
from regard.errors import MissingExtra
from regard.metrics.bleu import score
from regard.metrics.items import (
    METRICS,
    bleu,
    bleu_statistics,
    chrf,
    chrf_statistics,
    f1,
    fraction,
    item_statistics,
    read_items,
)
from regard.metrics.significance import (
    Difference,
    bootstrap,
    holm,
    paired,
    randomize,
    resample,
    seeds_needed,
    sign_flip,
    verdict,
)  # fmt: skip

stats = pytest.importorskip("scipy.stats", reason="install it with  pip install 'regard[study]'")
scores = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=9)


# --- over seeds


@given(scores)
@settings(max_examples=60, deadline=None)
def test_the_paired_test_is_scipys(pairs):
    base, row = map(np.array, zip(*pairs, strict=True))
    differences = row - base
    found = paired(base, row)
    assert found.mean == pytest.approx(differences.mean()) and found.n == len(pairs)
    if differences.std() < 1e-6:
        return
    expected = stats.ttest_rel(row, base)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-6, abs=1e-9)


@given(st.lists(st.integers(-20, 20), min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_sign_flips_are_counted_exactly(differences):
    signs = 1 - 2 * ((np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences))) & 1)
    means = np.abs(signs @ np.array(differences))
    assert sign_flip(differences) == pytest.approx((means >= abs(sum(differences))).mean())


@pytest.mark.parametrize(("seeds", "half", "smallest"), [(3, 2.48, 0.25), (5, 1.24, 0.063), (6, 1.05, 0.031)])
def test_known_values(seeds, half, smallest):
    """The half width in standard deviations, and the smallest p-value of sign flips, 2 / 2ⁿ."""
    row = 1 + 0.1 * np.arange(seeds)
    found = paired(np.zeros(seeds), row)
    assert (found.high - found.low) / 2 / found.sd == pytest.approx(half, abs=0.005)
    assert found.p_sign == pytest.approx(smallest, abs=0.00051) and found.p_sign == 2 / 2**seeds


def test_equal_differences_and_single_seeds():
    assert paired([1.0], [3.0]) == Difference(2.0, 1)
    same = paired([10.0, 20.0, 30.0], [10.0, 20.0, 30.0])
    assert (same.mean, same.sd, same.p, same.p_sign) == (0.0, 0.0, 1.0, 1.0)
    constant = paired([10.0, 20.0, 30.0], [11.0, 21.0, 31.0])
    assert (constant.sd, constant.p, constant.low) == (0.0, 0.25, None)  # no t without spread: sign flips
    assert seeds_needed(constant, 1) == 6 and seeds_needed(constant, 10) == 9  # 2 / 2⁶ = 0.031, 2 / 2⁹ = 0.0039


def test_many_pairs_are_sampled():
    """Beyond 13 pairs not all flips are tried; the p-value is close to the t-test's for normal differences."""
    differences = np.random.default_rng(0).normal(0.3, 1, size=40)
    assert sign_flip(differences) == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=0.02)


def test_holm_by_hand():
    """p 0.01, 0.04, 0.03, 0.005 of four rows: 0.005·4, 0.01·3, 0.03·2, and 0.04 is raised to the one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([None, 0.04, None, 0.5]) == [None, pytest.approx(0.08), None, 0.5]
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_verdicts():
    better, worse = Difference(1.0, 3), Difference(-1.0, 3)
    assert verdict(better, 0.01, higher=True) == "better" and verdict(worse, 0.01, higher=True) == "worse"
    assert verdict(better, 0.01, higher=False) == "worse" and verdict(worse, 0.01, higher=False) == "better"
    assert verdict(better, 0.05, higher=True) == verdict(better, None, higher=True) == "not decided"


@pytest.mark.parametrize("rows", [1, 10])
def test_as_many_seeds_as_needed_decide(rows):
    """With that many seeds of the same mean and spread the t-test decides, with one fewer it does not."""
    found = Difference(0.5, 3, sd=0.8)
    needed = seeds_needed(found, rows)

    def p(n):
        return 2 * stats.t.sf(found.mean / (found.sd / math.sqrt(n)), n - 1)

    assert p(needed) < 0.05 / rows <= p(needed - 1)
    assert seeds_needed(Difference(0.001, 3, sd=1.0), 1) is None  # more than a thousand
    assert seeds_needed(Difference(0.5, 1), 1) is None and seeds_needed(Difference(0.0, 3, sd=1.0), 1) is None


@pytest.mark.slow
def test_false_positives_are_rarer_than_alpha():
    """Tables of five rows without any effect: at most one table in twenty makes any claim, not one row in twenty."""
    generator, tables, claims = np.random.default_rng(0), 200, 0
    for _ in range(tables):
        base, *rows = generator.normal(size=(6, 5))  # the base is common to all, so the rows are correlated
        found = [paired(base, row) for row in rows]
        corrected = holm([one.p for one in found])
        claims += any(verdict(*pair, higher=True) != "not decided" for pair in zip(found, corrected, strict=True))
    assert claims / tables < 0.05


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtra, match=r"regard\[study\]"):
        paired([1.0, 2.0], [1.5, 2.9])


# --- over items


@pytest.fixture(scope="module")
def outputs():
    """References, and outputs of two systems of which the second is a little better."""
    references = sentences(200)
    return references, corrupted(references, 0.35, 1), corrupted(references, 0.31, 2)


@pytest.mark.parametrize(
    "hypotheses",
    [
        ["the dog runs over the red ball", "", "a"],
        ["", "", ""],
        ["the", "a cat", "zzz"],  # no n-grams of order 4
        ["the dog zzz runs qqq over", "cat man a the", "x y z w v"],  # no match of order 3
    ],
)
def test_bleu_of_summed_statistics_is_sacrebleus(hypotheses):
    references = ["the dog runs over the red ball", "the cat sat on a mat", "a man"]
    expected = score(hypotheses, references)["bleu"]
    assert bleu(bleu_statistics(hypotheses, references).sum(axis=0)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("splitting", ["13a", "char", "zh", "intl"])
def test_bleu_has_the_tokenisation_of_the_score(outputs, splitting):
    references, _, system = outputs
    statistics = bleu_statistics(system, references, splitting)
    assert bleu(statistics.sum(axis=0)) == pytest.approx(score(system, references, splitting)["bleu"])


def test_chrf_of_summed_statistics_is_sacrebleus(outputs):
    references, base, row = outputs
    odd = ["", "a", "the  dog\truns", "zzz"], ["the cat", "a b c", "the dog runs!", ""]
    for hypotheses, expected in ((base, references), (row, references), odd, ([""], ["x"]), (["q"], ["xyz"])):
        found = chrf(chrf_statistics(hypotheses, expected).sum(axis=0))
        assert found == pytest.approx(score(hypotheses, expected)["chrf"], abs=1e-9)


def test_f1_of_summed_statistics_is_seqevals():
    seqeval = pytest.importorskip("seqeval.metrics", reason="install it with  pip install 'regard[seqeval]'")
    generator, kinds = np.random.default_rng(0), ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    tags = [[[str(tag) for tag in generator.choice(kinds, size=8)] for _ in range(40)] for _ in range(2)]
    records = [{"words": [], "reference": one, "tags": two} for one, two in zip(*tags, strict=True)]
    assert f1(item_statistics(records, "f1").sum(axis=0)) == pytest.approx(seqeval.f1_score(*tags))
    assert item_statistics([{"words": ["a"], "reference": ["NOUN"], "tags": ["VERB"]}], "f1") is None  # macro-F1


def test_japanese_is_split_into_characters():
    references, hypotheses = ["これはペンです", "猫が好きです"], ["これはほんです", "猫が好きでした"]
    statistics = bleu_statistics(hypotheses, references)
    assert statistics[:, 1].tolist() == [7, 6]
    assert bleu(statistics.sum(axis=0)) == pytest.approx(score(hypotheses, references)["bleu"])


def sacrebleu_test(kind, references, base, row, samples):
    """(score, p) of the second system, as `sacrebleu --paired-bs` and `--paired-ar` compute them."""
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    systems = [("base", base), ("row", row)]
    test = PairedTest(systems, {"BLEU": BLEU()}, [references], test_type=kind, n_samples=samples)
    result = test()[1]["BLEU"][1]
    return result.score, result.p_value


def test_one_seed_is_the_paired_bootstrap_of_sacrebleu(outputs):
    """With sacrebleu's seed even the resamples are the same; its p-value is computed from our differences."""
    references, base, row = outputs
    first, last = (bleu_statistics(one, references)[None] for one in (base, row))
    differences = resample(first, last, bleu, resamples=300, seed=12345)
    observed = float(bleu(last.sum(axis=1))[0] - bleu(first.sum(axis=1))[0])
    centred = np.abs(differences) - np.abs(differences).mean()
    found, p = sacrebleu_test("bs", references, base, row, 300)
    assert bleu(last.sum(axis=1))[0] == pytest.approx(found)
    assert ((centred > abs(observed)).sum() + 1) / 301 == pytest.approx(p)
    low, high = bootstrap(first, last, bleu)
    assert low < observed < high
    assert (low, high) == pytest.approx(
        (observed - 1.96 * differences.std(), observed + 1.96 * differences.std()), rel=0.5
    )


def test_randomisation_agrees_with_sacrebleu(outputs):
    references, base, row = outputs
    first, last = (bleu_statistics(one, references) for one in (base, row))
    _, p = sacrebleu_test("ar", references, base, row, 1000)
    assert randomize(first, last, bleu, trials=5000) == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 1000) + 0.002)
    assert randomize(first, first, bleu, trials=100) == 1.0


def test_randomisation_of_accuracy_is_an_exact_test():
    """Which of two classifiers is correct, where they differ, is a coin toss: McNemar's exact test, a sign test."""
    base, row = np.zeros((60, 2)), np.zeros((60, 2))
    base[:, 1] = row[:, 1] = 1
    base[:7, 0] = row[5:25, 0] = 1  # 5 items only the base has correct, 18 only the row
    exact = stats.binomtest(5, 23, 0.5).pvalue
    assert randomize(base, row, fraction, trials=20_000) == pytest.approx(exact, abs=0.004)


def test_the_bootstrap_over_seeds_is_wider_than_over_items():
    """Its variance is that between seeds plus that between items."""
    generator = np.random.default_rng(3)
    items = generator.random((1, 400, 1)) < 0.6 + 0.1 * generator.normal(size=(6, 1, 1))
    row = np.concatenate([items, np.ones_like(items)], axis=2).astype(float)
    base = row * np.array([0.0, 1.0])
    (low, high), (narrow_low, narrow_high) = bootstrap(base, row, fraction), bootstrap(base[:1], row[:1], fraction)
    assert high - low > 1.5 * (narrow_high - narrow_low)
    means = fraction(row.sum(axis=1))
    within = (means * (1 - means)).mean() / 400
    expected = math.sqrt(means.var() / 6 + within)
    assert (high - low) / 2 / 1.96 == pytest.approx(expected, rel=0.35)


def test_chunks_change_nothing(monkeypatch, outputs):
    references, base, row = outputs
    first, last = (np.stack([bleu_statistics(one, references)] * 2) for one in (base, row))
    whole, p = resample(first, last, bleu, 50), randomize(first[0], last[0], bleu, 50)
    monkeypatch.setattr("regard.metrics.significance.CHUNK", 7 * len(references))
    assert np.array_equal(resample(first, last, bleu, 50), whole) and randomize(first[0], last[0], bleu, 50) == p


def test_the_bootstrap_is_fast():
    generator = np.random.default_rng(0)
    tables = generator.integers(1, 20, size=(2, 6, 1000, 10)).astype(float)
    start = time.process_time()
    bootstrap(tables[0], tables[1], bleu)
    assert time.process_time() - start < 2.0


def test_bootstrap_intervals_cover_as_often_as_they_say():
    """Two systems that are equally good: 95 % of the intervals over items contain 0, within chance."""
    generator, covered = np.random.default_rng(1), 0
    for number in range(200):
        pair = (generator.random((2, 1, 300, 1)) < 0.7).astype(float)
        tables = np.concatenate([pair, np.ones_like(pair)], axis=3)
        low, high = bootstrap(tables[0], tables[1], fraction, resamples=400, seed=number)
        covered += low <= 0 <= high
    assert covered >= 181  # 190 expected, with a standard deviation of 3


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "expected"), [(3, 0.73), (6, 0.89), (10, 0.91)])
def test_with_few_seeds_the_bootstrap_interval_is_too_narrow(seeds, expected):
    """The figures in docs/compare.md: the spread between seeds dominates, and there is no effect."""
    generator, covered, studies = np.random.default_rng(2), 0, 600
    for number in range(studies):
        rates = np.clip(0.6 + 0.1 * generator.normal(size=(2, seeds, 1, 1)), 0.01, 0.99)
        correct = (generator.random((2, seeds, 1000, 1)) < rates).astype(float)
        tables = np.concatenate([correct, np.ones_like(correct)], axis=3)
        low, high = bootstrap(tables[0], tables[1], fraction, resamples=300, seed=number)
        covered += low <= 0 <= high
    assert covered / studies == pytest.approx(expected, abs=3 * math.sqrt(2 * expected * (1 - expected) / studies))


# --- records


def test_records_of_each_kind():
    text = [{"source": "a", "reference": "x y", "hypothesis": "x y", "chrf": 100.0}]
    label = [{"text": "t", "reference": "good", "label": "bad", "probabilities": {}}]
    tags = [{"words": ["A", "b"], "reference": ["B-PER", "O"], "tags": ["B-PER", "B-LOC"]}]
    assert item_statistics(text, "exact").tolist() == [[1, 1]] and item_statistics(text, "bleu").shape == (1, 10)
    assert item_statistics(label, "accuracy").tolist() == [[0, 1]]
    assert item_statistics(tags, "accuracy").tolist() == [[1, 2]]
    for records, metric in ((text, "accuracy"), (text, "loss"), (label, "bleu"), (label, "loss"), ([], "bleu")):
        assert item_statistics(records, metric) is None
    items = read_items(tags, "f1")
    assert (items.inputs, items.references, items.outputs) == (["A b"], ["B-PER O"], ["B-PER B-LOC"])
    assert items.scores.tolist() == [50.0] and items.name == "% correct" and items.statistics.tolist() == [[1, 2, 1]]
    assert read_items(text, "bleu").name == "chrF" and read_items(text, "bleu").scores.tolist() == [100.0]
    assert fraction(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist() == [0.75, 0.0] and set(METRICS) >= {"bleu", "exact"}
