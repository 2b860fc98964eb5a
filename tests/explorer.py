"""What the tests of the page share: small runs with random weights, and a server of their own to ask."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import torch

from regard.explore.server.listen import Listener
from regard.explore.server.models import Models, find_runs
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.text.tokenizer import Tokenizer

ENGLISH = "the animal did not cross the street because it was too tired . a cat sat on the mat in the sun"
KOREAN = "동물은 너무 피곤해서 길을 건너지 않았다 . 고양이가 햇볕을 쬐며 매트 위에 앉아 있다"
TEXT = "the animal did not cross the street because it was too tired"
HOSTILE = (
    '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">&lt;b&gt; '
    "\u202eright to left\u202c שלום a\u200bb\u200d e\u0301\u0323\u0323\u0323 {{1+1}} ${1}"
)
SMALL = {"dim": 24, "layers": 2, "heads": 3, "ff_dim": 32, "dropout": 0.0, "embed_dropout": 0.0, "norm_order": "pre"}


def grow(model: torch.nn.Module) -> Any:
    """Random weights with strong opinions: uniform attention would pass many a test by accident."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "position" not in name:
                parameter.mul_(3)
    return model.eval()


def make_decoder(folder: Path, **changes: Any) -> Path:
    tokenizer = Tokenizer.train([ENGLISH, KOREAN], "bpe", 400)
    config = ModelConfig(architecture="decoder", vocab_size=len(tokenizer), **{**SMALL, "position": "rope", **changes})
    save(grow(build(config)), folder, tokenizers={"tokenizer": tokenizer})
    return folder


def make_translator(folder: Path, **changes: Any) -> Path:
    source, target = Tokenizer.train([ENGLISH], "word"), Tokenizer.train([KOREAN], "char")
    sizes = {"vocab_size": len(source), "target_vocab_size": len(target), "share_embeddings": False}
    config = ModelConfig(**{**SMALL, "position": "sinusoidal", **sizes, **changes})
    decode = {"decode": {"max_length": 12}}
    save(grow(build(config)), folder, tokenizers={"source": source, "target": target}, recipe=decode)
    return folder


def make_captioner(folder: Path) -> Path:
    tokenizer = Tokenizer.train([ENGLISH], "word")
    config = ModelConfig(
        **SMALL, input="patches", image_size=32, patch_size=8, vocab_size=len(tokenizer), position="sinusoidal"
    )
    save(grow(build(config)), folder, tokenizers={"tokenizer": tokenizer}, recipe={"decode": {"max_length": 8}})
    return folder


def make_masked(folder: Path) -> Path:
    tokenizer = Tokenizer.train([TEXT], "word").with_special_tokens(["<mask>"])
    config = ModelConfig(architecture="encoder", output_head="tokens", vocab_size=len(tokenizer), **SMALL)
    save(grow(build(config)), folder, tokenizers={"tokenizer": tokenizer})
    return folder


def make_numbers(folder: Path, channels: int = 1, **data: object) -> Path:
    config = ModelConfig(input="features", output_head="values", feature_dim=channels, **SMALL)
    tables = {"mean": [50.0] * channels, "std": [25.0] * channels, **data}
    save(grow(build(config)), folder, recipe={"task": "regression", "data": tables})
    return folder


@contextmanager
def served(runs: Path) -> Iterator[Listener]:
    """A server for `runs`, in a thread of this process; it is gone afterwards."""
    listener = Listener(Models(find_runs(runs)))
    thread = threading.Thread(target=listener.run, daemon=True)
    thread.start()
    try:
        yield listener
    finally:
        listener.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()


def ask(
    address: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, method: str | None = None
) -> tuple[int, bytes]:
    """(status, content) of one request; `body` is sent as JSON unless it is bytes."""
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    try:
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if content is not None else {}
        connection.request(
            method or ("GET" if content is None else "POST"), url.path + path, content, {**kind, **(headers or {})}
        )
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A frame taken apart, as the page does it."""
    assert content[:4] == b"RGRD"
    length = int.from_bytes(content[4:8], "little")
    header = json.loads(content[8 : 8 + length])
    start = -(-(8 + length) // 8) * 8
    arrays = {}
    for one in header["arrays"]:
        kind = np.dtype(f"<{one['type']}")
        count = int(np.prod(one["shape"]))
        assert (start + one["offset"]) % 8 == 0
        arrays[one["name"]] = np.frombuffer(content, kind, count, start + one["offset"]).reshape(one["shape"])
    return header, arrays


def ask_frame(address: str, path: str, body: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    status, content = ask(address, path, body)
    assert status == 200, content
    return unpack(content)


def refusal(output: tuple[int, bytes]) -> tuple[int, str]:
    """(status, sentence) of a request that was refused."""
    status, content = output
    return status, json.loads(content)["error"]


# --- the page, as a browser shows it


def settle(page: Any) -> None:
    """Until there is an answer to what was asked, or a sentence that says why not."""
    page.locator("main[data-state=ready], main[data-state=refused]").wait_for()


def state(run: str, text: str = TEXT, **fields: object) -> str:
    return "&".join(f"{name}={quote(str(value))}" for name, value in {"run": run, "text": text, **fields}.items())


def hover_cell(page: Any, row: int, column: int) -> float:
    """Point at a cell of the heat map and read the number off the page."""
    box = page.locator("[role=application]")
    gutter, head, wide, high = map(float, (box.get_attribute("data-geometry") or "").split())
    box.evaluate("(box, [x, y]) => box.scrollTo(x - 200, y - 200)", [column * wide, row * high])
    left, top = box.evaluate("box => [box.scrollLeft, box.scrollTop]")
    page.wait_for_timeout(50)
    box.hover(position={"x": gutter + (column + 0.5) * wide - left, "y": head + (row + 0.5) * high - top})
    return float(page.get_by_test_id("value").inner_text())


def choices(page: Any) -> dict[str, tuple[float, float]]:
    """token -> (before, after) of the output panel."""
    found = {}
    for row in page.get_by_test_id("choice").all():
        numbers = [row.get_by_test_id(name).inner_text().replace("<", "") for name in ("before", "after")]
        found[row.locator("th").inner_text().strip()] = (float(numbers[0]), float(numbers[1]))
    return found
