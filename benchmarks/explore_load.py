"""The server of `regard explore` under load: its start, its memory over many requests, and `api/alive` meanwhile.

    python benchmarks/explore_load.py RUN --out benchmarks/results/explore-load-cpu.json

    start     s from the command to its address, and to the first response about the model (also of CPU time)
    page      s from the command to the page that shows the output of the model, in a Chromium that is running already
    memory    MB (RSS) of the server after every tenth of the requests; all texts are different, so none is in its cache
    alive     ms of `api/alive` while `clients` clients send requests one after the other, and how many got a 503;
              patient clients wait a second after a refusal, as the page does, the others send again at once

Requests are those of the views in turn (`views`), with and without a change. Other processes slow everything down:
`load` is the load average, on `threads` cores. Needs Linux for the memory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import measure
from playwright.sync_api import sync_playwright


def ask(address: str, path: str, body: Any = None) -> int:
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=600)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(
            "GET" if body is None else "POST", url.path + path, content, {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        reply.read()
        return reply.status
    finally:
        connection.close()


def memory(process: subprocess.Popen[str]) -> float:
    """MB of a process."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return round((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 2)


PASSES = {
    "look": {}, "flow": {}, "lens": {}, "attribution": {}, "saliency": {}, "neurons": {}, "search": {"beam": 4},
    "generate": {}, "embeddings": {"side": "source"}, "position": {},
    "maps": {"part": "cross", "layer": 0, "heads": [0]},
    "steps": {"part": "cross", "layer": 0, "head": 0, "query": 0},
}  # fmt: skip


def question(run: str, number: int) -> dict[str, Any]:
    return {"run": run, "text": f"the {number} of {number * 7919 % 1000} was {number * 31 % 97}", "target": "1 2 3"}


def ask_view(address: str, run: str, number: int) -> int:
    """What one of the views asks; every other time with a head off."""
    path, fields = list(PASSES.items())[number % len(PASSES)]
    changes = {"heads": [["decoder", 0, 1]]} if number // len(PASSES) % 2 else {}
    return ask(address, f"api/{path}", {**question(run, number), **fields, "changes": changes})


def send(address: str, run: str, clients: int, seconds: float, pause: float, statuses: Any) -> None:
    """Clients in a process of their own: their threads would delay the measurement."""
    counts: Counter[int] = Counter()
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        while time.monotonic() < end:
            number += 1
            status = ask_view(address, run, number)
            counts[status] += 1
            time.sleep(pause if status == 503 else 0)

    threads = [threading.Thread(target=client, args=(1_000_000 + 10_000 * at,)) for at in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses.put(dict(counts))


def load(address: str, run: str, clients: int, seconds: float, pause: float) -> dict[str, Any]:
    """`api/alive` while clients send requests."""
    statuses: multiprocessing.Queue[dict[int, int]] = multiprocessing.Queue()
    sender = multiprocessing.Process(target=send, args=(address, run, clients, seconds, pause, statuses))
    sender.start()
    end, times = time.monotonic() + seconds, []
    while time.monotonic() < end:
        began = time.perf_counter()
        assert ask(address, "api/alive") == 200
        times.append(1000 * (time.perf_counter() - began))
        time.sleep(0.05)
    found = statuses.get(timeout=300)
    sender.join()
    ranked = sorted(times)
    figures = {"median": ranked[len(ranked) // 2], "p95": ranked[int(0.95 * len(ranked))], "longest": ranked[-1]}
    alive = {name: round(value, 1) for name, value in figures.items()}
    return {"clients": clients, "alive_ms": alive, "alive_requests": len(times), "statuses": found}


def page_times(folder: Path, rounds: int) -> list[float]:
    """Seconds from the command to the page with the model's own output."""
    seconds = []
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(rounds):
            page = browser.new_page(viewport={"width": 1440, "height": 1000})
            began = time.perf_counter()
            process = subprocess.Popen(command(folder), stdout=subprocess.PIPE, text=True)
            try:
                assert process.stdout is not None
                page.goto(process.stdout.readline().strip())
                page.locator("main[data-state=ready]").wait_for()
                seconds.append(time.perf_counter() - began)
            finally:
                process.terminate()
                process.wait(timeout=30)
            page.close()
        browser.close()
    return seconds


def command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "regard", "explore", str(folder), "--no-browser"]


def run(folder: Path, rounds: int, requests: int, clients: int, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": "explore load", "machine": measure.machine("cpu"), "load": os.getloadavg()[0]}
    result["page_s"] = measure.spread(page_times(folder, rounds))
    began, name = time.perf_counter(), folder.resolve().name
    process = subprocess.Popen(command(folder), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        start = {"address_s": round(time.perf_counter() - began, 2)}
        assert ask(address, "api/look", question(name, 0)) == 200
        start |= {"first_response_s": round(time.perf_counter() - began, 2), "cpu_s": cpu_seconds(process)}
        result |= {"start": start, "views": list(PASSES), "memory_mb": {"0": memory(process)}}
        print(result, flush=True)
        for number in range(1, requests + 1):
            assert ask_view(address, name, number) == 200, number
            if number % max(1, requests // 10) == 0:
                result["memory_mb"][str(number)] = memory(process)
                print(number, memory(process), flush=True)
        result["patient_clients"] = load(address, name, clients, seconds, 1.0)
        result["impatient_clients"] = load(address, name, clients, seconds, 0.0)
        result["memory_mb"]["after the load"] = memory(process)
    finally:
        process.terminate()
        process.wait(timeout=30)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="an encoder-decoder that reads text, such as the demo")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/explore-load-cpu.json"))
    parser.add_argument("--rounds", type=int, default=3, help="starts with a page")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the load")
    given = parser.parse_args()
    measure.write(given.out, run(given.run, given.rounds, given.requests, given.clients, given.seconds))
