"""A worker trains the runs of a study, one after another in one process, until none is left.

    claim a run ─→ train, resuming from its checkpoint ─→ evaluate ─→ done
                   an error or a loss that is not finite ─→ failed, with the reason; the study continues
                   Ctrl-C or SIGTERM                     ─→ a checkpoint; the claim is released

Any number of workers, on one machine or several, share a study (`regard.study.claim`). What they compute does not
depend on their number: each run starts from its own seed, and nothing is left of the run before. Tokenizers and
prepared data are copied from a run with the same [data] and [text], if there is one; before several processes start,
those of one run are prepared, so that they are not made by each process.
"""

from __future__ import annotations

import _thread
import gc
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from regard.api import train_run
from regard.errors import MissingExtra, MissingFiles, Unfinished, UserError, is_of_the_system
from regard.files import make_folder, terminable
from regard.models.recipe import EXAMPLES
from regard.study import claim
from regard.study.definition import Planned, Study
from regard.study.finished import FinishedRun
from regard.study.processes import work_together
from regard.study.results import claims, done_file, failed_file, progress, write_done, write_failed
from regard.tasks.registry import task_of
from regard.training.distributed import Workers
from regard.training.lock import Locked
from regard.training.run import Run

POLL = 2.0  # seconds between two looks for a run whose worker has died


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
    keep_checkpoints: bool = False,
) -> None:  # fmt: skip
    """Train what nobody else trains. With `wait`, stay until all is done, in case another worker dies."""
    with terminable():
        while True:
            study = Study.read(folder)  # again: rows may have been added
            taken = next(free(study, only), None)
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


def free(study: Study, only: Sequence[str]) -> Iterator[tuple[Planned, claim.Claim]]:
    """Runs that have to be trained, claimed."""
    for run in study.runs(only):
        ended = done_file(study, run), failed_file(study, run)
        if any(path.exists() for path in ended) or (own := claim.take(claims(study), run.name)) is None:
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
    like = [study.run_folder(other) for other in study.runs() if other != run and is_prepared(study, other)]
    try:
        with logged(study.folder / "logs" / f"{run.name}.log"):
            outcome = train_run(tables, folder, Workers(device), like=like)
        if outcome.metrics is None and not own.lost:
            raise Interrupted(f"{run.row}, seed {run.seed}: saved at step {outcome.step}")
        del outcome
    except KeyboardInterrupt:
        if not own.lost:
            raise
    except (MissingExtra, MissingFiles, Unfinished):  # other runs would end in the same way
        raise
    except Exception as error:
        if is_of_the_system(error):  # a full disk
            raise
        if isinstance(error, Locked):  # a process that was believed dead
            own.lost = True
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    finally:
        _forget()
    if own.lost:
        return
    seconds = max(time.monotonic() - began, FinishedRun(folder).seconds or 0.0)  # also before it was interrupted
    if reason:
        write_failed(study, run, reason)
        report(Event(run, "failed", seconds, reason))
        return
    if not keep_checkpoints:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    write_done(study, run, seconds)
    report(Event(run, "done", seconds))


def is_prepared(study: Study, run: Planned) -> bool:
    """Whether its data is complete: the examples of a run are the last file that is written before training."""
    return (study.run_folder(run) / EXAMPLES).exists()


def prepare_one(folder: Path, only: Sequence[str]) -> None:
    """Tokenizers and data of one run, for the others to copy; what is wrong with it shows when it is trained."""
    study = Study.read(folder)
    if any(is_prepared(study, run) for run in study.runs()):
        return
    run, own = next(free(study, only), (None, None))
    if run is None or own is None:
        return
    try:
        with suppress(UserError), logged(study.folder / "logs" / f"{run.name}.log"):
            tables = study.tables(run)
            Run(task_of(tables)(tables, study.run_folder(run), torch.device("cpu"))).prepare()
    finally:
        own.release()


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


# --- several processes on one machine


def work_in_processes(
    folder: Path, jobs: int, device: str | None, options: Sequence[str], report: Report, only: Sequence[str] = ()
) -> None:
    """Train with `jobs` processes that each do `regard ablate STUDY`, and report what they do."""
    prepare_one(folder, only)
    before = progress(Study.read(folder), only)
    known = {*before.done, *before.failed}
    try:
        finished = work_together(
            ["ablate", str(folder), *options], folder, jobs, device, lambda: _report_new(folder, known, report, only)
        )
    except UserError:
        if progress(Study.read(folder), only).pending:  # the others have not done its work
            raise
        return
    if not finished:
        raise Interrupted("the workers have saved what they were training")


def _report_new(folder: Path, known: set[Planned], report: Report, only: Sequence[str]) -> None:
    study = Study.read(folder)
    now = progress(study, only)
    for run in {*now.done, *now.failed} - known:
        known.add(run)
        if run in now.seconds:
            report(Event(run, "done", now.seconds[run]))
        else:
            report(Event(run, "failed", 0.0, failed_file(study, run).read_text(encoding="utf-8").strip()))
