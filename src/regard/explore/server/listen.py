"""Listening: a socket on this machine only, which requests are accepted, and a browser that opens the address.

The server listens on this machine only, but every page in every browser tab of this machine can send it requests, and
a domain name may be made to resolve to 127.0.0.1 (DNS rebinding). So each request must

    carry the token      /TOKEN/…: random, new at every start, compared in constant time        else 403
    name this host       Host: 127.0.0.1:PORT or localhost:PORT                                 else 403
    come from this page  Origin, and Sec-Fetch-Site where a browser sends it, are its own       else 403
    be small             at most 1 MB, whether its length is announced or not                   else 413

and every response forbids the browser to load, embed or run anything from elsewhere.

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
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.errors import UserError
from regard.explore.server.app import make_app
from regard.explore.server.models import Models
from regard.page import HEADERS

HOST = "127.0.0.1"
LIMIT = 1_000_000  # bytes of a request's body
TOO_LARGE = f"the request is larger than {LIMIT:,} bytes; send less"


class Guard:
    """Wraps an application; a refused request never reaches it."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app, self.token = app, token
        self.hosts = {f"{name}:{port}" for name in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > LIMIT:
                raise HTTPException(413, TOO_LARGE)  # becomes a response like any other error
            return message

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refusal = self.refuse(scope["path"], Headers(scope=scope))
        if refusal is None:
            return await self.app(scope, counted, guarded)
        # read the request to its end, within limits: a client cut off while sending may not read the response
        for _ in range(1000):  # messages of at most 64 kB
            if not (await receive()).get("more_body"):
                break
        status, message = refusal
        await JSONResponse({"error": message}, status, {"connection": "close"})(scope, receive, guarded)

    def refuse(self, path: str, headers: Headers) -> tuple[int, str] | None:
        """(status, message) for a request that is refused, else None."""
        if headers.get("host") not in self.hosts:
            return 403, "this server answers only to its own address on this machine"
        token, slash, _ = path.removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(token.encode(), self.token.encode()):
            return 403, "the address lacks the token; use the one that  regard explore  printed"
        own = "origin" not in headers or headers["origin"].removeprefix("http://") in self.hosts
        inner = headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
        if not own or (not inner and headers.get("sec-fetch-mode") != "navigate"):  # a link elsewhere may lead here
            return 403, "this request comes from another page"
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            return 400, f"Content-Length = {length[:20]!r}: not a number"
        if len(length) > 12 or int(length) > LIMIT:
            return 413, TOO_LARGE
        return None


class Listener:
    """The server: bound when it is created, responding while `run` runs, until `stop`."""

    def __init__(self, models: Models, port: int = 0) -> None:
        self.models, token = models, secrets.token_urlsafe(18)
        try:
            self.socket = socket.create_server((HOST, port), backlog=128)  # an early request waits instead of failing
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a response is not held back for 40 ms
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise UserError(f"--port {port}: {why}; choose another, or remove --port") from None
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
