"""What `regard ablate` says while it trains: a line per run, and the report, refreshed now and then."""

from __future__ import annotations

import sys
import threading
import time

from regard.progress import duration
from regard.study.definition import Study
from regard.study.finished import FinishedRun, choose_test, metric_of
from regard.study.processes import is_worker
from regard.study.report import write_all
from regard.study.results import Progress, collect, progress
from regard.study.worker import Event

REFRESH = 20.0  # seconds between two updates of the report at least
LINES = 60.0  # seconds between two lines about runs in progress


class Reporter:
    """Prints a line per run and one per minute, with the time that is left; refreshes table and report now and then."""

    def __init__(self, study: Study, only: list[str]) -> None:
        self.folder, self.only, self.file = study.folder, only, sys.stderr  # which is a log while a run is trained
        self.due = 0.0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="study", daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.stop.set()
        self.thread.join()

    def _watch(self) -> None:
        """Show runs in progress."""
        while not self.stop.wait(LINES):
            state = progress(Study.read(self.folder), self.only)
            runs = (f"{run.row}, seed {run.seed}: step {at:,} of {of:,}" for run, (at, of) in state.running.items())
            self._print("; ".join(runs), state)

    def _print(self, text: str, state: Progress) -> None:
        ended, width = len(state.done) + len(state.failed), len(str(state.total))
        left = f"; about {duration(state.left)} left" if state.left else ""
        print(f"[{ended:{width}} of {state.total}] {text}{left}", file=self.file, flush=True)

    def __call__(self, event: Event) -> None:
        state = progress(Study.read(self.folder), self.only)
        name = f"{event.run.row}, seed {event.run.seed}"
        match event.what:
            case "training":
                text = f"training {name}"
            case "done":
                text = f"{name}: {self._score(event)}{duration(event.seconds)}"
            case _:
                text = f"{name}: failed: {event.reason.splitlines()[0]}"
        self._print(text, state)
        if event.what != "training" and time.monotonic() >= self.due:
            self.refresh()

    def _score(self, event: Event) -> str:
        """The result of a run that is done."""
        study = Study.read(self.folder)
        one = FinishedRun(study.run_folder(event.run))
        test, key = study.test or choose_test([one]), study.metric or one.summary.get("test", "")
        value = None if test is None else one.score(test, key)
        metric = metric_of(key, None if study.metric else one.summary.get("headline"))
        return "" if value is None else f"{metric.name} {value:{metric.unit}}, "

    def refresh(self) -> None:
        """Write table and report; at most every twenty seconds, and for a tenth of the time at most."""
        if is_worker():
            return
        began = time.monotonic()
        write_all(self.folder, collect(Study.read(self.folder)))
        now = time.monotonic()
        self.due = now + max(REFRESH, 9 * (now - began))
