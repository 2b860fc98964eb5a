"""How fast the page of `regard explore` is, in a real Chromium.

    python benchmarks/explore.py --out benchmarks/results/explore-cpu.json

A decoder of GPT-2's size, 12 layers of 12 heads with random weights, is shown with 128 and with 512 tokens:

    paint     ms from the last byte of the response to the frame that shows all 144 maps
    frames    frames per second while the pointer moves over a view, or while it scrolls
    blocked   ms of the longest task of the page's thread meanwhile, during which it cannot react

Chromium draws without a GPU here, at most 60 frames per second. Other processes on the machine reduce the frame rate,
so the row "nothing" shows the frame rate of an idle page, and `load` the load average. Needs Chromium, `playwright` and
the built page.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure
import torch
from playwright.sync_api import Page, sync_playwright

from regard.explore.server.listen import Listener
from regard.explore.server.models import Models, find_runs
from regard.models.folder import save
from regard.models.recipe import preset
from regard.models.transformer import build
from regard.text.tokenizer import Tokenizer

WORDS = "the model reads what stands before it and writes the next token"
WATCH = """
window.watched = { frames: [], tasks: [], painted: [] };
new PerformanceObserver((list) => list.getEntries().forEach((one) => watched.tasks.push(one.duration)))
  .observe({ type: "longtask", buffered: true });
const tick = (now) => { watched.frames.push(now); requestAnimationFrame(tick); };
requestAnimationFrame(tick);
new MutationObserver((all) => {
  if (!all.some((one) => one.attributeName === "data-painted")) return;
  const answers = performance.getEntriesByType("resource").filter((one) => one.name.endsWith("api/look"));
  if (!answers.length) return;
  const came = answers[answers.length - 1].responseEnd;
  requestAnimationFrame(() => requestAnimationFrame(() => watched.painted.push([came, performance.now() - came])));
}).observe(document, { subtree: true, attributes: true });
"""


def make_run(folder: Path) -> None:
    tokenizer = Tokenizer.train([WORDS], "word")
    torch.manual_seed(0)
    model = build(preset("gpt2", vocab_size=len(tokenizer)))
    with torch.no_grad():
        for block in model.decoder.blocks:
            block.attention.qkv.weight.mul_(8)  # otherwise attention is nearly uniform, and few lines are visible
    save(model, folder, tokenizers={"tokenizer": tokenizer})


def first_paint(page: Page, tokens: int, times: int) -> list[float]:
    """Type a text of so many tokens a few times and measure how long its maps take to appear."""
    words = WORDS.split()
    figures = []
    for turn in range(times):
        seen = page.evaluate("watched.painted.length")
        page.locator("#text").fill(" ".join(words[(at + turn) % len(words)] for at in range(tokens)))
        while page.evaluate("watched.painted.length") == seen or page.locator("main[data-state=busy]").count():
            page.wait_for_timeout(50)
        page.wait_for_timeout(200)
        figures.append(page.evaluate("(seen) => watched.painted[seen][1]", seen))
    return figures


def interact(page: Page, seconds: float, move: Any) -> dict[str, Any]:
    """Frames per second, and the longest task, while `move(share)` is called over and over."""
    page.evaluate("watched.frames = []; watched.tasks = []")
    start = page.evaluate("performance.now()")
    step = 0
    while page.evaluate("performance.now()") - start < 1000 * seconds:
        move(0.5 - 0.5 * math.cos(step / 25))
        step += 1
    frames = page.evaluate("watched.frames")
    gaps = [after - before for before, after in pairwise(frames)]
    return {
        "frames_per_second": round(1000 * len(gaps) / (frames[-1] - frames[0]), 1),
        "slow_frames": round(sum(gap > 1000 / 50 + 1 for gap in gaps) / len(gaps), 4),
        "blocked_ms": round(max(page.evaluate("watched.tasks"), default=0.0), 1),
        "moves": step,
    }


def views(page: Page, seconds: float) -> dict[str, Any]:
    found = {"nothing": interact(page, seconds, lambda share: page.wait_for_timeout(16))}
    for name, selector in (("Heat map", "[role=application]"), ("Lines", ".box"), ("Step by step", ".box")):
        page.get_by_role("tab", name=name).click()
        page.locator(selector).wait_for()
        page.wait_for_timeout(500)
        box = page.locator(selector).bounding_box() or {"x": 0, "y": 0, "width": 1, "height": 1}
        high = min(box["height"], 860 - box["y"]) - 8

        def point(share: float, box: Any = box, high: float = high) -> None:
            page.mouse.move(box["x"] + 40 + share * (box["width"] - 80), box["y"] + 4 + share * high)

        found[f"{name}, pointing"] = interact(page, seconds, point)
        page.mouse.move(box["x"] + 60, box["y"] + 60)
        found[f"{name}, scrolling"] = interact(page, seconds, lambda share: page.mouse.wheel(0, 240 * (share - 0.5)))
    return found


def run(rounds: int, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": "explore", "machine": measure.machine("cpu"), "rows": []}
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        make_run(Path(folder) / "gpt2")
        listener = Listener(Models(find_runs(Path(folder))))
        thread = threading.Thread(target=listener.run, daemon=True)
        thread.start()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        result["machine"]["versions"]["chromium"] = browser.version
        for tokens in (128, 512):
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            page.set_default_timeout(120_000)
            page.add_init_script(WATCH)
            page.goto(f"{listener.address}#run=gpt2&text=the")
            page.locator("main[data-state=ready]").wait_for()
            page.wait_for_timeout(500)
            painted = first_paint(page, tokens, rounds)
            row: dict[str, Any] = {
                "tokens": tokens,
                "maps": 144,
                "paint_ms": measure.spread(painted),
                "views": views(page, seconds),
            }
            row["load"] = round(os.getloadavg()[0], 1)
            result["rows"].append(row)
            print(row, flush=True)
            page.close()
        browser.close()
        listener.stop()
        thread.join()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/explore-cpu.json"))
    parser.add_argument("--rounds", type=int, default=5, help="texts a length")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each interaction")
    given = parser.parse_args()
    measure.write(given.out, run(given.rounds, given.seconds))
