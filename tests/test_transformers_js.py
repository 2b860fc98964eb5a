"""transformers.js under Node reads the folders of `regard export --onnx`: greedy tokens and logits are those of Python.

It needs  make page  and  npm --prefix tests/node ci  (18 MB), and is skipped without them. ONNX Runtime is that of the
pages, as WebAssembly: its native library for Node is 290 MB, most of it for other systems.
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
from regard.cli import main
from regard.interop.check import TEXTS
from regard.predict.beam import greedy
from regard.predict.bundle import Bundle
from test_onnx import save_run
from variants import mostly_slow

NODE = Path(__file__).parent / "node"
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


@pytest.mark.parametrize("task", mostly_slow(CLASSES, ["language-modeling", "text-classification"]))
def test_node_gives_the_same(once, tmp_path: Path, capsys, task: str):
    run = once(f"onnx-run-{task}", lambda folder: save_run(task, folder))

    def export(folder: Path) -> None:
        assert main(["export", str(run), "--onnx", str(folder)]) == 0, capsys.readouterr().err

    (tmp_path / "model").symlink_to(once(f"onnx-{task}", export))  # that of test_onnx.py
    texts = [*TEXTS[:3], "한국어 문장 😀", "cafe\u0301"]
    words = ["node", "generate.mjs", f"{tmp_path}/", CLASSES[task], "20", *texts]
    done = subprocess.run(words, cwd=NODE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    bundle = regard.load(run)
    for text, row in zip(texts, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert row == pytest.approx(ours(bundle, task, text, 20), abs=1e-3), text
