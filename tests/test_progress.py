"""Signs of life: what takes long is shown, the rest is silent, and a fork happens without the thread."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from regard import progress
from regard.progress import Stage, duration, paused, rounded, stage, watched


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.05)
    monkeypatch.setattr(progress, "POLL", 0.01)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (45.4, "45 s"), (99, "99 s"), (100, "2 min"), (3540, "59 min"), (3599, "1 h"), (3600, "1 h"),
        (12_000, "3 h 20 min"), (86_400, "24 h"), (190_000, "2 days 5 h"), (172_800, "2 days"),
    ],
)  # fmt: skip
def test_durations_as_a_person_says_them(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0.0123, "0.012"), (5.49, "5.5"), (16.8, "17"), (1000.0, "1,000")])
def test_few_digits(number, text):
    assert rounded(number) == text


def test_short_work_is_silent_and_long_work_shows_what_it_does(quick, capsys):
    with stage("reading", "rows"):
        pass
    assert capsys.readouterr().err == ""
    for _ in watched(range(3), "reading 한국어.txt", "rows", 3):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines and lines[0] == "reading 한국어.txt: 0 of 3 rows, 0 s"


def test_one_long_call_is_no_silence(quick, capsys):
    with stage("outer"), stage("training the tokenizer"):
        time.sleep(0.15)
    assert capsys.readouterr().err.startswith("training the tokenizer: 0 s\n")  # the innermost only


def test_lines_become_rare(capsys):
    one = Stage("working")
    begin = one.began
    for second in range(301):
        one.show(begin + second)
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"working: {duration(at)}" for at in (2, 5, 11, 23, 47, 95, 155, 215, 275)]


def test_no_thread_remains_even_after_an_error(quick):
    before = threading.active_count()
    with pytest.raises(ValueError), stage("reading"), stage("inside"):
        assert threading.active_count() == before + 1
        with paused():
            assert threading.active_count() == before
        assert threading.active_count() == before + 1
        raise ValueError
    assert threading.active_count() == before and not progress._stages
    with paused():
        pass
    assert threading.active_count() == before  # nothing to show


def test_a_closed_standard_error_is_no_error(quick, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with stage("reading"):
        time.sleep(0.1)


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_in_a_terminal_one_line_that_is_removed(quick, monkeypatch):
    import pty

    master, slave = pty.openpty()
    with os.fdopen(slave, "w", buffering=1) as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with stage("reading"):
            time.sleep(0.15)
        end, text = time.monotonic() + 10, ""
        while not text.endswith(" \r") and time.monotonic() < end:  # a terminal gives what has arrived
            text += os.read(master, 10_000).decode()
    os.close(master)
    assert text.startswith("\rreading: 0 s") and "\n" not in text and text.endswith(" " * 12 + "\r")


@pytest.mark.slow
def test_the_first_sign_of_a_command_comes_within_five_seconds_of_work(tmp_path):
    """A reader so slow that nothing else is printed: the line comes through a pipe while it reads."""
    (tmp_path / "a.txt").write_text("a dog runs\n" * 50)
    (tmp_path / "mine.toml").write_text(
        'task = "language-modeling"\n[data]\ntrain = ["a.txt"]\n[text]\nkind = "char"\n'
        "[model]\ndim = 8\nheads = 2\nlayers = 1\nmax_length = 8\n[train]\nsteps = 1\nbatch_tokens = 16\n"
    )
    script = (
        "import sys, time; from regard.tasks.language_modeling import LanguageModeling as L; old = L.check_data\n"
        "L.check_data = lambda self: (print('begin', file=sys.stderr, flush=True), time.sleep(3.2), old(self))\n"
        "from regard.cli import main; sys.exit(main(['train', 'mine.toml', '--device', 'cpu']))"
    )
    run = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    lines, begin = [], 0.0
    assert run.stderr is not None
    for line in run.stderr:
        lines.append(line)
        if line == "begin\n":
            begin = time.monotonic()
        if line.startswith("reading the data: "):
            assert time.monotonic() - begin < 5
            break
    run.communicate()
    assert run.returncode == 0 and lines[-1].startswith("reading the data: "), lines
    assert Path(tmp_path / "runs" / "mine" / "model.safetensors").is_file()
