"""Lens, attribution, patching, neurons and embeddings in Chromium: the page shows what Python computes."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
import torch

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from playwright import sync_api
from safetensors.torch import save_file

from explorer import SMALL, TEXT, grow, make_decoder, make_numbers, served, settle, state
from regard import explore
from regard.explore.changes import Changes
from regard.explore.inside import Inside
from regard.models.config import ModelConfig
from regard.models.folder import read_weights, save
from regard.models.transformer import build
from regard.training.examples import as_json

pytest_plugins = ["browser"]
OTHER = TEXT.replace("tired", "sun")


def cells(page, label: str) -> dict[tuple[int, int], float]:
    """The values of a table of cells, by row and column."""
    grid = page.get_by_role("grid", name=label, exact=True)
    grid.wait_for()
    found = grid.locator("[data-cell]").evaluate_all("all => all.map(one => [one.dataset.cell, one.dataset.value])")
    return {tuple(map(int, where.split())): float(value) for where, value in found}


def test_every_view_shows_the_numbers_of_python(open_page, page_runs):
    page = open_page(state("decoder", view="lens"))
    inside = Inside.open(page_runs / "decoder")
    look = inside.look(TEXT)
    last = len(look.output.positions) - 1

    lens = explore.logit_lens(look)
    shown = cells(page, "Lens")
    assert len(shown) == lens.probabilities[..., 0].numel()
    for (row, column), value in shown.items():
        assert value == pytest.approx(float(lens.probabilities[row, column, 0]), abs=1e-3)
    page.locator("[data-cell='1 3']").click()
    top = page.get_by_test_id("lens-top").locator(".token").all_inner_texts()
    assert top == list(lens.labels[1][3])
    assert "at.source=3" in page.url  # the same token is selected in every view
    page.locator("[data-cell='1 3']").press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.cell") == "2 3"

    page.goto(page.url.split("#")[0] + "#" + state("decoder", view="attribution"))
    settle(page)
    terms = explore.direct_logit_attribution(look, last)
    shown = cells(page, "Contributions to the logit, layers by heads")
    for layer, heads in enumerate(terms.heads["decoder"]):
        for head, value in enumerate(heads.tolist()):
            assert shown[layer, head] == pytest.approx(value, abs=1e-3)
        assert shown[layer, len(heads)] == pytest.approx(terms.feedforward[layer], abs=1e-3)
    logit = float(page.get_by_test_id("logit").inner_text().replace("−", "-"))
    assert logit == pytest.approx(terms.logit, abs=1e-3)
    made = explore.token_saliency(look, last)
    rollout = [value for (row, _), value in sorted(cells(page, "Input tokens").items()) if row == 1]
    assert rollout == pytest.approx((made.rollout / made.rollout.abs().max()).tolist(), abs=1e-3)
    induction = cells(page, "Induction score, layers by heads")
    for layer, heads in enumerate(explore.induction_scores(inside)):
        assert [induction[layer, head] for head in range(len(heads))] == pytest.approx(heads.tolist(), abs=1e-3)

    page.goto(page.url.split("#")[0] + "#" + state("decoder", view="patching") + f"&other.text={quote(OTHER)}")
    settle(page)
    made = explore.activation_patching(look, inside.look(OTHER))
    shown = cells(page, "Residual stream: Decoder")
    for (row, column), value in shown.items():
        assert value == pytest.approx(float(made.residual["decoder"][row, column]), abs=1e-3)
    page.get_by_role("grid", name="Residual stream: Decoder").locator(f"[data-cell='2 {last}']").click()
    page.get_by_test_id("patched").wait_for()
    rows = page.get_by_test_id("patched").locator("tbody tr")
    at = rows.locator("th").all_inner_texts().index(made.answers[0])
    clean, _, patched = (float(text.replace("<", "")) for text in rows.nth(at).locator("td").all_inner_texts())
    assert patched == pytest.approx(clean, abs=2e-3)  # the last state of the last position is the whole output
    page.get_by_test_id("patching-other").fill("the cat")
    sync_api.expect(page.get_by_test_id("analysis-error")).to_contain_text("tokens")


def test_neurons_and_embeddings(open_page, page_runs):
    page = open_page(state("translator", view="neurons", part="decoder", layer=1))
    inside = Inside.open(page_runs / "translator")
    look = inside.look(TEXT)
    made = explore.neuron_activations(look, 1)
    units = made.top_units(24)
    page.get_by_test_id("units").wait_for()
    assert page.get_by_test_id("unit").input_value() == str(units[0][0])
    page.get_by_test_id("units").locator("button").nth(2).click()
    sync_api.expect(page.get_by_test_id("unit")).to_have_value(str(units[2][0]))
    sync_api.expect(page.locator("h2", has_text=f"Unit {units[2][0]},")).to_be_visible()
    shown = page.get_by_test_id("activations").locator("li").evaluate_all("all => all.map(one => +one.dataset.value)")
    assert shown == pytest.approx(made.activations[:, units[2][0]].tolist(), abs=1e-3)
    assert f"unit={units[2][0]}" in page.url

    page.get_by_test_id("ff-mean").click()
    page.get_by_test_id("loss-after").wait_for()
    off = inside.change(look, Changes(feedforward=(("decoder", 1, "mean"),)))
    assert float(page.get_by_test_id("loss-after").inner_text()) == pytest.approx(off.output.loss, abs=2e-3)
    assert json.dumps({"feedforward": [["decoder", 1, "mean"]]}).replace(" ", "") in page.evaluate(
        "decodeURIComponent(location.hash)"
    )
    page.get_by_test_id("ff-on").click()

    page.get_by_role("tab", name="Embeddings").click()
    page.get_by_role("button", name="animal", exact=True).click()
    page.get_by_test_id("neighbours").wait_for()
    wanted = [label for _, label, _ in explore.embedding_map(inside, "source").neighbours("animal")]
    assert page.get_by_test_id("neighbours").locator("button").all_inner_texts() == wanted
    assert page.locator("[data-points]").get_attribute("data-points") == str(len(inside.bundle.source))
    page.get_by_test_id("position").wait_for()
    assert page.get_by_text("sinusoidal").is_visible()
    page.get_by_test_id("near").fill("nonsense!")
    page.get_by_test_id("near").press("Enter")
    sync_api.expect(page.get_by_test_id("analysis-error")).to_contain_text("nonsense!")


def test_one_far_token_does_not_press_the_others_together(open_page, tmp_path):
    make_decoder(tmp_path / "decoder")
    weights = read_weights(tmp_path / "decoder" / "model.safetensors")
    weights["embedding.tokens.weight"][20] *= 50
    save_file(weights, tmp_path / "decoder" / "model.safetensors")
    with served(tmp_path) as listener:
        page = open_page(state("decoder", view="embeddings"), listener=listener)
        sync_api.expect(page.get_by_test_id("outside")).to_contain_text("beyond the edge, drawn on it")
        drawn = page.locator(".map canvas").evaluate(
            """canvas => {
              const {width, height} = canvas, {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
              const columns = new Set();
              for (let i = 3; i < data.length; i += 4)
                if (data[i]) columns.add(Math.floor(((i >> 2) % width) / width * 10));
              return columns.size; }"""
        )
        assert drawn >= 8  # of ten parts of the width


OVERLAPS = """all => all.map(one => one.getBoundingClientRect())
  .flatMap((a, i, boxes) => boxes.slice(i + 1).map(b => [a, b]))
  .filter(([a, b]) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
  .length"""


def test_only_views_that_the_model_has_are_offered_and_two_images_can_be_compared(open_page, tmp_path):
    make_numbers(tmp_path / "numbers", rule={"low": 0.0, "high": 100.0})
    folder = tmp_path / "vit"
    config = ModelConfig(
        architecture="encoder", input="patches", image_size=32, patch_size=8, output_head="classes", classes=12,
        pooling="mean", position="rope", position_axes=2, **SMALL,
    )  # fmt: skip
    save(grow(build(config)), folder, recipe={"data": {"classes": [f"a long class {n}" for n in range(12)]}})
    shades = torch.randint(256, (64, 3, 1, 1), dtype=torch.uint8).expand(-1, -1, 32, 32)
    inside = Inside.open(folder)
    best = {inside.look(image=one / 255).output.positions[0].top[0].label: one for one in shades}
    pixels = list(best.values())[:3]  # of different classes
    inputs = [{**as_json(one), "target": f"class {n}"} for n, one in enumerate(pixels)]
    (folder / "examples.json").write_text(json.dumps({"inputs": inputs}))
    with served(tmp_path) as listener:
        page = open_page(state("numbers", "10 20 30"), listener=listener)
        tabs = page.get_by_role("tab").all_inner_texts()
        assert "Neurons" in tabs and not {"Lens", "Attribution", "Patching", "Search tree", "Generation"} & {*tabs}
        page.get_by_role("tab", name="Embeddings").click()  # numbers have no vocabulary, but positions
        page.get_by_test_id("position").wait_for()
        assert page.get_by_test_id("near").count() == 0 and page.get_by_test_id("analysis-error").count() == 0

        page = open_page("run=vit&view=embeddings", listener=listener)
        page.get_by_test_id("position").wait_for()
        assert page.get_by_role("img", name="Position encoding: RoPE, 16 × 4").count() == 1  # a row for each patch
        page.get_by_role("tab", name="Lens").click()
        page.get_by_role("grid", name="Lens").wait_for()
        cut = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert page.get_by_role("grid", name="Lens").locator("button, [role=columnheader]").evaluate_all(cut) == 0
        page.get_by_role("tab", name="Patching").click()  # the second test image is suggested
        looks = [inside.look(image=one / 255) for one in pixels]
        grids = {}
        for other in (1, 2):
            made = explore.activation_patching(looks[0], looks[other])
            page.get_by_test_id("patching-picture").nth(other).click()
            sync_api.expect(page.get_by_test_id("answers")).to_contain_text(f"the second “{made.answers[1]}”")
            grids = cells(page, "Residual stream: Encoder")
            assert grids[0, 3] == pytest.approx(float(made.residual["encoder"][0, 3]), abs=1e-3)
        page.get_by_role("tab", name="Compare").click()
        page.get_by_test_id("other-picture").nth(1).click()
        page.get_by_role("region", name="Second").locator("canvas").wait_for()
        outputs = page.get_by_test_id("compare-output")
        sync_api.expect(outputs.nth(1)).to_contain_text(looks[1].output.positions[0].top[0].label)
        assert looks[0].output.positions[0].top[0].label in outputs.nth(0).inner_text()
        assert page.locator("section canvas, section .choice, aside").evaluate_all(OVERLAPS) == 0
        assert "other.image=" in page.url


def test_views_in_korean_on_a_phone_and_their_exports(open_page):
    page = open_page(state("translator", view="lens"), width=390, locale="ko-KR")
    for name in ("렌즈", "기여도", "뉴런", "임베딩"):
        page.get_by_role("tab", name=name, exact=True).click()
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert (
            page.locator("[role=rowheader]").evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth)") == []
        )
    page.get_by_role("tab", name="렌즈", exact=True).click()
    page.get_by_role("grid", name="렌즈", exact=True).wait_for()
    term = page.locator(".term", has_text="잔차 스트림")  # explained on hover, within the screen
    term.hover()
    box = term.get_by_role("tooltip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] > 20
    page.locator("summary", has_text="저장").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="그림 (SVG)").click()
    svg = download.value.path().read_text("utf-8")
    assert "<svg" in svg and "임베딩" in svg
