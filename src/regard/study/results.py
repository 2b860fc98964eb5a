"""The state of a study, read from its folder: runs that are done, failed or pending, and the table of their results."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from regard.files import make_folder, write_atomically
from regard.study.claim import owner_of
from regard.study.definition import Planned, Study
from regard.study.finished import FinishedRun, flat
from regard.study.rows import compare_rows
from regard.study.table import StudyTable


def claims(study: Study) -> Path:
    return study.folder / "claims"


def done_file(study: Study, run: Planned) -> Path:
    """It exists once the run is trained and evaluated; with the seconds that this took."""
    return claims(study) / f"{run.name}.done"


def failed_file(study: Study, run: Planned) -> Path:
    """Why a run has no result."""
    return study.folder / "failed" / f"{run.name}.txt"


def write_done(study: Study, run: Planned, seconds: float) -> None:
    make_folder(claims(study))
    write_atomically(done_file(study, run), json.dumps({"seconds": round(seconds, 2), "time": time.time()}).encode())


def write_failed(study: Study, run: Planned, reason: str) -> None:
    make_folder(study.folder / "failed")
    write_atomically(failed_file(study, run), f"{reason}\n".encode())


@dataclass(frozen=True)
class Progress:
    """How far a study is."""

    done: tuple[Planned, ...]
    failed: tuple[Planned, ...]
    pending: tuple[Planned, ...]  # the running ones too
    running: dict[Planned, tuple[int, int]]  # with the last step in their logs and the number of steps
    seconds: dict[Planned, float]  # that runs have taken

    @property
    def total(self) -> int:
        return len(self.done) + len(self.failed) + len(self.pending)

    @property
    def left(self) -> float | None:
        """Seconds until all are done, if as many run side by side as now; None if nothing is done yet.

        A run takes as long as others of its row have taken, or else as all others.
        """
        if not self.seconds:
            return None
        rows: dict[str, list[float]] = {}
        for run, seconds in self.seconds.items():
            rows.setdefault(run.row, []).append(seconds)
        mean, left = fmean(self.seconds.values()), 0.0
        for run in self.pending:
            step, steps = self.running.get(run, (0, 1))
            left += (fmean(rows[run.row]) if run.row in rows else mean) * (1 - step / steps)
        return left / max(1, len(self.running))


def progress(study: Study, only: Iterable[str] = ()) -> Progress:
    done, failed, pending, running, seconds = [], [], [], {}, {}
    ended, failures = (_names(path) for path in (claims(study), study.folder / "failed"))
    for run in study.runs(only):
        if done_file(study, run).name in ended:
            done.append(run)
            seconds[run] = float(json.loads(done_file(study, run).read_bytes())["seconds"])
        elif failed_file(study, run).name in failures:
            failed.append(run)
        else:
            pending.append(run)
            if f"{run.name}.0" in ended and owner_of(claims(study), run.name) is not None:
                running[run] = _steps(study.run_folder(run))
    return Progress(tuple(done), tuple(failed), tuple(pending), running, seconds)


def _steps(folder: Path) -> tuple[int, int]:
    """The last step in the log of a run, and the number of its steps; (0, 1) if it has only begun."""
    one = FinishedRun(folder)
    steps = one.summary.get("steps", 1)
    return min(steps, max((line["step"] for line in one.history), default=0)), steps


def _names(folder: Path) -> set[str]:
    return {*os.listdir(folder)} if folder.is_dir() else set()


def collect(study: Study) -> StudyTable:
    """The results so far; a row without a finished run has none."""
    state = progress(study)
    rows: dict[str, dict[int, Path]] = {name: {} for name in study.names}
    failed: dict[str, dict[int, str]] = {name: {} for name in study.names}
    pending: dict[str, list[int]] = {name: [] for name in study.names}
    for run in state.done:
        rows[run.row][run.seed] = study.run_folder(run)
    for run in state.failed:
        failed[run.row][run.seed] = failed_file(study, run).read_text(encoding="utf-8").strip()
    for run in state.pending:
        pending[run.row].append(run.seed)
    return compare_rows(
        study.title,
        rows,
        test=study.test,
        metric=study.metric,
        changes={name: flat(study.row(name).changes) for name in study.names},
        failed=failed,
        pending=pending,
        paper={row.name: row.paper for row in study.rows if row.paper is not None},
    )
