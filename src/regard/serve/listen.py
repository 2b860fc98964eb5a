"""Listening: the sockets, the processes that share a port, signals, logs.

With `--workers N`, N processes listen on one port, each with a socket of its own, among which Linux divides the
connections evenly (SO_REUSEPORT): of processes that wait for one socket, it wakes the same one again and again.
Elsewhere they share the socket.
Every process has its own copy of the models, its part of the cores and its part of the queue: with 1/N of the cores
it computes 1/N of the tokens/s, so that an accepted request waits as long as with one process. The first process
only watches: one that ends unexpectedly is started again, after a pause that doubles each time it ends soon. One worker
accepts connections while it loads the models, and answers 503; all others join when they and the first are ready, so
that no request gets 503 once the server was ready.

If no model can be loaded, the server ends with exit code 2; if some can, it serves these.

SIGTERM and SIGINT drain: no new connection is accepted, requests in progress are finished, and the exit code is 0. A
second SIGINT does not wait for them.
"""

from __future__ import annotations

import contextlib
import gc
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from regard.errors import UserError
from regard.messages import localize
from regard.start import import_torch

if TYPE_CHECKING:
    from regard.serve.models import Models
    from regard.serve.service import Service

SOON = 60.0  # seconds: a process that ends earlier is started again after a pause
PAUSES = (1.0, 64.0)  # the first pause, and the longest
USER_ERROR = 2  # exit code
DIVIDES = sys.platform == "linux"  # whether connections are divided among sockets with the same port


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
    shared: Path | None = None  # folder that several processes share
    first: bool = False  # of several processes, the one that accepts connections while it loads


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
    from regard.serve.guard import Keys

    Keys(settings.keys)  # a mistake shows before anything is started
    sock = bind(settings.host, settings.port)
    if settings.workers == 1 or not DIVIDES:
        announce(sock)
    else:
        address = sock.getsockname()
        sock.close()  # nobody else has the port: now it is only reserved, and the workers listen
        sock = reserve(sock.family, address)
    return run(settings, sock) if settings.workers == 1 else supervise(settings, sock)


def announce(sock: socket.socket) -> None:
    host, port = sock.getsockname()[:2]
    print(f"http://{f'[{host}]' if ':' in host else host}:{port}\n{localize('Ctrl-C stops it')}", flush=True)


def bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--host {host} --port {port}: {reason}; choose another") from None
    # Connections inherit this; asyncio sets it only on sockets that it has made. Without it the second of two small
    # writes waits 40 ms for the acknowledgement of the first.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.set_inheritable(True)
    return sock


def reserve(family: int, address: Any) -> socket.socket:
    """A socket that does not listen yet, at an address that others of its kind may have, too."""
    sock = socket.socket(family)
    for level, option in ((socket.SOL_SOCKET, socket.SO_REUSEADDR), (socket.SOL_SOCKET, socket.SO_REUSEPORT)):
        sock.setsockopt(level, option, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as `bind`
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.bind(address)
    return sock


def make_server(settings: Settings) -> tuple[Any, Service]:
    """uvicorn's server with our application, and its service; the models are not loaded yet."""
    import uvicorn

    from regard.models.folder import find_device
    from regard.serve.app import make_app
    from regard.serve.connection import Connection
    from regard.serve.guard import LOOPBACK, Guard, Keys
    from regard.serve.metrics import Metrics
    from regard.serve.models import Limits, Models
    from regard.serve.service import Service
    from regard.serve.shared import Reloads
    from regard.serve.work import Admission

    metrics = Metrics(shared=settings.shared is not None)
    limits = Limits(settings.batch_tokens, settings.batch_rows)
    models = Models(settings.folders, settings.languages, find_device(settings.device), limits, metrics.observer)
    admission = Admission(max(1, settings.queue_tokens // settings.workers), metrics.queue.set)
    service = Service(models, admission, settings.timeout, count=metrics.count)
    keys = Keys(settings.keys)
    guard = Guard(
        keys,
        limit=settings.body_limit,
        seconds=settings.timeout,
        rate=settings.rate,
        rates=None if settings.shared is None else settings.shared / "rates",
        proxy=settings.proxy,
        hosts=() if keys or settings.proxy or settings.host not in LOOPBACK else LOOPBACK,
    )
    reloads = Reloads(models.reload, settings.shared)
    app = make_app(service, guard, metrics, cors=settings.cors, admin_key=settings.admin_key, reload=reloads.reload)
    config = uvicorn.Config(
        app, http=Connection, log_config=None, access_log=False, lifespan="off", server_header=False, ws="none",
        timeout_keep_alive=75, proxy_headers=False,  # X-Forwarded-For is the guard's
    )  # fmt: skip
    return uvicorn.Server(config), service


def run(settings: Settings, sock: socket.socket, ready: Event | None = None) -> int:
    """Serve in this process. A worker waits for `ready`, which is set when the first has loaded its models."""
    import_torch()
    import torch

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    if settings.workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // settings.workers))
    server, service = make_server(settings)

    def drain(number: int | None = None, frame: FrameType | None = None) -> None:
        server.force_exit = service.draining and number == signal.SIGINT
        service.draining = True
        server.should_exit = True  # connections that wait are closed, requests in progress are finished

    def load() -> None:
        service.models.load_all()
        if not service.models.ready:
            drain()
            return
        gc.collect()
        gc.freeze()  # libraries and models stay: the garbage collector need not look at them again
        if ready is not None:
            ready.set()

    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT) if settings.shared is None else (signal.SIGTERM,):
            stack.callback(signal.signal, number, signal.signal(number, drain))
        stack.enter_context(sock)
        if (parent := multiprocessing.parent_process()) is not None:  # a worker ends with its supervisor
            threading.Thread(target=end_with, args=(parent, drain), daemon=True).start()
        if ready is None or settings.first:
            threading.Thread(target=load, daemon=True).start()
        else:
            service.models.load_all()
            check_models(service.models)
            while not (service.draining or ready.wait(0.1)):
                pass
        server.capture_signals = contextlib.nullcontext
        if settings.workers > 1 and DIVIDES:
            sock = stack.enter_context(reserve(sock.family, sock.getsockname()))
            sock.listen(2048)
            if settings.first:
                announce(sock)
        server.run(sockets=[sock])
        if not server.force_exit:
            service.models.close()
        check_models(service.models)
    return 0


def check_models(models: Models) -> None:
    """An error if none could be loaded, which a restart does not change."""
    if len(models.failed) == len(models.folders):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in models.failed.items())
        raise UserError(f"no model could be loaded: {reasons}")


def end_with(parent: BaseProcess, drain: Callable[[], None]) -> None:
    parent.join()
    drain()


def work(settings: Settings, sock: socket.socket, ready: Event) -> None:
    """A worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the supervisor sends SIGTERM
    try:
        run(settings, sock, ready)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)


@dataclass
class Slot:
    """The place of a worker process."""

    process: Any = None
    started: float = 0.0
    pause: float = 0.0  # before it is started again


def supervise(settings: Settings, sock: socket.socket) -> int:
    """Start the worker processes, start again what ends unexpectedly, end all at a signal."""
    from prometheus_client.multiprocess import mark_process_dead

    context, signals = multiprocessing.get_context("spawn"), list[int]()
    ready = context.Event()
    slots = [Slot() for _ in range(settings.workers)]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    with tempfile.TemporaryDirectory(prefix="regard-") as name:
        folder = Path(name)
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = name  # where the processes add up their metrics
        settings = replace(settings, shared=folder)
        while not signals:
            for index, slot in enumerate(slots):
                if slot.process is not None and not slot.process.is_alive():
                    code, seconds = slot.process.exitcode, time.monotonic() - slot.started
                    if code == USER_ERROR:  # which every process would repeat
                        return end(slots, sock, settings.timeout, signals) or code
                    slot.pause = min(2 * slot.pause or PAUSES[0], PAUSES[1]) if seconds < SOON else 0.0
                    print(f"worker {index} ended with code {code}; next start in {slot.pause:g} s", file=sys.stderr)
                    mark_process_dead(slot.process.pid)
                    (folder / f"{slot.process.pid}.json").unlink(missing_ok=True)
                    slot.process, slot.started = None, time.monotonic()
                    ready.set()  # the others do not wait for it
                if slot.process is None and time.monotonic() >= slot.started + slot.pause:
                    own = replace(settings, first=index == 0 and not ready.is_set())
                    slot.process = context.Process(target=work, args=(own, sock, ready), name=f"worker-{index}")
                    slot.process.start()
                    slot.started = time.monotonic()
            wait([slot.process.sentinel for slot in slots if slot.process is not None], timeout=0.2)
        return end(slots, sock, settings.timeout, signals)


def end(slots: list[Slot], sock: socket.socket, timeout: float, signals: list[int]) -> int:
    """Drain and end all workers."""
    sock.close()  # no process accepts connections any more
    running = [slot.process for slot in slots if slot.process is not None]
    for process in running:
        process.terminate()  # SIGTERM: it drains
    deadline, before = time.monotonic() + timeout + 5, len(signals)
    while any(process.is_alive() for process in running):
        if time.monotonic() > deadline or signal.SIGINT in signals[before:]:
            for process in running:
                process.kill()
        wait([process.sentinel for process in running], timeout=0.2)
    return 0
