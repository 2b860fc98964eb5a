"""Rows of runs become a table with statistics: what `regard ablate` and `regard compare` have in common.

    {row: {seed: folder}}, the base first   ─→  scores, sizes and learning curves of each row
    scores of the same seeds                ─→  differences to the base, Holm's correction over the rows, verdicts
    predictions of the same test items      ─→  bootstrap intervals; the items that the rows answer most differently

All runs must have been evaluated on the same test set, so inputs and references of their predictions are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from regard.errors import UserError, suggest
from regard.metrics.items import METRICS, Items, read_items
from regard.metrics.significance import Difference, bootstrap, holm, paired, randomize, seeds_needed, verdict
from regard.study.finished import SEED, FinishedRun, Metric, choose_test, metric_of
from regard.study.table import Disagreement, RowResult, StudyTable

EXAMPLES = 12  # disagreements in a table
OVER_ITEMS = (
    "where one run of each is compared, p and the interval are over the items of the test set alone. The randomness of "
    "training is not in them, so another seed may give another result; train with several seeds"
)
NO_ITEMS = "one run of each, and no saved predictions of single items for this metric: nothing can be tested"
COMMON = "each difference is over the seeds that the row and the base have in common"
PER_TOKEN, VOCABULARY = ("loss", "perplexity"), ("model.vocab_size", "model.target_vocab_size")
Row = Mapping[int, FinishedRun]  # by seed


def compare_rows(
    title: str,
    rows: Mapping[str, Mapping[int, Path]],
    *,
    test: str | None = None,
    metric: str | None = None,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    failed: Mapping[str, Mapping[int, str]] | None = None,
    pending: Mapping[str, Sequence[int]] | None = None,
    paper: Mapping[str, float] | None = None,
    over_items: bool = False,
    examples: int = EXAMPLES,
) -> StudyTable:
    """The table of `rows`: for each name the run folders by seed; the first row is the base.

    A row may be empty, its seeds `failed` (with reasons) or `pending`. `test` is a set of scores.json (default: the
    first that all runs have, "valid" only if there is no other), `metric` one of its keys (default: the most important
    one of the task). `changes` by row default to the settings that differ from those of the base.

    One seed decides nothing about a recipe. With `over_items`, two rows of one run each are compared all the same, as
    two given models, over the items of the test set.
    """
    runs = {name: {seed: FinishedRun(Path(path)) for seed, path in row.items()} for name, row in rows.items()}
    every = [run for row in runs.values() for run in row.values()]
    test, chosen = _choose(every, test, metric)
    curve = next((run.summary["metric"] for run in every if "metric" in run.summary), "valid_loss")
    if not any(run.curve(curve) for run in every):  # without a validation set
        curve = "loss"
    base = next(iter(runs.values()), {})
    changes = {name: changed(base, row) for name, row in runs.items()} if changes is None else changes
    results = [
        replace(
            _result(name, row, test, chosen, curve),
            changes=changes.get(name, {}),
            pending=tuple((pending or {}).get(name, ())),
            paper=(paper or {}).get(name),
        )
        for name, row in runs.items()
    ]
    results = [replace(one, failed={**one.failed, **(failed or {}).get(one.name, {})}) for one in results]
    items = {name: _items(row, test, chosen.key) for name, row in runs.items()}
    items = _same_test(items, runs, test)
    found = [
        _difference(results[0], row, items[results[0].name], items[row.name], chosen, over_items) for row in results[1:]
    ]
    return StudyTable(
        title=title,
        metric=chosen.name,
        unit=chosen.unit,
        higher=chosen.higher,
        test=test,
        rows=[*results[:1], *_decided(results[1:], found, chosen.higher)],
        curve=curve,
        disagreements=_disagreements(items, examples),
        item_metric=next((one.name for row in items.values() for one in row.values()), ""),
        notes=_notes(results, found, chosen, over_items, any(items.values())),
    )


def _notes(
    rows: Sequence[RowResult], differences: Sequence[Difference | None], metric: Metric, over_items: bool, checked: bool
) -> list[str]:
    """What a reader of the table must know."""
    singles = [one for one in differences if one is not None and one.n == 1]
    names = {name for row in rows for name in row.changes}
    notes = []
    if singles and over_items:
        notes.append(OVER_ITEMS if any(one.over == "items" for one in singles) else NO_ITEMS)
    pairs = [(row, one) for row, one in zip(rows[1:], differences, strict=True) if one is not None]
    if any(max(len(rows[0].scores), len(row.scores)) > one.n for row, one in pairs):
        notes.append(COMMON)
    if not checked and any(name.startswith("data.") and not name.startswith("data.train") for name in names):
        notes.append("this task saves no predictions: check that the settings of [data] name the same test set")
    if metric.key in PER_TOKEN and any(name.startswith("text.") or name in VOCABULARY for name in names):
        notes.append(f"the tokenizers differ, so {metric.name} per token cannot be compared; use bits per byte")
    return notes


def _choose(runs: Sequence[FinishedRun], test: str | None, metric: str | None) -> tuple[str, Metric]:
    """The test set and the metric, checked as far as there are scores."""
    scored = [run for run in runs if run.scores]
    sets = dict.fromkeys(name for run in scored for name in run.scores)
    if test is not None and sets and test not in sets:
        raise UserError(f"test = {test!r}: no run was evaluated on this set; {suggest(test, sets)}")
    test = test or choose_test(scored)
    if test is None and scored:
        raise UserError(
            f"{scored[0].folder}, …: no test set is common to all runs ({', '.join(sets)}); compare runs with the same "
            "[data] test"
        )
    summary = next((run.summary for run in runs if "test" in run.summary), {})
    key = metric or summary.get("test", "score")
    known = {name for run in scored for name, value in run.scores.get(test or "", {}).items() if _is_number(value)}
    if scored and metric is None and "test" not in summary:
        raise UserError(f"{scored[0].folder}: has no summary.json; name the metric: {', '.join(sorted(known))}")
    if metric is not None and known and metric not in known:
        raise UserError(
            f"metric = {metric!r}: scores.json of {scored[0].folder} does not have it; {suggest(metric, known)}"
        )
    return test or "test", metric_of(key, summary.get("headline") if key == summary.get("test") else None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def changed(base: Row, row: Row) -> dict[str, Any]:
    """The settings of a row that differ from those of the base, without the seed: {"model.heads": 1}."""
    if not base or not row:
        return {}
    before, after = (next(iter(one.values())).settings for one in (base, row))
    names = (name for name in {**before, **after} if name != SEED)
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _result(name: str, row: Row, test: str, metric: Metric, curve: str) -> RowResult:
    """A row without comparison."""
    scores = {seed: score for seed, run in row.items() if (score := run.score(test, metric.key)) is not None}
    seconds = [run.seconds for run in row.values() if run.seconds is not None]
    one = next(iter(row.values()), None)
    return RowResult(
        name=name,
        changes={},
        parameters=None if one is None else one.parameters,
        flops=None if one is None else one.flops,
        seconds=fmean(seconds) if seconds else None,
        scores=scores,
        failed={seed: run.missing(test, metric.key) for seed, run in row.items() if seed not in scores},
        mean=fmean(scores.values()) if scores else None,
        sd=stdev(scores.values()) if len(scores) > 1 else None,
        curves={seed: run.curve(curve) for seed, run in row.items()},
    )


def _items(row: Row, test: str, metric: str) -> dict[int, Items]:
    """The predictions of each seed, where they are saved."""
    records = ((seed, run.records(test)) for seed, run in row.items())
    return {seed: read_items(found, metric) for seed, found in records if found}


def _same_test(
    items: Mapping[str, Mapping[int, Items]], runs: Mapping[str, Row], test: str
) -> dict[str, dict[int, Items]]:
    """The same, with inputs and references in memory once; a UserError if those of two runs differ."""
    first: tuple[Items, Path] | None = None
    shared: dict[str, dict[int, Items]] = {}
    for name, row in items.items():
        shared[name] = {}
        for seed, one in row.items():
            folder = runs[name][seed].folder
            first = first or (one, folder)
            if (one.inputs, one.references) != (first[0].inputs, first[0].references):
                raise UserError(
                    f"{first[1]} and {folder}: {_where(first[0], one)} of the test set {test!r} differs; compare runs "
                    "that were evaluated on the same data"
                )
            shared[name][seed] = replace(one, inputs=first[0].inputs, references=first[0].references)
    return shared


def _where(one: Items, other: Items) -> str:
    """The first difference between two test sets."""
    if len(one.references) != len(other.references):
        return f"the size ({len(one.references):,} and {len(other.references):,} items)"
    pairs = zip(one.inputs, one.references, other.inputs, other.references, strict=True)
    at = next(number for number, (a, b, c, d) in enumerate(pairs, start=1) if (a, b) != (c, d))
    return f"item {at:,}"


def _difference(
    base: RowResult, row: RowResult, before: Mapping[int, Items], after: Mapping[int, Items], metric: Metric,
    over_items: bool,
) -> Difference | None:  # fmt: skip
    """The difference of a row to the base over the seeds that both have; None if there are none."""
    seeds = [(seed, seed) for seed in base.scores if seed in row.scores]
    if over_items and len(base.scores) == len(row.scores) == 1:  # two models, whatever their seeds
        seeds = [(next(iter(base.scores)), next(iter(row.scores)))]
    if not seeds:
        return None
    found = paired([base.scores[one] for one, _ in seeds], [row.scores[other] for _, other in seeds])
    with_items = [(before[one], after[other]) for one, other in seeds if one in before and other in after]
    tables = [(one.statistics, other.statistics) for one, other in with_items]
    pairs = [(one, other) for one, other in tables if one is not None and other is not None]
    if len(pairs) < len(seeds) or (found.n == 1 and not over_items):
        return found
    compute = METRICS[metric.key]
    first, last = (np.stack(column) for column in zip(*pairs, strict=True))  # [seeds, items, k]
    low, high = bootstrap(first, last, compute)
    found = replace(found, boot_low=low, boot_high=high)
    return found if found.n > 1 else replace(found, p=randomize(first[0], last[0], compute), over="items")


def _decided(rows: Sequence[RowResult], differences: Sequence[Difference | None], higher: bool) -> Iterable[RowResult]:
    """The rows with their differences, corrected p-values and verdicts."""
    corrected = holm([None if one is None else one.p for one in differences])
    count = sum(p is not None for p in corrected)
    for row, one, p in zip(rows, differences, corrected, strict=True):
        if one is None:
            yield row
            continue
        decision = verdict(one, p, higher)
        needed = seeds_needed(one, count) if decision == "not decided" else None
        yield replace(row, difference=one, p_holm=p, verdict=decision, seeds_needed=needed)


def _disagreements(items: Mapping[str, Mapping[int, Items]], count: int) -> list[Disagreement]:
    """The items whose scores, means over seeds, differ most between rows; the outputs are those of the first seed."""
    rows = {name: row for name, row in items.items() if row}
    if len(rows) < 2 or count < 1:
        return []
    scores = {name: np.mean([one.scores for one in row.values()], axis=0) for name, row in rows.items()}  # [items]
    table = np.stack([*scores.values()])  # [rows, items]
    spread = table.max(axis=0) - table.min(axis=0)
    first = {name: next(iter(row.values())) for name, row in rows.items()}
    one = next(iter(first.values()))
    return [
        Disagreement(
            input=one.inputs[at],
            reference=one.references[at],
            outputs={name: row.outputs[at] for name, row in first.items()},
            scores={name: float(row[at]) for name, row in scores.items()},
        )
        for at in np.argsort(-spread, kind="stable")[:count].tolist()
        if spread[at] > 0
    ]
