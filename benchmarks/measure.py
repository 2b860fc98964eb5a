"""Timing of several tools, and the metadata of a result file.

Peers take turns (round robin), so that noise affects all of them equally. The result of a peer is the median over the
rounds; the spread is given as quartiles, or as minimum and maximum if there are few rounds. On a GPU each sample is a
batch of calls between two events; on a CPU it is the wall clock around as many calls as fill `least` seconds.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

Call = Callable[[], Any]
Outcome = TypeVar("Outcome")


def machine(device: str) -> dict[str, Any]:
    """The machine and the versions."""
    packages = ("torch", "transformers", "x-transformers", "ctranslate2", "onnxruntime", "scikit-learn", "triton")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    hardware = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return {
        "hardware": hardware,
        "threads": torch.get_num_threads(),
        "versions": versions,
        "command": " ".join(["python", *map(_without_folders, sys.argv)]),
        "commit": commit(),
    }


def commit() -> str:
    """The commit measured: from git, or from REGARD_COMMIT where the code was copied without its history."""
    if "REGARD_COMMIT" in os.environ:
        return os.environ["REGARD_COMMIT"]
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _without_folders(argument: str) -> str:
    """Result files do not contain folder names of the machine."""
    return Path(argument).name if argument.startswith("/") else argument


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def sample(call: Call, device: str, least: float) -> float:
    """Milliseconds of one call, from as many calls as fill `least` seconds."""
    calls = 1
    while True:
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(calls):
                call()
            end.record()
            torch.cuda.synchronize()
            spent = start.elapsed_time(end) / 1000
        else:
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            spent = time.perf_counter() - begin
        if spent >= least:
            return spent / calls * 1000
        calls = max(calls + 1, int(calls * least / max(spent, 1e-6) * 1.1))


def race(
    calls: Mapping[str, Call], device: str, rounds: int, least: float, warm: int = 3
) -> dict[str, dict[str, float]]:
    """{name: median, low and high quartile in ms}, the peers taking turns; each is called `warm` times before."""
    for call in calls.values():
        for _ in range(warm):
            call()
    times = take_turns({name: partial(sample, call, device, least) for name, call in calls.items()}, rounds)
    figures = {}
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        figures[name] = {"ms": round(statistics.median(values), 4), "low": round(low, 4), "high": round(high, 4)}
    return figures


def take_turns(calls: Mapping[str, Callable[[], Outcome]], rounds: int) -> dict[str, list[Outcome]]:
    """The results of each call, once per round; every round starts with another one."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            outcomes[name].append(calls[name]())
    return outcomes


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of a few samples."""
    figures = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {name: round(value, 1) for name, value in figures.items()}


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
