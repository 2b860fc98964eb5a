"""The report of a run: every part of the results is on the page, and its attention maps are those of `Inside`."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from inside_models import SHAPES, given, opened
from regard.explore.figures import draw
from regard.explore.report import write_report
from regard.training.results import AttentionInput, Chart, Examples, Images, Matrix, Results, Section, Table

HISTORY = [
    {"step": 10, "loss": 4.0, "seconds": 3.0},
    {"step": 20, "loss": 2.5, "valid_loss": 2.0, "seconds": 7.4},
]


def report(folder: Path, architecture: str = "decoder", **fields: object) -> str:
    values = {"title": "A <run>", "headline": [("accuracy on test", "91.20%")], "history": HISTORY}
    path = write_report(folder / "report.html", Results(**{**values, **fields}), opened(architecture).bundle)
    return path.read_text("utf-8")


def text_of(page: str) -> str:
    return "".join(ElementTree.fromstring(page.split("\n", 1)[1]).itertext())


def test_the_headline_and_the_learning_curve(tmp_path: Path) -> None:
    text = text_of(report(tmp_path, loss_unit="nats per pixel"))
    parameters = sum(parameter.numel() for parameter in opened("decoder").model.parameters())
    for words in ("A <run>", "accuracy on test", "91.20%", "7 s", f"{parameters:,}", "nats per pixel", "20 steps"):
        assert words in text
    assert "the last training loss is 2.5000" in text and "the last validation loss is 2.0000" in text
    assert "nothing was logged" in text_of(report(tmp_path, history=[]))


def test_every_kind_of_part_is_rendered(tmp_path: Path) -> None:
    parts = [
        "A <paragraph>.",
        Table(["set", "loss"], [["valid <1>", 0.25]]),
        Table(["index", "sample"], [[1, "two  blanks"]], preformatted=True),
        Examples([("in", "expected", "predicted")]),
        Examples([("source", "reference", "translation")], graded=False),
        Chart("Errors", {"model": [(1, 0.5), (2, 0.75)]}, "steps ahead", "error", "Caption of the chart."),
        Matrix("Confusion", [[0.9, 0.1], [0.2, 0.8]], ["cat", "dog"], ["cat", "dog"], "class", "predicted class"),
        Images("Mistakes", torch.rand(2, 1, 4, 4), ["cat\ndog 0.90", ""], "Caption of the images."),
    ]
    page = report(tmp_path, sections=[Section("Evidence", parts)])
    text = text_of(page)
    for words in ("Evidence", "A <paragraph>.", "valid <1>", "0.25", "two  blanks", "Confusion", "predicted class"):
        assert words in text
    for words in ("Errors", "steps ahead", "Caption of the chart.", "dog 0.90", "Caption of the images."):
        assert words in text
    assert page.count(" wrong</td>") == 1  # graded examples only
    assert len(re.findall(r'<image width="96"', page)) == 2  # the gallery
    assert '<td class="number">1</td><td class="token">two  blanks</td>' in page


@pytest.mark.parametrize("architecture", list(SHAPES))
def test_attention_is_drawn_from_a_look(architecture: str, tmp_path: Path) -> None:
    content = given(architecture)
    target = "a b" if opened(architecture).reader.writes else None
    one = AttentionInput(next(iter(content.values())), target, title="the <title>")
    page = report(tmp_path, architecture, attention=[one, one])
    look = opened(architecture).look(**content, target=target)
    assert page.count(draw(look)) == 2  # the same figure for both inputs
    assert "the <title>" in text_of(page) and "not why" in text_of(page)
    grids = 0 if look.input.grid is not None else len(look.parts)
    assert page.count("Rows are queries") == grids


def test_a_model_without_text_or_images_needs_no_attention(tmp_path: Path) -> None:
    page = report(tmp_path, "vectors", attention=[])
    assert "not why" not in page
