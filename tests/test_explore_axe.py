"""The page in Chromium: axe finds no violation in any view, both languages, light and dark; its script is small."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from playwright import sync_api

from explorer import make_captioner, make_numbers, make_translator, settle, state
from regard import page as built
from regard.models.folder import read_weights
from regard.training.snapshots import write_snapshot

pytest_plugins = ["browser"]

WEB = Path(__file__).parent.parent / "web"
AXE = WEB / "node_modules" / "axe-core" / "axe.min.js"
TEXT, OTHER = "the cat sat on the mat", "the cat sat on the sun"
INPUTS = {"captioner": "", "numbers": "10 20 500"}  # the last number gets a hint
SCRIPT = 150_000  # bytes of script, compressed
CHANGES = '{"heads": [["decoder", 0, 1]], "layers": [["decoder", 1]]}'


def view_names() -> list[str]:
    """The views of the page; a new one is tested without being named here."""
    source = (WEB / "src" / "lib" / "ask.ts").read_text(encoding="utf-8")
    found = re.search(r"export const VIEWS = \[(.*?)\]", source, re.DOTALL)
    assert found is not None
    return re.findall(r'"([\w-]+)"', found[1])


CHECK = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  // a box of a picture or a cell of a table shows a number, and its name says which: nobody speaks it to a control
  const isCell = (node) => node.html.startsWith("<g") || node.html.includes('role="gridcell"');
  const isNumbers = (id, node) => id === "label-content-name-mismatch" && isCell(node);
  const found = violations.flatMap(({ id, nodes }) => nodes.map((node) => ({ id, node })));
  return found
    .filter(({ id, node }) => !isNumbers(id, node))
    .map(({ id, node }) => `${id}: ${node.html.slice(0, 160)}`);
}"""


def violations(page) -> list[str]:
    """The rules of axe that the page breaks, with the element."""
    return list(page.evaluate(CHECK))


@pytest.fixture(scope="module")
def page_runs(tmp_path_factory) -> Path:
    """A translator with snapshots of training, a captioner, the recurrent model of 2015, and a model of numbers."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    make_translator(folder / "translator")
    make_captioner(folder / "captioner")
    make_translator(folder / "recurrent", architecture="recurrent")
    make_numbers(folder / "numbers", rule={"low": 0.0, "high": 100.0})
    weights = read_weights(folder / "translator" / "model.safetensors")
    for step in (0, 20):
        write_snapshot(folder / "translator", step, weights)
    (folder / "translator" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 20, "loss": 1.0}\n')
    return folder


def states() -> list[tuple[str, str, dict[str, object]]]:
    """(run, view, fields of the link): every view, and what opens inside of some."""
    changed = {"changes": CHANGES}
    all_views = [("translator", view, changed) for view in view_names() if view not in ("image", "patching", "compare")]
    return [
        *all_views,
        *(("translator", view, {"other.text": OTHER}) for view in ("patching", "compare")),
        ("captioner", "image", {"part": "encoder"}),
        ("translator", "model", {"grid": "off"}),
        ("translator", "model", {"grid": "roles"}),
        ("translator", "flow", {"box": "decoder.0.cross.heads.1"}),
        ("translator", "embeddings", {"near": "cat"}),
        ("translator", "lines", {"tour": 3}),
        ("recurrent", "steps", {}),
        ("numbers", "steps", {"changes": CHANGES}),
    ]


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core:  make page")
@pytest.mark.parametrize(
    ("locale", "theme", "width"),
    [("ko-KR", "dark", 390), pytest.param("en-US", "light", 1280, marks=pytest.mark.slow)],
)
def test_axe_finds_no_violation_in_any_view(open_page, locale, theme, width):
    script, seen, found = AXE.read_text(encoding="utf-8"), set(), []
    page = open_page(state("translator", TEXT), locale=locale, width=width)
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.evaluate(script)
    for run, view, fields in states():
        link = state(run, INPUTS.get(run, TEXT), view=view, **fields)
        page.evaluate("link => (location.hash = link)", link)
        page.wait_for_timeout(80)
        settle(page)
        page.wait_for_timeout(120)
        sync_api.expect(page.locator("[data-testid=off-map][data-state=busy]")).to_have_count(0)
        seen.add(page.locator("[role=tab][aria-selected=true]").get_attribute("id"))
        found += [f"{view} {fields}: {one}" for one in violations(page)]
    assert found == [] and seen == {f"tab-{view}" for view in view_names()}


def test_the_script_of_the_page_is_small():
    if built.page_missing() is not None:
        pytest.skip("the page is not built:  make page")
    html = (built.PAGE / "index.html").read_text(encoding="utf-8")
    scripts = {built.PAGE / name for name in re.findall(r"assets/[\w.-]+\.js", html)}
    while True:  # and those that they import
        names = {name for one in scripts for name in re.findall(r"[\w.-]+\.js", one.read_text(encoding="utf-8"))}
        more = {path for name in names if (path := built.PAGE / "assets" / name).is_file()} - scripts
        if not more:
            break
        scripts |= more
    assert scripts and sum(len(gzip.compress(one.read_bytes())) for one in scripts) < SCRIPT
