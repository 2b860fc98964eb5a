"""Listening: the socket, the processes that share it, signals, logs.

With `--workers N`, N processes accept connections from one socket; the kernel gives each connection to one that waits.
Every process has its own copy of the models, which the operating system shares as far as weights are memory-mapped,
and its part of the cores. The first process only watches: one that ends unexpectedly is started again.

SIGTERM and SIGINT drain: no new request is accepted (503), those in progress are finished, and the exit code is 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from regard.errors import UserError

RESTART = 1.0  # seconds between the starts of a process that fails again and again


@dataclass(frozen=True)
class Settings:
    """The options of `regard serve`."""

    folders: dict[str, Path]
    languages: dict[str, tuple[str, str]]
    device: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    keys: str | None = None
    admin_key: str | None = None
    queue_tokens: int = 65_536
    batch_tokens: int = 4096
    batch_rows: int = 64
    timeout: float = 60.0
    rate: int = 0
    body_limit: int = 4_000_000
    cors: tuple[str, ...] = ()
    proxy: bool = False


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, message, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def serve(settings: Settings) -> int:
    """Serve until a signal; the exit code."""
    sock = bind(settings.host, settings.port)
    host, port = sock.getsockname()[:2]
    print(f"http://{host}:{port}\nCtrl-C stops it", flush=True)
    return run(settings, sock) if settings.workers == 1 else supervise(settings, sock)


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}; choose another") from None
    sock.set_inheritable(True)
    return sock


def run(settings: Settings, sock: socket.socket) -> int:
    """Serve in this process."""
    import torch
    import uvicorn

    from regard.models.folder import find_device
    from regard.serve.app import make_app
    from regard.serve.guard import Guard, Keys
    from regard.serve.metrics import Metrics
    from regard.serve.models import Limits, Models
    from regard.serve.service import Service
    from regard.serve.work import Admission

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if settings.workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // settings.workers))
    metrics = Metrics(shared=settings.workers > 1)
    models = Models(
        settings.folders,
        settings.languages,
        find_device(settings.device),
        Limits(settings.batch_tokens, settings.batch_rows),
        metrics.observer,
    )
    service = Service(models, Admission(settings.queue_tokens), settings.timeout)
    guard = Guard(Keys(settings.keys), limit=settings.body_limit, rate=settings.rate, proxy=settings.proxy)
    app = make_app(service, guard, metrics, cors=settings.cors, admin_key=settings.admin_key)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", server_header=False, ws="none", timeout_keep_alive=75
    )
    server = uvicorn.Server(config)

    def drain(number: int, frame: FrameType | None) -> None:
        service.draining = True
        server.should_exit = True  # connections that wait are closed, requests in progress are finished

    threading.Thread(target=models.load_all, daemon=True).start()
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            previous = signal.signal(number, drain)
            stack.callback(signal.signal, number, previous)
        stack.enter_context(sock)
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        server.run(sockets=[sock])
        models.close()
    return 0


def supervise(settings: Settings, sock: socket.socket) -> int:
    """Start the worker processes, start again what ends unexpectedly, end all at a signal."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="regard-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # where the processes add up their metrics
        stopping = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
        workers: dict[int, Any] = {}
        while not stopping.is_set():
            for index in range(settings.workers):
                if index not in workers or not workers[index].is_alive():
                    if index in workers:
                        from prometheus_client.multiprocess import mark_process_dead

                        mark_process_dead(workers[index].pid)
                        print(
                            f"worker {index} ended with code {workers[index].exitcode}; started again", file=sys.stderr
                        )
                    workers[index] = context.Process(target=run, args=(settings, sock), name=f"worker-{index}")
                    workers[index].start()
            stopping.wait(RESTART)
        for worker in workers.values():
            if worker.is_alive():
                worker.terminate()  # SIGTERM: it drains
        for worker in workers.values():
            worker.join(settings.timeout + 5)
            if worker.is_alive():
                worker.kill()
    sock.close()
    return 0
