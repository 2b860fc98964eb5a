"""A search for settings: many short trainings of one recipe, each with other values, chosen by the validation metric.

    FOLDER/search.toml      what is searched: [search], and the recipe, complete, in [base]
    FOLDER/journal.log      every trial, as Optuna's JournalStorage writes it
    FOLDER/trials/7/        a run as `regard train` makes it, without test sets; of the best ones the weights are kept
    FOLDER/best.toml        the complete recipe of the best trial
    FOLDER/trials.json      all trials

The first trial is the recipe itself, if its values are in the ranges, and the next ones are random. After ten, a
tree-structured Parzen estimator chooses (Bergstra et al. 2011): with l(x) the density of the settings of the better
trials and g(x) that of the others, it proposes the x with the highest l(x) / g(x). A trial whose best metric so far is
worse than the median of the completed trials at the same step is stopped (Golovin et al. 2017).

Processes share a search through its folder. The one that holds the lock of FOLDER chooses its next trial, and holds the
lock of the trial's folder while training. The operating system releases the locks of a process that ends, however it
ends; a trial that is running without its lock is orphaned, and the next process continues it from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.errors import MissingExtra, MissingFiles, UserError, is_of_the_system
from regard.files import make_folder, write_atomically
from regard.models.folder import WEIGHTS
from regard.models.recipe import RECIPE, override
from regard.progress import duration
from regard.settings import read_toml, to_dict, write_toml
from regard.study.definition import make_task
from regard.study.processes import work_together
from regard.study.space import Space, make_space
from regard.tasks.registry import task_of
from regard.training.history import read_metrics
from regard.training.lock import Locked, hold
from regard.training.run import Run, same_data
from regard.training.trainer import interruptible

SEARCH, JOURNAL, BEST, TRIALS = "search.toml", "journal.log", "best.toml", "trials.json"
STARTUP = 4  # completed trials before another one is compared with their median
ATTEMPTS = 3  # processes that may end during a trial before it counts as failed
FAILURES = 3  # first trials that may all fail before the search ends
REPEATS = 100  # proposals of settings that were tried before the search ends: they are all tried
IMPORTANCE = 10  # completed trials that an estimate of importance needs


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise MissingExtra("tune", "optuna", "regard tune") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@dataclass(frozen=True)
class TrialResult:
    """One trial; `settings` are as `--set` takes them."""

    number: int  # from 1
    status: str  # done, stopped, failed, running
    settings: dict[str, str]
    value: float | None  # the best validation metric, of a trial that is done
    step: int
    seconds: float
    reason: str  # why it failed

    def describe(self) -> str:
        return ", ".join(f"{name}={shorten(value)}" for name, value in self.settings.items())


def shorten(text: str) -> str:
    """Three digits of a fraction with more."""
    try:
        return f"{float(text):.3g}" if "." in text and len(text) > 6 else text
    except ValueError:
        return text


class Search:
    """The search in `folder`, of which this process may be one of several."""

    def __init__(self, folder: Path) -> None:
        self.optuna = import_optuna()
        content = read_toml(folder / SEARCH)
        self.folder, self.seed = folder, int(content["seed"])
        self.base: dict[str, Any] = content["base"]
        self.space: Space = make_space(content["search"], self.base)
        task = make_task(self.base)
        self.metric = task.METRICS[task.config.metric]
        self.name = self.metric.key.replace("_", " ")
        journal = self.optuna.storages.journal
        path = str(folder / JOURNAL)
        lock = journal.JournalFileOpenLock(path)
        _remove_torn_line(Path(path), lock)
        with hold(folder, wait=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.study = self.optuna.create_study(
                storage=self.optuna.storages.JournalStorage(journal.JournalFileBackend(path, lock)),
                study_name="regard",
                direction="maximize" if self.metric.higher else "minimize",
                pruner=self.optuna.pruners.MedianPruner(n_startup_trials=STARTUP),
                load_if_exists=True,
            )

    @property
    def results(self) -> list[TrialResult]:
        """All trials, in the order of their numbers."""
        state = self.optuna.trial.TrialState
        results = []
        for trial in self.study.get_trials(deepcopy=False):
            attributes = trial.user_attrs
            if "number" not in attributes:  # it waits, or had the settings of an earlier one
                continue
            reason = attributes.get("reason", "")
            ended = {state.RUNNING: "running", state.COMPLETE: "done", state.PRUNED: "failed" if reason else "stopped"}
            status = ended.get(trial.state, "failed")
            value = trial.value if status == "done" else None
            step = attributes.get("step", max(trial.intermediate_values, default=0))
            seconds = float(attributes.get("seconds", 0.0))
            settings = self._settings(trial)
            results.append(TrialResult(attributes["number"], status, settings, value, step, seconds, reason))
        return sorted(results, key=lambda one: one.number)

    def _settings(self, trial: Any) -> dict[str, str]:
        return {name: _text(trial.params[name]) for name in self.space if name in trial.params}

    def ranked(self) -> list[TrialResult]:
        """The trials with a value, the best first."""
        sign = -1 if self.metric.higher else 1
        done = [one for one in self.results if one.value is not None]
        return sorted(done, key=lambda one: (sign * (one.value or 0.0), one.number))

    def importance(self) -> dict[str, float]:
        """How much each setting decides whether a trial is among the best (PED-ANOVA, Watanabe et al. 2023)."""
        if len(self.space) < 2 or len(self.ranked()) < IMPORTANCE:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {
                name: float(part) for name, part in self.optuna.importance.get_param_importances(self.study).items()
            }

    # --- one trial

    @contextmanager
    def take(self, trials: int) -> Iterator[Any]:
        """An orphaned trial, or a new one while there are fewer than `trials`; None if nothing is left."""
        running = self.optuna.trial.TrialState.RUNNING
        with ExitStack() as stack:
            trial: Any = None
            with hold(self.folder, wait=True), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for one in self.study.get_trials(deepcopy=False, states=(running,)):
                    if "number" not in one.user_attrs:  # its process ended while it was chosen
                        self.study.tell(one.number, state=self.optuna.trial.TrialState.FAIL)
                    elif self._hold_trial(stack, one.user_attrs["number"]):
                        trial = self.optuna.trial.Trial(self.study, one._trial_id)
                        if one.user_attrs["starts"] < ATTEMPTS:
                            break
                        self._tell_failed(trial, f"its process ended {ATTEMPTS} times without a message")
                        self.write()
                        stack.close()
                        trial = None
                if trial is None and len(self.results) < trials:
                    trial = self._choose()
                if trial is not None:
                    self._hold_trial(stack, trial.user_attrs["number"])  # already held, if it was orphaned
                    trial.set_user_attr("starts", trial.user_attrs["starts"] + 1)
            yield trial

    def _choose(self) -> Any:
        """A trial with new settings, which depend on the seed and the trials before it alone; None if all are tried.

        A sampler may propose settings again, which would only give the same result again.
        """
        known, samplers = self.results, self.optuna.samplers
        for attempt in range(REPEATS):
            count = len(self.study.get_trials(deepcopy=False))
            seed = random.Random(f"{self.seed} {count}").getrandbits(32)
            tpe = samplers.TPESampler(seed=seed)
            self.study.sampler = tpe if attempt < REPEATS // 2 else samplers.RandomSampler(seed)
            if not count and (own := self._own_values()) is not None:
                self.study.enqueue_trial(own)
            trial = self.study.ask()
            self.assignments(trial)
            if all(one.settings != self._settings(trial) for one in known):
                trial.set_user_attr("starts", 0)
                trial.set_user_attr("number", len(known) + 1)
                return trial
            self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        return None

    def assignments(self, trial: Any) -> list[str]:
        """The settings of a trial, as `--set` takes them; those that it does not have yet are chosen."""
        return [f"{name}={choices.suggest(trial, name)}" for name, choices in self.space.items()]

    def _own_values(self) -> dict[str, Any] | None:
        """The values that the recipe itself has, if all of them are searched."""
        task = make_task(self.base)
        model = to_dict(task.make_model_config(task.PLACEHOLDERS))
        tables = {**task.own_tables(), "model": model, "train": to_dict(task.config)}
        values = {}
        for name, choices in self.space.items():
            value: Any = tables
            for key in name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            values[name] = choices.find(value)
        return None if None in values.values() else values

    def _hold_trial(self, stack: ExitStack, number: int) -> bool:
        """False if another process trains this trial."""
        try:
            stack.enter_context(hold(self.trial_folder(number)))
        except Locked:
            return False
        return True

    def trial_folder(self, number: int) -> Path:
        return self.folder / "trials" / str(number)

    def train(self, trial: Any, device: torch.device) -> bool:
        """Train one trial and record how it ended; False if it was interrupted, and can be continued."""
        began, folder = time.monotonic(), self.trial_folder(trial.user_attrs["number"])
        earlier, reached = float(trial.user_attrs.get("seconds", 0.0)), 0
        reported = {*self.study.get_trials(deepcopy=False)[trial.number].intermediate_values}

        def watch(step: int, metrics: Mapping[str, float], last: bool) -> None:
            nonlocal reached
            reached = step
            if step not in reported:
                trial.report(metrics[self.metric.key], step)
            if not last and trial.should_prune():
                raise self.optuna.TrialPruned

        def note() -> None:
            trial.set_user_attr("seconds", earlier + time.monotonic() - began)
            trial.set_user_attr("step", reached)

        try:
            tables = override(self.base, self.assignments(trial))
            value = train_trial(tables, folder, device, self.metric.key, watch, self._prepared())
        except self.optuna.TrialPruned:
            note()
            self._finish(trial, lambda: self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED))
            return True
        except (UserError, RuntimeError, MemoryError) as error:
            if isinstance(error, MissingFiles) or is_of_the_system(error):
                raise  # not because of the settings
            reason = " ".join(str(error).split()) or type(error).__name__
            note()
            self._finish(trial, lambda: self._tell_failed(trial, reason))
            return True
        if value is None:
            trial.set_user_attr("starts", trial.user_attrs["starts"] - 1)
            trial.set_user_attr("seconds", earlier + time.monotonic() - began)
            return False
        note()
        self._finish(trial, lambda: self.study.tell(trial, value))
        return True

    def _tell_failed(self, trial: Any, reason: str) -> None:
        """Optuna ignores failed trials, and would choose such values again: for it, the trial was stopped."""
        trial.set_user_attr("reason", reason)
        self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)

    def _prepared(self) -> list[Path]:
        """The folders of trials that have ended, with prepared data for others to copy: one for each [data], [text]."""
        folders = [self.trial_folder(one.number) for one in self.results if one.status != "running"]
        return [folder for folder in folders if (folder / "data").is_dir()]

    def _finish(self, trial: Any, tell: Callable[[], object]) -> None:
        """Record the end of a trial, write the results, and remove what only the trial needed."""
        number = trial.user_attrs["number"]
        folder = self.trial_folder(number)
        with hold(self.folder, wait=True):
            if any(same_data(read_toml(other / RECIPE), folder) for other in self._prepared()):
                shutil.rmtree(folder / "data", ignore_errors=True)  # before others see that the trial has ended
            tell()
            self.write()
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        if self.results[number - 1].status != "done":
            (folder / WEIGHTS).unlink(missing_ok=True)
        ended = [one for one in self.results if one.status != "running"]
        if len(ended) >= FAILURES and all(one.status == "failed" for one in ended):
            raise UserError(f"all of the first {len(ended)} trials failed; the last one: {ended[-1].reason}")

    # --- results

    def write(self) -> None:
        """best.toml and trials.json."""
        write_atomically(self.folder / TRIALS, json.dumps(self.summary(), ensure_ascii=False, indent=1).encode())
        for one in self.ranked()[:1]:
            recipe = (self.trial_folder(one.number) / RECIPE).read_text(encoding="utf-8")
            title = f"# {self.name} {one.value:.6g}: trial {one.number} of a search by  regard tune"
            write_atomically(self.folder / BEST, f"{title}\n# {one.describe()}\n\n{recipe}".encode())

    def summary(self) -> dict[str, Any]:
        """Everything, as JSON."""
        ranked = self.ranked()
        return {
            "folder": str(self.folder), "metric": self.metric.key, "higher": self.metric.higher,
            "best": ranked[0].number if ranked else None, "recipe": str(self.folder / BEST) if ranked else None,
            "trials": [vars(one) for one in self.results], "importance": self.importance(),
        }  # fmt: skip

    def line(self, number: int, trials: int, jobs: int = 1) -> str:
        """How a trial ended, and how long the others will take."""
        one = self.results[number - 1]
        best, ended = self.ranked()[:1], [result for result in self.results if result.status != "running"]
        running, left = len(self.results) - len(ended), trials - len(ended)
        how = {
            "done": f"{self.name} {one.value or 0.0:.4g}" + ", the best so far" * (best == [one]),
            "stopped": f"stopped at step {one.step:,}",
            "failed": f"failed: {one.reason}",
        }.get(one.status, one.status)
        times = [result.seconds for result in ended]
        seconds = sum(times) / max(1, len(times)) * left / max(1, min(max(jobs, running), left))
        rest = f"; {left} left, about {duration(seconds)}" if left > 0 else ""
        return f"trial {one.number} of {trials}, {one.describe()}: {how}{rest}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _remove_torn_line(path: Path, lock: Any) -> None:
    """Remove an incomplete last line, whose process was killed: writers hold `lock`."""
    if not path.exists():
        return
    lock.acquire()
    try:
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            write_atomically(path, content[: content.rfind(b"\n") + 1])
    finally:
        lock.release()


def train_trial(
    tables: Mapping[str, Any],
    folder: Path,
    device: torch.device,
    metric: str,
    watch: Callable[[int, Mapping[str, float], bool], None],
    like: Iterable[Path] = (),
) -> float | None:
    """The best validation metric of a run; None if it was interrupted.

    `watch` sees the step and the metrics of every evaluation, and whether it is the last. `like` are the folders of
    runs, of which one with the same data and tokenizers is copied.
    """
    run = Run(task_of(tables)(tables, folder, device))
    steps = run.config.steps
    with hold(folder):
        run.prepare(like)
        trainer = run.trainer()
        if trainer.resume():
            for line in read_metrics(folder):
                if metric in line:
                    watch(line["step"], line, line["step"] >= steps)
        trainer.watch = lambda step, metrics: watch(step, metrics, step >= steps)
        if not trainer.run():
            return None
        value = float(trainer.best["value"])
        if not math.isfinite(value):
            raise UserError(f"{metric} = {value}: the model has diverged")
        return value


def open_search(folder: Path, tables: Mapping[str, Any], search: Mapping[str, str], seed: int) -> Search:
    """The search in `folder`, which is created if needed; an existing one must be the same."""
    import_optuna()
    content = {"seed": seed, "search": dict(search), "base": dict(tables)}
    path = folder / SEARCH
    if not path.exists():
        make_space(search, tables)
        task = make_task(tables)
        task.make_model_config(task.PLACEHOLDERS)
        task.find_files()
        if not task.has_validation:
            raise UserError("the recipe has no validation data, which chooses the settings: add  valid  to [data]")
        if task.config.evaluation_interval == 0:
            note = "trials are evaluated at the end only, so none is stopped early; set train.evaluate_every"
            print(f"note: train.evaluate_every = 0: {note}", file=sys.stderr)
    make_folder(folder)
    with hold(folder, wait=True):
        if not path.exists():
            if any(one.name != ".lock" for one in folder.iterdir()):
                raise UserError(f"{folder}: holds other files but no {SEARCH}; name another folder with -o")
            write_toml(path, content)
        elif read_toml(path) != content:
            raise UserError(
                f"{folder}: holds another search (see {SEARCH} there): name another folder with -o, or continue that "
                f"one:  regard tune {folder}"
            )
    return Search(folder)


def work(search: Search, trials: int, device: torch.device, report: Callable[[int], None]) -> bool:
    """Train trials until `trials` are started; False if interrupted. `report` is called with each number."""
    with interruptible() as stop:
        while not stop():
            with search.take(trials) as trial:
                if trial is None:
                    return True
                if not search.train(trial, device):
                    return False
            report(trial.user_attrs["number"])
    return False


def work_in_processes(
    search: Search, trials: int, device: str | None, jobs: int, report: Callable[[int], None]
) -> bool:
    """The same in `jobs` processes that each do `regard tune FOLDER`."""
    known = {one.number for one in search.results if one.status != "running"}

    def report_new() -> None:
        for one in search.results:
            if one.status != "running" and one.number not in known:
                known.add(one.number)
                report(one.number)

    return work_together(["tune", str(search.folder), "--trials", str(trials)], search.folder, jobs, device, report_new)
