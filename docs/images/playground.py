"""Take the screenshot of the playground for the documentation.

    regard serve shakespeare=runs/shakespeare-char
    python docs/images/playground.py http://127.0.0.1:8000

The model is one that continues plays. Needs Chromium, playwright and Pillow.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

SETTINGS = {"max_tokens": 300, "temperature": 0.8, "seed": 1}


def main(address: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=1.5, locale="en-US")
        page.goto(address)
        page.locator("#text").fill("ROMEO:\nWhat light through yonder window breaks?")
        for name, value in SETTINGS.items():
            page.fill(f"#set-{name}", str(value))
        page.get_by_role("button", name="Python").click()
        page.get_by_role("button", name="Send").click()
        page.locator("[data-testid=outcome][aria-busy=false]").wait_for(timeout=60_000)
        page.evaluate("document.activeElement.blur()")
        shot = page.screenshot(full_page=True)
        browser.close()
    file = Path(__file__).with_suffix(".webp")
    Image.open(io.BytesIO(shot)).convert("RGB").save(file, quality=80, method=6)


if __name__ == "__main__":
    main(sys.argv[1])
