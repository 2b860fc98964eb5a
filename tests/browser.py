"""The page in a real browser, for the tests that look at it: small runs, a server, Chromium.

A pytest plugin: a test module asks for it with `pytest_plugins = ["browser"]`. Where Chromium or the built page is
missing, whatever needs a page is skipped, and says what to install.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def page_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from explorer import make_captioner, make_decoder, make_translator

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    make_decoder(folder / "decoder")
    make_decoder(folder / "deep", layers=8)  # 512 tokens make more maps than are sent at once
    make_translator(folder / "translator")
    make_captioner(folder / "captioner")
    (folder / "damaged").mkdir()
    for name in ("recipe.toml", "tokenizer.json"):
        shutil.copy(folder / "decoder" / name, folder / "damaged" / name)
    (folder / "damaged" / "model.safetensors").write_bytes(b"these are no weights")
    return folder


@pytest.fixture(scope="module")
def page_server(page_runs: Path) -> Iterator[Any]:
    from explorer import served

    with served(page_runs) as listener:
        yield listener


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright import sync_api

    from regard.page import page_missing

    if CHROMIUM is None:
        pytest.skip("needs Chromium:  apt install chromium")
    if page_missing() is not None:
        pytest.skip("the page is not built:  make page")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()
    assert not descendants("chrom")


def descendants(name: str) -> list[str]:
    """Processes that this one has started, itself or through others, whose name holds `name` (Linux)."""
    if sys.platform != "linux":
        return []
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = stat.read_text().split(" (", 1)
        except OSError:
            continue
        called, fields = rest.rsplit(") ", 1)
        parents[number], names[number] = fields.split()[1], (called, fields.split()[0])
    found, level = [], {str(os.getpid())}
    while level:
        level = {number for number, parent in parents.items() if parent in level}
        found += [names[number][0] for number in level if name in names[number][0] and names[number][1] != "Z"]
    return found


@pytest.fixture
def open_page(chromium: Any, page_server: Any) -> Iterator[Open]:
    """Opens the page at a state, ready and without a fault: no error in the console, nothing asked of other hosts."""
    from explorer import settle

    faults: list[str] = []
    contexts = []

    def watch(page: Any, address: str) -> None:
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on(
            "console", lambda m: faults.append(m.text) if m.type == "error" and "Failed to load" not in m.text else None
        )
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((address, "data:", "blob:")) else faults.append(f"asked {request.url}")
            ),
        )

    def opened(
        state: str = "", *, listener: Any = page_server, ready: bool = True, width: int = 1280, locale: str = "en-US"
    ):
        context = chromium.new_context(viewport={"width": width, "height": 860}, locale=locale, accept_downloads=True)
        context.set_default_timeout(20_000)
        contexts.append(context)
        page = context.new_page()
        watch(page, listener.address)
        page.goto(f"{listener.address}#{state}")
        if ready:
            settle(page)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults
