"""`regard serve` against hostile clients: keys, hosts, sizes, slow connections, images, messages, logs."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import logging
import shutil
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="install it with  pip install 'regard[serve]'")
pytest.importorskip("prometheus_client", reason="install it with  pip install 'regard[serve]'")

from explorer import TEXT
from regard.commands import Parser
from regard.commands.serve import ARGUMENTS
from regard.errors import UserError
from regard.serve.connection import Connection
from regard.serve.detect import detect
from regard.serve.guard import LOOPBACK, Guard, Keys, Rates, client_address
from regard.serve.listen import JsonLines, Settings, bind, check_models, serve
from serving import Server, make_runs, serving

KEY = "0123456789abcdef"
FIELDS = {"q": "cat", "source": "en", "target": "ko"}
NUMBERS = ("--workers", "--queue-tokens", "--batch-tokens", "--batch-rows", "--rate-limit", "--body-limit")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    path = tmp_path_factory.mktemp("keys") / "keys.txt"
    path.write_text(KEY)
    return Keys(str(path))


@pytest.fixture(scope="module")
def server(runs: dict[str, Path]) -> Iterator[Server]:
    with serving(runs, {"mt": ("en", "ko")}) as one:
        yield one


@pytest.fixture(scope="module")
def locked(runs: dict[str, Path], keys: Keys) -> Iterator[Server]:
    with serving({"mt": runs["mt"]}, {"mt": ("en", "ko")}, guard=Guard(keys), admin_key=KEY[::-1]) as one:
        yield one


def raw(port: int, content: bytes, wait: float = 5.0) -> bytes:
    """What the server sends back until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as client:
        client.sendall(content)
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while part := client.recv(65536):
                received += part
        return received


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer "}, {"Authorization": "Bearer"},
        {"Authorization": f"Basic {KEY}"}, {"X-Api-Key": "wrong"}, {"Authorization": "Bearer \xff\xfe"},
        {"Authorization": "Digest x", "X-Api-Key": ""},
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/translate", "/detect", "/v1/translate"])
def test_no_header_replaces_a_key(locked: Server, path: str, headers: dict[str, str]) -> None:
    body = {"input": "cat"} if path.startswith("/v1") else FIELDS
    assert locked.request("POST", path, body, headers)[0] == 401
    assert locked.request("POST", path, body, {**headers, "Authorization": f"bearer  {KEY} "})[0] == 200


@pytest.mark.parametrize("key", ["", "\ud800", "é" * 20, 5, None, [KEY], {"a": KEY}, KEY + "\x00", KEY.upper()])
def test_odd_keys_in_the_body(locked: Server, key: Any) -> None:
    status, content = locked.post("/translate", {**FIELDS, "api_key": key})
    assert status == (400 if key == "\ud800" else 401) and KEY not in json.dumps(content)


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/v1/models/mt", "/nowhere"])
def test_what_tells_about_the_server_needs_a_key(locked: Server, path: str) -> None:
    assert locked.get(path)[0] == 401
    assert locked.get("/health")[0] == 200 and locked.get("/ready")[0] == 200


def test_the_admin_key_is_another_one(locked: Server) -> None:
    own = {"Authorization": f"Bearer {KEY}"}
    for key in ("", KEY, "é", "x" * 5000):
        assert locked.request("POST", "/admin/reload?model=mt", headers={**own, "X-Admin-Key": key})[0] == 401
    assert locked.request("POST", "/admin/reload?model=mt", headers={"X-Admin-Key": KEY[::-1]})[0] == 401
    good = {**own, "X-Admin-Key": KEY[::-1]}
    assert locked.request("POST", "/admin/reload?model=mt", headers=good)[0] == 200
    assert locked.request("POST", "/admin/reload?model=../mt", headers=good)[0] == 404


def test_wrong_keys_are_counted_by_address(runs: dict[str, Path], keys: Keys) -> None:
    with serving({"mt": runs["mt"]}, guard=Guard(keys, rate=40)) as server:
        statuses = [server.get("/v1/models", Authorization=f"Bearer guess-{at}")[0] for at in range(14)]
        assert statuses[:10] == [401] * 10 and statuses[-1] == 429
        assert server.get("/v1/models", Authorization=f"Bearer {KEY}")[0] == 200, "its owner is not locked out"


@pytest.mark.parametrize(
    "header, address",
    [
        ("1.2.3.4", "1.2.3.4"), ("9.9.9.9, 1.2.3.4", "1.2.3.4"), ("1.2.3.4:5678", "1.2.3.4"),
        ("[2001:db8::1]:80", "2001:db8::/64"), ("2001:db8::ffff:1", "2001:db8::/64"), ("::ffff:1.2.3.4", "1.2.3.4"),
        ("unknown", None), ("", None), ("1.2.3.4 evil", None), ("fe80::1%eth0", "fe80::/64"), ("a" * 9000, None),
    ],
)  # fmt: skip
def test_addresses_behind_a_proxy(header: str, address: str | None) -> None:
    assert client_address(header.rpartition(",")[2]) == address
    scope = {"type": "http", "client": ("10.0.0.1", 5), "headers": [(b"x-forwarded-for", header.encode())]}
    from starlette.datastructures import Headers

    assert Guard(Keys(), proxy=True).address(scope, Headers(scope=scope)) == (address or "10.0.0.1")
    assert Guard(Keys()).address(scope, Headers(scope=scope)) == "10.0.0.1"


def test_a_proxy_that_adds_a_line_is_believed_rather_than_the_client() -> None:
    from starlette.datastructures import Headers

    lines = [(b"x-forwarded-for", b"6.6.6.6"), (b"x-forwarded-for", b"1.2.3.4")]
    scope = {"type": "http", "client": ("10.0.0.1", 5), "headers": lines}
    assert Guard(Keys(), proxy=True).address(scope, Headers(scope=scope)) == "1.2.3.4"


def test_processes_share_the_rates(tmp_path: Path) -> None:
    one, other = (Rates(240, tmp_path / "rates") for _ in range(2))
    assert [rates.take("a") for _ in range(30) for rates in (one, other)] == [0] * 60
    assert one.take("a") >= 1 and other.take("a") >= 1 and other.take("b") == 0


def test_a_loopback_server_is_called_by_its_own_names(runs: dict[str, Path]) -> None:
    with serving({"mt": runs["mt"]}, guard=Guard(Keys(), hosts=LOOPBACK)) as server:
        for host in ("localhost", f"127.0.0.1:{server.port}", "[::1]:8000", "LOCALHOST:1"):
            assert server.get("/v1/models", Host=host)[0] == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000", ""):
            assert server.get("/v1/models", Host=host)[0] == 403
        assert server.get("/health", Host="evil.example")[0] == 403


def test_a_chunked_body_is_limited_too(runs: dict[str, Path]) -> None:
    with serving({"mt": runs["mt"]}, {"mt": ("en", "ko")}, guard=Guard(Keys(), limit=1000)) as server:
        for path in ("/v1/translate", "/translate"):
            chunks = b"".join(b"190\r\n" + b"x" * 400 + b"\r\n" for _ in range(5))
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            received = raw(server.port, (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + chunks)
            assert b" 413 " in received.splitlines()[0]


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
def test_a_client_that_sends_everything_first_reads_why_it_was_refused(
    runs: dict[str, Path], keys: Keys, close: bytes
) -> None:
    size = 16_000_000
    head = b"Host: x\r\nContent-Type: application/json\r\n" + close
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % size
    with serving({"mt": runs["mt"]}, {"mt": ("en", "ko")}, guard=Guard(keys, limit=1000)) as server:
        for path, form, status in (
            (b"/translate", b"Content-Length: %d\r\n\r\n" % size, b" 413 "),
            (b"/translate", chunked, b" 413 "),
            (b"/v1/models", b"Content-Length: 900\r\n\r\n", b" 401 "),
            (b"/v1/translate", chunked, b" 401 "),
        ):
            body = b" " * (900 if b"900" in form else size) + (b"\r\n0\r\n\r\n" if b"chunked" in form else b"")
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
                client.sendall(b"POST %s HTTP/1.1\r\n%s%s" % (path, head, form) + body)
                time.sleep(0.1)  # until a connection that was closed too early is reset
                assert status in client.recv(65536).splitlines()[0]


def test_headers_are_limited(server: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    assert b" 400 " in raw(server.port, head + b"X: " + b"a" * 70_000).splitlines()[0]
    assert b" 400 " in raw(server.port, head + b"".join(b"X%d: a\r\n" % at for at in range(9000))).splitlines()[0]
    for size, status in ((15_000, b" 200 "), (17_000, b" 431 ")):
        for request in (head + b"X: " + b"a" * size, head.replace(b"health", b"health?" + b"a" * size)):
            assert status in raw(server.port, request + b"\r\nConnection: close\r\n\r\n").splitlines()[0]
    both = b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert b" 200 " not in raw(server.port, both, 1).splitlines()[0]


def test_slow_connections_are_closed(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "SECONDS", 0.4)
    with serving({"mt": runs["mt"]}, {"mt": ("en", "ko")}, guard=Guard(Keys(), seconds=0.4)) as server:
        began = time.monotonic()
        assert raw(server.port, b"") == b"" and raw(server.port, b"GET /health HT") == b""
        body = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        assert b" 408 " in raw(server.port, body).splitlines()[0]
        assert time.monotonic() - began < 4
        with socket.create_connection(("127.0.0.1", server.port)) as client, pytest.raises(OSError):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in client.recv(1000)
            for byte in b"GET /health HTTP/1.1\r\nX-Header: long\r\n" * 9:  # one byte at a time
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        assert server.get("/health")[0] == 200


def test_a_client_that_does_not_read_is_closed(runs: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with serving({"lm": runs["lm"]}, guard=Guard(Keys(), seconds=0.5)) as server:
        body = json.dumps({"model": "lm", "prompt": "a", "max_tokens": 8, "n": 128, "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", server.port))
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
            )  # fmt: skip
            time.sleep(2)
        assert server.service.admission.tokens == 0
        assert server.get("/health")[0] == 200


def png(width: int, height: int) -> bytes:
    """An image of one colour, a thousand times smaller than its pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(b"\0" * (width * 3 + 1)) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore:Image size")
def test_images_that_unpack_to_gigabytes(server: Server) -> None:
    pytest.importorskip("PIL.Image")
    bomb = png(12_000, 9_000)
    assert len(bomb) < 1_000_000
    began = time.monotonic()
    status, content = server.post("/v1/caption", {"input": base64.b64encode(bomb).decode()})
    assert status == 400 and "pixels" in content["error"]["message"] and time.monotonic() - began < 2
    assert server.post("/v1/caption", {"input": base64.b64encode(png(400, 300)).decode()})[0] == 200


def test_images_in_formats_that_run_programs(server: Server) -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (40, 30))
    for name in ("EPS", "TIFF"):
        file = io.BytesIO()
        image.save(file, name)
        assert server.post("/v1/caption", {"input": base64.b64encode(file.getvalue()).decode()})[0] == 400


def test_one_input_fits_into_a_batch(server: Server) -> None:
    long = ["cat", "cat " * 20_000]
    for path, body in (("/v1/translate", {"input": long}), ("/translate", {**FIELDS, "q": long})):
        status, content = server.post(path, body)
        assert status == 400 and "--batch-tokens" in json.dumps(content)
        assert f"{'q' if path == '/translate' else 'input'}.1: has " in json.dumps(content)
    long = {"model": "labels", "input": "cat " * 20_000}
    assert server.post("/v1/embeddings", long)[0] == 200, "a text that is truncated costs what is left of it"


def test_bodies_that_are_expensive_to_read(server: Server) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    began = time.monotonic()
    assert server.post("/translate", "a=1&" * 900_000, **form)[0] == 400
    assert server.post("/translate", "[" * 900_000)[0] == 400
    assert server.post("/v1/translate", "[" * 900_000, **{"Content-Type": "application/json"})[0] == 400
    assert server.post("/detect", {"q": "der Hund im Garten " * 150_000})[0] == 200
    assert time.monotonic() - began < 8
    assert detect("der Hund " * 1000, ["de", "en"])[0][0] == "de"


@pytest.mark.parametrize("text", ["\ud800", "cat\x00cat", "\u2028cat\r\nX: y", "a" * 300])
def test_odd_texts_never_fail_the_server(server: Server, text: str) -> None:
    for path, body in (
        ("/translate", {**FIELDS, "q": text}), ("/translate", {**FIELDS, "source": text}),
        ("/translate", {**FIELDS, "target": text, "q": "cat"}), ("/detect", {"q": text}),
        ("/v1/translate", {"input": text}), ("/v1/translate", {"input": "cat", "model": text}),
        ("/v1/completions", {"model": "lm", "prompt": "a", "stop": text, "max_tokens": 2}),
        ("/v1/embeddings", {"model": text, "input": text}),
    ):  # fmt: skip
        assert server.post(path, body)[0] in (200, 400, 404), path


def test_messages_do_not_name_folders(runs: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "secret-place"
    broken.mkdir()
    (broken / "recipe.toml").write_text("[model]\ndim = 'many'\n")
    with serving({"mt": runs["mt"], "bad": broken}, loaded=False, admin_key=KEY) as server:
        server.service.models.load_all()
        content = [
            server.get("/v1/models")[1],
            server.get("/ready")[1],
            server.post("/v1/translate", {"model": "bad", "input": "cat"})[1],
            server.request("POST", "/admin/reload?model=bad", headers={"X-Admin-Key": KEY})[1],
            server.post("/v1/translate", {"model": "mt", "input": TEXT, "max_length": 1, "n_best": 5, "beam": 2})[1],
        ]
    assert "failed" in json.dumps(content) and "secret-place" not in json.dumps(content)
    assert str(runs["mt"].parent) not in json.dumps(content) and str(tmp_path.parent) not in json.dumps(content)


@pytest.mark.parametrize("path", ["/..%2f..%2fetc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "//etc/passwd", "/%00"])
def test_no_path_of_a_request_is_opened(server: Server, path: str) -> None:
    status, content = server.get(path)
    assert status == 404 and "root:" not in json.dumps(content)


def test_other_sites_are_not_allowed_unless_named(runs: dict[str, Path]) -> None:
    ask = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    with serving({"mt": runs["mt"]}) as server:
        headers = server.request("OPTIONS", "/v1/translate", headers=ask)[2]
        assert "access-control-allow-origin" not in headers
    with serving({"mt": runs["mt"]}, cors=["https://good.example"]) as server:
        assert "access-control-allow-origin" not in server.request("OPTIONS", "/v1/translate", headers=ask)[2]
        good = {**ask, "Origin": "https://good.example"}
        headers = server.request("OPTIONS", "/v1/translate", headers=good)[2]
        assert headers["access-control-allow-origin"] == "https://good.example"
        assert "access-control-allow-credentials" not in headers


def test_a_log_line_is_one_line() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, 'a\nb "quoted" \u2028', (), None)
    record.fields = {"route": "/x\r\n{}"}
    line = JsonLines().format(record)
    assert "\n" not in line and "\r" not in line and json.loads(line)["message"].startswith("a\nb")


def test_mistakes_before_the_start(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        serve(Settings({"mt": runs["mt"]}, {}, port=0, keys=str(tmp_path / "none")))
    with contextlib.closing(bind("127.0.0.1", 0)) as sock, pytest.raises(UserError, match="in use"):
        bind("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(UserError, match="--port 99999"):
        bind("127.0.0.1", 99999)
    for option, value in (
        *(("--timeout", value) for value in ("0", "-1", "nan", "inf", "soon")),
        *((name, value) for name in NUMBERS for value in ("0", "-5", "1.5", "many")),
    ):
        with pytest.raises(UserError, match=f"argument {option}: .*{value}"):
            Parser("regard serve", "", ARGUMENTS).parse_args(["run", option, value])


def test_a_server_without_any_model_ends(runs: dict[str, Path], tmp_path: Path) -> None:
    bad = shutil.copytree(runs["mt"], tmp_path / "bad")
    (bad / "model.safetensors").write_bytes(b"damaged")
    command = [sys.executable, "-m", "regard", "serve", f"one={bad}", f"two={bad}", "--port", "0"]
    for workers in ("1", "2"):
        done = subprocess.run([*command, "--workers", workers], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "error: no model could be loaded: one: " in done.stderr and "; two: " in done.stderr


def test_a_damaged_model_leaves_the_others(
    runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = shutil.copytree(runs["mt"], tmp_path / "bad")
    (bad / "model.safetensors").write_bytes(b"damaged")
    with serving({"bad": bad, "mt": runs["mt"]}, loaded=False) as server:
        server.service.models.load_all()
        check_models(server.service.models)
        assert server.get("/ready") == (503, {"ready": False, "models": {"bad": "failed", "mt": "ready"}})
        assert server.post("/v1/translate", {"model": "mt", "input": "cat"})[0] == 200
        assert server.post("/v1/translate", {"model": "bad", "input": "cat"})[0] == 503
        assert server.post("/v1/translate", {"input": "cat"})[0] == 200, "the first that can do it"
    assert [record.fields["model"] for record in caplog.records if record.levelno == logging.ERROR] == ["bad"]


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_device_that_does_not_exist(runs: dict[str, Path], workers: str) -> None:
    command = [sys.executable, "-m", "regard", "serve", f"mt={runs['mt']}", "--port", "0", "--device", "nothing"]
    done = subprocess.run([*command, "--workers", workers], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "nothing" in done.stderr and "Traceback" not in done.stderr, done.stderr
