"""The page in Chromium: languages, hands, screens, hostile text, long text, and things that go wrong."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from playwright import sync_api

from explorer import HOSTILE, TEXT, hover_cell, served, settle, state
from regard.explore.inside import Inside
from regard.interop.folder import export_folder
from regard.models.recipe import preset
from regard.models.transformer import build
from variants import slow

pytest_plugins = ["browser"]


# --- languages, hands and screens


def test_korean_text_and_korean_words(open_page, page_runs):
    korean = "고양이가 햇볕을 쬐며 매트 위에 앉아 있다"
    page = open_page(state("decoder", korean, view="lines"), locale="ko-KR")
    assert page.get_by_role("tab", name="모델 전체").is_visible()
    assert page.locator("html").get_attribute("lang") == "ko"
    wanted = list(Inside.open(page_runs / "decoder").look(korean).parts["decoder"].rows)
    sync_api.expect(page.locator(".left [role=option]")).to_have_text(wanted)
    page.get_by_role("button", name="Show the page in English").click()
    assert page.get_by_role("tab", name="Whole model").is_visible()
    page.goto(page.url.replace("#", "?lang=ko#", 1))  # `regard --lang ko explore`, whatever was chosen before
    settle(page)
    assert page.get_by_role("tab", name="모델 전체").is_visible()
    page.get_by_role("button", name="Show the page in English").click()
    page.reload()
    settle(page)
    assert page.get_by_role("tab", name="Whole model").is_visible() and "?lang" not in page.url


def test_hostile_text_is_only_text(open_page, page_runs):
    page = open_page(state("decoder", HOSTILE, view="lines"))
    wanted = list(Inside.open(page_runs / "decoder").look(HOSTILE).parts["decoder"].rows)
    first = page.locator(".left [role=option]").all_inner_texts()
    assert len(first) > 20 and [text.strip() for text in first] == [token.strip() for token in wanted[: len(first)]]
    for name in ("Heat map", "Step by step", "Positions", "Whole model"):
        page.get_by_role("tab", name=name).click()
    assert page.locator("#text").input_value() == HOSTILE
    assert page.evaluate("window.hacked") is None
    assert page.locator("#app script, #app img").count() == 0


def test_everything_is_done_with_the_keyboard(open_page):
    page = open_page(state("decoder"))
    page.get_by_role("tab", name="Whole model").focus()
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.get_by_role("tab", name="Lines")).to_have_attribute("aria-selected", "true")
    page.get_by_role("listbox", name="Query tokens").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    sync_api.expect(page).to_have_url(re.compile("at.source=1"))  # the browser reports a new address a little later
    page.get_by_role("tab", name="Lines").focus()
    page.keyboard.press("ArrowRight")
    page.locator("[role=application]").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    sync_api.expect(page.get_by_test_id("readout")).not_to_be_empty()
    page.get_by_role("tab", name="Heat map").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Open layer 0, head 0").focus()
    page.keyboard.press("ArrowRight")
    sync_api.expect(page.get_by_role("button", name="Open layer 0, head 1")).to_be_focused()
    page.keyboard.press("o")
    sync_api.expect(page.get_by_role("button", name="Open layer 0, head 1, off")).to_be_visible()


@pytest.mark.parametrize(("view", "list_"), [("model", ".positions"), ("steps", ".queries")])
def test_a_list_of_tokens_is_one_stop_however_long(open_page, view, list_):
    page = open_page(state("decoder", view=view))
    options = page.locator(f"{list_} [role=option]")
    assert options.count() > 5 and page.locator(f"{list_} [tabindex='0']").count() == 1
    page.locator(f"{list_} [tabindex='0']").focus()
    for key, at in (("Home", 0), ("ArrowRight", 1), ("ArrowDown", 2), ("ArrowLeft", 1), ("End", options.count() - 1)):
        page.keyboard.press(key)
        sync_api.expect(options.nth(at)).to_be_focused()
        sync_api.expect(options.nth(at)).to_have_attribute("aria-selected", "true")
        sync_api.expect(page).to_have_url(re.compile(rf"at\.source={at}(&|$)"))


@pytest.mark.parametrize("run", ["translator", *slow("decoder")])
def test_everything_has_a_name_for_those_who_cannot_see_it(open_page, run):
    page = open_page(state(run, changes='{"layers": [["decoder", 1]]}'))
    for tab in page.get_by_role("tab").all():
        tab.click()
        page.wait_for_timeout(150)
        nameless = page.locator("button, input, select, textarea, [role=slider], canvas[tabindex='0']").evaluate_all(
            "all => all.filter(e => !e.textContent.trim() && !e.ariaLabel && !e.labels?.length && !e.title)"
            ".map(e => e.outerHTML.slice(0, 200))"
        )
        assert nameless == []


def test_a_phone_is_wide_enough(open_page):
    page = open_page(state("translator", changes='{"heads": [["decoder", 0, 1]]}'), width=390)
    for tab in page.get_by_role("tab").all():
        tab.click()
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab.inner_text()


@pytest.mark.slow
def test_512_tokens_do_not_hang_it(open_page, page_runs):
    text = " ".join([TEXT] * 60)
    inside = Inside.open(page_runs / "deep")
    ids = inside.reader.read(text).source[0, :512].tolist()
    text = inside.reader.decode(ids)
    page = open_page(state("deep", "the", view="model"))
    page.locator("#text").fill(text)
    page.get_by_text("Downsampled").wait_for()
    look = inside.look(text)
    assert len(look.input.read) >= 500
    page.get_by_role("tab", name="Heat map").click()
    shown = hover_cell(page, 30, 20)
    assert shown == pytest.approx(look.parts["decoder"].weights[0][0, 30, 20].item(), abs=1e-3)
    for name in ("Lines", "Step by step", "Positions", "Whole model"):
        page.get_by_role("tab", name=name).click()
    assert page.locator(".positions button").count() == len(look.input.read)


def test_a_page_that_nobody_touches_asks_nothing(open_page):
    page = open_page(state("translator", view="compare") + "&other.text=the+cat+sat")
    page.get_by_test_id("compare-output").nth(1).wait_for()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(800)
    assert [url for url in asked if not url.endswith("api/alive")] == []


# --- what a link or a folder leaves out


def test_a_link_that_names_only_a_run_begins_with_an_example(open_page):
    page = open_page("run=decoder&view=map&layer=1")
    assert page.locator("#text").input_value() != ""
    assert page.get_by_test_id("example").count() == 0
    sync_api.expect(page).to_have_url(re.compile("text=.*layer=1|layer=1.*text="))


def test_without_a_text_no_map_of_another_text_is_shown(open_page):
    page = open_page(state("decoder", view="lines"))
    page.locator("#text").fill("")
    page.get_by_text("Type a text above").wait_for()
    assert page.locator(".left [role=option]").count() == 0
    page.locator("#text").fill("a cat sat")
    page.locator(".left [role=option]").first.wait_for()


def test_a_vision_transformer_as_it_was_downloaded(open_page, tmp_path):
    sizes = {"dim": 24, "layers": 2, "heads": 3, "ff_dim": 32, "image_size": 32, "patch_size": 8, "classes": 3}
    export_folder(build(preset("vit-base", **sizes, max_length=17)), tmp_path / "vit")
    with served(tmp_path) as listener:
        page = open_page("run=vit&view=image", listener=listener)
        assert page.locator(".main canvas").is_visible()
        assert page.get_by_text("Class probabilities").is_visible()


# --- when things go wrong


def test_a_damaged_run_is_reported_and_the_others_work(open_page):
    page = open_page("run=damaged&text=the", ready=False)
    sync_api.expect(page.get_by_test_id("refused")).to_contain_text("model.safetensors")
    page.locator("#run").select_option("decoder")
    settle(page)
    sync_api.expect(page.get_by_test_id("refused")).to_have_count(0)
    page.get_by_test_id("grid").first.wait_for()


def test_a_server_that_has_gone_away_is_noticed(open_page, page_runs):
    with served(page_runs / "decoder") as short:
        page = open_page(state("decoder", view="map"), listener=short)
        value = hover_cell(page, 4, 2)
    page.get_by_test_id("gone").wait_for(timeout=20_000)
    assert "regard explore" in page.get_by_test_id("gone").inner_text()
    page.mouse.move(0, 0)
    assert hover_cell(page, 4, 2) == value  # what was there stays
