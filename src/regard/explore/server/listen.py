"""Listening: a socket on this machine only, a token, and a browser that opens the address.

The page and its prepared example are there at once. Loading the model takes longer (importing PyTorch alone takes
seconds), so it happens in a thread, and is done or under way when the first question comes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import webbrowser

import uvicorn

from regard.errors import UserError
from regard.explore.server.app import make_app
from regard.explore.server.guard import Guard
from regard.explore.server.models import Models

HOST = "127.0.0.1"


class Listener:
    """The server: bound when it is created, responding while `run` runs, until `stop`."""

    def __init__(self, models: Models, port: int = 0) -> None:
        self.models, token = models, secrets.token_urlsafe(18)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if os.name == "posix":  # a port just closed may be reused; on Windows this would share it
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((HOST, port))
        except OSError as error:
            self.socket.close()
            raise UserError(f"--port {port}: {error.strerror}; choose another, or remove --port") from None
        self.socket.listen(128)  # from here on, an early request waits instead of failing
        port = self.socket.getsockname()[1]
        self.address = f"http://{HOST}:{port}/{token}/"
        config = uvicorn.Config(
            Guard(make_app(models, token), token, port),
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)

    def run(self) -> None:
        threading.Thread(target=self._warm, daemon=True).start()
        with self.socket, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to end it
            self.server.run(sockets=[self.socket])

    def stop(self) -> None:
        """End `run`; from another thread."""
        self.server.should_exit = True

    def _warm(self) -> None:
        """Load the first model before it is needed. An error is reported when it is needed."""
        with contextlib.suppress(Exception):
            self.models.open(next(iter(self.models.folders)))


def serve(models: Models, port: int = 0, fragment: str = "", *, browser: bool = True) -> None:
    """Serve until Ctrl-C. The address is printed first, on a line of its own."""
    listener = Listener(models, port)
    address = listener.address + (f"#{fragment}" if fragment else "")
    print(f"{address}\nCtrl-C stops it", flush=True)
    if browser:
        threading.Thread(target=show, args=(address,), daemon=True).start()
    listener.run()


def show(address: str) -> None:
    """Open the browser, unless there is no screen: a browser inside the terminal would take it over."""
    screen = sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if not (screen and webbrowser.open(address)):
        print("no browser found here; open the address above in one", file=sys.stderr)
