"""What a request must satisfy before it is processed: host, size, time, key, rate.

    head   target and headers have at most 16 KB together                                             else 431
    host   a server without keys that listens on this machine only is called by its names             else 403
    size   the body has at most `limit` bytes, whether its length is announced or not                 else 413
    time   the body is there within `seconds`, and the client reads its response                      else 408
    key    if there are keys: `Authorization: Bearer KEY`, or the field `api_key` of LibreTranslate   else 401
    rate   at most `rate` requests per minute for each key, or without a valid key for each address   else 429

Keys are compared in constant time, by their SHA-256, and appear nowhere: not in logs, metrics or error messages, and
not in the list of processes, since they come from a file or from the environment. X-Forwarded-For is what a client
claims; it is read only if the server was told that a proxy in front of it sets it, and then only its last address,
which is the one that this proxy has added. The host is checked because a page of any site can give its own name the
address 127.0.0.1, and then read the responses of a server on the visitor's machine (DNS rebinding).

Processes that share a port share the buckets of the rate: a token bucket is (time of its last request, requests left),
in a table in memory that all of them map, in the row of the client's hash.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import mmap
import os
import struct
import threading
import time
from collections.abc import Collection
from contextlib import nullcontext, suppress
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.errors import UserError
from regard.files import locked
from regard.serve.errors import ApiError, error_response

VARIABLE = "REGARD_API_KEYS"
OPEN = ("/", "/docs", "/openapi.json", "/icon.svg", "/health", "/ready", "/languages")  # without a key
ASSETS = "/assets/"  # files of the page
FIELDS = ("/translate", "/detect")  # where the key may be a field of the body
CHECKED = "regard.key_checked"  # in the scope of a request
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LINGER, SILENCE = 30.0, 2.0  # seconds that the rest of a refused body is read, and that nothing may come
MOST_HEAD = 2**14  # bytes
ROWS = 2**14  # of the table of rates
ROW = struct.Struct("=16s2d")  # hash of a client, time, requests left


class Keys:
    """The keys of a server, as hashes: those of a file, one per line, and of the environment, separated by commas."""

    def __init__(self, file: str | None = None) -> None:
        lines = os.environ.get(VARIABLE, "").split(",")
        if file is not None:
            try:
                lines += Path(file).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"--keys {file}: cannot be read ({error})") from None
        keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if file is not None and not keys:
            raise UserError(f"--keys {file}: contains no keys; write one per line")
        if short := [number for number, key in enumerate(keys, 1) if len(key) < 16]:
            raise UserError(f"key {short[0]} has fewer than 16 characters; make one with  openssl rand -hex 24")
        self.hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self.hashes)

    def find(self, key: str) -> str | None:
        """The number of a key, for counting; None if it is not one. Every hash is compared, in constant time."""
        given, found = hashlib.sha256(key.encode(errors="surrogatepass")).digest(), None
        for number, known in enumerate(self.hashes, 1):
            if hmac.compare_digest(given, known):
                found = f"key {number}"
        return found


class Rates:
    """A token bucket for each client: `rate` requests per minute, of which a quarter may come at once.

    `file`: where the buckets are, for all processes that open it. Two clients in one row replace each other, which
    gives them more than their rate, never less.
    """

    def __init__(self, rate: int, file: Path | None = None) -> None:
        self.rate, self.burst, self._thread = rate, max(1.0, rate / 4), threading.Lock()
        self._file = None if file is None else file.open("a+b")
        if self._file is not None:
            self._file.truncate(ROWS * ROW.size)
        self._table = mmap.mmap(-1 if self._file is None else self._file.fileno(), ROWS * ROW.size)

    def take(self, client: str) -> int:
        """Count a request; 0, or the seconds after which the client may send the next."""
        key = hashlib.blake2b(client.encode(errors="replace"), digest_size=16).digest()
        offset = int.from_bytes(key[:4], "little") % ROWS * ROW.size
        with self._thread, nullcontext() if self._file is None else locked(self._file):
            owner, then, left = ROW.unpack_from(self._table, offset)
            now = time.monotonic()  # the same clock in all processes
            left = min(self.burst, left + (now - then) * self.rate / 60) if owner == key else self.burst
            ROW.pack_into(self._table, offset, key, now, left - 1 if left >= 1 else left)
        return 0 if left >= 1 else max(1, round((1 - left) * 60 / self.rate))


def client_address(text: str) -> str | None:
    """An IP address, with or without a port; of IPv6 its /64, which one client owns. None if it is not one."""
    text = text.strip().strip('"')
    host = text[1:].partition("]")[0] if text.startswith("[") else text
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if address.version == 4:
        return str(address)
    mapped = address.ipv4_mapped
    return str(mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))


class Guard:
    """Refuses requests before they reach the application; `check_field` is for keys that come as a field."""

    def __init__(
        self,
        keys: Keys,
        *,
        limit: int = 4_000_000,
        seconds: float = 60.0,
        rate: int = 0,
        rates: Path | None = None,
        proxy: bool = False,
        hosts: Collection[str] = (),
    ) -> None:
        """`rates`: the file of the buckets, if other processes count too. `hosts`: names of the server (none: any)."""
        self.keys, self.limit, self.seconds, self.proxy, self.hosts = keys, limit, seconds, proxy, hosts
        self.rates = Rates(rate, rates) if rate else None

    def check(self, scope: Scope) -> None:
        """Raise the `ApiError` for a request that is refused by its headers."""
        headers, path = Headers(scope=scope), scope["path"]
        parts = (scope["raw_path"], scope["query_string"], *(part for header in scope["headers"] for part in header))
        if sum(map(len, parts)) > MOST_HEAD:  # h11 limits what has not arrived completely
            raise ApiError(431, f"the headers have more than {MOST_HEAD:,} bytes")
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise ApiError(400, "Content-Length is not a number")
        if int(length) > self.limit:
            raise self.too_large()
        if self.hosts and host_name(headers.get("host", "")) not in self.hosts:
            raise ApiError(403, "this server is called by another name: its address, or localhost", code="host")
        if path in OPEN or path.startswith(ASSETS):
            return
        client = self.address(scope, headers)
        if self.keys:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            if not given and path in FIELDS:
                return  # `check_field` follows when the body is read
            client = self.check_key(given, client)
        scope[CHECKED] = True
        self.count(client)

    def check_key(self, key: object, address: str) -> str:
        """The name of the key for counting, or an error, which counts for the address."""
        found = self.keys.find(key) if isinstance(key, str) and key else None
        if found is None:
            self.count(address)
            raise ApiError(401, "this server needs a key: send  Authorization: Bearer KEY", code="invalid_api_key")
        return found

    def check_field(self, scope: Scope, key: object) -> None:
        """The same for a route that reads the key from its body, unless a header had it."""
        if self.keys and CHECKED not in scope:
            self.count(self.check_key(key, self.address(scope, Headers(scope=scope))))

    def count(self, client: str) -> None:
        if self.rates is not None and (seconds := self.rates.take(client)):
            raise ApiError(
                429, f"more than {self.rates.rate} requests per minute", code="rate_limit", retry_after=seconds
            )

    def address(self, scope: Scope, headers: Headers) -> str:
        own = (scope["client"] or ("?",))[0]
        claimed = headers.getlist("x-forwarded-for")[-1:] if self.proxy else []  # a proxy may add a line of its own
        address = client_address(claimed[0].rpartition(",")[2]) if claimed else None
        return address or client_address(own) or own

    def too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.limit:,} bytes", code="too_large")


def host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower()


async def drain(receive: Receive) -> None:
    """Read the rest of a body that was refused.

    A connection that is closed with unread data is reset, so that a client that sends everything before it reads would
    never see the response.
    """
    deadline = asyncio.get_running_loop().time() + LINGER
    with suppress(TimeoutError):
        while asyncio.get_running_loop().time() < deadline:
            async with asyncio.timeout(SILENCE):
                if not (await receive()).get("more_body"):
                    return


class GuardMiddleware:
    """The guard around an application."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size, complete, stalled, status, guard = 0, False, False, 0, self.guard
        deadline = asyncio.get_running_loop().time() + guard.seconds

        async def counted() -> Message:
            nonlocal size, complete
            try:
                async with asyncio.timeout_at(None if complete else deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {guard.seconds:g} s", code="timeout") from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > guard.limit:
                raise guard.too_large()
            return message

        async def timed(message: Message) -> None:
            nonlocal stalled, status
            status = message.get("status", status)
            is_end = message["type"] == "http.response.body" and not message.get("more_body")
            is_refused = status >= 400 and status != 408 and not complete
            try:
                async with asyncio.timeout(guard.seconds):
                    await send({**message, "more_body": True} if is_end and is_refused else message)
            except TimeoutError:
                stalled = True
                raise
            if is_end and is_refused:
                await drain(receive)
                await send({"type": "http.response.body"})

        try:
            guard.check(scope)
        except ApiError as error:
            await error_response(scope, error)(scope, receive, timed)
            return
        try:
            await self.app(scope, counted, timed)
        except Exception:
            if not stalled:  # otherwise the client does not read its response, and the server closes the connection
                raise
