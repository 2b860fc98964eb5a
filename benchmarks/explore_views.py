"""How long every view of `regard explore` takes to appear after its data, in a real Chromium.

    python benchmarks/explore_views.py --out benchmarks/results/explore-views-cpu.json

Models of 12 layers of 12 heads with random weights, and a text of 512 tokens. Each view is opened on a page of its own:

    draw_ms   from the last byte of its last response to the last change of the page, or to the end of the last long
              task of its thread; the median of --rounds
    kB        the largest response, and the sum of all
    wait_s    from opening the page to that change; most of it is the model's forward passes on this machine

`gpt2` has GPT-2's size. The others have vectors of 96 numbers: `decoder` for views with many forward passes or
snapshots (for GPT-2's size the server refuses to patch 512 tokens, with the reason), `translator` has an encoder and a
decoder of 12 layers each, `vit` reads 529 patches. The texts of Patching differ in the last word, so that few passes
fill its grid of 13 x 512 cells.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import explore
import measure
import torch
from playwright.sync_api import Browser, sync_playwright

from regard.explore.server.listen import Listener
from regard.explore.server.models import Models, find_runs
from regard.models.config import ModelConfig
from regard.models.folder import read_weights, save
from regard.models.transformer import build
from regard.text.tokenizer import Tokenizer
from regard.training.snapshots import write_snapshot

TOKENS = 512
WORDS = explore.WORDS.split()
TEXT = " ".join(WORDS[at % len(WORDS)] for at in range(TOKENS))
OTHER = TEXT.rpartition(" ")[0] + " model"
# what is opened: the model and the fields of the link
VIEWS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: ("gpt2", {"view": name})
        for name in (
            "model", "flow", "lines", "map", "steps", "positions", "generate", "lens", "attribution", "neurons",
            "embeddings",
        )
    },
    "compare": ("gpt2", {"view": "compare", "other.text": OTHER}),
    "model, roles": ("decoder", {"view": "model", "grid": "roles"}),
    "model, each head off": ("decoder", {"view": "model", "grid": "off"}),
    "patching": ("decoder", {"view": "patching", "other.text": OTHER}),
    "training": ("decoder", {"view": "training", "step": 1}),
    "search": ("translator", {"view": "search", "beam": 4}),
    "image": ("vit", {"view": "image"}),
}  # fmt: skip
ONCE = ("patching", "model, each head off")  # a minute of forward passes each
QUIET = 1500  # ms without a request or a change: the view is complete
WATCH = """
window.seen = { changed: 0, pending: 0, last: 0 };
const fetched = window.fetch;
window.fetch = async (...all) => { seen.pending++; try { return await fetched(...all); } finally { seen.pending--; } };
new MutationObserver(() => { seen.changed = performance.now(); })
  .observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
const ended = (one) => { seen.last = Math.max(seen.last, one.startTime + one.duration); };
new PerformanceObserver((list) => list.getEntries().forEach(ended)).observe({ type: "longtask", buffered: true });
"""
RESULT = """() => {
  const isData = (one) => one.name.includes("/api/") && !one.name.endsWith("/api/alive");
  const all = performance.getEntriesByType("resource").filter(isData);
  const changed = Math.max(seen.changed, seen.last);
  const before = all.filter((one) => one.responseEnd <= changed);
  const sizes = all.map((one) => one.decodedBodySize);
  return { came: Math.max(...before.map((one) => one.responseEnd)), changed,
           largest: Math.max(...sizes), sum: sizes.reduce((a, b) => a + b, 0) };
}"""


def make_runs(folder: Path) -> None:
    """The models, by name."""
    explore.make_run(folder / "gpt2")
    sizes = {"dim": 96, "heads": 12, "layers": 12, "ff_dim": 192, "norm_order": "pre"}
    tokenizer = Tokenizer.train([explore.WORDS], "word")
    tokens: dict[str, Any] = {"vocab_size": len(tokenizer), "max_length": 1024, **sizes}
    decoder, translator = (build(ModelConfig(architecture=kind, **tokens)) for kind in ("decoder", "encoder-decoder"))
    with torch.no_grad():
        decoder.embedding.tokens.weight.mul_(20)  # it predicts the last word again, so that the texts get other outputs
    save(decoder, folder / "decoder", tokenizers={"tokenizer": tokenizer}, recipe={"decode": {"max_length": 12}})
    for step in (0, 1):
        write_snapshot(folder / "decoder", step, read_weights(folder / "decoder" / "model.safetensors"))
    (folder / "decoder" / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "loss": {5 / (step + 1)}}}\n' for step in range(1000))
    )
    both = {"source": tokenizer, "target": tokenizer}
    save(translator, folder / "translator", tokenizers=both, recipe={"decode": {"max_length": 12}})
    patches = {"input": "patches", "image_size": 368, "patch_size": 16, "output_head": "classes", "classes": 10}
    save(build(ModelConfig(architecture="encoder", max_length=600, **patches, **sizes)), folder / "vit")


def open_view(browser: Browser, address: str, run: str, fields: dict[str, Any]) -> dict[str, float]:
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.set_default_timeout(300_000)
    page.add_init_script(WATCH)
    text = {} if run == "vit" else {"text": TEXT}
    page.goto(f"{address}#{urlencode({'run': run, **text, **fields})}")
    page.locator("main[data-state=ready]").wait_for()
    page.wait_for_function(f"() => !seen.pending && performance.now() - seen.changed > {QUIET}", timeout=300_000)
    assert page.locator("[role=tab][aria-selected=true]").get_attribute("id") == f"tab-{fields['view']}"
    assert page.get_by_test_id("analysis-error").count() == 0, page.get_by_test_id("analysis-error").inner_text()
    result: dict[str, float] = page.evaluate(RESULT)
    page.close()
    return result


def run(rounds: int, views: Sequence[str]) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": "explore views", "machine": measure.machine("cpu"), "tokens": TOKENS, "rows": []}
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        make_runs(Path(folder))
        listener = Listener(Models(find_runs(Path(folder))))
        thread = threading.Thread(target=listener.run, daemon=True)
        thread.start()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        result["machine"]["versions"]["chromium"] = browser.version
        for view in views:
            opened = [open_view(browser, listener.address, *VIEWS[view]) for _ in range(1 if view in ONCE else rounds)]
            result["rows"].append({
                "view": view,
                "model": VIEWS[view][0],
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
    parser.add_argument(
        "--rounds", type=int, default=3, help="pages opened for each view; one where the model computes for a minute"
    )
    parser.add_argument("--views", nargs="*", choices=VIEWS, default=list(VIEWS))
    given = parser.parse_args()
    measure.write(given.out, run(given.rounds, given.views))
