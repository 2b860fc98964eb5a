"""A worker trains the runs of a study, one after another in one process, until none is left.

    claim a run ─→ train, resuming from its checkpoint ─→ evaluate ─→ done
                   an error or a loss that is not finite ─→ failed, with the reason; the study continues
                   Ctrl-C or SIGTERM                     ─→ a checkpoint; the claim is released

Any number of workers, on one machine or several, share a study (`regard.study.claim`). What they compute does not
depend on their number: each run starts from its own seed, and nothing is left of the run before. Tokenizers and
prepared data are copied from a run with the same [data] and [text], if one is done.
"""

from __future__ import annotations

import _thread
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from regard.api import train_run
from regard.errors import MissingExtra, MissingFiles, Unfinished, UserError
from regard.files import make_folder
from regard.study import claim
from regard.study.definition import Planned, Study
from regard.study.results import claims, done_file, failed_file, progress, write_done, write_failed
from regard.training.distributed import Workers

POLL = 2.0  # seconds between two looks for a run whose worker has died
SHARED = ("task", "data", "text")  # tables that decide tokenizers and prepared data
LOCKED = "another process is training in this folder"


class Interrupted(KeyboardInterrupt):
    """A worker was asked to stop, and has saved what it was training."""


@dataclass(frozen=True)
class Event:
    """A run that has begun ("training") or ended ("done", "failed")."""

    run: Planned
    what: str
    seconds: float = 0.0
    reason: str = ""


Report = Callable[[Event], object]


def work(
    folder: Path, device: torch.device, report: Report, *, only: Sequence[str] = (), wait: bool = True,
    keep_checkpoints: bool = False, lease: float = claim.LEASE,
) -> None:  # fmt: skip
    """Train what nobody else trains. With `wait`, stay until all is done, in case another worker dies."""
    with terminable():
        while True:
            study = Study.read(folder)  # again: rows may have been added
            taken = next(free(study, only, lease), None)
            if taken is not None:
                run, own = taken
                try:
                    train_one(study, run, own, device, report, keep_checkpoints)
                finally:
                    own.release()
            elif wait and progress(study, only).pending:
                time.sleep(POLL)
            else:
                return


def free(study: Study, only: Sequence[str], lease: float = claim.LEASE) -> Iterator[tuple[Planned, claim.Claim]]:
    """Runs that have to be trained, claimed."""
    for run in study.runs(only):
        ended = done_file(study, run), failed_file(study, run)
        if any(path.exists() for path in ended) or (own := claim.take(claims(study), run.name, lease)) is None:
            continue
        if any(path.exists() for path in ended):  # in the moment before it was claimed
            own.release()
        else:
            yield run, own


def train_one(
    study: Study, run: Planned, own: claim.Claim, device: torch.device, report: Report, keep_checkpoints: bool = False
) -> None:
    """Train a run that was claimed, and record how it ended."""
    own.on_lost = _thread.interrupt_main
    began, folder, tables = time.monotonic(), study.run_folder(run), study.tables(run)
    report(Event(run, "training"))
    reason = ""
    try:
        with logged(study.folder / "logs" / f"{run.name}.log"):
            outcome = train_run(tables, folder, Workers(device), like=_prepared(study, tables))
        if outcome.metrics is None and not own.lost:
            raise Interrupted(f"{run.row}, seed {run.seed}: saved at step {outcome.step}")
        del outcome
    except KeyboardInterrupt:
        if not own.lost:
            raise
    except (MissingExtra, MissingFiles, Unfinished, OSError):  # other runs would end in the same way
        raise
    except Exception as error:
        if isinstance(error.__cause__, OSError):  # a full disk
            raise
        if isinstance(error, UserError) and LOCKED in str(error):  # a process that was believed dead
            own.lost = True
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    finally:
        _forget()
    if own.lost:
        return
    seconds = time.monotonic() - began
    if reason:
        write_failed(study, run, reason)
        report(Event(run, "failed", seconds, reason))
        return
    if not keep_checkpoints:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    write_done(study, run, seconds)
    report(Event(run, "done", seconds))


def _prepared(study: Study, tables: dict[str, object]) -> Path | None:
    """The folder of a finished run with the same data and tokenizers."""
    for run in study.runs():
        other = study.tables(run)
        if done_file(study, run).exists() and all(other.get(name) == tables.get(name) for name in SHARED):
            return study.run_folder(run)
    return None


def _forget() -> None:
    """Free memory and compiled code of the last run."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # it compiles a function for a limited number of models
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Messages of training go to a file."""
    make_folder(path.parent)
    with path.open("a", encoding="utf-8", buffering=1) as file, redirect_stderr(file), redirect_stdout(file):
        yield


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM is a Ctrl-C, also while nothing is trained."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- several processes on one machine


def start_workers(study: Study, jobs: int, device: str | None, options: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Processes that each do `regard ablate STUDY`; on several GPUs they take turns."""
    make_folder(study.folder / "logs")
    count = torch.cuda.device_count() if device in (None, "cuda") else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // jobs)), **os.environ, "REGARD_WORKER": str(os.getpid())}
    command = [sys.executable, "-m", "regard", "ablate", str(study.folder), "--jobs", "1", *options]
    workers = []
    for number in range(jobs):
        own = f"cuda:{number % count}" if count else device
        with (study.folder / "logs" / f"worker-{number}.log").open("ab") as log:
            # a session of its own: a Ctrl-C in the terminal reaches only the parent, which passes it on once
            workers.append(
                subprocess.Popen(
                    [*command, *(["--device", own] if own else [])], env=environment, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, start_new_session=True,
                )
            )  # fmt: skip
    return workers


def watch_workers(
    folder: Path, workers: Sequence[subprocess.Popen[bytes]], report: Report, only: Sequence[str] = ()
) -> None:
    """Report what the workers do until they have ended; Ctrl-C asks them to save and to end."""
    before = progress(Study.read(folder), only)
    known = {*before.done, *before.failed}
    try:
        with terminable():
            while any(worker.poll() is None for worker in workers):
                known |= _report_new(folder, known, report, only)
                time.sleep(0.5)
    except KeyboardInterrupt:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGTERM)
        for worker in workers:
            worker.wait()
        raise Interrupted("the workers have saved what they were training") from None
    finally:
        for worker in workers:
            if worker.poll() is None:  # after an error here
                worker.terminate()
    _report_new(folder, known, report, only)
    codes = [worker.returncode for worker in workers]
    if any(code not in (0, 3) for code in codes) and progress(Study.read(folder), only).pending:
        number = next(at for at, code in enumerate(codes) if code not in (0, 3))
        log = folder / "logs" / f"worker-{number}.log"
        last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
        raise UserError(
            f"worker {number} has ended with code {codes[number]}: {last.removeprefix('error: ')} (see {log})"
        )


def _report_new(folder: Path, known: set[Planned], report: Report, only: Sequence[str]) -> set[Planned]:
    study = Study.read(folder)
    now = progress(study, only)
    new = {*now.done, *now.failed} - known
    for run in new:
        if run in now.seconds:
            report(Event(run, "done", now.seconds[run]))
        else:
            report(Event(run, "failed", 0.0, failed_file(study, run).read_text(encoding="utf-8").strip()))
    return new
