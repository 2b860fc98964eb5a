"""The table of a study in every format: each row is in each of them, and what is written can be read back."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.metrics.significance import Difference
from regard.study import formats
from regard.study.latex import latex, latex_text
from regard.study.table import RowResult, StudyTable
from regard.terminal import screen_width

ODD = ["기준 모델", "<script>&|_$%\\", "[opt]", "--x~^{}#\"'", "*", "a\nb", "x" * 90, "=1+1", "–"]


def row(name: str, scores: Mapping[int, float], mean: float | None = None, **fields: Any) -> RowResult:
    values = list(scores.values())
    difference = None
    if mean is not None and values:
        difference = Difference(mean, len(values), 0.3, mean - 0.2, mean + 0.2, 0.02, 0.25)
    return RowResult(
        name, {"model.heads": 1}, 9_200_000, 2.2e17, 60.0, scores,
        mean=statistics.mean(values) if values else None, sd=statistics.stdev(values) if len(values) > 1 else None,
        difference=difference, **fields,
    )  # fmt: skip


def table(*rows: RowResult, unit: str = ".2f", **fields: Any) -> StudyTable:
    return StudyTable(
        **{"title": "A study", "metric": "BLEU", "higher": True, "test": "valid", **fields}, unit=unit, rows=rows
    )


BASE = row("base", {1: 25.0, 2: 26.0})
WORSE = row("heads-1", {1: 24.0, 2: 25.2}, -0.9, p_holm=0.0004, verdict="worse", paper=24.9)
FAILED = row("norm-off", {}, failed={1: "the loss is not finite\nat step 3", 2: "the loss is not finite"}, pending=[3])
OPEN = row("rope", {1: 25.1, 2: 26.0}, 0.05, p_holm=0.7, verdict="not decided", seeds_needed=28)
STUDY = table(BASE, WORSE, FAILED, OPEN, notes=["A note."])


def everything(study: StudyTable) -> dict[str, str]:
    return {
        "terminal": "\n".join(formats.lines(study)),
        "markdown": formats.markdown(study),
        "csv": formats.to_csv(study),
        "json": json.dumps(formats.to_json(study), ensure_ascii=False, allow_nan=False),
        "latex": latex(study),
    }


@pytest.mark.parametrize("name", ["terminal", "markdown", "csv", "json", "latex"])
def test_every_row_and_reason_is_in_every_format(name: str) -> None:
    text = everything(STUDY)[name]
    for words in ("base", "heads-1", "norm-off", "rope", "not decided", "worse", "28", "24.9"):
        assert words in text
    assert "the loss is not finite" in text
    if name not in ("csv", "json"):
        assert "2 failed, 1 pending" in text and "seeds 1 and 2" in text and "seed 3: not trained yet" in text


def test_the_text_of_each_column() -> None:
    columns = formats.shown(STUDY)
    texts = [formats.cells(STUDY, one, columns) for one in STUDY.rows]
    rows = {cells[0]: dict(zip([one.heading for one in columns], cells, strict=True)) for cells in texts}
    assert rows["heads-1"]["score"] == "24.60 ± 0.85 (2)"
    assert rows["heads-1"]["difference [95 %]"] == "-0.90 [-1.10, -0.70]"
    assert rows["heads-1"]["p (Holm)"] == "<0.001" and rows["heads-1"]["sign-flip p"] == "0.250"
    assert rows["heads-1"]["parameters"] == "9.20 M" and rows["heads-1"]["training FLOPs"] == "220.00 P"
    assert rows["base"]["verdict"] == "base" and rows["norm-off"]["verdict"] == "no score"
    assert "bootstrap [95 %]" not in rows["base"]  # no row has one


def test_percentages_are_times_100_and_nothing_is_minus_zero() -> None:
    rows = row("base", {1: 0.5, 2: 0.6}), row("same", {1: 0.5, 2: 0.6}, -0.000001)
    study = table(*rows, unit=".2%", metric="accuracy")
    text = "\n".join(formats.lines(study))
    assert "accuracy, % ± sd" in text and "55.00 ± 7.07 (2)" in text and "+0.00 [-20.00, +20.00]" in text


def test_one_seed_and_one_row() -> None:
    one = row("base", {7: 25.0})
    assert formats.score(table(one), one) == "25.00 (1)"
    for text in everything(table(one)).values():
        assert "base" in text
    for found, text in (
        (Difference(-1.0, 1), "-1.00"),
        (Difference(-1.0, 1, boot_low=-2.0, boot_high=-0.5), "-1.00 [-2.00, -0.50]"),
    ):
        more = RowResult("a", {}, None, None, None, {7: 24.0}, mean=24.0, difference=found)
        assert formats.difference(table(one, more), more) == text


def test_many_seeds_are_written_as_ranges() -> None:
    pending = row("a", {}, pending=[9, 1, 2, 3, 4, 6, 7])
    assert formats.remarks(table(BASE, pending)) == ["a, seeds 1 to 4, 6, 7 and 9: not trained yet"]


def test_csv_parses_back() -> None:
    study = table(BASE, WORSE, *(row(name, {1: 1 / 3, 2: 0.1}, -0.1) for name in ODD))
    rows = list(csv.DictReader(io.StringIO(formats.to_csv(study))))
    assert [one["row"] for one in rows] == [formats.one_line(one.name) for one in study.rows]
    for read, one in zip(rows, study.rows, strict=True):
        assert float(read["mean"]) == one.mean and int(read["n"]) == len(one.scores)
        assert read["scores"] == "; ".join(f"{seed}={value}" for seed, value in one.scores.items())
        assert read["difference"] == ("" if one.difference is None else str(one.difference.mean))
    heads = set(rows[0])
    assert heads == set(next(csv.DictReader(io.StringIO(formats.to_csv(table(BASE))))))  # the same fields always


def test_json_has_everything_and_only_finite_numbers() -> None:
    odd = row("nan", {1: math.nan}, curves={1: [(10, math.nan), (20, 2.0)]})
    content = json.loads(json.dumps(formats.to_json(table(BASE, odd)), allow_nan=False))
    assert content["rows"][1]["scores"] == {"1": None} and content["rows"][1]["mean"] is None
    assert content["rows"][1]["curves"] == {"1": [[10, None], [20, 2.0]]}
    assert content["rows"][0]["changes"] == {"model.heads": 1}


@given(st.lists(st.text(max_size=30), min_size=1, max_size=4, unique=True))
@settings(max_examples=60, deadline=None)
def test_any_name_keeps_the_structure(names: list[str]) -> None:
    study = table(BASE, *(row(name, {1: 1.0, 2: 2.0}, 0.5) for name in names), title=names[0], notes=names)
    assert_structure(study)


def assert_structure(study: StudyTable) -> None:
    width = len(formats.shown(study))
    lines = [line for line in formats.markdown(study).split("\n") if line.startswith("|")]
    assert len(lines) == len(study.rows) + 2
    assert all(len(re.sub(r"\\.", "", line).split("|")) == width + 2 for line in lines)
    text = latex(study)
    bare = re.sub(r"\\.", " ", text.split("\n", 1)[1].replace("\\\\\n", "\n"), flags=re.DOTALL)
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    assert not set(bare) & set("#^~%_\\")
    body = text.split("\\toprule\n")[1].split("\\bottomrule")[0]
    rows = [line for line in body.split("\n") if line.endswith(r" \\")]
    assert len(rows) == len(study.rows) + 1 and all(not line.strip().startswith(("[", "*")) for line in rows)
    assert all(len(re.sub(r"\\&", "", line).split("&")) == width for line in rows)
    assert re.findall(r"\\begin{(\w+)}", text) == re.findall(r"\\end{(\w+)}", text)[::-1]
    read = list(csv.DictReader(io.StringIO(formats.to_csv(study), newline="")))
    assert [one["row"] for one in read] == [formats.one_line(one.name) for one in study.rows]


def test_odd_names_keep_the_structure() -> None:
    assert_structure(table(BASE, *(row(name, {1: 1.0, 2: 2.0}, 0.5) for name in ODD), title="\\", notes=ODD))


def test_latex_prints_the_characters_of_a_name() -> None:
    assert latex_text("a_b & 50 % [x]") == r"a\_b \& 50 \% {[}x{]}"
    assert latex_text("--x") == "-{}-x"
    assert "$-$0.90 {[}$-$1.10, $-$0.70{]}" in latex(STUDY) and "24.60 $\\pm$ 0.85" in latex(STUDY)


def test_a_narrow_terminal_leaves_columns_out_and_says_so() -> None:
    wide, narrow = formats.lines(STUDY), formats.lines(STUDY, 100)
    assert "changes" in wide[2] and "changes" not in narrow[2]
    assert max(map(screen_width, narrow[2 : 3 + len(STUDY.rows)])) <= 100
    assert narrow[-1].startswith("Left out, as the terminal is narrow: changes")
    assert all(any(line.startswith(one.name) for line in narrow) for one in STUDY.rows)
    positions = [line.rindex(one.verdict) for line, one in zip(narrow[3:], STUDY.rows, strict=False) if one.verdict]
    assert len(set(positions)) == 1  # columns are aligned
