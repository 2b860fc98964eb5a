"""A run: from a recipe to a folder that can be resumed, evaluated, loaded and moved.

    task = "translation"        the task; see `regard.tasks.registry`
    [data]   the data           -> checked, then prepared in RUN/data
    [text]   the tokenizer      -> RUN/tokenizer.json
    [model]  the network        -> RUN/model.safetensors
    [train]  the optimization   -> RUN/checkpoints, RUN/metrics.jsonl
    [decode] the search         -> RUN/scores.json, RUN/predictions
             which metrics      -> RUN/summary.json, for `regard runs`
             some test inputs   -> RUN/examples.json, for `regard explore`

The complete recipe is saved in the folder, so that the folder alone is enough to resume and to evaluate. A `Run` knows
no task: it calls the steps of `regard.training.task.Task` in order, and trains with `regard.training.trainer.Trainer`.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shlex
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from regard.data.sets import DataConfig
from regard.errors import Unfinished, UserError, program
from regard.files import make_folder, write_atomically
from regard.messages import localize
from regard.models.config import ModelConfig
from regard.models.folder import WEIGHTS, fill, load_tokenizers, read_weights, weights_of, write_weights
from regard.models.recipe import EXAMPLES, RECIPE
from regard.models.transformer import build
from regard.progress import stage
from regard.settings import from_dict, read_toml, write_toml
from regard.training.checkpoint import average, complete_checkpoints, newest
from regard.training.distributed import current
from regard.training.examples import save_examples
from regard.training.initialize import initialize_tokenizers, initialize_weights
from regard.training.objective import score_on_gpu
from regard.training.task import Evaluation, Task
from regard.training.trainer import Trainer

CONTENTS = (
    "tokenizer.json", "source.json", "target.json", WEIGHTS, "metrics.jsonl", "scores.json", "summary.json", EXAMPLES,
    "predictions", "report.html", "checkpoints", "snapshots", "data", "tensorboard", "wandb",
)  # fmt: skip


class Run:
    """A task and the folder in which it is trained."""

    def __init__(self, task: Task) -> None:
        self.task, self.folder, self.config = task, task.folder, task.config
        self.is_new = not (self.folder / RECIPE).exists()
        task.make_model_config(task.PLACEHOLDERS)  # a mistake in [model] shows before the data is read

    def prepare(self, like: Iterable[Path] = ()) -> None:
        """Check the data, make the tokenizers, save the recipe. A folder that holds another run stays untouched.

        `like`: folders of runs; tokenizers and prepared data of the first with the same [data] and [text] are copied.
        """
        task = self.task
        self._refuse_foreign_folder()
        if self.is_new:
            repeated = task.data.repeated() if isinstance(task.data, DataConfig) else ()
            for line in (*self.config.warnings(), *repeated):
                print(localize(f"warning: {line}"), file=sys.stderr)
        with stage("reading the data"):
            task.check_data()
        preloading = threading.Thread(target=preload, args=(task.device,))
        preloading.start()
        names, own = task.tokenizer_names(), {"task": task.NAME, **task.own_tables()}
        other = next((folder for folder in like if same_data(own, folder)), None)
        saved = {} if self.is_new else load_tokenizers(self.folder)
        if saved.keys() >= {*names}:
            task.tokenizers = {name: saved[name] for name in names}
        elif self.config.init_from is not None:
            task.tokenizers = initialize_tokenizers(self.config.init_from, names)
        elif other is not None and (others := load_tokenizers(other)).keys() >= {*names}:
            task.tokenizers = {name: others[name] for name in names}
        else:
            task.tokenizers = task.make_tokenizers()
        task.model_config = task.settle_model()
        if not self.is_new and self._saved_recipe() != task.recipe:
            raise UserError(
                f"{self.folder}: holds a run with other settings (see {RECIPE} there): name another folder with -o, "
                f"or resume that run:  {program()} resume {shlex.quote(str(self.folder))}"
            )
        make_folder(self.folder)
        with self._removed_on_error():
            write_toml(self.folder / RECIPE, task.recipe)
            write_atomically(self.folder / "summary.json", json.dumps(task.summary).encode())
            for name, tokenizer in task.tokenizers.items():
                tokenizer.save(self.folder / f"{name}.json")
            with stage("preparing the data"):
                if other is not None:
                    self._copy_data(other / "data")
                task.prepare_data()  # uses what was copied, if it fits
            if not (self.folder / EXAMPLES).exists():
                save_examples(task, self.folder)
        preloading.join()  # what it loads must not become part of a recorded step

    def _copy_data(self, source: Path) -> None:
        target, part = self.folder / "data", self.folder / ".data"
        if source.is_dir() and not target.exists():
            shutil.rmtree(part, ignore_errors=True)  # of an earlier attempt
            shutil.copytree(source, part)
            os.replace(part, target)

    def _saved_recipe(self) -> dict[str, object]:
        """The folder's recipe; a field that it lacks, being older, has its default."""
        tables = read_toml(self.folder / RECIPE)
        if tables.get("task") != self.task.NAME:
            return tables
        try:
            saved = type(self.task)(tables, self.folder, self.task.device)
            saved.model_config = from_dict(ModelConfig, tables.get("model", {}), "model.")
        except UserError:  # settings of another version
            return tables
        return saved.recipe

    def open(self) -> None:
        """Open what rank 0 has prepared."""
        if not (self.folder / RECIPE).is_file():
            raise UserError(
                f"{self.folder}: rank 0 has prepared a run there, but {platform.node()} cannot see it: put run and "
                "data on a file system that all machines share"
            )
        self.is_new, task = False, self.task
        with redirect_stderr(StringIO()):  # rank 0 has printed all notes
            task.check_data()
            task.tokenizers = load_tokenizers(self.folder)
            task.model_config = task.settle_model()
            task.prepare_data()  # finds what rank 0 has prepared

    @contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        """A run that cannot start leaves nothing behind, so that the next attempt may have other settings."""
        try:
            yield
        except (Unfinished, KeyboardInterrupt):  # what is complete is kept: the same command continues with it
            raise
        except BaseException:
            if self.is_new:
                self._clear()
            with suppress(OSError):  # there are other files
                self.folder.rmdir()
            raise

    def clear_earlier(self) -> None:
        """Delete the run in the folder, if it has the same task and data; any other content stays untouched."""
        self._refuse_foreign_folder()
        if self.is_new:
            return
        saved = read_toml(self.folder / RECIPE)
        if (saved.get("task"), saved.get("data")) != (self.task.NAME, self.task.own_tables().get("data")):
            raise UserError(f"{self.folder}: holds a run with other data; name another folder")
        self._clear()

    def _clear(self) -> None:
        """Delete the files of the run; the recipe, which identifies a run, is deleted last."""
        for name in (*CONTENTS, RECIPE):
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        self.is_new = True

    def _refuse_foreign_folder(self) -> None:
        """The recipe identifies a run and is its first file: without one, the other files are not ours."""
        present = [name for name in CONTENTS if os.path.lexists(self.folder / name)]
        if present and self.is_new:
            raise UserError(f"{self.folder}: holds {present[0]} but no {RECIPE}: not a run; name another with -o")

    def trainer(self) -> Trainer:
        task, config = self.task, self.config
        torch.manual_seed(config.seed)
        evaluate, metric = task.evaluate if task.has_validation else None, task.METRICS[config.metric]
        with stage("building the model"), self._removed_on_error():
            model = build(task.model_config)
            if config.init_from is not None and newest(self.folder / "checkpoints")[0] is None:
                initialize_weights(model, config.init_from, verbose=current().leads)
            stream, objective = task.stream(), task.objective()
            return Trainer(model, stream, objective, config, self.folder, evaluate, metric, task.device, task.UNIT)

    def finish(self, trainer: Trainer) -> dict[str, Evaluation]:
        """Save the final weights and evaluate them on the test sets."""
        weights = self._final_weights(trainer)
        write_weights(self.folder / WEIGHTS, weights)
        fill(trainer.model, weights, WEIGHTS)
        self.bundle = self.task.bundle(trainer.model)
        evaluations = self.task.score_sets(self.bundle.predictor, self.task.sets)
        scores = {name: one.metrics for name, one in evaluations.items()}
        write_atomically(self.folder / "scores.json", json.dumps(scores, indent=1).encode())
        self.task.save_predictions(evaluations, self.folder / "predictions")
        return evaluations

    def _final_weights(self, trainer: Trainer) -> Mapping[str, torch.Tensor]:
        """The mean of the last checkpoints, or the best weights, or the last, as [train] says."""
        if self.config.average > 1:
            count = min(self.config.average, len([*complete_checkpoints(self.folder / "checkpoints")]))
            if count < self.config.average:
                line = f"note: train.average = {self.config.average}, but there are {count} checkpoints"
                print(localize(line), file=sys.stderr)
            return average(self.folder, count)
        if (self.folder / WEIGHTS).exists() and trainer.evaluate is not None:
            return read_weights(self.folder / WEIGHTS)  # the best
        with trainer.engine.evaluation_model(trainer.mean) as model:
            return {name: tensor.clone() for name, tensor in weights_of(model).items()}


def same_data(tables: Mapping[str, Any], folder: Path) -> bool:
    """Whether the run in `folder` has prepared its data and made its tokenizers with these settings."""
    path = folder / RECIPE
    saved = read_toml(path) if path.is_file() else {}
    return all(saved.get(name) == tables.get(name) for name in ("task", "data", "text"))


def preload(device: torch.device) -> None:
    """Load libraries for the first step while the processor is busy with the data.

    A GPU needs its libraries, and the optimizers of PyTorch import its compiler when they are made; both take seconds.
    """
    with suppress(Exception):  # an error will be reported where it matters
        if device.type == "cuda":
            square = torch.zeros(64, 64, device=device, dtype=torch.bfloat16)
            score_on_gpu()(square @ square, torch.zeros(64, device=device, dtype=torch.long), 0.0, 0.0)
        importlib.import_module("torch._dynamo")
