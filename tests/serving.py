"""A server of `regard serve` for tests: small models with random weights, in a thread, on a real socket."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn

from explorer import ENGLISH, SMALL, grow, make_captioner, make_decoder, make_translator
from prediction_models import KINDS
from prediction_models import SMALL as TINY
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.serve.app import make_app
from regard.serve.connection import Connection
from regard.serve.guard import Guard, Keys
from regard.serve.metrics import Metrics
from regard.serve.models import Limits, Models
from regard.serve.service import Service
from regard.serve.work import Admission
from regard.text.tokenizer import Tokenizer


def make_classifier(folder: Path, task: str = "text-classification", **fields: Any) -> Path:
    tokenizer = Tokenizer.train([ENGLISH], "word")
    own = {"architecture": "encoder", "vocab_size": len(tokenizer), "output_head": "classes", "classes": 3, **fields}
    save(grow(build(ModelConfig(**SMALL, **own))), folder, tokenizers={"tokenizer": tokenizer}, recipe={"task": task})
    return folder


def make_tagger(folder: Path) -> Path:
    return make_classifier(folder, "token-classification", pooling="none")


def make_kind(kind: str, folder: Path) -> Path:
    fields, tokenizer, recipe, *_ = KINDS[kind]
    own = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
    model = build(ModelConfig(**{**TINY, **own, **fields}))
    save(model, folder, tokenizers={} if tokenizer is None else {"tokenizer": tokenizer}, recipe=recipe)
    return folder


def make_runs(folder: Path) -> dict[str, Path]:
    """A model for every route."""
    torch.manual_seed(1)
    makers = {"lm": make_decoder, "mt": make_translator, "labels": make_classifier, "captions": make_captioner}
    makers |= {"tags": make_tagger, "masks": partial(make_kind, "fill"), "numbers": partial(make_kind, "predict")}
    return {name: make(folder / name) for name, make in makers.items()}


class Server:
    """A running server; `request` sends one request on a connection of its own."""

    def __init__(self, service: Service, port: int) -> None:
        self.service, self.port = service, port

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """(status, content, headers); a dict is sent as JSON, a response in JSON is parsed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        kind = {"Content-Type": "application/json"} if isinstance(body, dict) else {}
        content = json.dumps(body) if isinstance(body, dict) else body
        with contextlib.closing(connection):
            connection.request(method, path, content, {**kind, **(headers or {})})
            response = connection.getresponse()
            raw = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(raw) if is_json else raw.decode(), response.headers

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        return self.request("POST", path, body, headers)[:2]

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self.request("GET", path, None, headers)[:2]


@contextlib.contextmanager
def serving(
    folders: Mapping[str, Path],
    languages: Mapping[str, tuple[str, str]] | None = None,
    *,
    queue: int = 65_536,
    timeout: float = 60.0,
    guard: Guard | None = None,
    loaded: bool = True,
    **options: Any,
) -> Iterator[Server]:
    """A server of these models; `options` are those of `make_app`."""
    metrics = Metrics()
    models = Models(folders, languages or {}, torch.device("cpu"), Limits(), metrics.observer)
    service = Service(models, Admission(queue, metrics.queue.set), timeout, count=metrics.count)
    if loaded:
        models.load_all()
    assert not models.failed, models.failed
    app = make_app(service, guard or Guard(Keys()), metrics, **options)
    sock = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_level="error", lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Server(service, sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        models.close()
        sock.close()
