"""The guide of the page, in Chromium: roles and heads off, snapshots, two sides, the tour, and the page in one file."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from playwright import sync_api

from explorer import TEXT, make_captioner, make_decoder, make_translator, served, settle, state
from regard.explore import heads_off
from regard.explore.inside import Inside
from regard.models.folder import read_weights
from regard.training.snapshots import fill_snapshot, write_snapshot

pytest_plugins = ["browser"]
SECOND = "a cat sat on the mat"
TOUR = Path(__file__).parent.parent / "web" / "src" / "lib"


@pytest.fixture(scope="module")
def page_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with three snapshots and a loss curve, and a translator without."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    make_decoder(folder / "decoder")
    make_translator(folder / "translator")
    weights = read_weights(folder / "decoder" / "model.safetensors")
    for step, scale in ((0, 0.1), (5, 0.7), (20, 1.0)):
        write_snapshot(folder / "decoder", step, {name: scale * tensor for name, tensor in weights.items()})
    lines = [f'{{"step": {step}, "loss": {5 - step / 10}, "seconds": 1.0}}' for step in range(1, 21)]
    (folder / "decoder" / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_roles_and_heads_off_are_those_of_python(open_page, page_runs):
    page = open_page(state("decoder", view="model", grid="off"))
    page.locator("[data-testid=off-map][data-state=ready]").wait_for()
    off = heads_off(Inside.open(page_runs / "decoder").look(TEXT))
    names = [one.get_attribute("aria-label") for one in page.get_by_test_id("off-map").get_by_role("gridcell").all()]
    assert len(names) == len(off.heads)
    for name, changes, flipped in zip(names, off.changes, off.flipped, strict=True):
        value = float(re.search(r": ([<−\d.]+)", name)[1].replace("−", "-").replace("<", ""))
        assert value == pytest.approx(changes.mean().item(), abs=1.01e-3)
        assert ("other prediction" in name) == bool(flipped.any())
    page.get_by_test_id("off-position").select_option("3")
    first = page.get_by_test_id("off-map").get_by_role("gridcell").first.get_attribute("aria-label")
    assert float(re.search(r": ([−\d.]+)", first)[1].replace("−", "-")) == pytest.approx(
        off.changes[0, 3].item(), abs=1e-3
    )
    page.get_by_test_id("grid-roles").click()
    page.get_by_test_id("roles").wait_for()
    sync_api.expect(page.get_by_test_id("badge")).to_have_count(6)

    def column(at: int) -> list[float]:
        cells = page.get_by_test_id("roles").locator(f"tbody tr td:nth-child({at})").all_inner_texts()
        return [float(text.replace("−", "-").replace("<", "")) for text in cells]

    assert column(4) == sorted(column(4), reverse=True)  # the loss without the head
    page.get_by_role("button", name="Score").click()
    assert column(3) == sorted(column(3), reverse=True)


@pytest.mark.slow
def test_the_slider_shows_the_weights_of_a_step_in_every_view(open_page, page_runs):
    page = open_page(state("decoder", view="training"))
    slider = page.get_by_test_id("snapshot")
    slider.focus()
    page.keyboard.press("Home")
    sync_api.expect(page.get_by_test_id("step")).to_have_text("step 0 of 20")
    settle(page)
    assert page.get_by_test_id("at-step").is_visible() and "step=0" in page.url
    inside = Inside.open(page_runs / "decoder")
    fill_snapshot(inside.model, page_runs / "decoder", 0)
    sync_api.expect(page.get_by_test_id("loss-before")).to_have_text(f"{inside.look(TEXT).output.loss:.3f}")
    page.get_by_test_id("play").click()  # to the end
    sync_api.expect(page.get_by_test_id("step")).to_have_text("step 20 of 20")
    page.get_by_role("button", name="show the trained model").click()
    settle(page)
    assert "step=" not in page.url
    # two steps side by side
    page.goto(page.url.split("#")[0] + "#" + state("decoder", view="compare") + "&other.step=0&other.text=" + SECOND)
    page.reload()
    settle(page)
    second = page.get_by_test_id("compare-output").nth(1)
    best = inside.look(SECOND).output.positions[-1].top[0]
    sync_api.expect(second).to_contain_text(re.compile(rf"^\s*{re.escape(best.label)} "))
    page.get_by_test_id("other-run").select_option("translator")
    generated = Inside.open(page_runs / "translator").look(SECOND).output.generated
    sync_api.expect(page.get_by_test_id("compare-output").nth(1)).to_have_text(generated or "")


@pytest.mark.parametrize(
    ("run", "locale"), [pytest.param("decoder", "en-US", marks=pytest.mark.slow), ("translator", "ko-KR")]
)
def test_every_step_of_the_tour_acts_and_answers(open_page, run, locale):
    page = open_page(state(run) + "&tour=1", locale=locale)
    tour = page.get_by_test_id("tour")
    tour.wait_for()
    total = int(re.findall(r"\d+", tour.locator(".head .quiet").first.inner_text())[0 if locale == "ko-KR" else 1])
    assert total >= 9  # of 12: those that apply to this model
    for number in range(1, total + 1):
        assert f"tour={number}" in page.url
        sync_api.expect(tour.locator(".question")).to_be_visible()  # a prediction, before the experiment
        assert "changes=" not in page.url and "step=" not in page.url  # every step begins with the unchanged model
        page.get_by_test_id("tour-do").click()
        settle(page)
        sync_api.expect(page.get_by_test_id("tour-do")).to_be_enabled()
        before = tour.locator(".term").evaluate_all(
            "all => all.map(e => e.previousSibling?.textContent.slice(-1) ?? '')"
        )
        assert not any("가" <= letter <= "힣" for letter in before)  # 키, not the end of another word
        options = tour.locator(".options .pill")
        if options.count():
            names = options.all_inner_texts()
            options.first.click()
            said = page.get_by_test_id("tour-answer")
            sync_api.expect(said.locator("strong")).to_be_visible()
            text = said.inner_text()
            assert any(name in text for name in names), (number, text)
            verdict = said.locator("strong").inner_text() in ("Correct.", "맞았습니다.")
            told = re.split(r": ", text, maxsplit=1)[1]
            assert verdict == (told.startswith((f"{names[0]} (", f"{names[0]}."))), (number, text)
        if number < total:
            page.get_by_test_id("tour-next").click()
    assert page.get_by_test_id("tour-next").is_disabled()


def test_presenter_mode_and_the_glossary_work_with_the_keyboard(open_page):
    page = open_page(state("decoder") + "&tour=2")
    page.get_by_role("button", name="Presenter mode").click()
    assert page.locator("html").get_attribute("data-present") is not None
    page.keyboard.press("PageDown")
    sync_api.expect(page.get_by_test_id("tour").locator("h2")).to_be_focused()
    assert "tour=3" in page.url
    page.keyboard.press("Escape")
    assert page.locator("html").get_attribute("data-present") is None
    term = page.get_by_test_id("tour").locator(".term").first
    meaning = term.locator("[role=tooltip]")
    sync_api.expect(meaning).to_be_hidden()
    term.hover()
    sync_api.expect(meaning).to_be_visible()
    assert term.get_attribute("aria-describedby") == meaning.get_attribute("id")
    page.get_by_role("button", name="End the tour").click()
    page.get_by_test_id("start").click()
    sync_api.expect(page.get_by_test_id("tour")).to_be_visible()


def test_a_saved_page_opens_from_disk_and_still_answers(open_page, page_runs, tmp_path, chromium):
    page = open_page(state("translator", view="lines", part="cross", layer=1, head=0))
    shown = page.get_by_test_id("loss-before").inner_text()
    page.get_by_text("Save", exact=True).click()
    with page.expect_download() as download:
        page.get_by_test_id("save-html").click()
    path = tmp_path / "saved.html"
    download.value.save_as(path)
    assert path.stat().st_size < 20_000_000
    faults: list[str] = []
    context = chromium.new_context(viewport={"width": 1280, "height": 860}, locale="en-US", offline=True)
    try:
        saved = context.new_page()
        saved.on("pageerror", lambda error: faults.append(str(error)))
        saved.on(
            "request", lambda one: None if one.url.startswith(("file:", "data:", "blob:")) else faults.append(one.url)
        )
        saved.goto(path.as_uri())
        settle(saved)
        assert saved.get_by_test_id("saved").is_visible()
        assert saved.get_by_test_id("loss-before").inner_text() == shown
        assert saved.locator("#text").input_value() == TEXT
        saved.get_by_test_id("toggle").click()  # the head of the link
        after = Inside.open(page_runs / "translator").compare(TEXT, changes=_off("cross", 1, 0)).after.output.loss
        assert float(saved.get_by_test_id("loss-after").inner_text()) == pytest.approx(after, abs=1e-3)
        saved.get_by_test_id("toggle").click()
        saved.get_by_role("tab", name="Step by step").click()
        saved.locator(".rows .row").first.wait_for()
        for name, content in (
            ("Lens", "lens"),
            ("Attribution", "saliency"),
            ("Neurons", "units"),
            ("Embeddings", "position"),
        ):
            saved.get_by_role("tab", name=name).click()
            saved.get_by_test_id(content).wait_for()
        saved.locator("#text").fill("something else")  # which the file does not have
        saved.get_by_test_id("refused").wait_for()
        assert "regard explore" in saved.get_by_test_id("refused").inner_text()
    finally:
        context.close()
    assert not faults


def test_a_saved_page_holds_the_second_side_a_generation_and_images(open_page, page_runs, tmp_path, chromium):
    other = TEXT.replace("tired", "sun")
    make_captioner(tmp_path / "runs" / "captioner")
    states = {
        "decoder": state("decoder", view="compare") + f"&other.text={quote(other)}",
        "captioner": "run=captioner&view=image",
    }
    context = chromium.new_context(viewport={"width": 1280, "height": 860}, locale="en-US", offline=True)
    try:
        with served(tmp_path / "runs") as images:
            for run, link in states.items():
                page = open_page(link, **({"listener": images} if run == "captioner" else {}))
                page.get_by_text("Save", exact=True).click()
                with page.expect_download() as download:
                    page.get_by_test_id("save-html").click()
                download.value.save_as(tmp_path / f"{run}.html")
        saved = context.new_page()
        saved.goto((tmp_path / "decoder.html").as_uri())
        settle(saved)
        best = Inside.open(page_runs / "decoder").look(other).output.positions[-1].top[0].label
        sync_api.expect(saved.get_by_test_id("compare-output").nth(1)).to_contain_text(best)
        saved.get_by_role("tab", name="Patching").click()
        grid = saved.get_by_role("grid", name="Residual stream: Decoder")
        grid.locator("[data-cell='1 2']").click()
        saved.get_by_test_id("patched").wait_for()
        saved.get_by_role("tab", name="Generation").click()
        saved.get_by_test_id("step").click()
        sync_api.expect(saved.get_by_test_id("generated")).to_have_count(1)
        saved.goto((tmp_path / "captioner.html").as_uri())
        settle(saved)
        assert saved.locator("#view canvas, #view img").count() > 0 and saved.get_by_test_id("refused").count() == 0
    finally:
        context.close()


def _off(part, layer, head):
    from regard.explore.changes import Changes

    return Changes(heads=((part, layer, head),))


def test_figures_of_the_guide_hold_what_the_views_show(open_page, page_runs):
    svg = "{http://www.w3.org/2000/svg}"

    def saved(name: str) -> ElementTree.Element:
        page.locator("summary", has_text="Save").click()
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        return ElementTree.parse(download.value.path()).getroot()

    page = open_page(state("decoder", view="model", grid="off"))
    page.locator("[data-testid=off-map][data-state=ready]").wait_for()
    shown = [
        one.split("\n")[0].strip() for one in page.get_by_test_id("off-map").get_by_role("gridcell").all_inner_texts()
    ]
    drawn = [one.text for one in saved("Figure (SVG)").iter(f"{svg}text")]
    assert "Layer 1" in drawn and all(value in drawn for value in shown)
    page.get_by_test_id("grid-roles").click()
    page.get_by_test_id("roles").wait_for()
    drawn = saved("Figure (SVG)")
    assert "Loss when off" in drawn.itertext() and len(list(drawn.iter(f"{svg}image"))) == 6  # and the maps
    page.get_by_role("tab", name="Training").click()
    page.locator("#loss-curve").wait_for()
    drawn = saved("Figure (SVG)")
    assert len(list(drawn.iter(f"{svg}path"))) >= 1 and len(list(drawn.iter(f"{svg}image"))) == 6
    page.get_by_role("tab", name="Embeddings").click()
    page.get_by_test_id("position").wait_for()
    page.locator("[data-points]").wait_for()
    drawn = saved("Figure (SVG)")
    assert "decoder · Embeddings" in drawn.itertext() and len(list(drawn.iter(f"{svg}image"))) == 2
    page.get_by_role("tab", name="Compare").click()
    page.get_by_test_id("other-text").fill(SECOND)
    page.get_by_role("region", name="Second").locator("canvas").wait_for()
    drawn = saved("Figure (SVG)")
    titles = [one.text for one in drawn.iter(f"{svg}title")]
    assert titles == [f"First: {TEXT[:60]} · Layer 0, head 0", f"Second: {SECOND} · Layer 0, head 0"]
    page.get_by_role("tab", name="Generation").click()
    page.locator("summary", has_text="Save").click()
    page.get_by_role("button", name="Figure (SVG)").click()  # nothing is generated yet, and it says so
    sync_api.expect(page.get_by_test_id("refused")).to_contain_text("Press Generate")


def test_both_languages_have_the_same_steps():
    """The type check compares the keys; here the number of places to be filled in."""
    texts = [(TOUR / f"tour.{name}.ts").read_text(encoding="utf-8") for name in ("en", "ko")]
    places = [
        [sorted(re.findall(r"\{\d\}", line)) for line in text.splitlines() if re.match(r"\s+\w+: \"", line)]
        for text in texts
    ]
    assert places[0] == places[1] and len(places[0]) > 60
    for text in texts:
        steps = re.findall(r"^  (\w+): \{\n(.*?)^  \},", text, re.DOTALL | re.MULTILINE)
        assert 10 <= len(steps) <= 12
        for name, step in steps:
            words = dict(re.findall(r"(\w+): \"(.*)\",", step))
            assert len(re.findall(r"[.?](?= |$)", words["text"])) == 2, name  # two sentences,
            assert len(re.findall(r"[.?](?= |$)", words["do"])) == 1, name  # one experiment
            assert words["ask"].endswith("?"), name  # and one question


def test_the_documentation_shows_every_view():
    docs = TOUR.parents[2] / "docs"
    (views,) = re.findall(r"VIEWS = \[(.*?)\]", (TOUR / "ask.ts").read_text(), re.DOTALL)
    names = re.findall(r'"(\w+)"', views)
    assert len(names) == 16
    for text in ((docs / "explore.md").read_text("utf-8"), (docs / "ko" / "explore.md").read_text("utf-8")):
        assert [name for name in names if f"images/page-{name}.webp" not in text] == []
