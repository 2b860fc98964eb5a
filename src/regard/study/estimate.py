"""What a study will cost: parameters and FLOPs by formula, time from a few steps of each row that are discarded."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from regard.errors import UserError
from regard.progress import stage
from regard.study.definition import BASE, Planned, Study
from regard.study.finished import FinishedRun
from regard.study.results import progress
from regard.tasks.registry import task_of
from regard.training.run import Run


@dataclass(frozen=True)
class RowEstimate:
    """One row: sizes, and seconds of one run; None where it cannot be trained, for which `reason` says why."""

    row: str
    pending: int  # runs that are still to be trained
    steps: int
    parameters: int | None
    flops: float | None  # of one run
    seconds_per_step: float | None
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        """All pending runs one after another, without evaluation."""
        return None if self.seconds_per_step is None else self.pending * self.steps * self.seconds_per_step


def estimate(study: Study, device: torch.device, only: list[str] | None = None) -> list[RowEstimate]:
    pending = progress(study, only or ()).pending
    names = [name for name in study.names if not only or name in (BASE, *only)]
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        stage("measuring a few steps of each row", "rows") as done,
    ):
        found = []
        for name in names:
            count = sum(run.row == name for run in pending)
            found.append(_measure(study, name, count, Path(folder), device))
            done.count += 1
    return found


def _measure(study: Study, name: str, count: int, folder: Path, device: torch.device) -> RowEstimate:
    tables, own = study.tables(Planned(name, study.seeds_of(name)[0])), folder / name
    steps, messages = int(tables.get("train", {}).get("steps", 0)), StringIO()
    try:
        with redirect_stderr(messages):
            run = Run(task_of(tables)(tables, own, device))
            steps = run.config.steps
            run.prepare([folder / BASE])
            seconds = run.trainer().measure()
    except (UserError, RuntimeError) as error:
        if name == BASE:
            print(messages.getvalue(), end="", file=sys.stderr)
            raise
        return RowEstimate(name, count, steps, None, None, None, str(error).splitlines()[0])
    sizes = FinishedRun(own)
    return RowEstimate(name, count, steps, sizes.parameters, sizes.flops, seconds)
