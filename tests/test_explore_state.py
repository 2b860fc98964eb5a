"""The page in Chromium: one selected token in every view, Back and Forward, and Undo."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from playwright import sync_api

from explorer import served, settle, state

pytest_plugins = ["browser"]


# In the page, so that a busy machine does not part what belongs together.
TYPE = """async (field, text) => {
  for (const letter of text) {
    field.value += letter;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise((done) => setTimeout(done, 20));
  }
}"""
DRAG = """async (slider, values) => {
  for (const value of values) {
    slider.value = value;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise((done) => setTimeout(done, 20));
  }
}"""


def selected(page, list_: str) -> int:
    return int(page.locator(f"{list_} [aria-selected=true]").evaluate("e => [...e.parentNode.children].indexOf(e)"))


def test_one_token_is_selected_in_all_views_and_panels(open_page):
    page = open_page(state("translator", view="steps", part="cross"))
    page.locator(".queries [role=option]").first.wait_for()
    assert selected(page, ".queries") == selected(page, ".positions") == 1  # the default is the same, too
    page.locator(".positions [role=option]").nth(3).click()
    assert selected(page, ".queries") == 3
    page.get_by_role("tab", name="Lines").click()
    sync_api.expect(page.locator("#q3")).to_have_attribute("aria-selected", "true")
    page.locator("#q2").click()
    page.locator("#q2").hover()
    assert selected(page, ".positions") == 2
    page.mouse.move(0, 0)
    page.get_by_test_id("toggle").click()  # a change does not move the selection
    page.get_by_test_id("loss-after").wait_for()
    assert selected(page, ".positions") == 2
    if page.get_by_test_id("largest").count():
        page.get_by_test_id("largest").click()
        assert selected(page, ".positions") != 2


def test_back_and_forward_return_to_every_state(open_page):
    page = open_page(state("decoder"))
    start = page.evaluate("history.length")
    page.get_by_role("tab", name="Lines").click()
    page.get_by_role("button", name="Layer: next").click()
    page.get_by_test_id("toggle").click()
    page.get_by_test_id("loss-after").wait_for()
    page.locator("#text").evaluate(TYPE, " again")  # one entry, not six
    settle(page)
    assert page.evaluate("history.length") == start + 4
    page.go_back()
    sync_api.expect(page.locator("#text")).not_to_have_value("again")
    settle(page)
    assert page.get_by_test_id("loss-after").count() == 1
    page.go_back()
    sync_api.expect(page.get_by_test_id("loss-after")).to_have_count(0)
    assert page.get_by_test_id("layer").inner_text() == "1"
    page.go_back()
    sync_api.expect(page.get_by_test_id("layer")).to_have_text("0")
    page.go_back()
    sync_api.expect(page.get_by_role("tab", name="Whole model")).to_have_attribute("aria-selected", "true")
    page.go_forward()
    sync_api.expect(page.get_by_role("tab", name="Lines")).to_have_attribute("aria-selected", "true")


def test_ctrl_z_undoes_one_change_after_the_other(open_page):
    page = open_page(state("decoder", view="lines"))
    off = page.locator("[role=switch][aria-checked=false].off")
    for head in (0, 2):
        page.get_by_role("switch", name=f"Layer 1, head {head}").click()
        sync_api.expect(off).to_have_count(1 + head // 2)
    page.get_by_role("slider", name="Attention temperature").evaluate(DRAG, ["0.1", "0.2"])  # one action
    temperature = page.locator(".control output")
    sync_api.expect(temperature).to_have_text("1.15")
    page.keyboard.press("Control+z")
    sync_api.expect(temperature).to_have_text("1.00")
    sync_api.expect(off).to_have_count(2)
    page.keyboard.press("Control+z")
    sync_api.expect(off).to_have_count(1)
    page.keyboard.press("Control+Shift+z")
    sync_api.expect(off).to_have_count(2)
    page.locator("#text").press_sequentially(" x")
    page.locator("#text").press("Control+z")  # the field's own
    assert off.count() == 2
    page.get_by_role("tab", name="Embeddings").click()
    page.get_by_test_id("near").press_sequentially("cat")
    page.get_by_test_id("near").press("Control+z")
    assert off.count() == 2
    page.get_by_test_id("undo").click()
    page.get_by_test_id("undo").click()
    sync_api.expect(off).to_have_count(0)
    sync_api.expect(page.get_by_test_id("undo")).to_have_count(0)


def test_a_link_needs_no_model_where_one_is_open_and_says_if_its_model_is_missing(open_page, page_runs):
    changes = quote('{"heads":[["decoder",1,2]]}')
    with served(page_runs / "decoder") as listener:
        page = open_page(f"view=lines&layer=1&head=2&changes={changes}", listener=listener)
        assert page.get_by_test_id("layer").inner_text() == "1" and page.get_by_test_id("loss-after").count() == 1
        sync_api.expect(page).to_have_url(re.compile("run=decoder.*layer=1.*changes="))
        page.evaluate("link => (location.hash = link)", "run=elsewhere&text=a cat sat&layer=1")
        sync_api.expect(page.get_by_test_id("missing")).to_contain_text("“elsewhere”, which is not open here")
        settle(page)
        assert page.locator("#text").input_value() == "a cat sat" and "run=decoder" in page.url
