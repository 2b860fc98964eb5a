"""Downloads: nothing gets a name before its digest fits, and every failure is one readable error."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import socket
import threading
from pathlib import Path

import pytest

from regard import cli
from regard.data import fetch as module
from regard.data.fetch import DATASETS, Dataset, Remote, fetch, named
from regard.errors import UserError

CONTENT = bytes(range(256)) * 1000  # several blocks


class Handler(http.server.BaseHTTPRequestHandler):
    """The path says what to do."""

    stop = threading.Event()

    def do_GET(self) -> None:
        kind = self.path.rpartition("/")[2]
        if kind == "missing":
            return self.send_error(404)
        if kind == "hang":
            self.stop.wait(20)
            return None
        self.send_response(200)
        sizes = {"endless": 10 * len(CONTENT)}
        self.send_header("Content-Length", str(sizes.get(kind, len(CONTENT))))
        self.end_headers()
        body = {"wrong": CONTENT[::-1], "cut": CONTENT[:70_000], "endless": CONTENT * 10}.get(kind, CONTENT)
        with contextlib.suppress(OSError):  # the client may hang up
            self.wfile.write(body)
            if kind == "stall":
                self.stop.wait(20)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address():
    Handler.stop.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.stop.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def dataset(address: str, *names: str, size: int = len(CONTENT)) -> Dataset:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return Dataset("set", "", "", tuple(Remote(name, f"{address}/{name}", size, digest) for name in names))


def test_good_files_arrive_and_are_kept(address, tmp_path) -> None:
    paths = fetch(dataset(address, "a", "b"), tmp_path / "deep" / "folder")
    assert [path.read_bytes() for path in paths] == [CONTENT, CONTENT]
    again = fetch(dataset("http://127.0.0.1:1", "a", "b"), tmp_path / "deep" / "folder")  # nobody listens there
    assert again == paths and sorted(path.name for path in paths[0].parent.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("wrong", "SHA-256 is " + hashlib.sha256(CONTENT[::-1]).hexdigest()),
        ("cut", "received 70,000 bytes instead of 256,000"),
        ("endless", "received more bytes instead of 256,000"),
        ("missing", "HTTP Error 404: Not Found"),
        ("hang", "timed out"),
    ],
)
def test_failure_leaves_nothing_and_says_what_to_do(address, tmp_path, kind, reason) -> None:
    with pytest.raises(UserError) as caught:
        fetch(dataset(address, "good", kind, "later"), tmp_path, timeout=0.3)
    message = str(caught.value)
    assert reason in message and f"{address}/{kind}" in message and "--data DIR" in message
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert re.search(rf"  {kind} +256,000 bytes  sha256 {digest}", message) and "  later" in message
    assert "  good" not in message  # it has arrived, only the others are wanted
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_a_server_that_stalls_midway_times_out(address, tmp_path) -> None:
    larger = dataset(address, "stall", size=len(CONTENT) + 1)
    with pytest.raises(UserError, match="cannot be downloaded"):
        fetch(larger, tmp_path / "new", timeout=0.3)
    assert not list(tmp_path.rglob("*stall*"))


def test_a_long_download_shows_its_progress_in_a_pipe(address, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("regard.progress.FIRST", 0.05)
    monkeypatch.setattr("regard.progress.POLL", 0.01)
    with pytest.raises(UserError, match="cannot be downloaded"):
        fetch(dataset(address, "good", "hang"), tmp_path, timeout=0.3)
    assert re.search(r"^downloading set: 256,000 of 512,000 bytes, ", capsys.readouterr().err, re.MULTILINE)


def test_nobody_listens(tmp_path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(UserError, match="Connection refused"):
        fetch(dataset(f"http://127.0.0.1:{port}", "a"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("url", ["http://no.such.host.invalid", "nonsense", "http://[::1"])
def test_addresses_that_lead_nowhere(tmp_path, url) -> None:
    with pytest.raises(UserError, match="cannot be downloaded"):
        fetch(dataset(url, "a"), tmp_path, timeout=1)


def test_another_file_of_that_name_is_not_overwritten(address, tmp_path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    with pytest.raises(UserError, match="other content"):
        fetch(dataset(address, "a"), tmp_path)
    assert (tmp_path / "a").read_bytes() == b"mine"
    with pytest.raises(UserError, match="is a file"):
        fetch(dataset(address, "a"), tmp_path / "a")


def test_catalogue_is_well_formed() -> None:
    for name, one in DATASETS.items():
        assert one.name == name and one.files and one.licence
        assert len({file.name for file in one.files}) == len(one.files)
        for file in one.files:
            assert re.fullmatch(r"[0-9a-f]{64}", file.sha256) and file.size > 0 and "/" not in file.name
            fixed = r"https://raw\.githubusercontent\.com/[\w-]+/[\w-]+/[0-9a-f]{40}/"  # a commit never changes
            assert re.match(rf"{fixed}|https://openaipublic\.blob\.core\.windows\.net/gpt-2/", file.url)
            assert file.url.endswith(f"/{file.name}")
    with pytest.raises(UserError, match="did you mean 'multi30k'"):
        named("multi30")


def test_the_command(address, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(module, "DATASETS", {"set": dataset(address, "a")})
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "get", "set"]) == 0
    assert Path("data/set/a").read_bytes() == CONTENT and "verified by SHA-256" in capsys.readouterr().out
    assert cli.main(["data", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["files"][0]["size"] == len(CONTENT)
    monkeypatch.setattr(module, "DATASETS", {"set": dataset(address, "missing")})
    assert cli.main(["data", "get", "set", "-o", "other"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: set: ") and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], "did you mean 'list'"),
        (["get"], "name a data set"),
        (["check"], "name a recipe"),
        (["list", "multi30k"], "regard data get multi30k"),
        (["list", "-o", "x"], "has no option --out"),
        (["get", "multi30k", "--skip-bad-lines"], "belongs to  regard data check"),
        (["get", "nothing"], "unknown data set"),
        (["check", "no-such-recipe.toml"], "no such file"),
    ],
)
def test_wrong_words(words, message, capsys) -> None:
    assert cli.main(["data", *words]) == 2
    assert message in capsys.readouterr().err
