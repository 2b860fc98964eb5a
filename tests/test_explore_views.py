"""The page in Chromium: what the views say is true and complete, for the model and the input that are shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from playwright import sync_api

from explorer import (
    TEXT,
    choices,
    make_captioner,
    make_decoder,
    make_masked,
    make_numbers,
    make_translator,
    served,
    settle,
    state,
)
from regard import explore
from regard.explore.inside import Inside
from regard.text.labels import labels
from regard.text.scripts import scripts
from regard.training.examples import as_json

pytest_plugins = ["browser"]


def download(page, name: str, folder: Path) -> Path:
    page.locator("summary").click()
    with page.expect_download() as got:
        page.get_by_role("button", name=name).click()
    got.value.save_as(folder / "saved")
    return folder / "saved"


# --- before the model, and after the server


def test_the_example_and_the_users_input_are_not_mixed(open_page, page_runs):
    with served(page_runs / "translator") as slow:
        with slow.models._lock:
            page = open_page("run=translator&text=the+cat+sat", listener=slow, ready=False)
            page.get_by_test_id("example").wait_for()
            assert page.locator("#text").input_value() == "the cat sat"
            assert page.locator("#target").count() == 0  # no output beside an input that it does not belong to
            assert re.search("March 3rd, 2021.*→.*3월 3일", page.get_by_test_id("example").inner_text())
        settle(page)
        assert page.get_by_test_id("example").count() == 0 and page.locator("#target").count() == 1
        results = (page.locator("#target"), page.locator(".columns"))
        for one in results:
            sync_api.expect(one).to_have_css("opacity", "1")
        with slow.models._lock:
            page.locator("#text").fill("the cat sat on the mat")
            for one in results:  # they belong to the earlier text
                sync_api.expect(one).to_have_css("opacity", "0.4")
        settle(page)
        for one in results:
            sync_api.expect(one).to_have_css("opacity", "1")


def test_a_server_that_was_restarted_is_told_from_one_that_stopped(open_page, tmp_path):
    folder = make_decoder(tmp_path / "my run")
    with served(folder) as old:
        page = open_page("run=my+run&view=map&layer=1&text=the+cat", listener=old)
        page.route("**/api/alive", lambda route: route.fulfill(status=403, json={"error": "lacks the token"}))
        page.get_by_test_id("gone").wait_for()
    assert "restarted" in page.get_by_test_id("gone").inner_text()
    command = page.get_by_test_id("command").inner_text()
    assert f"'{folder}'" in command and '--link "#run=my+run' in command and "layer=1" in command


# --- examples


def test_a_run_begins_with_its_own_test_images_and_targets(open_page, tmp_path):
    folder = make_captioner(tmp_path / "captioner")
    images = [as_json(torch.full((3, 32, 32), shade, dtype=torch.uint8)) for shade in (10, 120)]
    inputs = [{**one, "target": target} for one, target in zip(images, ("a cat", "a mat"), strict=True)]
    (folder / "examples.json").write_text(json.dumps({"inputs": inputs}))
    with served(folder) as listener:
        page = open_page("run=captioner&view=image&part=encoder&layer=0&head=1", listener=listener)
        sync_api.expect(page.get_by_test_id("target")).to_contain_text("a cat")
        page.get_by_test_id("picture").nth(1).click()
        sync_api.expect(page.get_by_test_id("target")).to_contain_text("a mat")
        settle(page)
        # a dark image is grey, and its attention is orange: somewhere the red exceeds the blue by far
        page.get_by_test_id("picture").nth(0).click()
        settle(page)
        page.wait_for_timeout(200)
        centres = page.locator(".main canvas").evaluate(
            "c => { const at = [...Array(16).keys()].map(n => [(n % 4 + 0.5) / 4, (Math.floor(n / 4) + 0.5) / 4]);"
            " return at.map(([x, y]) => [...c.getContext('2d').getImageData(x * c.width, y * c.height, 1, 1).data]); }"
        )
        red, green, blue = np.array(centres)[:, :3].T
        assert (red - blue).max() > 150 and green.max() < 200
        weights = Inside.open(folder).look(image=torch.full((3, 32, 32), 10 / 255)).parts["encoder"].weights[0][1, 0]
        assert np.corrcoef(red - blue, weights.numpy())[0, 1] > 0.99
        assert page.get_by_test_id("unlike").count() == 0


def test_targets_leave_the_inputs_their_width_and_the_header_has_no_keys(open_page, page_runs, tmp_path):
    folder = make_translator(tmp_path / "translator")
    (folder / "examples.json").write_text(json.dumps({"inputs": [{"text": TEXT, "target": "고양이가"}]}))
    with served(folder) as listener:
        page = open_page("run=translator", listener=listener, width=1440, locale="ko-KR")
        page.get_by_test_id("target").wait_for()
        right = [page.locator(name).bounding_box() for name in ("#target", "main")]
        assert right[0]["x"] + right[0]["width"] > right[1]["x"] + right[1]["width"] - 40
        assert "인코더-디코더" in page.locator(".facts").inner_text()


def test_an_input_unlike_the_training_data_gets_a_hint(open_page, tmp_path):
    folder = make_decoder(tmp_path / "decoder")
    known = {"inputs": [{"text": TEXT, "target": None}], "scripts": scripts(TEXT), "tokens_per_character": 0.5}
    (folder / "examples.json").write_text(json.dumps(known))
    with served(folder) as listener:
        page = open_page("run=decoder", listener=listener)
        assert page.locator("#text").input_value() == TEXT and page.get_by_test_id("unlike").count() == 0
        page.locator("#text").fill("고양이가 앉아 있다")
        sync_api.expect(page.get_by_test_id("unlike")).to_contain_text("Hangul")


def test_a_model_of_numbers_shows_its_test_data_and_its_output_on_a_phone(open_page, tmp_path):
    folder = make_numbers(tmp_path / "numbers", rule={"low": 0.0, "high": 100.0})
    (folder / "examples.json").write_text(json.dumps({"inputs": [{"text": "7, 9, 11", "target": "9, 11, 13"}]}))
    with served(folder) as listener:
        page = open_page("run=numbers&view=map", listener=listener, width=390)
        assert page.locator("#text").input_value() == "7, 9, 11"
        assert "9, 11, 13" in page.get_by_test_id("target").inner_text()
        assert page.get_by_test_id("unlike").count() == 0
        summary, shown = page.get_by_test_id("summary"), page.get_by_test_id("value").nth(1)
        assert shown.get_by_test_id("before").inner_text() in summary.inner_text()
        summary.get_by_role("button", name="Switch head off").click()
        sync_api.expect(summary).to_contain_text("→")
        assert shown.get_by_test_id("after").inner_text() in summary.inner_text()
        page.locator("#text").fill("7 9 500")
        sync_api.expect(page.get_by_test_id("unlike")).to_contain_text("500")
        page.locator("#text").fill("seven")  # refused: what was said about other numbers is not said about it
        sync_api.expect(page.get_by_test_id("refused")).to_contain_text("not a number")
        sync_api.expect(page.get_by_test_id("unlike")).to_have_count(0)
        sync_api.expect(page.locator(".columns")).to_have_css("opacity", "0.4")


def test_a_masked_model_says_how_to_type_its_mask(open_page, page_runs, tmp_path):
    folder = make_masked(tmp_path / "masked")
    mask = Inside.open(folder).reader.mask
    assert mask is not None
    with served(folder) as listener:
        page = open_page("run=masked&text=the+cat", listener=listener)
        assert "nothing is masked" in page.locator("#says").inner_text()
        assert mask in page.get_by_test_id("mask").inner_text()
        page.locator("#text").press("End")
        page.get_by_role("button", name=f"Insert {mask}").click()
        assert page.locator("#text").input_value() == f"the cat {mask}"
        settle(page)
        sync_api.expect(page.locator(".positions [aria-selected=true]")).to_contain_text(mask)
        assert "masked tokens" in page.locator("#says").inner_text()


# --- outputs and words


def test_the_original_favourite_and_the_expected_token_are_always_shown(open_page, page_runs):
    changes = json.dumps({"layers": [["decoder", 0], ["decoder", 1]]})
    page = open_page(state("decoder", changes=changes))
    page.get_by_test_id("loss-after").wait_for()
    output = Inside.open(page_runs / "decoder").look(TEXT).output
    for at in (3, 6):
        page.locator(".positions [role=option]").nth(at).click()
        place, shown = output.positions[at], choices(page)
        assert place.top[0].label.strip() in shown and place.expected.label.strip() in shown
    widths = page.locator("tr[data-testid=choice]").first.evaluate(
        "row => [row.querySelector('.bar.new').getBoundingClientRect().width, row.querySelector('.bars').clientWidth,"
        " Number(row.querySelector('[data-testid=after]').innerText)]"
    )
    assert widths[0] / widths[1] == pytest.approx(widths[2], abs=0.02)  # linear: a probability of 1 fills the room


def test_words_fit_what_is_shown(open_page):
    changes = json.dumps({"heads": [["decoder", 0, 1]], "future": True})
    page = open_page(state("translator", view="map", part="decoder", head=1, changes=changes, show="change"))
    page.get_by_test_id("loss-after").wait_for()
    assert page.get_by_text("it sums to 0").is_visible() and page.get_by_text("it sums to 1").count() == 0
    assert "head is off" in page.get_by_test_id("off").inner_text()
    assert "teacher forcing" in page.get_by_test_id("future-why").inner_text()
    page.get_by_role("tab", name="Search tree").click()
    assert "this head" not in page.locator(".note").inner_text()


def test_parts_of_characters_are_labelled_by_the_character(open_page, page_runs):
    text = "괜찮다 뛰어"
    page = open_page(state("decoder", text, view="lines"))
    tokenizer = Inside.open(page_runs / "decoder").bundle.source
    wanted = list(labels(tokenizer, tokenizer.encode(text)))
    sync_api.expect(page.locator(".left [role=option]")).to_have_text(wanted)
    assert any("₂" in label for label in wanted) and "\\x" not in page.locator("main").inner_text()


# --- views


def test_positions_draws_all_of_the_attention(open_page):
    text = " ".join([TEXT] * 12)
    page = open_page(state("decoder", text, view="positions", head=1))
    page.get_by_test_id("grouped").wait_for()
    weights = [float(one) for one in page.get_by_test_id("bin").evaluate_all("all => all.map(e => e.dataset.weight)")]
    assert sum(weights) == pytest.approx(1, abs=1e-3)
    assert page.get_by_test_id("bin").first.locator("title").text_content().startswith("−129…143")


def test_lines_keep_their_labels_and_have_a_threshold(open_page):
    page = open_page(state("decoder", TEXT + " incomprehensibilities", view="lines", head=1))
    before = page.locator(".right bdi").evaluate_all("all => all.map(e => e.clientWidth)")
    page.locator("#q9").hover()
    assert page.get_by_test_id("weight").count() > 0
    assert page.locator(".right bdi").evaluate_all("all => all.map(e => e.clientWidth)") == before
    cut = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length"
    assert page.locator(".right bdi, .left bdi").evaluate_all(cut) == 0
    page.get_by_test_id("threshold").press("Home")
    most = int(page.get_by_test_id("drawn").inner_text().split()[0])
    page.get_by_test_id("threshold").press("End")
    assert int(page.get_by_test_id("drawn").inner_text().split()[0]) < most


def test_labels_of_the_search_tree_do_not_overlap(open_page):
    page = open_page(state("translator", view="search", beam=5))
    page.get_by_test_id("tree").wait_for()
    boxes = page.locator("[data-testid=tree] text").evaluate_all(
        "all => all.map(e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })"
    )
    for at, (left, top, right, bottom) in enumerate(boxes):
        assert not any(
            left < other[2] and other[0] < right and top + 2 < other[3] - 2 and other[1] + 2 < bottom - 2
            for other in boxes[at + 1 :]
        )


def test_a_heat_map_uses_the_width_there_is(open_page):
    page = open_page(state("decoder", "the cat sat on the mat", view="map"), width=1440)
    box = page.locator("[role=application]")
    gutter, _, wide, high = map(float, box.get_attribute("data-geometry").split())
    columns = int(re.search(r"by (\d+) columns", box.get_attribute("aria-label"))[1])
    assert wide > high and (gutter + columns * wide) / box.bounding_box()["width"] > 0.75


def test_exports_hold_what_the_view_shows(open_page, page_runs, tmp_path):
    page = open_page(state("translator", view="steps", part="cross", layer=1, head=0) + "&at.target=2")
    page.locator(".rows .row").first.wait_for()
    look = Inside.open(page_runs / "translator").look(TEXT)
    saved = json.loads(download(page, "Values (JSON)", tmp_path).read_text(encoding="utf-8"))
    maps = {(one["part"], one["layer"]): one["heads"] for one in saved["maps"]}
    assert len(maps) == sum(len(part.weights) for part in look.parts.values())
    for (part, layer), heads in maps.items():
        assert torch.allclose(torch.tensor(heads), look.parts[part].weights[layer], atol=1e-4)
    assert saved["steps"]["token"] == look.parts["cross"].rows[2]
    drawn = ElementTree.parse(download(page, "Figure (SVG)", tmp_path)).getroot()
    text = " ".join(drawn.itertext())
    assert look.parts["cross"].rows[2] in text and "Σ weight × v" in text
    keys = len(look.parts["cross"].columns)
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}image")) == 2 * keys + 2  # q, q × k, weight × v, the sum


def test_exported_steps_name_what_the_model_computes(open_page, tmp_path):
    folder = make_translator(tmp_path / "recurrent", architecture="recurrent", attention_score="additive")
    with served(folder) as listener:
        page = open_page(state("recurrent", view="steps"), listener=listener)
        page.locator(".rows .row").first.wait_for()
        heads = page.locator("[role=columnheader]").all_inner_texts()
        drawn = "".join(ElementTree.parse(download(page, "Figure (SVG)", tmp_path)).getroot().itertext())
        assert "score" in heads and "score" in drawn and "q · k" not in [*heads, drawn]  # an additive score is none


def test_exports_of_tables_and_embeddings_are_complete(open_page, page_runs, tmp_path):
    page = open_page(state("translator", view="attribution"))
    logit = page.get_by_test_id("logit").inner_text()
    saved = download(page, "Figure (SVG)", tmp_path).read_text(encoding="utf-8")
    assert f"= {logit}<" in saved  # the sum, as on the page
    page.get_by_role("tab", name="Embeddings").click()
    page.get_by_test_id("position").wait_for()
    answers = json.loads(download(page, "Values (JSON)", tmp_path).read_text(encoding="utf-8"))["analysis"]
    wanted = explore.embedding_map(Inside.open(page_runs / "translator"), "source")
    assert answers["embeddings"]["points"]["values"] == pytest.approx(wanted.points.flatten().tolist(), abs=1e-3)
    assert "neighbours" not in answers and answers["position"]["kind"] == "sinusoidal"


# --- phone and screen reader


def test_a_phone_shows_output_and_switches_beside_the_view(open_page):
    page = open_page(state("translator", view="steps", part="cross"), width=390)
    summary = page.get_by_test_id("summary")
    page.locator(".rows .row").first.wait_for()
    page.locator("#view").scroll_into_view_if_needed()
    sync_api.expect(summary).to_be_in_viewport()
    summary.get_by_role("button", name="Switch head off").click()
    page.get_by_test_id("loss-after").wait_for()
    assert "→" in summary.inner_text()
    table = page.locator(".box")
    last = page.locator(".rows .row").first.locator("[role=cell]").last
    table.evaluate("box => (box.scrollLeft = box.scrollWidth)")
    assert table.evaluate("box => box.scrollLeft") > 0
    sync_api.expect(last).to_be_in_viewport()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_names_tell_the_kinds_of_attention_apart_and_the_focus_stays(open_page):
    page = open_page(state("translator"))
    names = [one.get_attribute("aria-label") for one in page.locator("button.map").all()]
    assert len(set(names)) == len(names) and {name.split(":")[0] for name in names} == {"Encoder", "Decoder", "Cross"}
    layers = [one.get_attribute("aria-label") for one in page.locator("button.layer").all()]
    assert len(set(layers)) == len(layers)
    page.get_by_role("button", name="Cross: Open layer 0, head 1").click()
    assert page.evaluate("document.activeElement.id") == "view"
    page.get_by_role("switch", name="Cross, Layer 0, head 1").click()
    page.get_by_test_id("loss-after").wait_for()
    page.get_by_test_id("reset").click()
    sync_api.expect(page.get_by_test_id("reset")).to_have_count(0)
    assert page.evaluate("document.activeElement.id") == "touch"
