"""`regard serve --workers 2`: killed processes, signals, reload in all processes, metrics and rates of all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="install it with  pip install 'regard[serve]'")
pytest.importorskip("prometheus_client", reason="install it with  pip install 'regard[serve]'")

from explorer import TEXT, make_decoder
from regard.serve import listen
from regard.serve.listen import Settings, bind, supervise
from regard.serve.shared import NotAll, Reloads
from serving import Server

KEY = "0123456789abcdef"
BODY = {"model": "lm", "prompt": TEXT, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_decoder(tmp_path_factory.mktemp("runs") / "lm")


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if value := condition():
                return value
        assert time.monotonic() < deadline
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    """The worker processes of a supervisor (not Python's resource tracker)."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


@contextlib.contextmanager
def command(run: Path, *options: str, wait: bool = True) -> Iterator[tuple[subprocess.Popen[str], Server]]:
    """Two processes; `wait`: until the models are loaded."""
    arguments = [sys.executable, "-m", "regard", "serve", f"lm={run}", "--port", "0", "--workers", "2", *options]
    environment = {**os.environ, "REGARD_API_KEYS": "", "REGARD_ADMIN_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            server = Server(None, int(process.stdout.readline().rpartition(":")[2]))  # type: ignore[arg-type]
            threading.Thread(target=process.stderr.read, daemon=True).start()  # type: ignore[union-attr]
            if wait:
                until(lambda: server.get("/ready")[0] == 200)
            yield process, server
        finally:
            process.kill()


def texts(server: Server, count: int = 40) -> set[str]:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: server.post("/v1/completions", BODY), range(count)))
    assert {status for status, _ in replies} == {200}
    return {content["choices"][0]["text"] for _, content in replies}


def test_a_small_response_is_sent_at_once() -> None:
    """Nagle's algorithm would delay the second of two writes until the first is acknowledged, after 40 ms."""
    with bind("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()), sock.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif(sys.platform != "linux", reason="connections are divided by Linux")
def test_connections_are_divided_among_the_processes(run: Path) -> None:
    def sockets(pid: int) -> int:
        return sum(os.readlink(one).startswith("socket:") for one in Path(f"/proc/{pid}/fd").iterdir())

    with command(run) as (process, server), contextlib.ExitStack() as stack:
        workers = until(lambda: len(found := children(process.pid)) == 2 and found)
        listens = f":{server.port:04X} 00000000:0000 0A"
        until(lambda: Path("/proc/net/tcp").read_text().count(listens) == 2)
        before = [sockets(pid) for pid in workers]
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        until(lambda: all(sockets(pid) - count >= 8 for pid, count in zip(workers, before, strict=True)), 10)


@pytest.mark.slow
def test_no_request_gets_503_after_the_first_success(run: Path) -> None:
    """Connections go to either process: the second accepts them when both have loaded the models."""
    with command(run, wait=False) as (process, server):
        statuses = [server.get("/ready")[0]]
        while statuses.count(200) < 200:
            statuses.append(server.get("/ready")[0])
            assert process.poll() is None
        assert statuses == [503] * (len(statuses) - 200) + [200] * 200
        until(lambda: len(children(process.pid)) == 2)


def test_a_killed_worker_is_replaced_and_a_reload_reaches_all(tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "lm")
    with command(folder, "--rate-limit", "100000") as (process, server):
        before = texts(server)
        assert len(before) == 1
        workers = until(lambda: len(found := children(process.pid)) == 2 and found)
        with ThreadPoolExecutor(4) as pool:  # under load
            pending = [pool.submit(server.post, "/v1/completions", {**BODY, "max_tokens": 60}) for _ in range(24)]
            time.sleep(0.2)
            os.kill(workers[0], signal.SIGKILL)
            failed = [one.exception() for one in pending]
        assert sum(one is None for one in failed) >= 12, "the other process answers"
        replaced = until(lambda: len(found := children(process.pid)) == 2 and workers[0] not in found and found)
        assert workers[1] in replaced
        metrics = server.get("/metrics")[1]
        assert "regard_queue_tokens 0.0" in metrics and 'status="200"' in metrics

        make_decoder(folder)  # other random weights
        assert server.request("POST", "/admin/reload?model=lm", headers={"X-Admin-Key": KEY})[0] == 200
        after = texts(server)
        assert len(after) == 1 and after != before
        (folder / "model.safetensors").write_bytes(b"damaged")
        assert server.request("POST", "/admin/reload?model=lm", headers={"X-Admin-Key": KEY})[0] == 409
        assert texts(server) == after

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in replaced), 5)


def test_a_signal_under_load_finishes_what_was_accepted(run: Path) -> None:
    with command(run) as (process, server), ThreadPoolExecutor(16) as pool:
        pending = [pool.submit(server.post, "/v1/completions", {**BODY, "max_tokens": 80}) for _ in range(16)]
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        failed = [one.exception() for one in pending]  # a connection that no process had accepted is closed
        assert all(isinstance(error, ConnectionError) for error in failed if error is not None)
        statuses = [one.result()[0] for one in pending if one.exception() is None]
        assert statuses.count(200) >= 6 and set(statuses) <= {200, 503}, "503: read after the signal"
        assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_workers_end_with_their_supervisor(run: Path) -> None:
    with command(run) as (process, _):
        workers = children(process.pid)
        assert len(workers) == 2
        process.kill()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 20)


def fail(settings: Settings, sock: Any, ready: Any) -> None:
    assert settings.shared is not None
    with (settings.shared.parent / "starts.txt").open("a") as file:
        file.write("x")
    sys.exit(1)


@pytest.mark.slow
def test_a_worker_that_fails_at_once_does_not_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(listen, "work", fail)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: multiprocessing.context.ForkContext())
    threading.Timer(6, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    previous = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        assert supervise(Settings({}, {}, workers=2), bind("127.0.0.1", 0)) == 0
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), previous, strict=True):
            signal.signal(number, handler)
    starts = len((tmp_path / "starts.txt").read_text())
    assert starts == 6, "at 0, 1 and 3 s, and next at 7 s"
    assert "ended with code 1; next start in 4 s" in capfd.readouterr().err


@pytest.mark.slow
def test_reloads_of_several_processes(tmp_path: Path) -> None:
    """Here the processes are objects of one: their files have other names."""
    loaded: dict[str, list[str]] = {"a": [], "b": []}

    class Other(Reloads):
        def _report(self) -> None:
            self._write("99", self.done)

    def fails(name: str) -> None:
        loaded["b"].append(name)
        if name == "bad":
            raise MemoryError

    one, _ = Reloads(loaded["a"].append, tmp_path), Other(fails, tmp_path)
    one.reload("lm")
    one.reload("lm")
    assert loaded == {"a": ["lm"] * 2, "b": ["lm"] * 2}
    with pytest.raises(NotAll, match="MemoryError"):
        one.reload("bad")
    (tmp_path / "77.json").write_text("{}")  # a process that never answers
    with pytest.raises(NotAll, match="1 other"):
        one.reload("lm", seconds=3)
    (tmp_path / "77.json").unlink()  # it has ended: the supervisor removes its file
    one.reload("lm")
