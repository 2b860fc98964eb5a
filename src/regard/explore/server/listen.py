"""Listening: a socket on this machine only, which requests are accepted, and a browser that opens the address.

The server listens on this machine only, but every page in every browser tab of this machine can send it requests, and
a domain name may be made to resolve to 127.0.0.1 (DNS rebinding). So each request must

    carry the token      /TOKEN/…: random, new at every start, compared in constant time        else 403
    name this host       Host: 127.0.0.1:PORT or localhost:PORT                                 else 403
    come from this page  Origin, and Sec-Fetch-Site where a browser sends it, are its own       else 403
    be small             at most 1 MB, whether its length is announced or not                   else 413

and every response forbids the browser to load, embed or run anything from elsewhere.

The page and its prepared example are there at once. Loading the model takes longer (importing PyTorch alone takes
a second), so it happens in a thread, and is done or under way when the first question comes.

A request without the token that a browser shows as a page (after a restart, whose token is another) is answered by a
page that explains it.
"""

from __future__ import annotations

import asyncio
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
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.errors import UserError
from regard.explore.server.app import make_app
from regard.explore.server.models import Models
from regard.explore.server.work import BUSY, Work
from regard.messages import language, localize
from regard.page import HEADERS

HOST = "127.0.0.1"
HELD = 0.5  # s until a 503 is sent: a client that tries again at once does so twice per second, not a thousand times
LIMIT = 1_000_000  # bytes of a request's body
TOO_LARGE = f"the request is larger than {LIMIT:,} bytes; send less"

EXPLANATION = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Regard</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<main><h1>This address is no longer valid</h1>
<p>Each start of <code>regard explore</code> has an address of its own, with a new token. Open the address that it
printed last in the terminal. If the server was restarted, an older page keeps its results until it is closed.</p>
<p lang="ko">이 주소는 더 이상 유효하지 않습니다. <code>regard explore</code>를 시작할 때마다 새 토큰이 들어간 주소가
만들어집니다. 터미널에 마지막으로 출력된 주소를 여세요.</p></main></html>
"""


class Guard:
    """Wraps an application; a refused request never reaches it."""

    def __init__(self, app: ASGIApp, token: str, port: int, work: Work) -> None:
        self.app, self.token, self.work = app, token, work
        self.image = f"/{token}/api/image"  # the only POST that is not computed
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
        if refusal is None and self.work.is_full and scope["method"] == "POST" and scope["path"] != self.image:
            refusal = 503, BUSY  # before the request is parsed: a crowd of clients must not delay `alive`
        if refusal is None:
            return await self.app(scope, counted, guarded)
        # read the request to its end, within limits: a client cut off while sending may not read the response
        for _ in range(1000):  # messages of at most 64 kB
            if not (await receive()).get("more_body"):
                break
        status, message = refusal
        if status == 503:
            await asyncio.sleep(HELD)
        close = {"connection": "close", **({"retry-after": "1"} if status == 503 else {})}
        reply: Response = JSONResponse({"error": message}, status, close)
        if status == 403 and "text/html" in Headers(scope=scope).get("accept", ""):  # a browser shows it to a person
            reply = HTMLResponse(EXPLANATION, status, close)
        await reply(scope, receive, guarded)

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
        self.models, self.work, token = models, Work(), secrets.token_urlsafe(18)
        try:
            self.socket = socket.create_server((HOST, port), backlog=128)  # an early request waits instead of failing
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a response is not held back for 40 ms
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise UserError(f"--port {port}: {why}; choose another, or remove --port") from None
        port = self.socket.getsockname()[1]
        self.address = f"http://{HOST}:{port}/{token}/"
        config = uvicorn.Config(
            Guard(make_app(models, token, self.work), token, port, self.work),
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
        self.work.submit(self._warm)
        with self.socket, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to end it
            self.server.run(sockets=[self.socket])
        self.work.close()

    def stop(self) -> None:
        """End `run`; from another thread."""
        self.server.should_exit = True

    def _warm(self) -> None:
        """Compute the first look before it is asked for. An error is reported when it is."""
        with contextlib.suppress(Exception):
            self.models.first_look()


def serve(models: Models, port: int = 0, fragment: str = "", *, browser: bool = True) -> None:
    """Serve until Ctrl-C. The address is printed first, on a line of its own."""
    listener = Listener(models, port)
    chosen = "?lang=ko" if language() == "ko" else ""  # otherwise the browser's
    address = listener.address + chosen + (f"#{fragment}" if fragment else "")
    print(localize(f"{address}\nCtrl-C stops it"), flush=True)
    if browser:
        threading.Thread(target=show, args=(address,), daemon=True).start()
    listener.run()


def show(address: str) -> None:
    """Open the browser, unless there is no screen: a browser inside the terminal would take it over."""
    screen = sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if not (screen and webbrowser.open(address)):
        print(localize("no browser found here; open the address above in one"), file=sys.stderr)
