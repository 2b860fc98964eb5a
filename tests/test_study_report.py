"""The report of a study: every row is on the page and in the figures, positions follow the values, nothing overlaps."""

from __future__ import annotations

import itertools
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.explore.html import text_width
from regard.metrics.significance import Difference
from regard.study.curves import averaged, curves
from regard.study.figures import figures
from regard.study.forest import differences
from regard.study.labels import label_boxes, spread
from regard.study.marks import NARROW, WIDE, reach
from regard.study.report import page, write_all
from regard.study.scatter import against
from regard.study.table import Disagreement, RowResult, StudyTable

pytest_plugins = ["browser"]

NS = "{http://www.w3.org/2000/svg}"
ODD = [
    "기준 모델",
    "<script>alert(1)</script>",
    "위치 인코딩을 학습된 임베딩으로 바꾼 아주 긴 이름의 변형",
    "[x] & 'y'",
    "n" * 120,
]
Numbers = tuple[float, float, float]


def row(name: str, mean: float | None, effect: float | None = None, **fields: Any) -> RowResult:
    spread = None
    if effect is not None:
        spread = Difference(effect, 3, 0.2, effect - 0.3, effect + 0.3, 0.01, 0.25)
    scores = {} if mean is None else {1: mean - 0.2, 2: mean, 3: mean + 0.2}
    steps = {seed: [(at, 2 + 5 / at + seed / 10) for at in (10, 20, 30)] for seed in scores}
    values: dict[str, Any] = {
        "parameters": 9_200_000,
        "flops": 2e17,
        "sd": None if mean is None else 0.2,
        "curves": steps,
    }
    values |= {"verdict": "not decided" if effect is not None else "", **fields}
    return RowResult(name, {"model.x": 1}, seconds=1.0, scores=scores, mean=mean, difference=spread, **values)


def study(*rows: RowResult, **fields: Any) -> StudyTable:
    values = {"title": "A <study>", "metric": "BLEU", "unit": ".2f", "higher": True, "test": "valid"}
    return StudyTable(**{**values, **fields}, rows=rows)


FAILED = row("norm off", None, failed={1: "the loss is not finite", 2: "killed"}, pending=[3])
CASES = {
    "usual": study(row("base", 25.8), row("worse", 24.8, -1.0, verdict="worse"), row("up", 26.8, 1, verdict="better")),
    "one row": study(row("base", 25.8)),
    "one seed": study(
        RowResult("base", {}, 10, 1e9, 1.0, {1: 25.0}, mean=25.0),
        RowResult("a", {}, 20, 2e9, 1.0, {1: 24.0}, mean=24.0, difference=Difference(-1.0, 1), verdict="not decided"),
    ),
    "all failed": study(FAILED, row("other", None, failed={1: "killed"})),
    "base failed": study(FAILED, row("other", 20.0)),
    "no cost": study(row("base", 25.8, parameters=None, flops=None), row("a", 24.8, -1.0, parameters=None, flops=None)),
    "odd names": study(row("base", 25.8), *(row(name, 25 + i / 9, i / 9 - 0.3) for i, name in enumerate(ODD)), FAILED),
    "thirty": study(row("base", 25.8), *(row(f"row-{i}", 25.8 + i / 99, i / 99) for i in range(30))),
    "far": study(row("base", 25.8), *(row(f"row-{i}", 25.8 + i / 9, i / 9) for i in range(6)), row("off", 0.3, -25.5)),
    "equal": study(row("base", 25.8, sd=0.0), *(row(f"row-{i}", 25.8, 0.0, sd=0.0) for i in range(4))),
    "percent": study(row("base", 0.9), row("a", 0.95, 0.05), unit=".2%", metric="accuracy", higher=False),
}  # fmt: skip


def parse(markup: str) -> ET.Element:
    """A figure or page as a tree; nothing in it loads or runs anything."""
    assert set(re.findall(r"https?://[^\s\"'<)]*", markup)) <= {NS.strip("{}")}
    assert "@import" not in markup and "url(" not in markup
    root = ET.fromstring(markup)
    for element in root.iter():
        assert element.tag.removeprefix(NS) not in ("script", "img", "iframe")
        for name, value in element.attrib.items():
            assert not name.startswith("on") and (name not in ("href", "src") or value.startswith(("data:", "#")))
    return root


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", list(CASES))
def test_every_figure_is_well_formed_and_inside_its_frame(name: str, width: int) -> None:
    for figure in figures(CASES[name], width).values():
        root = parse(figure)
        wide, height = float(root.get("width", 0)), float(root.get("height", 0))
        coordinates = " ".join(
            value for one in root.iter() for key, value in one.attrib.items() if key in ("d", "points")
        )
        assert not re.search(r"nan|inf", coordinates)
        for text in root.iter(f"{NS}text"):
            assert 0 <= float(text.get("x", -1)) <= wide and 0 <= float(text.get("y", -1)) <= height
        for one in root.iter(f"{NS}circle"):
            assert 0 <= float(one.get("cx", -1)) <= wide and 0 <= float(one.get("cy", -1)) <= height


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", list(CASES))
def test_texts_do_not_overlap(name: str, width: int) -> None:
    """By the estimated widths, which are those that the figures were laid out with."""
    for figure in figures(CASES[name], width).values():
        boxes = []
        for text in parse(figure).iter(f"{NS}text"):
            x, y, wide = float(text.get("x", 0)), float(text.get("y", 0)), 0.9 * text_width(text.text or "")
            left = x - wide * {"": 0.0, "start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "")]
            assert left + wide <= float(figure.split(' width="')[1].split('"')[0]), text.text
            boxes.append((left, y - 11, left + wide, y + 2, text.text))
        for a, b in itertools.combinations(boxes, 2):
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, (a, b)


@pytest.mark.parametrize("name", list(CASES))
def test_the_page_has_every_row_and_reason(name: str) -> None:
    table = CASES[name]
    text = "".join(parse(page(table).split("\n", 1)[1]).itertext())
    for one in table.rows:
        assert one.name in text
        assert all(reason in text for reason in one.failed.values())
    assert ("not trained yet" in text) == any(one.pending for one in table.rows)


def test_the_page_has_no_empty_sections() -> None:
    headings = {name: re.findall(r'<h2 id="heading-[^>]*>([^<]*)', page(table)) for name, table in CASES.items()}
    assert headings["all failed"] == ["Results", "Remarks"]
    assert headings["one row"] == ["Results", "Learning curves", "Quality and cost"]
    assert headings["usual"] == ["Results", "Differences", "Learning curves", "Quality and cost"]
    assert "Quality and cost" not in headings["no cost"]


def signs(figure: str) -> dict[str, Numbers]:
    """Row -> (x, left end, right end) of its sign and its interval in the forest plot."""
    places = {}
    for group in parse(figure).iter(f"{NS}g"):
        if (group.get("class") or "").startswith("row"):
            title = (group[0].text or "").split(":")[0]
            bar = [one.get("d", "") for one in group if one.get("class") == "bar"]
            mark = next(one for one in group if (one.get("class") or "").startswith("mark"))
            left, right = map(float, re.findall(r"M([\d.]+) [\d.]+H([\d.]+)", bar[0])[0])
            places[title] = (float(mark.get("cx", math.nan)), left, right)
    return places


def test_positions_in_the_forest_plot_are_linear_in_the_values() -> None:
    effects = {f"row {at}": effect for at, effect in enumerate([0.7, -0.4, 0.1, -1.1, 0.0])}
    table = study(row("base", 25.8), *(row(name, 25.8 + effect, effect) for name, effect in effects.items()))
    places = signs(differences(table))
    assert list(places) == sorted(effects, key=lambda name: -effects[name])  # the best first
    x = np.array([places[name][0] for name in effects])
    slope, start = np.polyfit(list(effects.values()), x, 1)
    assert slope > 0
    for name, effect in effects.items():
        drawn = np.array(places[name])
        assert np.abs(drawn - (start + slope * np.array([effect, effect - 0.3, effect + 0.3]))).max() < 0.2


def test_lower_is_better_turns_the_order_and_the_words_around() -> None:
    table = study(row("base", 2.5), row("a", 2.0, -0.5, verdict="better"), row("b", 3.0, 0.5, verdict="worse"))
    figure = differences(StudyTable(**{**table.__dict__, "higher": False}))
    texts = [text.text for text in parse(figure).iter(f"{NS}text")]
    assert texts.index("a") < texts.index("b") and "← better" in texts and "worse →" in texts
    assert "better" in texts and "worse" in texts  # words, not colour alone


def test_a_row_far_away_is_an_arrow_and_the_others_keep_their_scale() -> None:
    assert reach([0.1, 0.2, 0.3, 25.0]) == 0.3 and reach([1.0, 2.0]) == 2.0 and reach([0.0, 0.0]) == 0.0
    figure = differences(CASES["far"])
    assert "A row outside the axis is drawn as an arrow alone." in figure and "−25.50 [−25.80, −25.20]" in figure
    ticks = [
        float((one.text or "").replace("−", "-"))
        for one in parse(figure).iter(f"{NS}text")
        if one.get("text-anchor") == "middle"
    ]
    assert min(ticks) >= -2
    assert "off (0.30)" in against(CASES["far"], "parameters")


@pytest.mark.parametrize("cost", ["parameters", "flops"])
def test_positions_against_cost_are_monotone(cost: str) -> None:
    sizes = [1e5, 3e5, 2e6, 9e6, 5e7]
    rows = [row(f"row {at}", 20 + at, at and float(at), **{cost: size}) for at, size in enumerate(sizes)]
    circles = {}
    for group in parse(against(study(*rows), cost)).iter(f"{NS}g"):
        if (group.get("class") or "").startswith("row undecided"):
            mark = next(one for one in group if one.tag == f"{NS}circle")
            circles[(group[0].text or "").split(":")[0]] = (float(mark.get("cx", 0)), float(mark.get("cy", 0)))
    points = [circles[f"row {at}"] for at in range(1, 5)]
    x, y = np.array(points).T
    assert (np.diff(y) < 0).all() and np.ptp(np.diff(x) / np.diff(np.log(sizes[1:]))) < 0.1  # linear in the logarithm


def test_labels_are_near_their_points_and_apart() -> None:
    generator = np.random.default_rng(0)
    points = [(float(x), float(y)) for x, y in generator.uniform((150, 120), (450, 380), (30, 2))]
    points = [(300.0, y) if at % 2 else (x, y) for at, (x, y) in enumerate(points)]
    boxes = label_boxes(
        points, [(y - 4, y + 4) for _, y in points], [f"label-{at}" for at in range(30)], (40, 80, 840, 600)
    )
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    heights = spread([1.0, 2.0, 3.0, 50.0], 10.0, 0.0, 100.0)
    assert min(np.diff(heights)) >= 10 - 1e-9 and heights[3] == 50.0 and spread([5.0], 10.0, 0.0, 9.0) == [5.0]


def test_a_curve_is_the_mean_over_seeds_with_its_range() -> None:
    seeds = {1: [(10, 3.0), (20, 2.0), (30, 1.0)], 2: [(10, 5.0), (20, math.nan)], 3: [(10, 4.0), (20, 4.0)]}
    line = averaged(row("a", 1.0, curves=seeds))
    assert line.tolist() == [[10, 4.0, 3.0, 5.0], [20, 3.0, 2.0, 4.0]]  # step 30 has one seed of three
    assert "No run has logged this metric" in curves(CASES["all failed"])
    panels = [text.text for text in parse(curves(CASES["usual"])).iter(f"{NS}text")]
    assert {"base", "worse", "up", "Validation loss by row"} <= set(panels)


def test_disagreements_group_rows_with_the_same_output() -> None:
    outputs = {"base": "ein Mann", "a": "ein Mann", "b": "<b>"}
    one = Disagreement("a <man>", "ein Mann", outputs, {"base": 100.0, "a": 100.0, "b": 1.5})
    markup = page(study(row("base", 25.8), row("a", 25.0, -0.8), row("b", 20.0, -5.8), disagreements=[one]))
    text = "".join(parse(markup.split("\n", 1)[1]).itertext())
    assert "a <man>" in text and "base, aein Mann100.0b<b>1.5" in text


def test_every_file_is_written(tmp_path: Path) -> None:
    written = write_all(tmp_path / "study", CASES["usual"])
    names = {path.relative_to(tmp_path / "study").as_posix() for path in written}
    plots = {f"figures/{name}.svg" for name in ("differences", "curves", "parameters", "flops")}
    assert names == {"table.md", "table.csv", "table.json", "table.tex", "report.html"} | plots
    assert all(path.stat().st_size for path in written)
    before = (tmp_path / "study" / "table.md").read_bytes()
    write_all(tmp_path / "study", CASES["usual"])  # again, over it
    assert (tmp_path / "study" / "table.md").read_bytes() == before


def test_figures_as_png(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    written = write_all(tmp_path, CASES["one row"], png=True)
    assert sum(path.suffix == ".png" and path.read_bytes().startswith(b"\x89PNG") for path in written) == 4


def test_labels_and_scores_have_room_on_a_screen_and_on_a_phone(tmp_path: Path, chromium: Any) -> None:
    """A long metric does not touch its value; a score stays on one line beside a long output."""
    outputs = {"base": "ein Mann", "a": "lange " * 60}
    one = Disagreement("a man", "ein Mann", outputs, {"base": 100.0, "a": 1.5})
    rows = [row("base", 0.25), row("a", 0.2, -0.05)]
    path = tmp_path / "report.html"
    path.write_text(page(study(*rows, unit=".2%", metric="exact match", item_metric="chrF", disagreements=[one])))
    for width in (1440, 390):
        context = chromium.new_context(viewport={"width": width, "height": 860})
        tab = context.new_page()
        tab.goto(path.as_uri())
        lines = "[...document.querySelectorAll('.outputs td.number')].map(td => { const range = new Range(); "
        lines += "range.selectNodeContents(td); return range.getClientRects().length; })"
        assert tab.evaluate(lines) == [1, 1]
        if width == 390:
            labels = "[...document.querySelectorAll('.study td[data-name]')].map(td => parseFloat("
            labels += "getComputedStyle(td).paddingLeft) - parseFloat(getComputedStyle(td, '::before').width))"
            assert min(tab.evaluate(labels)) >= 8
        context.close()
