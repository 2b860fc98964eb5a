"""Several processes, one run: who is there, what they agree on, and how they end together.

`torchrun --nproc-per-node 8 -m regard train …` starts the same command eight times and tells each its number,
the rank. Two groups connect them: one for gradients (NCCL between GPUs, gloo between CPUs), and one of gloo for
everything that is said rather than computed: a stop, an error, a figure that rank 0 found. That one waits as
long as it takes, since rank 0 may be tokenising or testing for an hour; if a process dies, its connections
break, and the others know at once.

    rank 0          writes files, prints, evaluates
    every rank      holds weights (or a part of them), reads its share of the batches, adds to the gradient

With one process nothing here does anything.
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
PATIENCE = timedelta(days=30)  # of those who wait for what rank 0 does
TIDY = timedelta(seconds=3)  # for what it leaves behind after an error


class PeerError(UserError):
    """Another rank has failed, and says why itself."""


class Workers:
    """The processes of a run, seen from one of them."""

    def __init__(self, device: torch.device | None = None, rank: int = 0, world: int = 1) -> None:
        self.device, self.rank, self.world = device or torch.device("cpu"), rank, world
        self.control = dist.new_group(backend="gloo", timeout=PATIENCE) if world > 1 else None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, computed in the place of `tensor`."""
        if self.control is not None:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """What every rank gives, in their order."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def on_lead(self, action: Callable[[], T]) -> T:
        """`action` on rank 0, its result on all. An error there ends all; only rank 0 tells what it was."""
        if self.control is None:
            return action()
        told: list[Any] = [None, False]  # result, whether it failed
        try:
            if self.leads:
                told[0] = action()
        except BaseException:
            told = [None, True]
            raise
        finally:
            dist.broadcast_object_list(told, src=0, group=self.control)
        if told[1]:
            raise PeerError("rank 0 has failed")
        return told[0]  # type: ignore[no-any-return]

    @contextmanager
    def leading(self, context: AbstractContextManager[object]) -> Iterator[None]:
        """Inside, rank 0 is in `context`."""
        with ExitStack() as stack:

            def enter() -> None:
                stack.enter_context(context)

            self.on_lead(enter)
            yield

    @contextmanager
    def agreement(self, ask: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        """Whether any rank has said yes; all must ask equally often, and hear the same.

        Nobody waits: an answer is the one to the question before, which has travelled meanwhile.
        """
        if self.control is None:
            yield ask
            return
        asked: list[tuple[dist.Work, Tensor]] = []

        def agreed() -> bool:
            said = torch.tensor(int(ask()))
            work = dist.all_reduce(said, dist.ReduceOp.MAX, group=self.control, async_op=True)
            asked.append((work, said))
            return len(asked) > 1 and answer()

        def answer() -> bool:
            work, said = asked.pop(0)
            work.wait()
            return bool(said)

        yield agreed
        while asked:
            answer()


_current = Workers()


def current() -> Workers:
    """The processes of this run: one, unless `join` is under way."""
    return _current


@contextmanager
def join(device: str | None = None) -> Iterator[Workers]:
    """Inside, this process is one of those that torchrun has started; its `device` is its own.

    Whatever ends one rank ends all, with one message: that of the rank whose error came first.
    """
    global _current
    world = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if world == 1:
        yield Workers(find_device(device))
        return
    own = _own_device(device)
    store, rank, world = next(dist.rendezvous("env://"))
    # torchrun may keep its store over a restart, with the addresses of processes that are gone
    store = dist.PrefixStore(f"regard/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    try:
        backend, bound = ("nccl", own) if own.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=bound)
        _current = Workers(own, rank, world)
        yield _current
        dist.destroy_process_group()
    except Exception as error:
        speaks = not isinstance(error, PeerError) and _is_first(store)
        _let_tidy(store, rank)
        if not speaks:
            raise SystemExit(2) from None
        if _is_lost_connection(error):
            raise UserError(
                f"rank {rank} of {world}: another process of this run has ended without a word (killed, or its "
                "machine is gone). Started again, by torchrun or by you, it goes on from the last checkpoint"
            ) from error
        raise
    finally:
        _current = Workers()


def _own_device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda:"):
        raise UserError(f"--device {name}: each process has a GPU of its own; write --device cuda")
    if name != "cuda":
        return find_device(name)
    local, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= found:
        raise UserError(
            f"{local + 1} processes or more on a machine with {found} GPUs: start torchrun with "
            f"--nproc-per-node {found}, or train with --device cpu"
        )
    torch.cuda.set_device(local)
    return find_device(f"cuda:{local}")


def _is_first(store: dist.Store) -> bool:
    """Whether no other rank has reported an error yet."""
    with suppress(RuntimeError):  # torchrun itself is gone
        return store.add("errors", 1) == 1
    return True


def _let_tidy(store: dist.Store, rank: int) -> None:
    """Once a process has ended, torchrun ends the others: so let rank 0, which has come to its end here, be first."""
    with suppress(RuntimeError):  # it waits for us elsewhere, or is gone
        store.set("tidy", "yes") if rank == 0 else store.wait(["tidy"], TIDY)


def _is_lost_connection(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
