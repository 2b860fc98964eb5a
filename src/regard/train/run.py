"""A run, whatever it learns: from a recipe to a folder that can go anywhere.

    task = "translation"        which subclass of `TaskRun`; see `regard.tasks.registry`
    [data]   what is learned    -> checked, then made ready in RUN/data
    [text]   which tokenizer    -> RUN/tokenizer.json
    [model]  which network      -> RUN/model.safetensors
    [train]  how it learns      -> RUN/checkpoints, RUN/metrics.jsonl
    [decode] how it answers     -> RUN/scores.json, RUN/report.html

The recipe travels into the folder, complete, so that the folder alone can go on, be tested and be moved. What
every task needs is here; a task brings its data, its batches, its loss and its figures, in the methods below
that have no body. There is one training loop, `regard.train.trainer.Trainer`, for all of them.
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
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import torch

from regard.commands import program
from regard.data.batch import Stream
from regard.data.sets import home
from regard.errors import Unfinished, UserError, suggest
from regard.files import make_folder, write_atomically
from regard.models import ModelConfig, build
from regard.models.folder import WEIGHTS, fill, load_tokenizers, read_weights, weights_of, write_weights
from regard.models.recipe import RECIPE
from regard.predict.bundle import Bundle, Predictor
from regard.settings import from_dict, read_toml, to_dict, write_toml
from regard.tasks.registry import DEFAULT
from regard.text.config import TextConfig
from regard.text.gpt2 import read_gpt2
from regard.text.sentencepiece import load_tokenizer
from regard.text.tokenizer import Tokenizer
from regard.train.average import average
from regard.train.checkpoint import whole
from regard.train.config import TrainConfig
from regard.train.distributed import current
from regard.train.inherit import inherit, inherit_tokenizers, inherit_weights
from regard.train.metric import LOSS, Metric
from regard.train.trainer import Objective, Trainer
from regard.train.vocabulary import score_on_gpu

CONTENTS = (
    "tokenizer.json", "source.json", "target.json", WEIGHTS, "metrics.jsonl", "scores.json", "report.html",
    "checkpoints", "data", "tensorboard",
)  # fmt: skip
Figures = dict[str, Any]  # what a test gives: plain numbers and texts, by name


class TaskRun(ABC):
    """What the tables of a recipe say, made real in `folder`."""

    NAME: ClassVar[str]
    predictor: ClassVar[type[Predictor[Any, Any]]]  # what `regard.load` predicts with
    TABLES: ClassVar[tuple[str, ...]] = ("data", "text", "model", "train", "decode")
    DEFAULTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # table: settings that differ from the general ones
    METRICS: ClassVar[Mapping[str, Metric]] = {"loss": LOSS}  # what `train.metric` may say
    HEADLINE: ClassVar[tuple[str, str]]  # the figure of scores.json that `regard runs` shows, and how it calls it
    UNIT: ClassVar[str] = "tokens"  # what `tokens` of a batch counts, for the speed that is shown
    EXAMPLE: ClassVar[str]  # a line of [data], for someone who has none
    EVALUATE: ClassVar[tuple[str, ...]]  # the options of `regard evaluate` that it takes, besides --device and --json

    tokenizers: dict[str, Tokenizer]  # by the names of `regard.models.folder.TOKENIZERS`; known after `prepare`
    model_config: ModelConfig  # known after `prepare`
    warming: threading.Thread | None = None

    def __init__(self, tables: Mapping[str, Any], folder: Path, device: torch.device) -> None:
        tables = {name: table for name, table in tables.items() if name != "task"}
        for name, table in tables.items():
            if name not in self.TABLES:
                raise UserError(f"[{name}]: unknown table; {suggest(name, self.TABLES)}")
            if not isinstance(table, dict):
                raise UserError(f"{name} = {table!r}: write a table [{name}]")
        tables = self.complete(inherit(tables, self.DEFAULTS, folder))
        self.folder, self.device = folder, device
        self.config = from_dict(TrainConfig, tables.get("train", {}), "train.")
        if self.config.metric not in self.METRICS:
            near = suggest(self.config.metric, self.METRICS)
            raise UserError(f"train.metric = {self.config.metric!r}: is no figure of a {self.NAME} run; {near}")
        self.model_fields = dict(tables.get("model", {}))
        self.read_tables(tables)

    @classmethod
    def complete(cls, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The tables with this task's defaults in them."""
        return {name: {**cls.DEFAULTS.get(name, {}), **tables.get(name, {})} for name in {**tables, **cls.DEFAULTS}}

    # --- what a task brings

    @abstractmethod
    def read_tables(self, tables: Mapping[str, Any]) -> None:
        """Its own tables (all but [train]), checked as far as they can be before any data is read."""

    @abstractmethod
    def own_tables(self) -> dict[str, Any]:
        """The same tables, complete, but for [model]: they go into the folder's recipe."""

    @abstractmethod
    def find_data(self) -> None:
        """A UserError unless all files are there."""

    @abstractmethod
    def check_data(self) -> None:
        """Read everything once: a mistake in a test set must not show after training."""

    def tokenizer_names(self) -> tuple[str, ...]:
        return ("tokenizer",)

    @abstractmethod
    def make_tokenizers(self) -> dict[str, Tokenizer]:
        """New ones, by those names; called where the folder has none yet."""

    @abstractmethod
    def settle_model(self) -> ModelConfig:
        """[model], with what the tokenizers or the data decide."""

    @abstractmethod
    def prepare_data(self) -> None:
        """Make ready what `stream` and `evaluate` read, under RUN/data; an error leaves no run behind."""

    @abstractmethod
    def stream(self) -> Stream:
        """The batches. Each has `to(device)` and `tokens`, how many it counts as; see `regard.data.batch`."""

    @abstractmethod
    def objective(self) -> Objective:
        """(model, batch) -> (summed loss, what it is a sum over)."""

    @property
    def judged(self) -> bool:
        """Whether there is validation data."""
        return True

    @abstractmethod
    def evaluate(self, model: Any) -> dict[str, float]:
        """Validation figures of the model, in eval mode; "valid_loss" and whatever METRICS names."""

    @abstractmethod
    def score(self, model: Any) -> dict[str, Figures]:
        """The final figures of every test set."""

    @abstractmethod
    def report(self, model: Any, scores: Mapping[str, Figures]) -> None:
        """Write report.html."""

    @classmethod
    @abstractmethod
    def rescore(cls, folder: Path, device: torch.device, options: Mapping[str, Any]) -> dict[str, Figures]:
        """What `regard evaluate` tells about a finished model; `options` are those of EVALUATE, None if not given."""

    @staticmethod
    @abstractmethod
    def tell(figures: Figures) -> list[str]:
        """Figures in words: the first line says what matters."""

    # --- what is the same for all

    def prepare(self) -> None:
        """Check the data, make the tokenizers, write the recipe. A folder that holds another run is left alone."""
        self.fresh = not (self.folder / RECIPE).exists()
        self._refuse_foreign_folder()
        self.check_data()
        self.warming = threading.Thread(target=warm_up, args=(self.device, self.config.compile))
        self.warming.start()
        names = self.tokenizer_names()
        found = {} if self.fresh else load_tokenizers(self.folder)
        if found.keys() >= {*names}:
            self.tokenizers = {name: found[name] for name in names}
        elif self.config.init_from is not None:
            self.tokenizers = inherit_tokenizers(self.config.init_from, names)
        else:
            self.tokenizers = self.make_tokenizers()
        self.model_config = self.settle_model()
        recipe = self._recipe()
        if not self.fresh and self._recipe_there() != recipe:
            raise UserError(
                f"{self.folder}: holds a run with other settings (see {RECIPE} there): name another folder with -o, "
                f"or go on with that one:  {program()} resume {shlex.quote(str(self.folder))}"
            )
        make_folder(self.folder)
        with self._or_nothing():
            write_toml(self.folder / RECIPE, recipe)
            for name, tokenizer in self.tokenizers.items():
                tokenizer.save(self.folder / f"{name}.json")
            self.prepare_data()

    def bundle(self, model: Any) -> Bundle:
        """The model in memory with what belongs to it."""
        return Bundle(model, self.tokenizers, self._recipe(), self.folder)

    def _recipe(self) -> dict[str, Any]:
        model, train = to_dict(self.model_config), to_dict(self.config)
        return {"task": self.NAME, **self.own_tables(), "model": model, "train": train}

    def _recipe_there(self) -> dict[str, Any]:
        """The folder's recipe; a field that it does not know, being older, has its default."""
        tables = read_toml(self.folder / RECIPE)
        if tables.get("task", DEFAULT) != self.NAME:
            return tables
        there = type(self)(tables, self.folder, self.device)
        there.model_config = from_dict(ModelConfig, tables.get("model", {}), "model.")
        return there._recipe()

    def open(self) -> None:
        """Take up what rank 0 has prepared."""
        if not (self.folder / RECIPE).is_file():
            raise UserError(
                f"{self.folder}: rank 0 has made a run there, but {platform.node()} does not see it: put run and "
                "data on a file system that all machines share"
            )
        self.fresh = False
        with redirect_stderr(StringIO()):  # rank 0 has said it all
            self.check_data()
            self.tokenizers = load_tokenizers(self.folder)
            self.model_config = self.settle_model()
            self.prepare_data()  # finds what rank 0 has made

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """A run that cannot begin leaves nothing behind, so that the next try may have other settings."""
        try:
            yield
        except (Unfinished, KeyboardInterrupt):  # what is ready is kept: the same command goes on with it
            raise
        except BaseException:
            for name in (*CONTENTS, RECIPE) if self.fresh else ():
                path = self.folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            with suppress(OSError):  # something else is in it
                self.folder.rmdir()
            raise

    def _refuse_foreign_folder(self) -> None:
        """The recipe is the mark of a run, and the first file in it: without one, nothing there is ours."""
        found = [name for name in CONTENTS if os.path.lexists(self.folder / name)]
        if found and self.fresh:
            raise UserError(f"{self.folder}: holds {found[0]} but no {RECIPE}, so it is no run: name another with -o")

    def learn_tokenizer(self, lines: Iterable[str], text: TextConfig, folder: str, side: int = 0) -> Tokenizer:
        """The tokenizer that [text] asks for, from `lines` or from files; errors are in the words of a recipe."""
        if text.tokenizer_files:
            return load_tokenizer(home(folder) / home(text.tokenizer_files[side]))
        if text.kind == "gpt2":
            return read_gpt2(home(folder) / home(text.vocab_dir or ""))
        try:
            return Tokenizer.train(lines, text.kind, text.vocab_size)
        except UserError as error:
            raise UserError(str(error).replace("vocab_size", "text.vocab_size")) from None

    def trainer(self) -> Trainer:
        if self.warming is not None:
            self.warming.join()  # what it loads must not fall into the recording of a step
        torch.manual_seed(self.config.seed)
        model = build(self.model_config)
        evaluate, metric = self.evaluate if self.judged else None, self.METRICS[self.config.metric]
        with self._or_nothing():
            if self.config.init_from is not None and not whole(self.folder / "checkpoints"):
                inherit_weights(model, self.config.init_from, say=current().leads)
            stream, objective = self.stream(), self.objective()
            return Trainer(model, stream, objective, self.config, self.folder, evaluate, metric, self.device, self.UNIT)

    def finish(self, trainer: Trainer) -> dict[str, Figures]:
        """Settle the final weights, score the test sets with them, write the report."""
        weights = self._final_weights(trainer)
        write_weights(self.folder / WEIGHTS, weights)
        fill(trainer.model, weights, WEIGHTS)
        scores = self.score(trainer.model)
        write_atomically(self.folder / "scores.json", json.dumps(scores, indent=1).encode())
        self.report(trainer.model, scores)
        return scores

    def _final_weights(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        """The mean of the last checkpoints, or the best ones, or the last, as [train] says."""
        if self.config.average > 1:
            count = min(self.config.average, len(whole(self.folder / "checkpoints")))
            if count < self.config.average:
                print(
                    f"note: train.average = {self.config.average}, but there are {count} checkpoints", file=sys.stderr
                )
            return average(self.folder, count)
        if (self.folder / WEIGHTS).exists() and trainer.evaluate is not None:
            return read_weights(self.folder / WEIGHTS)  # the best
        with trainer.judged_weights() as model:
            return {name: tensor.clone() for name, tensor in weights_of(model).items()}


def warm_up(device: torch.device, compiled: bool = False) -> None:
    """Load what the first step would wait for, while the processor is busy with the data.

    A GPU brings its libraries, `train.compile` the compiler: seconds, which need no one to watch them.
    """
    with suppress(Exception):  # whatever is wrong will be said where it is needed
        if device.type == "cuda":
            square = torch.zeros(64, 64, device=device, dtype=torch.bfloat16)
            score_on_gpu()(square @ square, torch.zeros(64, device=device, dtype=torch.long), 0.0, 0.0)
        if compiled:
            importlib.import_module("torch._dynamo")
