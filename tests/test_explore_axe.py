"""The page in Chromium: axe finds no violation in any view, both languages, light and dark; its script is small."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the package playwright")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from explorer import settle, state
from regard import page as built

pytest_plugins = ["browser"]

WEB = Path(__file__).parent.parent / "web"
AXE = WEB / "node_modules" / "axe-core" / "axe.min.js"
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


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core:  make page")
@pytest.mark.parametrize(
    ("locale", "theme", "width"),
    [("ko-KR", "dark", 390), pytest.param("en-US", "light", 1280, marks=pytest.mark.slow)],
)
def test_axe_finds_no_violation_in_any_view(open_page, locale, theme, width):
    script, seen, found = AXE.read_text(encoding="utf-8"), set(), []
    page = open_page(state("translator", changes=CHANGES), locale=locale, width=width)
    page.emulate_media(color_scheme=theme, reduced_motion="reduce")
    page.evaluate(script)
    for run, fields in (("translator", {"changes": CHANGES}), ("captioner", {"part": "encoder"})):
        for view in view_names() if run == "translator" else ["image"]:
            link = state(run, "" if run == "captioner" else "the cat sat on the mat", view=view, **fields)
            page.evaluate("link => (location.hash = link)", link)
            page.wait_for_timeout(150)
            settle(page)
            page.wait_for_timeout(250)
            shown = page.locator("[role=tab][aria-selected=true]").get_attribute("id")
            seen.add(shown)
            found += [f"{view}: {one}" for one in violations(page)]
    assert found == [] and len(seen) >= 6


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
