"""Several processes, one run: who is there, what they agree on, and how they end together.

`torchrun --nproc-per-node 8 -m regard train …` starts the same command eight times and gives each process its number,
the rank. Two groups connect them: one for gradients (NCCL between GPUs, gloo between CPUs), and a gloo group for
control: a request to stop, an error, a metric that rank 0 has computed. The second has no practical timeout, since
rank 0 may tokenise or evaluate for an hour; if a process dies, its connections break, and the others notice at once.

    rank 0          writes files, prints, evaluates
    every rank      holds weights (or shards of them), reads its part of the batches, contributes to the gradient

With one process nothing here has an effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import UserError
from regard.models.folder import find_device

T = TypeVar("T")
TIMEOUT = timedelta(days=30)  # for the other ranks, while rank 0 works
CLEANUP = timedelta(seconds=10)  # for rank 0 to remove its files after an error


class PeerError(UserError):
    """Another rank has failed, and reports the reason itself."""


class Workers:
    """The processes of a run, seen from one of them."""

    def __init__(self, device: torch.device | None = None, rank: int = 0, world: int = 1) -> None:
        self.device, self.rank, self.world = device or torch.device("cpu"), rank, world
        self.control = dist.new_group(backend="gloo", timeout=TIMEOUT) if world > 1 else None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.control is not None:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def on_lead(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on all ranks. An error ends all; only rank 0 reports it."""
        if self.control is None:
            return action()
        outcome: list[Any] = [None, False]  # result, whether it failed
        try:
            if self.leads:
                outcome[0] = action()
        except BaseException:
            outcome = [None, True]
            raise
        finally:
            dist.broadcast_object_list(outcome, src=0, group=self.control)
        if outcome[1]:
            raise PeerError("rank 0 has failed")
        return outcome[0]  # type: ignore[no-any-return]

    @contextmanager
    def leading(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Inside, rank 0 is in `context`."""
        with ExitStack() as stack:
            self.on_lead(lambda: stack.enter_context(context))
            yield

    @contextmanager
    def agreement(self, ask: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        """A function that is True once `ask` is True on any rank; all ranks must call it equally often.

        Nobody waits: a call returns the result of the previous one, whose reduction has finished meanwhile.
        """
        if self.control is None:
            yield ask
            return
        vote, work = torch.tensor(0), None  # of the previous call

        def agreed() -> bool:
            nonlocal vote, work
            if work is not None:
                work.wait()
            result, vote = bool(vote), torch.tensor(int(ask()))
            work = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.control, async_op=True)
            return result

        yield agreed
        if work is not None:
            work.wait()


_current: Workers | None = None


def current() -> Workers:
    """The processes of this run: one, outside of `join`."""
    return _current or Workers()


@contextmanager
def join(device: str | None = None) -> Iterator[Workers]:
    """Inside, this process is one of those that torchrun has started, with a device of its own.

    An error on one rank ends all, with one message: that of the rank that failed first.
    """
    global _current
    world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if world == 1:
        yield Workers(find_device(device))
        return
    own = _own_device(device)
    store, rank, world = next(dist.rendezvous("env://"))
    # torchrun may keep its store over a restart, with addresses of processes that have ended
    store = dist.PrefixStore(f"regard/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        backend, bound = ("nccl", own) if own.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=bound)
        _current = Workers(own, rank, world)
        yield _current
        dist.destroy_process_group()
    except Exception as error:
        reports = not isinstance(error, PeerError)
        with suppress(RuntimeError):  # torchrun itself has ended, or rank 0 waits elsewhere
            reports = reports and store.add("errors", 1) == 1  # no other rank has reported an error yet
            # Once a process has ended, torchrun kills the others: so they wait until rank 0 has cleaned up.
            store.set("cleanup", "done") if rank == 0 else store.wait(["cleanup"], CLEANUP)
        if not reports:
            raise SystemExit(2) from None
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower()):
            raise UserError(
                f"rank {rank} of {world}: another process of this run has ended without a message (killed, or "
                "its machine failed). Restart it: it resumes from the last checkpoint"
            ) from error
        raise
    finally:
        _current = None


def _own_device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda:"):
        raise UserError(f"--device {name}: each process has its own GPU; use --device cuda")
    if name != "cuda":
        return find_device(name)
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise UserError(
            f"{local + 1} processes or more on a machine with {count} GPUs: start torchrun with "
            f"--nproc-per-node {count}, or train with --device cpu"
        )
    torch.cuda.set_device(local)
    return find_device(f"cuda:{local}")
