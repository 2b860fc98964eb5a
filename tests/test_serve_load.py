"""`regard serve` under load and over time: metrics, a full queue, disconnects, batches, keys, reload, its end."""

from __future__ import annotations

import gc
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi", reason="install it with  pip install 'regard[serve]'")
pytest.importorskip("prometheus_client", reason="install it with  pip install 'regard[serve]'")

import regard
from explorer import TEXT, make_decoder
from regard.serve.guard import Guard, Keys, Rates
from regard.serve.work import Admission, Batcher, Job, Overloaded
from serving import Server, make_runs, serving
from variants import slow

KEY = "0123456789abcdef"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[Server]:
    with serving(runs, {"mt": ("en", "ko")}) as one:
        yield one


def test_state_and_metrics(server: Server, runs: dict[str, Path]) -> None:
    assert server.get("/health") == (200, {"status": "ok"})
    assert server.get("/ready")[0] == 200
    names = [one["id"] for one in server.get("/v1/models")[1]["data"]]
    assert names == list(runs)
    server.post("/v1/completions", {"model": "lm", "prompt": TEXT, "max_tokens": 2})
    server.get("/a/path/that/no/route/has?secret=1")
    text = server.get("/metrics")[1]
    assert 'regard_requests_total{route="/v1/completions",status="200"}' in text
    assert "regard_first_token_seconds_count" in text and "no/route" not in text and "secret" not in text


def test_a_full_queue_refuses_at_once(runs: dict[str, Path]) -> None:
    with serving({"lm": runs["lm"]}, queue=400) as server, ThreadPoolExecutor(8) as pool:
        fields = {"model": "lm", "prompt": TEXT, "max_tokens": 150}
        replies = list(pool.map(lambda at: server.request("POST", "/v1/completions", {**fields, "seed": at}), range(8)))
        statuses = [status for status, _, _ in replies]
        assert set(statuses) == {200, 429}
        assert all(int(headers["Retry-After"]) >= 1 for status, _, headers in replies if status == 429)
        deadline = time.monotonic() + 10
        while server.service.admission.tokens and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.service.admission.tokens == 0
        status, _ = server.post("/v1/completions", {**fields, "prompt": ["a", "b", "c"]})
        assert status == 200, "an empty server admits a request of any size"


def test_a_client_that_disconnects_is_not_computed_to_the_end(runs: dict[str, Path]) -> None:
    with serving({"lm": runs["lm"]}) as server:
        body = json.dumps({"model": "lm", "prompt": "a", "max_tokens": 5000, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
            )  # fmt: skip
            assert client.recv(100)
            assert server.service.admission.tokens
        deadline = time.monotonic() + 5
        while server.service.admission.tokens and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.service.admission.tokens == 0
        batch = server.service.models.ready["lm"].worker.batch  # type: ignore[attr-defined]
        assert not batch.rows


def test_a_search_that_nobody_waits_for_ends(runs: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with serving({"mt": runs["mt"]}, timeout=0.1) as server:
        body = {"input": [TEXT] * 64, "beam": 20, "max_length": 5000}
        assert server.post("/v1/translate", body)[0] == 504
        server.service.timeout = 60
        with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as client:
            client.request("POST", "/v1/translate", json.dumps(body), {"Content-Type": "application/json"})
            time.sleep(0.1)
        deadline = time.monotonic() + 2
        while server.service.admission.tokens and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.service.admission.tokens == 0
        gc.collect()  # asyncio reports an error that nobody has read when its future is deleted
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
        server.service.timeout = 60
        assert server.post("/v1/translate", {"input": "cat", "max_length": 2})[0] == 200


@pytest.mark.slow
def test_searches_in_processes(runs: dict[str, Path]) -> None:
    """On several cores: outputs are those of the predictor, and a process that is killed or cancelled fails nothing."""
    torch.set_num_threads(2)
    with serving({"mt": runs["mt"]}) as server, ThreadPoolExecutor(8) as pool:
        served = server.service.models.ready["mt"]
        assert served.processes is not None
        own = [served.processes.free.get() for _ in range(2)]
        pids = [one.process.pid for one in own]
        for one in own:
            served.processes.free.put(one)

        def translate(text: str) -> str:
            status, content, _ = server.request("POST", "/v1/translate", {"input": text, "max_length": 20})
            assert status == 200
            return str(content["outputs"][0]["n_best"][0]["text"])

        words = TEXT.split()
        texts = [" ".join(words[: count % len(words) + 1]) for count in range(16)]
        expected = regard.load(runs["mt"]).predictor.translate(texts, max_length=20)
        assert list(pool.map(translate, texts)) == expected
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        assert list(pool.map(translate, texts)) == expected
        served.processes.folder = Path("nowhere")  # a process could not be started again
        server.service.timeout = 0.1
        assert server.post("/v1/translate", {"input": [TEXT] * 64, "beam": 20, "max_length": 5000})[0] == 504
        deadline = time.monotonic() + 5
        while server.service.admission.tokens and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.service.admission.tokens == 0
        server.service.timeout = 60
        assert list(pool.map(translate, texts)) == expected
    served.worker.join()
    with pytest.raises(OSError, match="closed"):
        own[0].pipe.poll()


def test_loading_and_timeout(runs: dict[str, Path]) -> None:
    with serving({"lm": runs["lm"]}, loaded=False) as server:
        assert server.get("/ready")[0] == 503 and server.get("/health")[0] == 200
        assert server.post("/v1/completions", {"model": "lm", "prompt": "a"})[0] == 503
    with serving({"lm": runs["lm"]}, timeout=0.05) as server:
        status, content = server.post("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 3000})
        assert status == 504 and content["error"]["code"] == "timeout"


def test_keys(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_API_KEYS", raising=False)
    (tmp_path / "keys.txt").write_text(f"# of the team\n{KEY}\n")
    guard = Guard(Keys(str(tmp_path / "keys.txt")))
    with serving({"lm": runs["lm"], "mt": runs["mt"]}, {"mt": ("en", "ko")}, guard=guard) as server:
        body = {"model": "lm", "prompt": "a", "max_tokens": 1}
        assert server.post("/v1/completions", body)[0] == 401
        assert server.post("/v1/completions", body, Authorization="Bearer wrong-key-of-16-chars")[0] == 401
        assert server.post("/v1/completions", body, Authorization=f"Bearer {KEY}")[0] == 200
        fields = {"q": "cat", "source": "en", "target": "ko"}
        assert server.post("/translate", fields)[0] == 401
        assert server.post("/translate", {**fields, "api_key": "wrong"})[0] == 401
        assert server.post("/translate", {**fields, "api_key": KEY})[0] == 200
        assert server.get("/health")[0] == 200 and server.get("/metrics")[0] == 401


def test_limits_of_a_request(runs: dict[str, Path]) -> None:
    with serving({"lm": runs["lm"]}, guard=Guard(Keys(), limit=1000, rate=60)) as server:
        assert server.post("/v1/completions", {"model": "lm", "prompt": "a" * 2000})[0] == 413
        statuses = [server.get("/v1/models")[0] for _ in range(20)]
        assert statuses[:10] == [200] * 10 and 429 in statuses
        status, _, headers = server.request("GET", "/v1/models")
        assert status == 429 and int(headers["Retry-After"]) >= 1
    rates = Rates(240)
    assert [rates.take("a") for _ in range(60)] == [0] * 60 and rates.take("a") >= 1 and rates.take("b") == 0


def test_reload_swaps_the_model(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "lm")
    with serving({"lm": folder}, admin_key=KEY) as server:
        body = {"model": "lm", "prompt": TEXT, "temperature": 0, "max_tokens": 8}
        before = server.post("/v1/completions", body)[1]["choices"]
        make_decoder(folder)  # other random weights
        assert server.post("/v1/completions", body)[1]["choices"] == before
        assert server.request("POST", "/admin/reload?model=lm")[0] == 401
        assert server.request("POST", "/admin/reload?model=lm", headers={"X-Admin-Key": KEY})[0] == 200
        assert server.post("/v1/completions", body)[1]["choices"] != before
        (folder / "model.safetensors").write_bytes(b"damaged")
        after = server.post("/v1/completions", body)[1]["choices"]
        assert server.request("POST", "/admin/reload?model=lm", headers={"X-Admin-Key": KEY})[0] == 409
        assert server.post("/v1/completions", body)[1]["choices"] == after


def test_one_bad_input_does_not_fail_its_neighbours() -> None:
    sizes = []

    def predict(items: list[int]) -> list[int]:
        sizes.append(len(items))
        time.sleep(0.02)
        if 3 in items:
            raise ValueError("three")
        return [item * item for item in items]

    batcher = Batcher("squares", predict, tokens=100, most=8)
    jobs = [Job(item, (), 10) for item in range(20)]
    batcher.submit(jobs)
    jobs[15].future.cancel()
    outputs = [None if job.item in (3, 15) else job.future.result(timeout=5) for job in jobs]
    assert outputs == [None if item in (3, 15) else item * item for item in range(20)]
    with pytest.raises(ValueError, match="three"):
        jobs[3].future.result()
    assert max(sizes) == 8 and jobs[15].future.cancelled()
    batcher.close()
    batcher.join()


def test_a_request_that_fails_leaves_those_of_its_batch(server: Server) -> None:
    texts = ["the <mask> sat", "no mask here"] * 8
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda text: server.post("/v1/fill", {"input": text}), texts))
    assert [status for status, _ in replies] == [200, 400] * 8
    tokens = [[one["token"] for one in content["outputs"][0]["masks"][0]] for _, content in replies[::2]]
    assert tokens == tokens[:1] * 8


def test_batches_side_by_side_share_what_waits() -> None:
    sizes, together = [], threading.Barrier(2, timeout=10)

    def predict(items: list[int]) -> list[int]:
        sizes.append(len(items))
        together.wait()  # both threads compute at once
        return items

    batcher = Batcher("two", predict, tokens=1000, most=64, threads=2)
    for _ in range(3):  # the second and third time the threads wait for as many as they had
        jobs = [Job(item, (), 10) for item in range(16)]
        batcher.submit(jobs)
        assert [job.future.result(timeout=10) for job in jobs] == list(range(16))
    assert sizes == [8] * 6
    batcher.close()
    batcher.join()


def test_a_batch_waits_for_those_that_came_with_the_last_one() -> None:
    sizes = []

    def predict(items: list[int]) -> list[int]:
        sizes.append(len(items))
        time.sleep(0.2)
        return items

    batcher, others = Batcher("patient", predict, tokens=1000, most=64), [Job(item, (), 10) for item in range(8)]
    batcher.submit(others)
    for job in others:
        job.future.result(timeout=5)
    for item in range(8):  # one by one, as clients do
        batcher.submit([Job(item, (), 10)])
        time.sleep(0.001)
    batcher.close()
    batcher.join()
    assert sizes == [8, 8]


def test_admission_counts_tokens() -> None:
    admission = Admission(100)
    admission.enter(150)  # alone, of any size
    with pytest.raises(Overloaded) as overloaded:
        admission.enter(1)
    assert overloaded.value.retry_after >= 1
    admission.leave(150)
    admission.enter(60)
    admission.enter(40)
    with pytest.raises(Overloaded):
        admission.enter(1)


@pytest.mark.parametrize("workers", [1, *slow(2)])
def test_the_command(runs: dict[str, Path], workers: int) -> None:
    """Ready, answers, and at SIGTERM finishes what is in progress and exits with 0."""
    command = [sys.executable, "-m", "regard", "serve", f"lm={runs['lm']}", "--port", "0", "--workers", str(workers)]
    environment = {**os.environ, "REGARD_API_KEYS": "", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        server = Server(None, port)  # type: ignore[arg-type]
        deadline = time.monotonic() + 60
        while True:
            try:
                if server.get("/ready")[0] == 200:
                    break
            except OSError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with (
            ThreadPoolExecutor(1) as pool,
            closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as client,
        ):
            fields = {"model": "lm", "prompt": "a", "max_tokens": 100}
            pending = pool.submit(server.post, "/v1/completions", fields)
            body = json.dumps({**fields, "stream": True})
            client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            stream = client.getresponse()  # begins with the first token
            time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert pending.result()[0] == 200
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(timeout=30) == 0
