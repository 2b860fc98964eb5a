"""The page's server under load: it answers at once, refuses what it cannot hold, drops what nobody waits for."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from explorer import TEXT, ask, make_decoder, refusal, served
from regard.explore.changes import Changes
from regard.explore.server import models as server_models
from regard.explore.server.models import Models, find_runs
from regard.explore.server.work import WAITING


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    torch.manual_seed(0)
    folder = make_decoder(tmp_path_factory.mktemp("load") / "decoder")
    page = tmp_path_factory.mktemp("page")
    (page / "index.html").write_text("<!doctype html><title>page</title>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.page.PAGE", page)
        with served(folder) as listener:
            assert ask(listener.address, "api/look", {"run": "decoder", "text": TEXT})[0] == 200  # it is loaded
            yield listener


class Gate:
    """Blocks every pass of a model at its first block until it is opened; counts the blocks that ran."""

    def __init__(self, listener):
        self.opened, self.entered, self.blocks = threading.Event(), threading.Event(), 0
        check = listener.models.interrupt

        def wait() -> None:
            self.entered.set()
            self.opened.wait(20)
            check()
            self.blocks += 1

        self.listener, self.check = listener, check
        listener.models.interrupt = wait

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opened.set()
        self.listener.models.interrupt = self.check


def test_it_stays_alive_and_refuses_what_exceeds_its_queue(listener):
    def look(number: int) -> tuple[int, bytes]:
        return ask(listener.address, "api/look", {"run": "decoder", "text": f"{TEXT} {number}"})

    with Gate(listener) as gate, ThreadPoolExecutor(WAITING + 20) as pool:
        asked = [pool.submit(look, number) for number in range(WAITING + 20)]
        while sum(one.done() for one in asked) < 20:
            time.sleep(0.01)
        seconds = []
        for _ in range(10):
            began = time.perf_counter()
            assert ask(listener.address, "api/alive")[0] == 200
            seconds.append(time.perf_counter() - began)
        assert sorted(seconds)[5] < 0.1
        # an image is stored meanwhile, too
        assert ask(listener.address, "api/image", bytes(3 * 8 * 8))[0] == 200
        gate.opened.set()
        replies = [one.result() for one in asked]
    assert Counter(status for status, _ in replies) == {200: WAITING, 503: 20}
    assert "busy" in refusal(next(reply for reply in replies if reply[0] == 503))[1]


def test_abandoned_requests_are_not_computed(listener):
    url = urlsplit(listener.address)
    connections = []
    with Gate(listener) as gate:
        for number in range(6):
            connection = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
            body = json.dumps({"run": "decoder", "text": f"left {number}"})
            connection.request("POST", url.path + "api/look", body, {"Content-Type": "application/json"})
            connections.append(connection)
        work, limit = listener.work, time.monotonic() + 20
        while work.jobs < 6 and time.monotonic() < limit:
            time.sleep(0.01)
        assert gate.entered.wait(20)  # one is being computed, five wait
        for connection in connections:
            connection.close()
        while work.jobs > 1 and time.monotonic() < limit:  # those that wait are dropped at once
            time.sleep(0.01)
        assert work.jobs == 1
        gate.opened.set()
        while work.jobs and time.monotonic() < limit:
            time.sleep(0.01)
        assert work.jobs == 0 and gate.blocks == 0  # the one under way ended before its first block
    assert ask(listener.address, "api/look", {"run": "decoder", "text": "left 0"})[0] == 200


def test_what_is_kept_is_bounded_in_number_and_size(listener, monkeypatch):
    models = Models(find_runs(next(iter(listener.models.folders.values()))))
    for number in range(server_models.LOOKS + 10):
        models.look(("decoder", f"{TEXT} {number}", None, None, None), Changes())
    assert len(models._looks) == server_models.LOOKS
    size = models._size()
    monkeypatch.setattr(server_models, "KEPT", size // 4)
    models.look(("decoder", "a cat", None, None, None), Changes())
    assert models._size() <= size // 4
    for number in range(40):
        models.keep_image(bytes([number]) * 3)
    assert len(models.images) == server_models.IMAGES
