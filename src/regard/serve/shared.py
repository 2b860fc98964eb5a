"""What processes that share a port tell each other: that a model is to be loaded again, and that this is done.

    orders.json     {model: number of the newest version}          written by the process that got the request
    PID.json        {model: [number, error or null]}               written by the process PID, for itself

Every process polls the orders, loads what is newer than its own, and writes what became of it. The process that got
the request loads first: if that fails, nothing is ordered. The supervisor removes the files of a process that ended.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.files import locked, write_atomically

POLL = 0.5  # seconds
log = logging.getLogger("regard.serve")


class NotAll(Exception):
    """Some processes have a new version of a model, but not all."""


class Reloads:
    """Loads models again, with `load(name)` in this process and in those that share `folder`."""

    def __init__(self, load: Callable[[str], None], folder: Path | None = None) -> None:
        self.load, self.folder = load, folder
        self.done: dict[str, tuple[int, str | None]] = {}
        if folder is not None:
            self.done = {name: (number, None) for name, number in self._read("orders").items()}
            self._report()
            threading.Thread(target=self._follow, daemon=True).start()

    def reload(self, name: str, seconds: float = 120.0) -> None:
        """Load a model again in all processes; `NotAll` if only some of them have."""
        self.load(name)
        if self.folder is None:
            return
        with (self.folder / "lock").open("w") as file, locked(file):
            orders = self._read("orders")
            number = orders[name] = orders.get(name, 0) + 1
            self.done[name] = (number, None)
            self._report()
            self._write("orders", orders)
        deadline = time.monotonic() + seconds
        while waiting := self._behind(name, number):
            if time.monotonic() > deadline:
                raise NotAll(f"{len(waiting)} other processes have not replaced it within {seconds:g} s")
            time.sleep(0.05)

    def _behind(self, name: str, number: int) -> list[str]:
        """The processes that have not loaded this version yet; an error if one could not."""
        waiting = []
        for path in self.folder.glob("[0-9]*.json") if self.folder is not None else ():
            known, error = self._read(path.stem).get(name, (0, None))
            if known >= number and error is not None:
                raise NotAll(f"another process could not load it: {error}")
            if known < number and path.exists():  # not that of a process that has just ended
                waiting.append(path.stem)
        return waiting

    def _follow(self) -> None:
        """Do what other processes order."""
        while True:
            time.sleep(POLL)
            for name, number in self._read("orders").items():
                if number <= self.done.get(name, (0, None))[0]:
                    continue
                error = None
                try:
                    self.load(name)
                except Exception as failure:
                    log.exception("model not replaced", extra={"fields": {"model": name}})
                    error = type(failure).__name__
                self.done[name] = (number, error)
                self._report()

    def _report(self) -> None:
        self._write(str(os.getpid()), self.done)

    def _read(self, stem: str) -> dict[str, Any]:
        assert self.folder is not None
        try:
            content: dict[str, Any] = json.loads((self.folder / f"{stem}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        return content

    def _write(self, stem: str, content: Any) -> None:
        assert self.folder is not None
        write_atomically(self.folder / f"{stem}.json", json.dumps(content).encode())
