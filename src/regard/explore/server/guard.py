"""The guard: which requests the server accepts.

The server listens on this machine only, but every page in every browser tab of this machine can send it requests, and
a domain name may be made to resolve to 127.0.0.1 (DNS rebinding). So each request must

    carry the token      /TOKEN/…: random, new at every start, compared in constant time        else 403
    name this host       Host: 127.0.0.1:PORT or localhost:PORT                                 else 403
    come from this page  Origin, and Sec-Fetch-Site where a browser sends it, are its own       else 403
    be small             at most 1 MB, whether its length is announced or not                   else 413

and every response forbids the browser to load, embed or run anything from elsewhere.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

LIMIT = 1_000_000  # bytes of a request's body
TOO_LARGE = f"the request is larger than {LIMIT:,} bytes; send less"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """Wraps an application; a refused request never reaches it."""

    def __init__(self, app: App, token: str, port: int) -> None:
        self.app, self.token = app, token
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refusal = self.refuse(scope["path"], headers)
        if refusal is not None:
            await drain(receive)
            return await answer(send, *refusal)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *encoded(HEADERS)]
            await send(message)

        await self.app(scope, Counted(receive), guarded)

    def refuse(self, path: str, headers: MutableMapping[str, str]) -> tuple[int, str] | None:
        """(status, message) for a request that is refused, else None."""
        if headers.get("host") not in self.hosts:
            return 403, "this server answers only to its own address on this machine"
        token, slash, _ = path.removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(token.encode(), self.token.encode()):
            return 403, "the address lacks the token; use the one that  regard explore  printed"
        if "origin" in headers and headers["origin"].removeprefix("http://") not in self.hosts:
            return 403, "this request comes from another page"
        inner = headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
        if not inner and headers.get("sec-fetch-mode") != "navigate":  # a link on another page may lead here
            return 403, "this request comes from another page"
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit():
            return 400, f"Content-Length = {length[:20]!r}: not a number"
        if len(length) > 12 or int(length) > LIMIT:
            return 413, TOO_LARGE
        return None


class Counted:
    """The messages of a request, up to LIMIT bytes of body."""

    def __init__(self, receive: Receive) -> None:
        self.receive, self.size = receive, 0

    async def __call__(self) -> Message:
        message = await self.receive()
        self.size += len(message.get("body", b""))
        if self.size > LIMIT:
            raise HTTPException(413, TOO_LARGE)  # becomes a response like any other error
        return message


async def drain(receive: Receive) -> None:
    """Read a refused request to its end, within limits: a client cut off while sending may not read the response."""
    for _ in range(1000):  # messages of at most 64 kB
        if not (await receive()).get("more_body"):
            return


def encoded(headers: MutableMapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


async def answer(send: Send, status: int, message: str) -> None:
    """A refusal, like all errors: {"error": "…"}."""
    body = json.dumps({"error": message}).encode()
    own = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    await send({"type": "http.response.start", "status": status, "headers": encoded({**HEADERS, **own})})
    await send({"type": "http.response.body", "body": body})
