"""The Python API of training: `regard.train` runs a recipe as `regard train` does.

    bundle = regard.train("recipes/multi30k-en-de.toml", data="multi30k-tok", out="runs/mine", train={"steps": 2000})
    bundle.predict(["A man rides a horse."])

A recipe is a TOML file, its text, or a dict of tables. The run is a folder; the same call resumes a run that was
interrupted, and returns at once where it is finished. For a training loop of your own, see docs/training-loop.md.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from regard.cost.smaller import smaller
from regard.errors import UserError
from regard.explore.report import write_report
from regard.interop.convert import nearest_family
from regard.messages import localize
from regard.models.recipe import PRESETS, RECIPE, override, read_recipe, smoke_form
from regard.predict.bundle import Bundle
from regard.progress import duration, stage
from regard.samples import sample_folder
from regard.tasks.registry import load, task_of
from regard.training.distributed import Workers, join
from regard.training.lock import hold
from regard.training.run import Run
from regard.training.task import Metrics, Task
from regard.training.trainer import Trainer

HOUR = 3600.0
TYPICAL = 64  # tokens of a row, where the recipe does not say: it hardly changes the ratio between two models


@dataclass(frozen=True)
class Outcome:
    """How training ended; `metrics` of each test set are None where it was interrupted."""

    run: Run
    resumed_from: int  # the step of the checkpoint, 0 if there was none
    step: int
    seconds: float
    metrics: dict[str, Metrics] | None


def train(
    recipe: str | Path | Mapping[str, Any],
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    smoke: bool = False,
    device: str | None = None,
    **tables: Mapping[str, Any],
) -> Bundle:
    """Train a model and return it, as `regard.load` would.

    `recipe` is the path of a TOML file, TOML text, or a dict of tables; `data` the folder of the data files, or
    "sample:NAME"; `out` the folder of the run (default: runs/NAME-OF-THE-RECIPE). With `smoke`, the recipe's small form
    is trained. Further keywords change settings: `train={"steps": 200}, model={"dim": 64}`.

    Ctrl-C saves a checkpoint and raises KeyboardInterrupt; the same call resumes.
    """
    settings, folder = open_recipe(recipe, data, out, smoke=smoke, changes=tables)
    with join(device) as workers:
        outcome = train_run(settings, folder, workers)
    if outcome.metrics is None:
        raise KeyboardInterrupt(f"saved at step {outcome.step}")
    return load(folder, device or str(workers.device))


def open_recipe(
    recipe: str | Path | Mapping[str, Any],
    data: str | Path | None = None,
    out: str | Path | None = None,
    *,
    smoke: bool = False,
    assignments: Iterable[str] = (),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    skip_bad: bool = False,
) -> tuple[dict[str, Any], Path]:
    """The tables of a recipe with changes, all paths absolute, and the folder of the run."""
    tables, name, base = _read(recipe)
    tables = smoke_form(tables, name) if smoke else {key: table for key, table in tables.items() if key != "smoke"}
    tables = override(tables, assignments)
    for key, table in (changes or {}).items():
        if not isinstance(table, Mapping):
            raise UserError(f"{key} = {table!r}: must be a dict of settings, such as train={{'steps': 200}}")
        tables[key] = {**tables.get(key, {}), **table}
    settings = tables.get("data")
    if not isinstance(settings, dict):
        raise UserError(f"{name}: has no table [data]; add one, such as  [data]  with  {task_of(tables).EXAMPLE}")
    given = data or settings.get("folder", ".")
    if isinstance(given, str | Path) and "\0" not in str(given):
        given = str(given)
        folder = sample_folder(given) or (Path(given) if data else base / Path(given).expanduser())
        settings["folder"] = str(folder.resolve())
    train = tables.get("train")
    if isinstance(train, dict) and isinstance(train.get("init_from"), str):
        train["init_from"] = str(Path(train["init_from"]).expanduser().resolve())
    if skip_bad:
        settings["skip_bad"] = True
    return tables, Path(out) if out else Path("runs") / (Path(name).stem + "-smoke" * smoke)


def _read(recipe: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str, Path]:
    """The tables, the name of the recipe and the folder that its relative paths start in."""
    if isinstance(recipe, Mapping):
        tables = {key: dict(table) if isinstance(table, Mapping) else table for key, table in recipe.items()}
        return tables, "run", Path()
    if isinstance(recipe, str) and "\n" in recipe:
        try:
            return tomllib.loads(recipe), "run", Path()
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"recipe: not readable as TOML: {error}") from None
    if str(recipe) in PRESETS and not Path(recipe).exists():
        remedy = f'write a recipe with  [data]  and  [model]  preset = "{recipe}"'
        raise UserError(f"{recipe}: is a preset of a model, without data: {remedy}")
    path = Path(recipe)
    path = path / RECIPE if path.is_dir() else path
    return read_recipe(recipe), str(path), path.parent


def estimate(tables: Mapping[str, Any], workers: Workers) -> dict[str, Any]:
    """What `regard train --dry-run` shows: sizes, and the time from a few steps that are trained and discarded."""
    if workers.world > 1:
        raise UserError("--dry-run: measures one process; run it without torchrun")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Run(task_of(tables)(tables, Path(folder) / "run", workers.device))
        run.prepare()
        trainer = run.trainer()
        size, seconds, steps = _size(trainer), trainer.measure(), run.config.steps
        return {
            **size, "steps": steps, "epochs": trainer.epochs, "device": trainer.device.type,
            "seconds_per_step": seconds, "seconds": steps * seconds,
            "advice": _advice(run, trainer, steps * seconds) or None, "export": export_note(run.task) or None,
        }  # fmt: skip


def _size(trainer: Trainer) -> dict[str, int]:
    """The number of parameters and the size of the training data."""
    return {"parameters": sum(one.numel() for one in trainer.model.parameters()), **trainer.batches.size}


def format_size(size: Mapping[str, int]) -> str:
    data = ", ".join(f"{size[name]:,} {name}" for name in ("examples", "tokens") if name in size)
    return f"{size['parameters']:,} parameters" + f"; training data: {data}" * bool(data)


def _advice(run: Run, trainer: Trainer, seconds: float) -> str:
    """A line for a run that takes long on a CPU: what would fit into an hour."""
    if trainer.device.type != "cpu" or seconds <= HOUR or trainer.started:
        return ""
    task, options = run.task, [f"--set train.steps={max(1, int(run.config.steps * HOUR / seconds))}"]
    if found := smaller(task.model_config, task.model_fields, run.config.pack or TYPICAL, seconds, HOUR):
        sets = " ".join(f"--set model.{name}={value}" for name, value in found.settings.items())
        options.insert(0, f"{sets} (as preset {found.preset!r}: about {duration(found.seconds)})")
    return f"note: more than an hour on a CPU. To stay below:  {', or  '.join(options)}"


def export_note(task: Task) -> str:
    """A line about a model that `regard export` will refuse."""
    nearest, differences = nearest_family(task.make_model_config(task.PLACEHOLDERS))
    if not differences:
        return ""
    return (
        f"note: this architecture cannot be exported to Hugging Face; {nearest.name}, the most similar one there, "
        f"differs in {'; '.join(differences)}. Change [model] if you need the export"
    )


def train_run(
    tables: Mapping[str, Any], folder: Path, workers: Workers, fresh: bool = False, like: Iterable[Path] = ()
) -> Outcome:
    """Prepare, train (from the last checkpoint, if there is one), evaluate, write the report.

    `fresh` deletes an earlier run with the same task and data in that folder. `like` are the folders of runs: data
    and tokenizers of one with the same [data] and [text] are copied instead of made.
    """
    run = Run(task_of(tables)(tables, folder, workers.device))
    with workers.leading(hold(folder)):
        if fresh:
            workers.on_lead(run.clear_earlier)
        workers.on_lead(partial(run.prepare, like))
        if not workers.leads:
            run.open()
        workers.gather(None)  # all ranks have opened it, before an error may remove it
        trainer = run.trainer()
        if trainer.resume() and workers.leads and not trainer.finished:
            print(localize(f"resuming from step {trainer.step} of {run.config.steps}."), file=sys.stderr)
        begin = trainer.step
        if workers.leads and not trainer.finished:
            print(localize(format_size(_size(trainer))), file=sys.stderr)
        trainer.advise = partial(_advice, run, trainer)

        def finish() -> dict[str, Metrics]:
            evaluations = run.finish(trainer)
            results = run.task.results(run.bundle.predictor, evaluations)
            with stage("writing report.html"):
                write_report(folder / "report.html", results, run.bundle)
            return {name: one.metrics for name, one in evaluations.items()}

        metrics = workers.on_lead(finish) if trainer.run() else None
        return Outcome(run, begin, trainer.step, trainer.seconds, metrics)
