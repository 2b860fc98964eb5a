"""Statistics of single test items, whose sums over a test set give its metric.

BLEU is no mean over sentences: it is computed from counts that are summed over all of them. With the counts of every
item in a table S [items, k], the metric of any resample of the test set, in which item i occurs c_i times, is

    metric(c @ S)                          c [items], c @ S [k]

so a thousand resamples are one matrix multiplication (`regard.metrics.significance`).

    bleu               tokens of the hypothesis and of the reference; matching n-grams, n = 1 to 4; n-grams of the
                       hypothesis                                                             k = 10
    chrf               character n-grams, n = 1 to 6, of hypothesis and reference, and those in both   k = 18
    exact, accuracy    correct answers, answers (the words of a tagged sentence)              k = 2
    f1                 entities that are correct, predicted, in the reference                 k = 3

The items are the records that training saves in RUN/predictions/SET.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.tags import find_entities, is_prefixed
from regard.metrics.bleu import bleu_metric, natural_splitting

Array = NDArray[np.float64]
ORDER = 4  # longest n-gram of BLEU
CHARACTERS, BETA = 6, 2  # of chrF: longest n-gram of characters, weight of recall
INPUTS, OUTPUTS = ("source", "text", "words"), ("hypothesis", "label", "tags")  # fields of records


def bleu(sums: Array) -> Array:
    """sacrebleu's BLEU, with its default smoothing, of summed statistics [..., 10] -> [...]."""
    sums = np.asarray(sums, float)
    length, reference, correct, total = sums[..., 0], sums[..., 1], sums[..., 2 : 2 + ORDER], sums[..., 2 + ORDER :]
    # smoothing: the k-th order without a match counts as 1 / 2^k matches (as in NIST's mteval)
    smoothed = np.where(correct > 0, correct, 0.5 ** np.cumsum(correct == 0, axis=-1))
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(smoothed / total).mean(axis=-1))
        brevity = np.exp(np.minimum(0.0, 1 - reference / length))
        scores = 100 * brevity * precision
    return np.where(correct.any(axis=-1) & total.all(axis=-1), scores, 0.0)


def fraction(sums: Array) -> Array:
    """Correct answers of all answers: [..., 2] -> [...]."""
    return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], 1))


def chrf(sums: Array) -> Array:
    """sacrebleu's chrF of summed statistics [..., 18] -> [...]: precision and recall are means over the orders."""
    hypothesis, reference, both = np.moveaxis(np.reshape(sums, (*np.shape(sums)[:-1], -1, 3)), -1, 0)  # [..., 6]
    counted = (hypothesis > 0) & (reference > 0)
    orders = np.maximum(counted.sum(axis=-1), 1)
    precision, recall = (
        np.where(counted, both / np.maximum(total, 1), 0.0).sum(axis=-1) / orders for total in (hypothesis, reference)
    )
    weighted = BETA**2 * precision + recall
    return 100 * (1 + BETA**2) * precision * recall / np.where(weighted > 0, weighted, 1.0)


def f1(sums: Array) -> Array:
    """2 TP / (predicted + in the reference): [..., 3] -> [...]."""
    return np.asarray(2 * sums[..., 0] / np.maximum(sums[..., 1] + sums[..., 2], 1))


METRICS: dict[str, Callable[[Array], Array]] = {
    "bleu": bleu, "chrf": chrf, "exact": fraction, "accuracy": fraction, "f1": f1
}  # fmt: skip


def item_statistics(records: Sequence[Mapping[str, Any]], metric: str) -> Array | None:
    """The statistics [items, k] from which `METRICS[metric]` is computed; None where the records do not have them.

    `metric` is a key of scores.json.
    """
    fields = {*records[0]} if records else set()
    match metric:
        case "bleu" | "chrf" if {"hypothesis", "reference"} <= fields:
            count = bleu_statistics if metric == "bleu" else chrf_statistics
            return count([one["hypothesis"] for one in records], [one["reference"] for one in records])
        case "exact" if "hypothesis" in fields:
            return np.array([_correct(one) for one in records], float)
        case "accuracy" if {"label", "tags"} & fields:
            return np.array([_correct(one) for one in records], float)
        case "f1" if "tags" in fields and is_prefixed([tag for one in records for tag in one["reference"]]):
            return np.array([_entities(one) for one in records], float)
    return None


def _correct(record: Mapping[str, Any]) -> tuple[int, int]:
    """(correct answers, answers) of one item."""
    reference, found = record["reference"], _output(record)
    if isinstance(reference, list):
        return sum(map(str.__eq__, reference, found)), len(reference)
    return int(reference == found), 1


def bleu_statistics(hypotheses: Sequence[str], references: Sequence[str], splitting: str | None = None) -> Array:
    """[items, 10], counted by sacrebleu with the tokenisation of `regard.metrics.bleu.score`."""
    metric = bleu_metric(splitting or natural_splitting(references))
    metric.effective_order = True  # no effect on the counts; without it sacrebleu warns about single sentences
    counted = (metric.sentence_score(found, [line]) for found, line in zip(hypotheses, references, strict=True))
    return np.array([[one.sys_len, one.ref_len, *one.counts, *one.totals] for one in counted], float)


def chrf_statistics(hypotheses: Sequence[str], references: Sequence[str]) -> Array:
    """[items, 18]: for each n the n-grams of the hypothesis, of the reference, and those in both."""

    def count(text: str, n: int) -> Counter[str]:
        return Counter(text[at : at + n] for at in range(len(text) - n + 1))

    rows = []
    for pair in zip(hypotheses, references, strict=True):
        found, line = ("".join(text.split()) for text in pair)
        grams = [(count(found, n), count(line, n)) for n in range(1, CHARACTERS + 1)]
        counts = [(one.total() * bool(two), two.total(), (one & two).total()) for one, two in grams]
        rows.append([number for triple in counts for number in triple])
    return np.array(rows, float)


def _entities(record: Mapping[str, Any]) -> tuple[int, int, int]:
    """(correct, predicted, all) entities of a sentence."""
    found, reference = ({*find_entities(record[name])} for name in ("tags", "reference"))
    return len(found & reference), len(found), len(reference)


@dataclass(frozen=True)
class Items:
    """The predictions of a model for a test set, as text, and how good each is."""

    inputs: Sequence[str]  # "" where a record has none, as of images
    references: Sequence[str]
    outputs: Sequence[str]
    scores: Array  # [items] between 0 and 100
    name: str  # of the scores: chrF (sentence-level), or % correct (classes, tags)
    statistics: Array | None  # [items, k] of a metric; None: it has none


def read_items(records: Sequence[Mapping[str, Any]], metric: str) -> Items:
    return Items(
        [_text(next((one[name] for name in INPUTS if name in one), "")) for one in records],
        [_text(one["reference"]) for one in records],
        [_text(_output(one)) for one in records],
        np.array([_score(one) for one in records], float),
        "chrF" if records and "chrf" in records[0] else "% correct",
        item_statistics(records, metric),
    )


def _output(record: Mapping[str, Any]) -> Any:
    """Text, a class, or a list of tags."""
    return next((record[name] for name in OUTPUTS if name in record), "")


def _text(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def _score(record: Mapping[str, Any]) -> float:
    correct, answers = _correct(record)
    return float(record["chrf"]) if "chrf" in record else 100 * correct / max(1, answers)
