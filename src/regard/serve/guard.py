"""What a request must satisfy before it is processed: size, key, rate.

    size   the body has at most `limit` bytes, whether its length is announced or not                    else 413
    key    if the server has keys: `Authorization: Bearer KEY`, or the field `api_key` of LibreTranslate  else 401
    rate   at most `rate` requests per minute for each key, or without keys for each address              else 429

Keys are compared in constant time, by their SHA-256, and appear nowhere: not in logs, metrics or error messages, and
not in the list of processes, since they come from a file or from the environment. X-Forwarded-For is what a client
claims; it is read only if the server was told that a proxy in front of it sets it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections import OrderedDict
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.errors import UserError
from regard.serve.errors import ApiError, error_response

VARIABLE = "REGARD_API_KEYS"
OPEN = ("/health", "/ready", "/languages")  # without a key
FIELDS = ("/translate", "/detect")  # where the key may be a field of the body
CLIENTS = 10_000  # whose rate is remembered


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
        given, found = hashlib.sha256(key.encode()).digest(), None
        for number, known in enumerate(self.hashes, 1):
            if hmac.compare_digest(given, known):
                found = f"key {number}"
        return found


class Rates:
    """A token bucket for each client: `rate` requests per minute, of which a quarter may come at once."""

    def __init__(self, rate: int) -> None:
        self.rate, self.burst = rate, max(1.0, rate / 4)
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, and when that was

    def take(self, client: str) -> int:
        """Count a request; 0, or the seconds after which the client may send the next."""
        now = time.monotonic()
        left, then = self._left.pop(client, (self.burst, now))
        left = min(self.burst, left + (now - then) * self.rate / 60)
        self._left[client] = (max(left - 1, 0.0) if left >= 1 else left, now)
        if len(self._left) > CLIENTS:
            self._left.popitem(last=False)
        return 0 if left >= 1 else max(1, round((1 - left) * 60 / self.rate))


class Guard:
    """Refuses requests before they reach the application; `check_key` is for keys that come as a field."""

    def __init__(self, keys: Keys, *, limit: int = 4_000_000, rate: int = 0, proxy: bool = False) -> None:
        self.keys, self.limit, self.proxy = keys, limit, proxy
        self.rates = Rates(rate) if rate else None

    def check(self, scope: Scope) -> None:
        """Raise the `ApiError` for a request that is refused by its headers."""
        headers, path = Headers(scope=scope), scope["path"]
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or len(length) > 18:
            raise ApiError(400, "Content-Length is not a number")
        if int(length) > self.limit:
            raise self.too_large()
        if path in OPEN:
            return
        client = self.address(scope, headers)
        if self.keys:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
            if not given and path in FIELDS:
                return  # `check_key` follows when the body is read
            client = self.check_key(given)
        self.count(client)

    def check_key(self, key: object) -> str:
        """The name of the key for counting, or an error."""
        found = self.keys.find(key) if isinstance(key, str) and key else None
        if found is None:
            raise ApiError(401, "this server needs a key: send  Authorization: Bearer KEY", code="invalid_api_key")
        return found

    def check_field(self, scope: Scope, key: object) -> None:
        """The same for a route that reads the key from its body, unless a header had it."""
        headers = Headers(scope=scope)
        if self.keys and not (headers.get("authorization") or headers.get("x-api-key")):
            self.count(self.check_key(key))

    def count(self, client: str) -> None:
        if self.rates is not None and (seconds := self.rates.take(client)):
            raise ApiError(
                429, f"more than {self.rates.rate} requests per minute", code="rate_limit", retry_after=seconds
            )

    def address(self, scope: Scope, headers: Headers) -> str:
        claimed = headers.get("x-forwarded-for", "").split(",")[-1].strip() if self.proxy else ""
        return claimed or (scope["client"] or ("?",))[0]

    def too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.limit:,} bytes", code="too_large")


class GuardMiddleware:
    """The guard around an application; `respond(error)` makes the response to a refused request."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self.app, self.guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.guard.limit:
                raise self.guard.too_large()
            return message

        try:
            self.guard.check(scope)
        except ApiError as error:
            await error_response(scope["path"], error)(scope, receive, send)
            return
        await self.app(scope, counted, send)
