"""The page in Chromium: the numbers on it are those that Python computes, and a link brings them back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from playwright import sync_api

import regard
from explorer import HOSTILE, TEXT, choices, hover_cell, served, settle, state
from regard.explore.changes import Changes
from regard.explore.inside import Inside

pytest_plugins = ["browser"]


# --- the numbers on the page are the model's


def test_a_prepared_example_is_painted_before_the_model_answers(open_page, page_runs):
    with served(page_runs / "decoder") as slow:
        with slow.models._lock:  # nothing can be looked at while this is held
            page = open_page(listener=slow, ready=False)
            page.get_by_test_id("example").wait_for()
            page.get_by_test_id("grid").first.wait_for()
            assert int(page.get_by_test_id("grid").first.get_attribute("data-painted")) > 0
        settle(page)
        assert page.get_by_text("decoder · 2 layers · 3 heads").is_visible()


def test_every_map_equals_the_trace(open_page, page_runs):
    page = open_page(state("decoder", view="map", layer=1, head=2))
    weights = Inside.open(page_runs / "decoder").look(TEXT).parts["decoder"].weights
    for row, column in [(0, 0), (5, 2), (9, 9), (11, 4)]:
        assert hover_cell(page, row, column) == pytest.approx(weights[1][2, row, column].item(), abs=1e-3)
    page.get_by_role("button", name="Layer: previous").click()
    assert hover_cell(page, 7, 3) == pytest.approx(weights[0][2, 7, 3].item(), abs=1e-3)
    page.get_by_role("button", name="Mean of the heads").click()
    assert hover_cell(page, 7, 3) == pytest.approx(weights[0][:, 7, 3].mean().item(), abs=1e-3)


def test_typing_shows_the_new_text_at_once(open_page, page_runs):
    page = open_page(state("decoder", view="lines", layer=0, head=1))
    page.locator("#text").fill("a cat sat on the mat")
    look = Inside.open(page_runs / "decoder").look("a cat sat on the mat")
    sync_api.expect(page.locator(".left [role=option]")).to_have_text(list(look.parts["decoder"].rows))
    page.locator("#q4").hover()
    shown = [float(text) for text in page.get_by_test_id("weight").all_inner_texts()]
    row = [weight for weight in look.parts["decoder"].weights[0][1, 4].tolist() if weight >= 0.0005]
    assert shown == pytest.approx(row, abs=1e-3)
    page.locator("#q4").click()
    sync_api.expect(page).to_have_url(re.compile("at.source=4"))


def test_a_head_switched_off_changes_the_probabilities_as_python_does(open_page, page_runs):
    page = open_page(state("decoder", view="lines", layer=0, head=1))
    page.get_by_test_id("toggle").click()
    page.get_by_test_id("loss-after").wait_for()
    inside = Inside.open(page_runs / "decoder")
    before = inside.look(TEXT)
    after = inside.change(before, Changes(heads=(("decoder", 0, 1),)))
    at = int(page.locator(".positions [aria-selected=true]").evaluate("e => [...e.parentNode.children].indexOf(e)"))
    both = [look.output.logits[at].softmax(dim=-1) for look in (before, after)]
    names = [inside.reader.label(id) for id in range(both[0].shape[0])]
    found = choices(page)
    assert len(found) >= 5
    for label, numbers in found.items():
        id = names.index(label)
        assert numbers == pytest.approx((both[0][id].item(), both[1][id].item()), abs=1e-3)
    assert float(page.get_by_test_id("loss-before").inner_text()) == pytest.approx(before.output.loss, abs=1e-3)
    assert float(page.get_by_test_id("loss-after").inner_text()) == pytest.approx(after.output.loss, abs=1e-3)
    page.get_by_test_id("reset").click()
    sync_api.expect(page.get_by_test_id("loss-after")).to_have_count(0)


def test_the_steps_are_those_of_python(open_page, page_runs):
    page = open_page(state("translator", view="steps", part="cross", layer=1, head=0) + "&at.target=2")
    steps = Inside.open(page_runs / "translator").look(TEXT).steps("cross", 1, 0, 2)
    rows = page.locator(".rows .row")
    sync_api.expect(rows).to_have_count(len(steps.weights))
    for stage, digits in (("scores", 0.006), ("scaled", 0.006), ("weights", 0.001)):
        shown = [
            float(text.replace("−", "-").replace("<", ""))
            for text in rows.locator(f"[data-stage={stage}]").all_inner_texts()
        ]
        assert shown == pytest.approx(getattr(steps, stage).tolist(), abs=digits)


def test_a_bar_dragged_is_an_edited_row(open_page, page_runs):
    page = open_page(state("translator", view="steps", part="cross", layer=1, head=0) + "&at.target=2")
    bar = page.locator(".rows [data-key='3'] [role=slider]")
    box = bar.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 9)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 9, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Undo the edit").wait_for()
    sync_api.expect(bar).to_have_attribute("aria-valuenow", re.compile(r"0\.7[3-6]\d*|0\.77"))  # 0.75 within 0.02
    bar.press("End")
    sync_api.expect(bar).to_have_attribute("aria-valuenow", "1")
    page.get_by_role("tab", name="Heat map").click()
    settle(page)
    assert hover_cell(page, 2, 3) == pytest.approx(1, abs=1e-3)
    assert hover_cell(page, 2, 4) == pytest.approx(0, abs=1e-3)


def test_the_search_tree_ends_in_what_the_model_generates(open_page, page_runs):
    page = open_page(state("translator", view="search", beam=3))
    page.get_by_test_id("tree").wait_for()
    wanted = regard.load(page_runs / "translator").predict([TEXT], beam=3, n_best=3)[0].n_best
    assert page.locator("ol li bdi").all_inner_texts() == [one.text for one in wanted]
    assert page.locator("text.best").count() >= len(wanted[0].text)


def test_attention_over_an_image_equals_the_trace(open_page, page_runs, tmp_path):
    image = pytest.importorskip("PIL.Image").new("RGB", (64, 64), (200, 30, 40))
    image.paste((20, 60, 200), (32, 0, 64, 64))
    image.save(tmp_path / "two.png")
    page = open_page("run=captioner&view=image&part=encoder&layer=0&head=1")
    drawn = page.url  # an example image is shown first
    page.locator("input[type=file]").set_input_files(tmp_path / "two.png")
    sync_api.expect(page).not_to_have_url(drawn)
    settle(page)
    pixels = torch.zeros(3, 32, 32)
    pixels[:, :, :16] = (torch.tensor([200, 30, 40]) / 255)[:, None, None]
    pixels[:, :, 16:] = (torch.tensor([20, 60, 200]) / 255)[:, None, None]
    weights = Inside.open(page_runs / "captioner").look(image=pixels).parts["encoder"].weights[0][1]
    canvas = page.locator(".main canvas")
    side = canvas.bounding_box()["width"]
    canvas.click(position={"x": side * 0.1, "y": side * 0.4})  # pins patch 4: row 1, column 0
    canvas.hover(position={"x": side * 0.9, "y": side * 0.1})
    sync_api.expect(page.get_by_test_id("patch")).to_have_text(re.compile(r"patch 3: \S+"))
    shown = float(page.get_by_test_id("patch").inner_text().split(": ")[1].replace("<", ""))
    assert shown == pytest.approx(weights[4, 3].item(), abs=2e-3)  # the browser may resize a pixel at the edge
    again = open_page(page.url.partition("#")[2])
    assert again.locator(".main canvas").is_visible()


# --- states and files


def test_a_link_brings_back_the_same_state(open_page):
    changes = json.dumps(
        {"heads": [["decoder", 0, 1], ["cross", 1, 2]], "temperature": 1.5, "shuffle": 3, "future": True}
    )
    page = open_page(state("translator", view="map", part="cross", layer=1, head=0, changes=changes, show="change"))
    page.get_by_test_id("loss-after").wait_for()
    value, url = hover_cell(page, 3, 2), page.url
    texts = [page.get_by_test_id(name).inner_text() for name in ("generated-before", "generated-after", "loss-after")]
    other = open_page(url.partition("#")[2])
    other.get_by_test_id("loss-after").wait_for()
    assert hover_cell(other, 3, 2) == value and other.url == url
    assert [
        other.get_by_test_id(name).inner_text() for name in ("generated-before", "generated-after", "loss-after")
    ] == texts
    assert other.get_by_role("tab", name="Heat map").get_attribute("aria-selected") == "true"
    assert other.get_by_role("button", name="Difference").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(
    "link", ["changes=%7Bnot json", "layer=99&head=99&view=nothing&part=none", "run=nowhere&text=%E0%A4%A"]
)
def test_a_link_that_makes_no_sense_is_no_catastrophe(open_page, link):
    page = open_page(link)
    page.get_by_test_id("grid").first.wait_for()


def test_a_change_that_the_server_refuses_is_reported(open_page):
    page = open_page(state("decoder", changes='{"heads": [["decoder", 0, 77]]}'))
    assert "heads 0 to 2" in page.get_by_test_id("refused").inner_text()


def test_figures_and_values_can_be_saved(open_page, page_runs, tmp_path):
    page = open_page(state("decoder", HOSTILE, view="map", layer=1, head=2))

    def save(name: str, file: str) -> Path:
        page.locator("summary").click()
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        download.value.save_as(tmp_path / file)
        return tmp_path / file

    look = Inside.open(page_runs / "decoder").look(HOSTILE)
    numbers = json.loads(save("Values (JSON)", "numbers.json").read_text(encoding="utf-8"))
    wanted = look.parts["decoder"].weights[1][2]
    assert torch.allclose(torch.tensor(numbers["map"]["weights"]), wanted, atol=1e-4)
    assert tuple(numbers["map"]["rows"]) == look.parts["decoder"].rows
    for view in ("Heat map", "Lines", "Whole model", "Step by step", "Positions"):
        page.get_by_role("tab", name=view).click()
        page.wait_for_timeout(300)
        drawn = ElementTree.parse(save("Figure (SVG)", "figure.svg")).getroot()
        assert drawn.tag.endswith("svg") and not drawn.findall(".//{http://www.w3.org/2000/svg}script")
    assert save("Figure (PNG)", "figure.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
