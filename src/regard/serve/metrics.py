"""Metrics for Prometheus, at /metrics: what waits, what is computed, how long it takes. No texts, keys or addresses.

regard_queue_tokens                       tokens that wait or are being computed
regard_requests_total{route, status}      requests, by route (not by path) and status
regard_inputs_total{outcome}              requests for outputs: accepted or refused (429), and how accepted ones ended:
                                          answered, cancelled (the client disconnected), timeout, failed
regard_request_seconds{route}             from the first byte of a request to the last of its response
regard_first_token_seconds{model}         from a prompt to its first token
regard_tokens_total{model}                tokens generated
regard_batch_size{model}                  inputs that were computed together
regard_batch_seconds{model}               time that a batch took
"""

from __future__ import annotations

import logging
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.serve.work import Observe

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
log = logging.getLogger("regard.serve")


class Metrics:
    """The metrics of one process."""

    def __init__(self, shared: bool = False) -> None:
        """`shared`: several processes serve one port, and each reports the sum of all."""
        self.registry, self.shared = CollectorRegistry(), shared
        to = {"registry": None if shared else self.registry}
        if shared:
            MultiProcessCollector(self.registry)
        self.queue = Gauge("regard_queue_tokens", "tokens in the server", multiprocess_mode="livesum", **to)
        self.requests = Counter("regard_requests", "requests", ["route", "status"], **to)
        self.inputs = Counter("regard_inputs", "requests for outputs", ["outcome"], **to)
        self.seconds = Histogram("regard_request_seconds", "time of a request", ["route"], buckets=SECONDS, **to)
        self.first = Histogram(
            "regard_first_token_seconds", "time to the first token", ["model"], buckets=SECONDS, **to
        )
        self.tokens = Counter("regard_tokens", "tokens generated", ["model"], **to)
        self.sizes = Histogram("regard_batch_size", "inputs per batch", ["model"], buckets=SIZES, **to)
        self.batches = Histogram("regard_batch_seconds", "time of a batch", ["model"], buckets=SECONDS, **to)

    def observer(self, model: str) -> Observe:
        """What a worker reports for its model."""
        histograms = {"batch_size": self.sizes, "batch_seconds": self.batches, "first_token_seconds": self.first}

        def observe(name: str, value: float) -> None:
            if name == "tokens":
                self.tokens.labels(model).inc(value)
            else:
                histograms[name].labels(model).observe(value)

        return observe

    def count(self, outcome: str) -> None:
        """What a `Service` reports of a request."""
        self.inputs.labels(outcome).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Observed:
    """Counts and logs every request of an application: route, status, seconds."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), [0]

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            route: Any = scope.get("route")
            path = getattr(route, "path", "other")  # a path that no route has must not become a label
            seconds = time.perf_counter() - began
            self.metrics.requests.labels(path, status[0]).inc()
            self.metrics.seconds.labels(path).observe(seconds)
            log.info("request", extra={"fields": {"route": path, "status": status[0], "seconds": round(seconds, 4)}})
