"""The views Flow and Generation in Chromium, and what their requests return."""

from __future__ import annotations

import re

import numpy as np
import pytest

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from playwright import sync_api

from explorer import TEXT, ask, ask_frame, make_decoder, make_numbers, make_translator, refusal, served, state
from regard.explore.flow import Flow
from regard.explore.generation import generate_steps
from regard.explore.inside import Inside
from regard.predict.config import SearchConfig

pytest_plugins = ["browser"]


def test_the_server_sends_the_flow_and_refuses_what_is_wrong(page_server, page_runs):
    address = page_server.address
    header, arrays = ask_frame(
        address, "api/flow", {"run": "translator", "text": TEXT, "at": {"source": 3, "target": 1}}
    )
    flow = Flow.of(Inside.open(page_runs / "translator").look(TEXT), 3, 1)
    assert header["at"] == flow.at and set(header["shapes"]) == set(flow.stages)
    for name in ("encoder.0.attention.norm", "decoder.1.cross.weights", "decoder.1.feedforward.up"):
        assert np.allclose(arrays[f"v:{name}"], flow.stages[name].vector, atol=1e-5)
    assert np.allclose(arrays["n:decoder.0.cross.heads"], flow.stages["decoder.0.cross.heads"].norms, atol=1e-5)
    for path, body, message in (
        ("flow", {"at": {"source": 99}}, "position = 99"),
        ("flow", {"at": {"memory": 1}}, "at"),
        ("generate", {"prefix": [10**9]}, "prefix"),
        ("generate", {"count": 1000}, "count = 1000"),
        ("generate", {"sampling": {"temperature": 0}}, "temperature"),
        ("generate", {"sampling": {"top": 0}}, "top: unknown setting"),
    ):
        status, sentence = refusal(ask(address, f"api/{path}", {"run": "decoder", "text": TEXT, **body}))
        assert status == 422 and message in sentence


def test_the_picture_of_a_model_shows_the_numbers_of_python(open_page, page_runs):
    page = open_page(state("decoder", view="flow", layer=1) + "&at.source=4")
    flow = Flow.of(Inside.open(page_runs / "decoder").look(TEXT), 4)
    picture = page.get_by_test_id("flow")
    picture.wait_for()

    def length(stage: str) -> str:
        return f"{float(flow.stages[stage].vector.norm()):.2f}"

    # pre-LN: the norm is in the branch, before queries, keys and values; one layer is open
    order = picture.locator("[data-box]").evaluate_all("all => all.map(one => one.dataset.box)")
    inner = [name.removeprefix("decoder.1.") for name in order if name.startswith("decoder.1.")]
    attention = [f"attention.{part}" for part in ("norm", "q", "k", "v", "cache", "heads.0", "heads.1", "heads.2")]
    attention += ["attention.output", "attention.sum"]
    assert inner == [*attention, *(f"feedforward.{part}" for part in ("norm", "up", "hidden", "output", "sum"))]
    assert order[:3] == ["decoder.token", "decoder.embedding", "decoder.0.output"]
    for stage in ("decoder.embedding", "decoder.1.attention.norm", "decoder.1.feedforward.up"):
        box = picture.locator(f"[data-box='{stage}']")
        assert length(stage) in box.get_attribute("aria-label") and "shape" in box.get_attribute("aria-label")
    # the arithmetic of a head
    picture.locator("[data-box='decoder.1.attention.heads.2']").click()
    detail = page.get_by_test_id("detail")
    assert "1/√8 = 0.354" in detail.inner_text()
    weights = flow.stages["decoder.1.attention.weights"].vector[2]
    shown = [float(text.replace("<", "")) for text in detail.locator("tbody td:last-child").all_inner_texts()]
    assert shown == pytest.approx(weights.topk(len(shown)).values.tolist(), abs=1e-3)
    assert "box=decoder.1.attention.heads.2" in page.url
    # another token, another layer; the keyboard
    page.locator(".chips [role=option]").nth(2).click()
    page.keyboard.press("ArrowRight")
    sync_api.expect(picture.locator("[data-box='decoder.token']")).to_have_attribute(
        "aria-label", re.compile("not, |not$")
    )
    layer = picture.locator("[data-box='decoder.0.output']")
    layer.focus()
    layer.press("Enter")
    picture.locator("[data-box='decoder.0.attention.q']").wait_for()
    # the token's way, box by box
    for _ in range(3):
        page.get_by_test_id("step").click()
    assert picture.locator(".active").get_attribute("data-order") == "2"
    page.get_by_test_id("play").click()
    sync_api.expect(picture.locator(".active")).to_have_attribute("data-order", "5")
    page.get_by_test_id("play").click()


def test_tokens_are_generated_one_by_one_as_python_samples_them(open_page, page_runs):
    page = open_page(state("decoder", view="generate", temperature=0.7, top_k=5, seed=4))
    config = SearchConfig(sample=True, temperature=0.7, top_k=5, seed=4)
    look = Inside.open(page_runs / "decoder").look(TEXT)
    steps = generate_steps(look, config, count=4)
    for count in (1, 2):
        page.get_by_test_id("step").click()
        sync_api.expect(page.get_by_test_id("generated")).to_have_count(count)
    rows = page.get_by_test_id("candidate")
    for row, choice in zip(rows.all(), steps[1].choices, strict=True):
        before, after = row.locator("td").all_inner_texts()
        assert float(before.replace("<", "")) == pytest.approx(choice.probability, abs=1e-3)
        assert (float(after.replace("<", "")) if after != "cut" else 0) == pytest.approx(choice.kept, abs=1e-3)
    assert "5 tokens can be sampled" in page.locator("[aria-label='What can follow']").inner_text()
    used = steps[1].cache.used  # 2 layers, 2 · 3 heads · 8 numbers · 4 bytes per token
    assert used == 2 * 2 * 3 * 8 * 4 * (len(look.input.source_labels) + 1)
    assert f"{used / 1000:.2f} kB" in page.get_by_test_id("cache").inner_text()
    # playing continues where the steps ended; a pause stops it
    page.get_by_test_id("play").click()
    sync_api.expect(page.get_by_test_id("generated")).to_have_count(4)
    page.get_by_test_id("play").click()
    assert page.get_by_test_id("generated").all_inner_texts()[:4] == [step.label for step in steps]
    # other options change the tokens to come, and the link names them
    page.get_by_label("Top k").fill("1")
    sync_api.expect(page).to_have_url(re.compile("top_k=1"))
    page.get_by_test_id("restart").click()
    page.get_by_test_id("step").click()
    sync_api.expect(page.get_by_test_id("generated")).to_have_text([look.output.positions[-1].top[0].label])


CROWDED = """all => all.filter((box) => {
  const [name, number] = ["text.name", "text.small"].map((one) => box.querySelector(one)?.getBoundingClientRect());
  return name && number?.width && name.right > number.left - 2 && name.bottom > number.top + 2;
}).map((box) => box.dataset.box)"""


@pytest.mark.parametrize("locale", ["en-US", "ko-KR"])
def test_names_and_numbers_of_boxes_do_not_overlap(open_page, locale):
    page = open_page(state("translator", view="flow"), width=1440, locale=locale)
    page.get_by_test_id("flow").wait_for()
    assert page.locator("[data-box]").evaluate_all(CROWDED) == []
    lines = page.locator(".tokens > .quiet").evaluate_all("all => all.map(one => one.getClientRects()[0].height)")
    assert max(lines) < 30  # "Output" in one line


def test_an_encoder_decoder_is_drawn_with_both_stacks_and_fits_a_phone(open_page, page_runs):
    page = open_page(state("translator", view="flow"), width=390, locale="ko-KR")
    picture = page.get_by_test_id("flow")
    picture.wait_for()
    assert picture.locator("[data-box='memory']").count() == 1
    assert picture.locator("[data-box='decoder.0.cross.heads.1']").count() == 1
    assert picture.bounding_box()["width"] <= 390
    picture.locator("[data-box='encoder.0.attention.norm']").click()
    assert "정규화" in page.get_by_test_id("detail").inner_text() or "μ" in page.get_by_test_id("detail").inner_text()
    page.get_by_role("button", name="닫기").click()
    sync_api.expect(page.get_by_test_id("detail")).to_have_count(0)


@pytest.mark.slow
def test_post_norm_and_numbers_are_drawn_as_they_are_computed(open_page, tmp_path):
    make_translator(tmp_path / "post", norm_order="post")
    make_numbers(tmp_path / "numbers", rule={"low": 0.0, "high": 100.0})
    with served(tmp_path) as listener:
        page = open_page(state("post", view="flow"), listener=listener)
        page.get_by_test_id("flow").wait_for()
        order = page.locator("[data-box]").evaluate_all("all => all.map(one => one.dataset.box)")
        for part in ("encoder.0.attention", "decoder.0.cross", "decoder.0.feedforward"):
            assert order.index(f"{part}.sum") + 1 == order.index(f"{part}.norm")
        assert "decoder.output" not in order  # post-LN has no final norm
        page = open_page(state("numbers", "10 20 30", view="flow"), listener=listener)
        page.locator("[data-box='values']").wait_for()
        values = Inside.open(tmp_path / "numbers").look("10 20 30").output.logits[:, 0].tolist()
        shown = [float(text.replace("−", "-")) for text in page.get_by_test_id("before").all_inner_texts()]
        assert shown == pytest.approx(values, rel=1e-3)
        assert f"{values[1]:.2f}" in page.locator("[data-box='values']").text_content()


def test_formulas_are_those_of_the_model(open_page, tmp_path):
    """Position bias, gates, no biases; and the state that queries in a recurrent decoder."""
    changes = {"position": "alibi", "activation": "swiglu", "norm": "rms", "bias": False, "qk_norm": True}
    make_decoder(tmp_path / "modern", **changes)
    make_translator(tmp_path / "recurrent", architecture="recurrent")
    with served(tmp_path) as listener:
        page = open_page(state("modern", view="flow"), listener=listener)

        def formula(box: str) -> str:
            page.locator(f"[data-box='{box}']").click()
            sync_api.expect(page.locator(f"[data-box='{box}']")).to_have_attribute("aria-pressed", "true")
            return page.locator(".formula").inner_text()

        assert formula("decoder.0.attention.q") == "q = RMSNorm(W_q x)"
        assert formula("decoder.0.feedforward.up") == "h = [W_g x; W_u x]"
        assert formula("decoder.0.feedforward.output") == "f(x) = W₂ SwiGLU"
        assert formula("decoder.0.attention.heads.2") == "softmax(q · k / √d_k + b) · V"
        assert "position bias (ALiBi)" in page.get_by_test_id("detail").inner_text()
        page = open_page(state("recurrent", view="flow"), listener=listener)
        assert formula("decoder.cross.q") == "q = U s" and formula("decoder.cross.v") == "v = h"
        assert formula("decoder.cross.heads.0") == "softmax(aᵀ tanh(q + k)) · V"
        assert page.locator(".line.previous").count() == 1  # from the cell to the query of the next step
