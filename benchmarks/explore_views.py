"""How long every view of `regard explore` takes to appear after its data, in a real Chromium.

    python benchmarks/explore_views.py --out benchmarks/results/explore-views-cpu.json

A decoder of GPT-2's size, 12 layers of 12 heads with random weights, and a text of 512 tokens. Each view is opened on a
page of its own:

    draw_ms   from the last byte of its last response to the last change of the page; the median of --rounds
    kB        the largest response, and the sum of all
    wait_s    from opening the page to that change; most of it is the model's forward passes on this machine

Patching has no result: a grid of 12 x 512 patched passes of this model is refused by the server, with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import explore
import measure
from playwright.sync_api import Browser, sync_playwright

from regard.explore.server.listen import Listener
from regard.explore.server.models import Models, find_runs

VIEWS = (
    "model", "flow", "lines", "map", "steps", "positions", "generate", "lens", "attribution", "neurons", "embeddings",
    "compare",
)  # fmt: skip
TOKENS = 512
QUIET = 1500  # ms without a request or a change: the view is complete
WATCH = """
window.seen = { changed: 0, pending: 0 };
const fetched = window.fetch;
window.fetch = async (...all) => { seen.pending++; try { return await fetched(...all); } finally { seen.pending--; } };
new MutationObserver(() => { seen.changed = performance.now(); })
  .observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
"""
RESULT = """() => {
  const all = performance.getEntriesByType("resource").filter((one) => one.name.includes("/api/"));
  const before = all.filter((one) => one.responseEnd <= seen.changed);
  const sizes = all.map((one) => one.decodedBodySize);
  return { came: Math.max(...before.map((one) => one.responseEnd)), changed: seen.changed,
           largest: Math.max(...sizes), sum: sizes.reduce((a, b) => a + b, 0) };
}"""


def open_view(browser: Browser, address: str, view: str, text: str) -> dict[str, float]:
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.set_default_timeout(300_000)
    page.add_init_script(WATCH)
    page.goto(f"{address}#{urlencode({'run': 'gpt2', 'text': text, 'view': view})}")
    page.locator("main[data-state=ready]").wait_for()
    page.wait_for_function(f"() => !seen.pending && performance.now() - seen.changed > {QUIET}", timeout=300_000)
    result: dict[str, float] = page.evaluate(RESULT)
    page.close()
    return result


def run(rounds: int, views: tuple[str, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": "explore views", "machine": measure.machine("cpu"), "tokens": TOKENS, "rows": []}
    words = explore.WORDS.split()
    text = " ".join(words[at % len(words)] for at in range(TOKENS))
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        explore.make_run(Path(folder) / "gpt2")
        listener = Listener(Models(find_runs(Path(folder))))
        thread = threading.Thread(target=listener.run, daemon=True)
        thread.start()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        result["machine"]["versions"]["chromium"] = browser.version
        for view in views:
            opened = [open_view(browser, listener.address, view, text) for _ in range(rounds)]
            result["rows"].append({
                "view": view,
                "draw_ms": measure.spread([one["changed"] - one["came"] for one in opened]),
                "largest_kB": round(max(one["largest"] for one in opened) / 1000),
                "sum_kB": round(max(one["sum"] for one in opened) / 1000),
                "wait_s": round(statistics.median(one["changed"] for one in opened) / 1000, 1),
                "load": round(os.getloadavg()[0], 1),
            })  # fmt: skip
            print(result["rows"][-1], flush=True)
        browser.close()
        listener.stop()
        thread.join()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/explore-views-cpu.json"))
    parser.add_argument("--rounds", type=int, default=3, help="pages opened for each view")
    parser.add_argument("--views", nargs="*", default=VIEWS)
    given = parser.parse_args()
    measure.write(given.out, run(given.rounds, tuple(given.views)))
