"""Take the screenshots of `regard explore` for the documentation and the README.

    python docs/images/page.py RUNS [NAME …]

takes all of them, or those with these names. RUNS is a folder with three runs: `demo` (what `regard demo` leaves),
`minilm` (the Hugging Face folder of all-MiniLM-L6-v2) and `shapes` (a captioning model, from docs/images/shapes.py).
Needs Chromium, playwright and Pillow.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from shapes import example_image

from regard.explore.server.listen import Listener
from regard.explore.server.models import Models, find_runs

HERE = Path(__file__).parent
MARCH = {"run": "demo", "text": "March 3rd, 2021"}
JULY = {"run": "demo", "text": "July 4th, 1976"}
ANIMAL = {"run": "minilm", "text": "The animal didn't cross the street because it was too tired."}
OFF = json.dumps({"heads": [["decoder", 0, 0]]})

# name -> the state in the link, and options of the screenshot
SHOTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "page-flow": (
        {**JULY, "view": "flow", "box": "decoder.0.cross.heads.1", "at.target": 6},
        {"width": 1440, "height": 1560},
    ),
    "page-touch": (
        {**JULY, "view": "map", "part": "cross", "layer": 1, "head": 2, "at.target": 6, "changes": OFF},
        {"height": 1000},
    ),
    "page-model": (ANIMAL, {"dark": True}),
    "page-lines": ({**ANIMAL, "view": "lines", "layer": 3, "head": 1, "at.source": 10}, {}),
    "page-map": ({**MARCH, "view": "map", "part": "cross", "layer": 1, "head": ""}, {"hover": (75, 345)}),
    "page-steps": ({**ANIMAL, "view": "steps", "layer": 3, "head": 1, "at.source": 10}, {"height": 1010}),
    "page-positions": ({**ANIMAL, "view": "positions", "layer": 1, "head": 8}, {"height": 880}),
    "page-search": ({**JULY, "view": "search", "at.target": 6, "changes": OFF}, {"height": 760}),
    "page-image": ({"run": "shapes", "view": "image", "part": "cross", "layer": 1, "head": 2}, {"file": True}),
    "page-generate": ({**JULY, "view": "generate", "temperature": 1.5, "top_k": 5}, {"height": 980, "steps": 7}),
    "page-lens": ({**JULY, "view": "lens", "at.target": 6}, {"height": 720}),
    "page-attribution": ({**JULY, "view": "attribution", "at.target": 6}, {"height": 980}),
    "page-patching": ({**JULY, "view": "patching", "other.text": "March 4th, 1976"}, {"height": 1240, "pick": "1 0"}),
    "page-neurons": ({**JULY, "view": "neurons", "part": "decoder", "layer": 0}, {"height": 800}),
    "page-embeddings": ({**JULY, "view": "embeddings", "near": "July"}, {"height": 1180}),
    "page-tour": ({**JULY, "tour": 7, "grid": "off"}, {"width": 1440, "height": 1240, "answer": True}),
    "page-roles": ({**JULY, "grid": "roles"}, {"height": 1300, "wait": "[data-testid=roles]"}),
    "page-training": (
        {**JULY, "view": "training", "step": 136, "target": "1976년 7월 4일"},
        {"height": 1180},
    ),
    "page-compare": ({**JULY, "view": "compare", "other.text": "March 4th, 1976"}, {"height": 1000}),
    "page-phone": (
        {**JULY, "view": "lines", "part": "cross", "layer": 1, "head": 2, "at.target": 6, "changes": OFF},
        {"width": 390, "height": 1180, "korean": True, "dark": True},
    ),
}


def photograph(browser: Browser, address: str, state: dict[str, Any], how: dict[str, Any]) -> bytes:
    context = browser.new_context(
        viewport={"width": how.get("width", 1280), "height": how.get("height", 940)},
        device_scale_factor=1.5,
        color_scheme="dark" if how.get("dark") else "light",
        locale="ko-KR" if how.get("korean") else "en-US",
    )
    page = context.new_page()
    page.goto(f"{address}#{urlencode(state)}")
    page.locator("main[data-state=ready]").wait_for(timeout=60_000)
    page.wait_for_timeout(1500)
    if "wait" in how:
        page.locator(how["wait"]).wait_for(timeout=60_000)
    if "file" in how:
        content = {"name": "shapes.png", "mimeType": "image/png", "buffer": example_image()}
        page.locator("input[type=file]").set_input_files(files=[content])  # type: ignore[list-item]
        page.wait_for_timeout(1500)
        page.locator(".words button").nth(6).click()
        page.mouse.move(0, 0)
    if "pick" in how:
        page.locator(f"[data-cell='{how['pick']}']").first.click()
        page.wait_for_timeout(1500)
    for count in range(1, how.get("steps", 0) + 1):
        page.get_by_test_id("step").click()
        page.get_by_test_id("generated").nth(count - 1).wait_for()
    if "answer" in how:
        page.get_by_text("Show the answer").click()
        page.wait_for_timeout(4000)
    if "hover" in how:
        x, y = how["hover"]
        page.locator("[role=application]").hover(position={"x": x, "y": y})
    page.wait_for_timeout(500)
    shot = page.screenshot()
    context.close()
    return shot


def main(runs: Path, names: list[str]) -> None:
    listener = Listener(Models(find_runs(runs)))
    thread = threading.Thread(target=listener.run, daemon=True)
    thread.start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (state, how) in ((name, shot) for name, shot in SHOTS.items() if not names or name in names):
            shot = photograph(browser, listener.address, state, how)
            Image.open(io.BytesIO(shot)).convert("RGB").save(HERE / f"{name}.webp", quality=80, method=6)
            print(f"{name}.webp", (HERE / f"{name}.webp").stat().st_size)
        browser.close()
    listener.stop()
    thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
