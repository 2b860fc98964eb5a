"""Shared by all tests: reproducible random numbers, few threads, Ctrl-C, which tests are slow or need a GPU.

torch is seeded only if a test module has imported it, so that the tests of the command line alone start in
milliseconds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine must not fail a test: examples have no time limit.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Test tensors are tiny, so that several threads would be slower than one. The variable also applies to torch in
# subprocesses, and must be set before torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests read English messages, whatever the locale of the machine.
os.environ["REGARD_LANG"] = "en"


def pytest_configure() -> None:
    """SIGINT interrupts, as at a terminal, even if the process that started the tests ignores it.

    A background job of a shell script and some CI runners pass an ignored SIGINT on. Once Python handles the signal,
    the processes that tests start have its default action too: `exec` resets every signal that has a handler.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state, regardless of the tests before it."""
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory for the commands of a test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`once(name, make)`: the folder `name`, filled by `make(folder)` in one test process and read by all of them.

    Use it for what takes seconds to make, such as trained models. Tests must not change the folder.
    """
    from filelock import FileLock

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        path, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                make(path)
                done.touch()
        return path

    return folder


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("grid") and not item.get_closest_marker("slow"):
            function = item.nodeid.partition("[")[0]
            if seen[function] % 4:
                item.add_marker(pytest.mark.slow)
            seen[function] += 1
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
