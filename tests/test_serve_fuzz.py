"""What no client would send: requests generated from the OpenAPI schema, and bytes that are hardly HTTP.

Whatever comes in, no response is a 5xx, every response conforms to the schema, and the server serves the next request.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import json
import logging
import random
import socket
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="install it with  pip install 'regard[serve]'")
pytest.importorskip("prometheus_client", reason="install it with  pip install 'regard[serve]'")

from explorer import TEXT
from regard.serve.guard import Guard, Keys
from serving import Server, make_runs, serving

MODELS = {
    "/v1/completions": "lm", "/v1/embeddings": "labels", "/v1/translate": "mt", "/v1/classify": "labels",
    "/v1/tag": "tags", "/v1/caption": "captions", "/v1/fill": "masks", "/v1/forecast": "numbers",
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def fuzzed(runs: dict[str, Path]) -> Iterator[Server]:
    with serving(runs, {"mt": ("en", "ko")}, admin_key="0123456789abcdef") as one:
        yield one


@pytest.fixture
def server(fuzzed: Server, caplog: pytest.LogCaptureFixture) -> Iterator[Server]:
    """Afterwards nothing is left in the queue, no error was logged, and every model predicts."""
    with caplog.at_level(logging.ERROR, "regard.serve"):
        yield fuzzed
    deadline = time.monotonic() + 10
    while fuzzed.service.admission.tokens and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fuzzed.service.admission.tokens == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert fuzzed.post("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 1})[0] == 200
    assert fuzzed.post("/v1/translate", {"input": TEXT})[0] == 200


def fuzz_schema(server: Server, cases: int) -> Counter[int]:
    """Requests that follow the schema, and requests that violate it, `cases` of each for every operation."""
    schemathesis = pytest.importorskip("schemathesis", reason="install it with  pip install schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

    statuses = Counter[int]()
    options = settings(
        max_examples=cases, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip

    def send(case: Any) -> None:
        body = case.body
        if isinstance(body, dict) and case.path in MODELS and isinstance(body.get("model"), str):
            body["model"] = MODELS[case.path]  # a name at random would end every request with 404
        if case.path == "/translate" and isinstance(body, dict):
            body.update({name: "ko" for name in ("target",) if isinstance(body.get(name), str)})
            body.update({name: "en" for name in ("source",) if isinstance(body.get(name), str)})
        response = case.call()
        statuses[response.status_code] += 1
        # a valid field may still not fit the model or another field, which is a 400; 413 is a refusal, too
        own = [negative_data_rejection] if response.status_code == 413 else []
        case.validate_response(response, excluded_checks=[positive_data_acceptance, *own])

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    for operation in (result.ok() for result in schema.get_all_operations()):
        for mode in schemathesis.GenerationMode:
            with contextlib.suppress(Unsatisfiable):  # a route without parameters cannot be violated
                options(given(case=operation.as_strategy(generation_mode=mode))(send))()
    return statuses


def test_requests_from_the_schema(server: Server) -> None:
    statuses = fuzz_schema(server, 3)
    assert statuses[200] > 10 and statuses[400] > 20 and max(statuses) < 500


@pytest.mark.slow
def test_ten_thousand_requests_from_the_schema(server: Server) -> None:
    assert sum(fuzz_schema(server, 450).values()) >= 10_000


def exchange(port: int, *parts: bytes, pause: float = 0.0, half: bool = False) -> int | None:
    """The status of the response to these bytes, sent part by part; None if the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            if half:
                with contextlib.suppress(OSError):  # the server may have closed the connection
                    client.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(client)
            response.begin()
            response.read()
            return response.status
        except (http.client.BadStatusLine, http.client.IncompleteRead, ConnectionError):
            return None


def request(path: str, body: bytes, *headers: str, method: str = "POST", length: object = None) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "Host: x",
        *headers,
        f"Content-Length: {len(body) if length is None else length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


JSON = "Content-Type: application/json"
GOOD = json.dumps({"model": "lm", "prompt": "a", "max_tokens": 1}).encode()
BROKEN: dict[str, tuple[bytes, ...]] = {
    "nothing": (b"",),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),),
    "half a line": (b"POST /v1/compl",),
    "another version": (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n",),
    "a space in the path": (b"GET /health /x HTTP/1.1\r\nHost: x\r\n\r\n",),
    "a path outside": (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",),
    "an encoded path outside": (b"GET /v1/models/..%2f..%2fetc%2fpasswd%00 HTTP/1.1\r\nHost: x\r\n\r\n",),
    "bytes in the path": (b"GET /v1/models/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",),
    "encoded bytes in the path": (b"GET /v1/models/%ff%fe%ed%a0%80 HTTP/1.1\r\nHost: x\r\n\r\n",),
    "a huge path": (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",),
    "a huge header": (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",),
    "a header without end": (b"GET /health HTTP/1.1\r\nHost: x\r\n", *([b"X: y\r\n" * 1000] * 30)),
    "a null byte in a header": (b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n",),
    "two lengths": (request("/v1/completions", GOOD, JSON, "Content-Length: 3"),),
    "a length and chunks": (request("/v1/completions", GOOD, JSON, "Transfer-Encoding: chunked"),),
    "a negative length": (request("/v1/completions", GOOD, JSON, length=-1),),
    "no number as length": (request("/v1/completions", GOOD, JSON, length="²"),),
    "an enormous length": (request("/v1/completions", GOOD, JSON, length=10**30),),
    "too small a length": (request("/v1/completions", GOOD, JSON, length=5),),
    "too large a length": (request("/v1/completions", GOOD, JSON, length=len(GOOD) + 100),),
    "broken chunks": (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" + GOOD,),
    "one byte at a time": tuple(bytes([one]) for one in request("/v1/completions", GOOD, JSON)),
    "an unknown method": (request("/v1/completions", GOOD, JSON, method="BREW"),),
    "a key of bytes": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http(server: Server, name: str) -> None:
    status = exchange(server.port, *BROKEN[name], half=True)
    assert status is None or status < 500, status


def test_a_body_that_never_comes(runs: dict[str, Path]) -> None:
    with serving({"lm": runs["lm"]}, guard=Guard(Keys(), limit=1000, seconds=0.3)) as server:
        began = time.monotonic()
        assert exchange(server.port, request("/v1/completions", GOOD, JSON, length=len(GOOD) + 100)) == 408
        assert time.monotonic() - began < 5
        chunked = request("/v1/completions", b"", JSON).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        assert exchange(server.port, chunked + b"800\r\n" + b" " * 0x800 + b"\r\n") == 413


ODD_BODIES = {
    "invalid UTF-8": b'{"model": "lm", "prompt": "\xff\xfe\xed\xa0\x80"}',
    "UTF-16": json.dumps({"model": "lm", "prompt": "a"}).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD,
    "a surrogate": b'{"model": "lm", "prompt": "a \\ud800 b", "max_tokens": 2}',
    "a surrogate as model": b'{"model": "\\udfff", "prompt": "a"}',
    "a surrogate as stop": b'{"model": "lm", "prompt": "a", "stop": ["\\ud83d"], "max_tokens": 2}',
    "a null byte": b'{"model": "lm", "prompt": "a\\u0000b", "max_tokens": 2}',
    "NaN": b'{"model": "lm", "prompt": "a", "temperature": NaN}',
    "Infinity": b'{"model": "lm", "prompt": "a", "temperature": Infinity}',
    "-Infinity": b'{"model": "lm", "prompt": "a", "top_p": -Infinity}',
    "1e999": b'{"model": "lm", "prompt": "a", "temperature": 1e999}',
    "a tiny temperature": b'{"model": "lm", "prompt": "a", "temperature": 1e-300, "max_tokens": 2}',
    "a tiny top_p": b'{"model": "lm", "prompt": "a", "top_p": 1e-300, "max_tokens": 2}',
    "a huge top_k": b'{"model": "lm", "prompt": "a", "top_k": %d, "max_tokens": 2}' % 10**30,
    "a huge seed": b'{"model": "lm", "prompt": "a", "seed": -%d, "max_tokens": 2}' % 10**30,
    "a number of 5,000 digits": b'{"model": "lm", "prompt": "a", "seed": 1%s}' % (b"0" * 5000),
    "deep lists": b'{"model": "lm", "prompt": %s}' % (b"[" * 100_000 + b"]" * 100_000),
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "negative ids": b'{"model": "lm", "prompt": [-1, -2]}',
    "huge ids": b'{"model": "lm", "prompt": [%d]}' % 2**63,
    "huger ids": b'{"model": "lm", "prompt": [%d]}' % 10**40,
    "ids that are no integers": b'{"model": "lm", "prompt": [1.5, true, null]}',
    "very many ids": b'{"model": "lm", "prompt": %s}' % json.dumps([1] * 500_000).encode(),
    "very many prompts": b'{"model": "lm", "prompt": %s}' % json.dumps(["a"] * 100_000).encode(),
    "empty prompts": b'{"model": "lm", "prompt": ["", ""]}',
    "an empty stop": b'{"model": "lm", "prompt": "a", "stop": "", "max_tokens": 2}',
    "many stops": b'{"model": "lm", "prompt": "a", "stop": %s}' % json.dumps(["x"] * 1000).encode(),
    "a long stop": b'{"model": "lm", "prompt": "a", "stop": "%s", "max_tokens": 2}' % (b"x" * 1_000_000),
    "many samples": b'{"model": "lm", "prompt": ["a", "b"], "n": 128}',
    "duplicate fields": b'{"model": "lm", "model": "mt", "prompt": "a", "prompt": "b"}',
    "a string": b'"model"', "null": b"null", "a list": b"[]", "no JSON": b"{model: lm}", "cut off": GOOD[:-5],
    "a formless body": b"&&&===%%%%\xff",
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_BODIES)
def test_odd_bodies(server: Server, name: str) -> None:
    """To the route that they are made for, and to every other one."""
    for path in ("/v1/completions", "/translate", *list(MODELS)[1:]):
        status = exchange(server.port, request(path, ODD_BODIES[name], JSON))
        assert status is not None and (status == 200 or 400 <= status < 500), (path, status)
    form = "Content-Type: application/x-www-form-urlencoded"
    status = exchange(server.port, request("/translate", ODD_BODIES[name], form))
    assert status is not None and 400 <= status < 500


@pytest.mark.parametrize(
    "text", ["", " ", "\u0000", "\ud800", "😀" * 2000, "a" * 90_000, "가" * 5000, "e\u0301" * 500, "<mask>"]
)
def test_odd_texts(server: Server, text: str) -> None:
    for path in ("/v1/translate", "/v1/classify", "/v1/tag", "/v1/fill", "/v1/embeddings"):
        body = {"model": MODELS[path], "input": [text, "the cat"], **({"max_length": 3} if "translate" in path else {})}
        status, content = server.post(path, body)
        assert status in (200, 400), (path, content)
    assert server.post("/detect", {"q": [text, text]})[0] in (200, 400)
    assert server.post("/translate", {"q": text, "source": "auto", "target": "ko"})[0] in (200, 400)


def png(width: int, height: int, rows: bytes) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def images() -> dict[str, Callable[[], bytes]]:
    def real(kind: str, mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> bytes:
        file = io.BytesIO()
        pytest.importorskip("PIL.Image").new(mode, size).save(file, kind)
        return file.getvalue()

    return {
        "empty": lambda: b"",
        "truncated PNG": lambda: real("PNG", size=(200, 200))[:-60],
        "truncated JPEG": lambda: real("JPEG", size=(200, 200))[:300],
        "a bomb": lambda: png(50_000, 50_000, b"\0" * 1_000_000),
        "a larger bomb": lambda: png(2**31 - 1, 2**31 - 1, b""),
        "no pixels": lambda: png(0, 0, b""),
        "one pixel": lambda: real("PNG", size=(1, 1)),
        "a line": lambda: real("PNG", size=(1, 5000)),
        "grey with alpha": lambda: real("PNG", "LA"),
        "black and white": lambda: real("PNG", "1"),
        "palette": lambda: real("GIF", "P"),
        "16 bits": lambda: real("PNG", "I;16"),
        "CMYK": lambda: real("JPEG", "CMYK"),
        "TIFF": lambda: real("TIFF"),
        "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        "PostScript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n(/etc/passwd) run\n",
        "a wrong checksum": lambda: real("PNG")[:-20] + b"\0" * 20,
    }  # fmt: skip


@pytest.mark.parametrize("name", images())
def test_odd_images(server: Server, name: str) -> None:
    text = base64.b64encode(images()[name]()).decode()
    began = time.monotonic()
    status, content = server.post("/v1/caption", {"input": text})
    assert status in (200, 400), content
    assert time.monotonic() - began < 5
    # beside an image that can be read
    file = io.BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (40, 30)).save(file, "PNG")
    assert server.post("/v1/caption", {"input": base64.b64encode(file.getvalue()).decode()})[0] == 200


def test_random_bytes(server: Server) -> None:
    """A good request with bytes changed, cut or inserted at random."""
    choose, good = random.Random(1), request("/v1/completions", GOOD, JSON)
    for _ in range(150):
        raw = bytearray(good)
        for _ in range(choose.randint(1, 6)):
            at = choose.randrange(len(raw))
            match choose.randrange(3):
                case 0:
                    raw[at] = choose.randrange(256)
                case 1:
                    del raw[at : at + choose.randint(1, 20)]
                case 2:
                    raw[at:at] = choose.randbytes(choose.randint(1, 20))
        status = exchange(server.port, bytes(raw), half=True)
        assert status is None or status < 500, bytes(raw)


def test_requests_that_are_pipelined(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(request("/v1/completions", GOOD, JSON) * 5)
        received = b""
        while received.count(b"HTTP/1.1 200") < 5:
            part = client.recv(65536)
            assert part, received
            received += part
