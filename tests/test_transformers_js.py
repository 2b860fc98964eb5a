"""transformers.js reads the folders of `regard export --onnx`: greedy tokens and logits are those of Python.

Under Node, and in Chromium without a network. It needs  make page  and  npm --prefix tests/node ci  (18 MB), and is
skipped without them. ONNX Runtime is that of the pages, as WebAssembly: its native library for Node is 290 MB, most of
it for other systems.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime", reason="pip install 'regard[onnx]'")
pytest.importorskip("onnxscript", reason="pip install 'regard[onnx]'")

import regard
from browser import CHROMIUM
from regard.cli import main
from regard.interop.check import TEXTS
from regard.predict.beam import greedy
from regard.predict.bundle import Bundle
from test_onnx import save_run
from variants import mostly_slow

NODE = Path(__file__).parent / "node"
INPUTS, TOKENS = [*TEXTS[:3], "한국어 문장 😀", "cafe\u0301"], 20
CLASSES = {
    "translation": "AutoModelForSeq2SeqLM",
    "language-modeling": "AutoModelForCausalLM",
    "text-classification": "AutoModelForSequenceClassification",
}

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None
    or not (NODE / "node_modules/@huggingface/transformers").is_dir()
    or not (NODE.parent.parent / "web/node_modules/onnxruntime-web").is_dir(),
    reason="needs transformers.js:  make page;  npm --prefix tests/node ci",
)


def ours(bundle: Bundle, task: str, text: str, count: int) -> list[float]:
    """The ids or logits of Python, as transformers.js returns them."""
    if task == "language-modeling":
        (sample,) = bundle.predictor.generate(text, top_k=1, max_length=count)  # type: ignore[attr-defined]
        return [*bundle.tokenizer.encode(text), *sample.ids]
    if task == "translation":
        begin, end = bundle.target_frame
        source = torch.tensor([[*bundle.source.encode(text), bundle.source.eos]])
        (ids,) = greedy(bundle.model, source, None, bos=begin, eos=end, limit=count)  # type: ignore[arg-type]
        return [begin, *ids, *[end] * (len(ids) < count)]
    model: Any = bundle.model
    with torch.no_grad():
        ids = [bundle.tokenizer.bos, *bundle.tokenizer.encode(text), bundle.tokenizer.eos]
        logits: list[float] = model(torch.tensor([ids]))[0].tolist()
    return logits


@pytest.fixture
def exported(once, tmp_path: Path, capsys, task: str) -> Bundle:
    """The run, which tmp_path / "model" is an export of."""
    run = once(f"onnx-run-{task}", lambda folder: save_run(task, folder))

    def export(folder: Path) -> None:
        assert main(["export", str(run), "--onnx", str(folder)]) == 0, capsys.readouterr().err

    (tmp_path / "model").symlink_to(once(f"onnx-{task}", export))  # that of test_onnx.py
    return regard.load(run)


def check(bundle: Bundle, task: str, rows: list[list[float]]) -> None:
    for text, row in zip(INPUTS, rows, strict=True):
        assert row == pytest.approx(ours(bundle, task, text, TOKENS), abs=1e-3), text


every_task = pytest.mark.parametrize("task", mostly_slow(CLASSES, ["language-modeling", "text-classification"]))


@every_task
def test_node_gives_the_same(exported: Bundle, tmp_path: Path, task: str) -> None:
    words = ["node", "generate.mjs", f"{tmp_path}/", CLASSES[task], str(TOKENS), *INPUTS]
    done = subprocess.run(words, cwd=NODE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    check(exported, task, json.loads(done.stdout.splitlines()[-1]))


IN_PAGE = """async ([kind, tokens, texts]) => {
  const { env, ...classes } = await import("transformers");
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/", useBrowserCache: false });
  env.backends.onnx.wasm.wasmPaths = "/ort/";
  const tokenizer = await classes.AutoTokenizer.from_pretrained("model");
  const model = await classes[kind].from_pretrained("model", { dtype: "fp32", device: "wasm" });
  const rows = [];
  for (const text of texts) {
    const inputs = tokenizer([text]);
    const output = kind.includes("Classification")
      ? (await model(inputs)).logits : await model.generate({ ...inputs, max_new_tokens: tokens });
    rows.push(output.tolist()[0].map(Number));
  }
  return rows;
}"""
MODULES = {
    "transformers": "/transformers/transformers.web.js",
    "onnxruntime-common": "/common/index.js",
    "onnxruntime-web/webgpu": "/ort/ort.wasm.bundle.min.mjs",
}


@every_task
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium:  apt install chromium")
def test_chromium_gives_the_same_without_a_network(exported: Bundle, tmp_path: Path, task: str) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    folders = {
        "model": tmp_path / "model",
        "transformers": NODE / "node_modules/@huggingface/transformers/dist",
        "common": NODE / "node_modules/onnxruntime-common/dist/esm",
        "ort": NODE.parent.parent / "web/node_modules/onnxruntime-web/dist",
    }
    page_source = f'<script type="importmap">{json.dumps({"imports": MODULES})}</script>'

    def answer(route: Any) -> None:
        """From the folders above; everything else fails, as without a network."""
        host, _, path = route.request.url.removeprefix("http://").partition("/")
        name, _, rest = path.partition("/")
        if host != "page.test":
            route.abort()
        elif not path:
            route.fulfill(body=page_source, content_type="text/html")
        elif name in folders and (folders[name] / rest).is_file():
            route.fulfill(path=folders[name] / rest)
        else:
            route.fulfill(status=404)

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page()
        page.route("**/*", answer)
        page.goto("http://page.test/")
        rows = page.evaluate(IN_PAGE, [CLASSES[task], TOKENS, INPUTS])
        browser.close()
    check(exported, task, rows)
