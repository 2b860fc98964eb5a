"""A connection: HTTP/1.1 by h11, and a time limit for the headers of a request.

uvicorn waits for the headers of a request as long as the client sends nothing, so that a few thousand silent
connections would take all file descriptors (slow loris). Here a connection whose headers are incomplete after
`SECONDS` is closed; the guard limits the time of bodies and responses (`regard.serve.guard`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    SECONDS = 15.0  # from the connection, or the first byte of its next request, to the end of the headers
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self.SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._deadline is None:  # the first bytes of the next request
            self._deadline = self.loop.call_later(self.SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
