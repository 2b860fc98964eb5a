"""`regard serve` under load: throughput, time to the first token, overload, memory, and a soak with disconnects.

    python benchmarks/serving.py --mt runs/multi30k --lm runs/shakespeare-char-best --data multi30k-tok \\
        -o benchmarks/results/serving-cpu.json
    python benchmarks/serving.py --parts soak --minutes 30 …

    throughput   64 clients, one sentence at a time each, while all are at work, against the same engine offline
                 (`regard translate --batch 64`, all sentences at hand and sorted by length): sentences/s, in turns
    first_token  a generation on an idle server, and while 16 others run, in turns
    overload     twice the requests that the server can answer: latency of accepted requests against that at a full
                 queue without overload, and the time to a 429
    memory       resident memory over 10,000 mixed requests, valid and invalid
    soak         mixed load with clients that disconnect at random; requests counted by the clients and by /metrics

The server is a process of its own, as users start it. The load generator is another, one asyncio loop over raw sockets
with requests prepared as bytes; its CPU time is measured, since it is taken from the server where cores are few.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure

CLIENTS = 64
OTHERS = 16
TEST = "test_2016_flickr.lc.norm.tok.en"
PROMPT = "ROMEO:\nBut soft, what light through yonder window breaks?\n"


# --- the server


class Server:
    """A process of `regard serve`."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def get(self, path: str) -> tuple[int, str]:
        return asyncio.run(self._get(path))

    async def _get(self, path: str) -> tuple[int, str]:
        async with connect(self.port) as client:
            reply = await client.send(request("GET", path))
            return reply.status, reply.body.decode()

    def metrics(self) -> dict[str, float]:
        """Values of /metrics by name and labels."""
        lines = self.get("/metrics")[1].splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def memory(self) -> float:
        """Resident memory in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1000  # type: ignore[index]

    def cpu(self) -> float:
        """Seconds of CPU time."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serve(*arguments: str) -> Iterator[Server]:
    """A server that is ready; it is drained afterwards and must exit with 0."""
    command = [sys.executable, "-m", "regard", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            server = Server(process, int(process.stdout.readline().rpartition(":")[2]))
            while True:
                with contextlib.suppress(OSError):
                    if server.get("/ready")[0] == 200:
                        break
                if process.poll() is not None:
                    raise SystemExit(f"the server ended: {' '.join(command)}")
                time.sleep(0.1)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
        if process.wait(60) != 0:
            raise SystemExit(f"the server exited with {process.returncode}")


# --- the clients


@dataclass
class Reply:
    status: int
    body: bytes
    first: float  # seconds to the first byte of the body
    seconds: float  # to the last one


def request(method: str, path: str, body: Any = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = (f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
    head = "\r\n".join((*lines, f"Content-Length: {len(content)}"))
    return head.encode() + b"\r\n\r\n" + content


class Client:
    """A connection that is kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, raw: bytes) -> Reply:
        began = time.perf_counter()
        self.writer.write(raw)
        head = await self.reader.readuntil(b"\r\n\r\n")
        status, length = int(head[9:12]), re.search(rb"content-length: (\d+)", head)
        if length is not None:
            body = await self.reader.readexactly(int(length[1]))
            first = time.perf_counter()
        else:
            body, first = b"", 0.0
            while size := int(await self.reader.readline(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
                first = first or time.perf_counter()
            await self.reader.readline()
        return Reply(status, body, first - began, time.perf_counter() - began)


@contextlib.asynccontextmanager
async def connect(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def closed_loop(port: int, clients: int, requests: Iterator[bytes]) -> list[Reply]:
    """Every client sends its next request when the last one was answered, until there are no more."""
    replies: list[Reply] = []

    async def one() -> None:
        async with connect(port) as client:
            for raw in requests:
                replies.append(await client.send(raw))

    await asyncio.gather(*(one() for _ in range(clients)))
    return replies


def milliseconds(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile."""
    ordered = sorted(values)
    at = {"median": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: round(1000 * ordered[int(part * (len(ordered) - 1))], 1) for name, part in at.items()}


# --- the parts


def read_lines(args: argparse.Namespace) -> list[str]:
    with gzip.open(args.data / f"{TEST}.gz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()[: args.sentences]


def translate_offline(pipe: Any, folder: Path, lines: list[str]) -> None:
    import torch

    import regard

    translator = regard.load(folder).predictor
    translator.translate(lines[:64])
    while pipe.recv():
        began = time.perf_counter()
        texts = translator.translate(lines, batch=CLIENTS)
        pipe.send((texts, time.perf_counter() - began, torch.get_num_threads()))


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Sentences/s of 64 clients and of the engine alone, in turns."""
    lines = read_lines(args)
    raw = [request("POST", "/v1/translate", {"input": line}) for line in lines]
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=translate_offline, args=(there, args.mt, lines))
    process.start()
    client_cpu: list[float] = []
    texts: dict[str, list[str]] = {}

    def offline() -> float:
        here.send(True)
        texts["offline"], seconds, _ = here.recv()
        return len(lines) / seconds

    def served(server: Server) -> Callable[[], float]:
        def go() -> float:
            order, outputs, times, cpu = itertools.cycle(enumerate(raw)), [""] * len(raw), list[float](), [0.0]

            async def one() -> None:
                async with connect(server.port) as client:
                    while len(times) <= CLIENTS + len(raw):
                        at, content = next(order)
                        reply = await client.send(content)
                        assert reply.status == 200, reply.body
                        outputs[at] = json.loads(reply.body)["outputs"][0]["n_best"][0]["text"]
                        times.append(time.perf_counter())
                        if len(times) == CLIENTS:
                            cpu[0] = time.process_time()

            async def all_of_them() -> None:
                await asyncio.gather(*(one() for _ in range(CLIENTS)))

            asyncio.run(all_of_them())
            seconds = times[CLIENTS + len(raw)] - times[CLIENTS]  # while all clients were at work
            client_cpu.append((time.process_time() - cpu[0]) / seconds)
            texts["served"] = outputs
            return len(raw) / seconds

        return go

    with contextlib.ExitStack() as stack:
        options = (f"mt={args.mt}", "--timeout", "600", "--workers")
        servers = {n: stack.enter_context(serve(*options, str(n))) for n in args.workers}
        calls = {"offline": offline, **{f"workers_{n}": served(server) for n, server in servers.items()}}
        for call in calls.values():
            call()
        client_cpu.clear()
        rates = measure.take_turns(calls, args.rounds)
        sizes = {f"workers_{n}": batch_size(server.metrics()) for n, server in servers.items()}
    here.send(False)
    process.join()
    same = sum(one == other for one, other in zip(texts["offline"], texts["served"], strict=True)) / len(lines)
    return {
        "clients": CLIENTS,
        "sentences": len(lines),
        "sentences_per_second": {name: measure.spread(values) for name, values in rates.items()},
        "of_offline": {
            name: round(statistics.median(a / b for a, b in zip(values, rates["offline"], strict=True)), 3)
            for name, values in rates.items()
            if name != "offline"
        },
        "mean_batch": sizes,
        "cpu_of_the_clients": round(statistics.median(client_cpu), 3),
        "same_outputs": round(same, 4),
    }


def batch_size(metrics: dict[str, float]) -> float:
    values = {
        kind: sum(value for name, value in metrics.items() if name.startswith(f"regard_batch_size_{kind}"))
        for kind in ("sum", "count")
    }
    return round(values["sum"] / max(values["count"], 1), 1)


def first_token(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds to the first token: alone, and beside 16 generations, in turns."""
    own = request("POST", "/v1/completions", {"model": "lm", "prompt": PROMPT, "max_tokens": 4, "stream": True})
    other = request("POST", "/v1/completions", {"model": "lm", "prompt": PROMPT, "max_tokens": 180, "stream": True})

    async def probe(port: int, count: int) -> list[float]:
        seconds = []
        async with connect(port) as client:
            for _ in range(count):
                await asyncio.sleep(random.uniform(0.02, 0.06))  # at any time within a step
                seconds.append((await client.send(own)).first)
        return seconds

    async def busy(port: int, count: int) -> list[float]:
        stopping = False

        async def generate() -> None:
            async with connect(port) as client:
                while not stopping:
                    await client.send(other)

        others = [asyncio.create_task(generate()) for _ in range(OTHERS)]
        await asyncio.sleep(0.5)
        seconds = await probe(port, count)
        stopping = True
        await asyncio.gather(*others)
        return seconds

    with serve(f"lm={args.lm}") as server:
        calls = {
            "idle": lambda: asyncio.run(probe(server.port, args.probes)),
            "busy": lambda: asyncio.run(busy(server.port, args.probes)),
        }
        for call in calls.values():
            call()
        seconds = measure.take_turns(calls, args.rounds)
        rate = asyncio.run(tokens_per_second(server.port, other))
    ratios = [statistics.median(b) / statistics.median(a) for a, b in zip(*seconds.values(), strict=True)]
    return {
        "others": OTHERS,
        "ms": {name: milliseconds(list(itertools.chain(*values))) for name, values in seconds.items()},
        "ratio_of_medians": round(statistics.median(ratios), 2),
        "tokens_per_second": rate,
    }


async def tokens_per_second(port: int, raw: bytes) -> dict[str, float]:
    """Of 1, 16 and 64 generations at once."""
    rates = {}
    for clients in (1, OTHERS, CLIENTS):
        began = time.perf_counter()
        replies = await closed_loop(port, clients, iter([raw] * max(2, clients * 2)))
        tokens = sum(reply.body.count(b'"index"') for reply in replies)
        rates[str(clients)] = round(tokens / (time.perf_counter() - began))
    return rates


def overload(args: argparse.Namespace) -> dict[str, Any]:
    """Requests at twice the capacity, at times of their own, whether or not earlier ones were answered."""
    lines = read_lines(args)
    raw = itertools.cycle([request("POST", "/v1/translate", {"input": line}) for line in lines])
    queue = 1500  # tokens: about two batches

    async def at_capacity(port: int, clients: int, seconds: float) -> tuple[float, list[Reply]]:
        end, began = time.perf_counter() + seconds, time.perf_counter()
        replies = await closed_loop(port, clients, itertools.takewhile(lambda _: time.perf_counter() < end, raw))
        accepted = [reply for reply in replies if reply.status == 200]
        return len(accepted) / (time.perf_counter() - began), accepted

    async def flood(port: int, rate: float, seconds: float) -> list[Reply]:
        """Poisson arrivals over a pool of open connections."""
        replies: list[Reply] = []
        async with contextlib.AsyncExitStack() as stack:
            free = [await stack.enter_async_context(connect(port)) for _ in range(CLIENTS * 2)]

            async def one(client: Client) -> None:
                replies.append(await client.send(next(raw)))
                free.append(client)

            tasks, due, end = [], time.perf_counter(), time.perf_counter() + seconds
            while due < end:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                if not free:
                    free.append(await stack.enter_async_context(connect(port)))
                tasks.append(asyncio.create_task(one(free.pop())))
                due += random.expovariate(rate)
            await asyncio.gather(*tasks)
        return replies

    with serve(f"mt={args.mt}", "--queue-tokens", str(queue)) as server:
        # as many clients as fill the queue, so that hardly any request is refused
        clients = int(queue / statistics.mean(len(line.split()) * 1.25 + 1 for line in lines))
        asyncio.run(at_capacity(server.port, clients, 3))
        calls = {
            "full": lambda: asyncio.run(at_capacity(server.port, clients, args.seconds)),
            "flooded": lambda: asyncio.run(flood(server.port, 2 * capacity[-1], args.seconds)),
        }
        capacity, full, flooded = [0.0], [], []
        for _ in range(args.rounds):
            rate, replies = calls["full"]()
            capacity.append(rate)
            full += replies
            flooded.append(calls["flooded"]())
    replies = list(itertools.chain(*flooded))
    accepted = [reply.seconds for reply in replies if reply.status == 200]
    refused = [reply.seconds for reply in replies if reply.status == 429]
    return {
        "queue_tokens": queue,
        "capacity_per_second": round(statistics.median(capacity[1:]), 1),
        "sent": len(replies),
        "accepted": len(accepted),
        "refused": len(refused),
        "others": len(replies) - len(accepted) - len(refused),
        "latency_ms_at_capacity": milliseconds([reply.seconds for reply in full]),
        "latency_ms_of_accepted": milliseconds(accepted),
        "ms_to_429": milliseconds(refused),
    }


def mixed(lines: Sequence[str], choose: random.Random) -> dict[str, Any]:
    """A request at random: translations, generations, lists, and requests that are invalid."""
    line = choose.choice(lines)
    match choose.randrange(10):
        case 0 | 1:
            return {"path": "/translate", "body": {"q": line, "source": "en", "target": "de"}}
        case 2:
            body = {"input": choose.sample(lines, 3), "beam": 1, "max_length": 8}
            return {"path": "/v1/translate", "body": body}
        case 3:
            return {"path": "/v1/translate", "body": {"input": line, "beam": choose.randint(1, 3), "max_length": 8}}
        case 4 | 5:
            body = {"model": "lm", "prompt": line[:80] or "a", "max_tokens": choose.randint(1, 40)}
            return {"path": "/v1/completions", "body": body}
        case 6 | 7:
            body = {"model": "lm", "prompt": "a", "max_tokens": choose.randint(1, 60), "stream": True, "n": 2}
            return {"path": "/v1/completions", "body": body}
        case 8:
            return {"path": "/v1/completions", "body": {"model": "nowhere", "prompt": line}}
        case _:
            return {"path": "/v1/translate", "body": {"input": line, "beam": choose.choice([0, -1, "x", 10**9])}}


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Resident memory while 10,000 mixed requests are answered by 16 connections."""
    lines, choose = read_lines(args), random.Random(1)
    statuses, sizes = Counter[int](), []
    with serve(f"mt:en-de={args.mt}", f"lm={args.lm}") as server:
        for _ in range(40):
            part = [mixed(lines, choose) for _ in range(args.requests // 40)]
            raw = iter([request("POST", one["path"], one["body"]) for one in part])
            statuses += Counter(reply.status for reply in asyncio.run(closed_loop(server.port, OTHERS, raw)))
            sizes.append(round(server.memory(), 1))
    half = sizes[len(sizes) // 2 :]
    return {
        "requests": sum(statuses.values()),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "mb": sizes,
        "growth_over_last_half": round(max(half) / half[0] - 1, 4),
    }


@dataclass
class Count:
    """What the clients of a soak saw."""

    sent: int = 0
    left: int = 0  # disconnected before the end of the response
    statuses: Counter[int] = field(default_factory=Counter)
    broken: int = 0  # the server closed the connection, or a stream has no end
    seconds: list[float] = field(default_factory=list)


def soak(args: argparse.Namespace) -> dict[str, Any]:
    """Mixed load; every fourth request is given up after a random time. Nothing is lost."""
    lines, count = read_lines(args), Count()
    end = time.perf_counter() + 60 * args.minutes

    async def one(port: int, seed: int) -> None:
        choose = random.Random(seed)
        client, close = None, contextlib.AsyncExitStack()
        while time.perf_counter() < end:
            if client is None:
                client = await close.enter_async_context(connect(port))
            content = mixed(lines, choose)
            count.sent += 1
            limit = choose.expovariate(1 / 0.1) if choose.random() < 0.25 else 120
            try:
                reply = await asyncio.wait_for(client.send(request("POST", content["path"], content["body"])), limit)
            except TimeoutError:
                count.left += limit < 120
                count.broken += limit == 120
            except (OSError, EOFError):
                count.broken += 1
            else:
                count.statuses[reply.status] += 1
                count.seconds.append(reply.seconds)
                if content["body"].get("stream") and reply.status == 200:
                    count.broken += not reply.body.endswith(b"data: [DONE]\n\n")
                continue
            await close.aclose()
            client, close = None, contextlib.AsyncExitStack()
        await close.aclose()

    async def all_of_them(port: int) -> None:
        await asyncio.gather(*(one(port, seed) for seed in range(24)))

    with serve(f"mt:en-de={args.mt}", f"lm={args.lm}", "--queue-tokens", "3000") as server:
        asyncio.run(all_of_them(server.port))
        time.sleep(2)
        metrics, resident = server.metrics(), server.memory()
    outcomes = {
        name: int(metrics.get(f'regard_inputs_total{{outcome="{name}"}}', 0))
        for name in ("accepted", "answered", "cancelled", "timeout", "failed", "refused")
    }
    return {
        "minutes": args.minutes,
        "clients": {
            "sent": count.sent,
            "disconnected": count.left,
            "answered": {str(status): number for status, number in sorted(count.statuses.items())},
            "broken": count.broken,
            "ms": milliseconds(count.seconds),
        },
        "server": outcomes,
        "lost": outcomes["accepted"] - sum(outcomes[name] for name in ("answered", "cancelled", "timeout", "failed")),
        "queue_tokens_afterwards": metrics["regard_queue_tokens"],
        "mb": round(resident, 1),
    }


PARTS = {part.__name__: part for part in (throughput, first_token, overload, memory, soak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mt", type=Path, required=True, help="a translation run")
    parser.add_argument("--lm", type=Path, required=True, help="a run of a language model")
    parser.add_argument("--data", type=Path, required=True, help="the folder of Multi30k, tokenised")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--probes", type=int, default=40, help="generations of each turn of first_token")
    parser.add_argument("--seconds", type=float, default=10, help="of each turn of overload")
    parser.add_argument("--requests", type=int, default=10_000, help="of memory")
    parser.add_argument("--minutes", type=float, default=30, help="of the soak")
    parser.add_argument("--note", help="what else the machine was doing, for the result file")
    parser.add_argument("-o", "--out", type=Path, help="the result file; parts that are not measured keep their values")
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out is not None and args.out.is_file() else {}
    for name in args.parts:
        entry = PARTS[name](args)
        about = {**measure.machine("cpu"), **({"note": args.note} if args.note else {})}
        result[name] = {**entry, "about": about}
        print(json.dumps({name: entry}, indent=1), flush=True)
        if args.out is not None:
            measure.write(args.out, result)


if __name__ == "__main__":
    main()
