"""`regard explore` as a user starts it: the address, the end, and what it says when something is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from explorer import ask, make_decoder
from regard import cli
from regard.page import page_missing

ROOT = Path(__file__).parent.parent
built = pytest.mark.skipif(page_missing() is not None, reason="the page is not built:  make page")


@contextmanager
def started(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the address it prints first."""
    words = [sys.executable, "-m", "regard", "explore", *map(str, arguments)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(timeout=10)


@built
def test_it_serves_until_ctrl_c(tmp_path):
    make_decoder(tmp_path / "run")
    with started(tmp_path / "run", "--no-browser", "--link", "http://127.0.0.1:1/old/#view=map&layer=1") as (
        process,
        line,
    ):
        address, _, state = line.partition("#")
        assert address.startswith("http://127.0.0.1:") and state == "view=map&layer=1"
        assert ask(address, "")[0] == 200  # before the model is loaded
        status, _ = ask(address, "api/look", {"run": "run", "text": "the cat"})
        assert status == 200
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 0 and "Traceback" not in out


@pytest.mark.parametrize(
    ("chosen", "end", "note"), [("en", "/#a=1", "Ctrl-C stops it"), ("ko", "/?lang=ko#a=1", "Ctrl-C를")]
)
def test_the_address_has_the_language(monkeypatch, capsys, tmp_path, chosen, end, note):
    from regard.explore.server import listen
    from regard.explore.server.models import Models

    monkeypatch.setenv("REGARD_LANG", chosen)
    monkeypatch.setattr(listen.Listener, "run", lambda self: self.socket.close())
    make_decoder(tmp_path / "run")
    listen.serve(Models({"run": tmp_path / "run"}, "cpu"), fragment="a=1", browser=False)
    address, line = capsys.readouterr().out.splitlines()
    assert address.endswith(end) and line.startswith(note)


@built
def test_a_port_in_use_is_named(tmp_path, capsys):
    make_decoder(tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["explore", str(tmp_path / "run"), "--no-browser", "--port", str(port)]) == 2
    assert f"--port {port}" in capsys.readouterr().err


def test_a_browser_is_opened_where_there_is_a_screen(monkeypatch, capsys):
    from regard.explore.server import listen

    opened: list[str] = []
    monkeypatch.setattr(listen.webbrowser, "open", lambda address: bool(opened.append(address) or True))
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    listen.show("http://127.0.0.1:1/x/")
    assert opened == [] and "open the address" in capsys.readouterr().err
    monkeypatch.setenv("DISPLAY", ":0")
    listen.show("http://127.0.0.1:1/x/")
    assert opened == ["http://127.0.0.1:1/x/"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no such folder"),
        (["."], "contains no run"),
        (["run", "--port", "70000"], "is not a port"),
        (["run", "--port", "eighty"], "is not a port"),
        (["run", "--link", "http://127.0.0.1/"], "no part after #"),
    ],
)
def test_mistakes_are_reported_in_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "run":
        make_decoder(tmp_path / "run")
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("a page")
    monkeypatch.setattr("regard.page.PAGE", page)
    assert cli.main(["explore", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_without_the_page_it_says_how_to_build_it(tmp_path, monkeypatch, capsys):
    make_decoder(tmp_path / "run")
    monkeypatch.setattr("regard.page.PAGE", tmp_path / "nothing")
    assert cli.main(["explore", str(tmp_path / "run")]) == 2
    assert "no npm when Regard was installed" in capsys.readouterr().err
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "package.json").write_text("{}")
    monkeypatch.setattr("regard.page.PAGE", tmp_path / "src/regard/explore/page")
    assert cli.main(["explore", str(tmp_path / "run")]) == 2
    assert "make page" in capsys.readouterr().err


def test_without_its_packages_it_names_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "regard.explore.server.listen")
    assert cli.main(["explore", str(tmp_path)]) == 2
    assert "regard[explore]" in capsys.readouterr().err


@built
def test_the_wheel_holds_the_page(tmp_path):
    pytest.importorskip("hatchling")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {"regard/explore/page/index.html", "regard/explore/page/playground.html"} <= set(names)
    assert {"regard/explore/page/example.bin", "regard/explore/server/app.py"} <= set(names)
    assert any(name.startswith("regard/explore/page/assets/") and name.endswith(".js") for name in names)


def test_a_fresh_clone_builds_the_page_into_the_wheel_or_says_why_not(tmp_path, monkeypatch):
    """The hook of the build, with an npm of our own that leaves a page, fails, or is not there."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "web" / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    web, page = tmp_path / "web", tmp_path / "src/regard/explore/page/index.html"
    for file in (web / "package.json", web / "package-lock.json", web / "src/main.ts"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    assert not hook.up_to_date(tmp_path)
    npm = tmp_path / "bin" / "npm"
    monkeypatch.setenv("PATH", str(npm.parent))
    assert "npm not found" in hook.build(web)

    def become(script: str) -> None:
        npm.parent.mkdir(exist_ok=True)
        npm.write_text(f"#!/bin/sh\n{script}\n")
        npm.chmod(0o755)

    become("echo no network >&2; exit 1")
    assert hook.build(web) == "npm ci failed: no network"
    other = tmp_path / "src/regard/interop/page/index.html"
    make = "; ".join(f"/bin/mkdir -p {one.parent}; echo page > {one}" for one in (page, other))
    become(f"[ $1 = ci ] || {{ {make}; }}")
    assert hook.build(web) is None and page.is_file() and hook.up_to_date(tmp_path)
    os.utime(page, (1, 1))
    assert not hook.up_to_date(tmp_path)  # older than its sources
    assert 'path = "web/hatch_build.py"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_lock_file_holds_for_every_registry_and_platform():
    text = (ROOT / "web" / "package-lock.json").read_text(encoding="utf-8")
    assert '"resolved"' not in text
    packages = json.loads(text)["packages"]
    assert all("integrity" in package for name, package in packages.items() if name)
    wanted = {name for package in packages.values() for name in package.get("optionalDependencies", {})}
    assert {f"node_modules/{name}" for name in wanted} <= set(packages)  # else `npm ci` refuses it
