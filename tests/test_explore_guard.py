"""Which requests the server of the page accepts, and what it survives."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from explorer import TEXT, ask, ask_frame, make_decoder, make_translator, refusal, served
from regard.explore.server.listen import LIMIT


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs")
    make_decoder(folder / "decoder")
    make_translator(folder / "translator")
    page = tmp_path_factory.mktemp("page")
    (page / "index.html").write_text("<!doctype html><title>page</title>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.page.PAGE", page)  # these tests need no built page
        with served(folder) as listener:
            yield listener.address


def test_a_request_without_its_token_is_refused(address):
    root = address.rsplit("/", 2)[0] + "/"
    assert ask(address, "")[0] == 200
    for path in ("", "api/runs", "index.html", "x" * 24 + "/api/runs"):
        assert ask(root, path)[0] == 403, path
    token = urlsplit(address).path.strip("/")
    assert ask(root, token[:-1] + ("a" if token[-1] != "a" else "b") + "/api/runs")[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1:1"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    ],
)
def test_other_hosts_and_pages_are_refused(address, headers):
    assert refusal(ask(address, "api/runs", headers=headers))[0] == 403


def test_the_page_itself_and_a_link_to_it_are_let_in(address):
    own = "http://" + urlsplit(address).netloc
    assert ask(address, "api/runs", headers={"Origin": own, "Sec-Fetch-Site": "same-origin"})[0] == 200
    assert ask(address, "", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"})[0] == 200


def test_every_response_forbids_content_from_elsewhere(address):
    url = urlsplit(address)
    for path in ("", "api/runs", "nothing-here"):
        connection = http.client.HTTPConnection(url.hostname, url.port)
        connection.request("GET", url.path + path)
        headers = connection.getresponse().headers
        connection.close()
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"


def test_large_requests_are_refused_whether_they_say_so_or_not(address):
    large = json.dumps({"run": "decoder", "text": "a" * LIMIT}).encode()
    assert ask(address, "api/look", large)[0] == 413
    assert ask(address, "api/image", bytes(5 * LIMIT))[0] == 413
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    try:
        chunks = (large[at : at + 65536] for at in range(0, len(large), 65536))
        connection.request("POST", url.path + "api/look", chunks, {"Content-Type": "application/json"})
        assert connection.getresponse().status == 413
    except ConnectionError:
        pass  # it closed before all was sent: refused too
    finally:
        connection.close()
    assert ask(address, "api/alive")[0] == 200


@pytest.mark.parametrize("run", ["decoder", "translator"])
def test_a_text_too_long_is_refused_before_it_fills_the_memory(address, run):
    status, sentence = refusal(ask(address, "api/look", {"run": run, "text": "the cat sat on the mat " * 40_000}))
    assert status == 422 and "shorter" in sentence


@pytest.mark.parametrize(
    "path",
    [
        "../../../../etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/pyproject.toml",
        "api/image/../../x",
    ],
)
def test_no_path_leads_out(address, path):
    status, content = ask(address, path)
    assert status in (403, 404) and b"root:" not in content


@pytest.mark.parametrize("name", ["../decoder", "/etc", "decoder/", "", "decoder\u0000", "디코더", "x" * 10_000])
def test_a_run_is_known_by_its_name_only(address, name):
    status, sentence = refusal(ask(address, "api/look", {"run": name, "text": "a"}))
    assert status == 404 and len(sentence) < 300


def malformed(choose: random.Random) -> tuple[str, bytes]:
    """A request that no page would send."""
    path = choose.choice(["look", "maps", "steps", "search", "nothing", "look?x=1", "runs", "image/none"])
    junk = [None, True, -1, 10**9, 1e308, "x", "\ud800", [], [[]], {}, {"a": {}}, ["decoder", 0, 99], "decoder"]
    fields = ("text", "target", "image", "changes", "part", "layer", "head", "heads", "query", "beam", "extra")
    match choose.randrange(5):
        case 0:
            return path, choose.randbytes(choose.randrange(0, 300))
        case 1:
            return path, b"[" * choose.randrange(1, 50_000)
        case 2:
            return path, json.dumps({"run": choose.choice(["none", "../decoder", 3]), "text": "a"}).encode()
        case 3:
            changes = {choose.choice(["heads", "layers", "rows", "future", "shuffle", "temperature", "more"]): "wrong"}
            return path, json.dumps({"run": "decoder", "text": "a", "changes": changes}).encode()
        case _:
            body = {
                "run": "decoder",
                "text": 7,
                **{choose.choice(fields): choose.choice(junk) for _ in range(3)},
                "no": 1,
            }
            return path, json.dumps(body).encode()


def test_a_thousand_malformed_requests_get_4xx_and_it_lives_on(address):
    choose = random.Random(0)
    for _ in range(1000):
        path, body = malformed(choose)
        status, content = ask(address, f"api/{path}", body)
        assert 400 <= status < 500, (path, body[:200], content[:300])
        assert isinstance(json.loads(content)["error"], str)
    _, arrays = ask_frame(address, "api/look", {"run": "decoder", "text": TEXT})
    assert len(arrays) == 2


def test_bytes_that_are_no_http_do_not_stop_it(address):
    url = urlsplit(address)
    choose = random.Random(1)
    for content in [
        b"\x16\x03\x01" + choose.randbytes(200),
        b"GET\r\n\r\n",
        b"G" * 100_000,
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ]:
        with socket.create_connection((url.hostname, url.port), timeout=10) as raw:
            try:
                raw.sendall(content)
                raw.shutdown(socket.SHUT_WR)
                output = raw.recv(100)
            except ConnectionError:
                continue
            assert output == b"" or b" 4" in output[:13]
    assert ask(address, "api/alive")[0] == 200


def test_a_browser_with_an_old_address_gets_an_explanation(address):
    """After a restart on the same port the token is another: a reload shows a page, not JSON."""
    url = urlsplit(address)
    old = f"{url.scheme}://{url.netloc}/anoldtoken/"
    status, content = ask(old, "", headers={"Accept": "text/html,*/*;q=0.8"})
    assert status == 403 and b"<h1>This address is no longer valid" in content and "토큰".encode() in content
    assert refusal(ask(old, "api/alive"))[0] == 403  # the page itself asks for JSON
