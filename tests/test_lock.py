"""One process a run: another is refused, and a killed one holds nobody up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from corpus import SMALL, write_corpus
from regard.cli import main
from regard.errors import UserError
from regard.training.lock import NAME, hold
from reversal import make_trainer

HOLDER = """
import sys, time
from pathlib import Path
from regard.training.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path / "run"."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def test_a_held_folder_is_refused_with_the_name_of_its_holder(tmp_path, holder):
    words = rf"run: another process is training in this folder \(process {holder.pid} on .*\): wait for it or stop it"
    for attempt in (hold(tmp_path / "run").__enter__, make_trainer(tmp_path / "run").run):
        with pytest.raises(UserError, match=words):
            attempt()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [NAME]


def test_the_command_is_refused_before_it_touches_anything(tmp_path, holder, monkeypatch, capsys):
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "mine.toml", "-o", "run", *SMALL, "--device", "cpu"]) == 2
    assert "another process is training in this folder" in capsys.readouterr().err
    assert os.listdir("run") == [NAME]


def test_a_killed_holder_holds_nobody_up(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / NAME).exists()
    assert make_trainer(tmp_path / "run").run()
    assert not (tmp_path / "run" / NAME).exists()


def test_an_empty_folder_goes_again_with_those_made_for_it(tmp_path):
    with hold(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / NAME).exists()
        with hold(tmp_path / "a" / "b"):  # the same process may
            pass
        with pytest.raises(UserError, match="another process"):
            elsewhere(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    with hold(tmp_path / "mine"):
        (tmp_path / "mine" / "notes").touch()
    assert os.listdir(tmp_path / "mine") == ["notes"]


def elsewhere(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HOLDER, str(folder)], capture_output=True, text=True, timeout=60)
    raise UserError(done.stderr.splitlines()[-1])


def test_many_at_once_and_one_wins(tmp_path):
    """Whoever takes the file away does so while it holds it: no two ever hold at the same time."""
    script = """
import sys, time
from pathlib import Path
from regard.errors import UserError
from regard.training.lock import hold
folder, end, times = Path(sys.argv[1]), time.time() + 1.0, 0
while time.time() < end:
    try:
        with hold(folder):
            (folder / "inside").mkdir()  # fails if another is inside
            (folder / "inside").rmdir()
            times += 1
    except UserError:
        pass
print(times)
"""
    several = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    times = [int(process.communicate(timeout=60)[0]) for process in several]
    assert all(process.returncode == 0 for process in several) and sum(times) > 10


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot be"):
        hold(tmp_path).__enter__()


def test_a_drive_without_locks_is_said(tmp_path, monkeypatch, capsys):
    fcntl = pytest.importorskip("fcntl")

    def refuse(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold(tmp_path):
        pass
    assert "cannot be locked here" in capsys.readouterr().err
