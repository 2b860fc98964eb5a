"""Claims on the runs of a study: one process at a time, whatever happens to the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from claiming import NAMES
from regard.study import claim
from regard.study.claim import file_system_time, owner_of, take


def test_one_of_many_gets_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        claims = [one for one in pool.map(lambda _: take(tmp_path, "base@1"), range(64)) if one is not None]
    assert len(claims) == 1
    owner = owner_of(tmp_path, "base@1")
    assert owner is not None and owner["process"] == os.getpid()
    claims[0].release()
    assert owner_of(tmp_path, "base@1") is None
    again = take(tmp_path, "base@1")
    assert again is not None and again.number == 1
    again.release()


def test_a_lease_is_renewed_by_its_owner(tmp_path: Path) -> None:
    own = take(tmp_path, "base@1", lease=0.6)
    assert own is not None
    time.sleep(1.5)
    assert take(tmp_path, "base@1") is None and not own.lost
    own.release()


def other_machine(path: Path) -> None:
    """As if a process of another machine had made it."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "machine": "elsewhere"}))


def test_a_claim_without_a_sign_of_life_is_taken_over_once_and_its_owner_notices(tmp_path: Path) -> None:
    own = take(tmp_path, "base@1", lease=0.6)
    assert own is not None
    own.stop.set()  # as if the process were stopped
    own.thread.join()
    other_machine(own.path)
    assert take(tmp_path, "base@1") is None
    now = file_system_time(tmp_path)
    os.utime(own.path, (now - 1, now - 1))
    with ThreadPoolExecutor(8) as pool:
        others = [one for one in pool.map(lambda _: take(tmp_path, "base@1"), range(16)) if one is not None]
    assert len(others) == 1 and others[0].number == 1
    noticed: list[bool] = []
    woken = claim.Claim(tmp_path, "base@1", 0, 0.1)
    woken.on_lost = lambda: noticed.append(True)
    woken.thread.join(5)
    assert woken.lost and noticed
    others[0].release()


def test_a_stale_look_takes_nothing_from_the_new_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two saw that the owner was dead; the second acts after the first has taken over."""
    dead = take(tmp_path, "base@1")
    assert dead is not None
    dead.release()
    first = take(tmp_path, "base@1")
    monkeypatch.setattr(claim, "_last", lambda folder, name: 0)  # what the second saw before
    assert first is not None and take(tmp_path, "base@1") is None
    first.release()


def test_clocks_of_machines_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = take(tmp_path, "base@1")
    assert own is not None
    other_machine(own.path)
    monkeypatch.setattr(time, "time", lambda: 4e9)  # this one's clock is decades ahead
    assert take(tmp_path, "base@1") is None
    own.release()


def test_three_processes_one_killed_every_run_ends_once(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "claiming.py"), str(tmp_path), "2", "0.4"]
    workers = [subprocess.Popen(command) for _ in range(3)]
    try:
        log = tmp_path / "log"
        until = time.monotonic() + 30
        while time.monotonic() < until and not (log.exists() and f"{workers[0].pid} begin" in log.read_text()):
            time.sleep(0.02)
        workers[0].send_signal(signal.SIGKILL)
        assert workers[0].wait(30) == -signal.SIGKILL
        assert [worker.wait(60) for worker in workers[1:]] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
    lines = [line.split() for line in log.read_text().splitlines()]
    ended = Counter(name for _, what, name in lines if what == "end")
    assert ended == dict.fromkeys(NAMES, 1)
    begun = Counter(name for _, what, name in lines if what == "begin")
    assert sum(begun.values()) in (len(NAMES), len(NAMES) + 1)  # the killed one's run was begun twice
