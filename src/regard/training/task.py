"""A task: what the tables of a recipe mean, from files to metrics.

    files → check_data → tokenizers → prepare_data → stream ─→ objective → loss
                                                      model ─→ evaluate  → validation metrics
                                      examples(set) ─→ predictor → score → test metrics, report

A subclass states its tables, its defaults, its metrics and its predictor, which says what [model] must be, and
implements the steps. What is the same for all tasks is here or in `regard.training.run`: reading tables, learning the
tokenizer, sizes that the data decides, test sets, `regard evaluate`, the report. CONTRIBUTING.md shows a complete
example.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.data.sets import Sources, TextFiles, home
from regard.data.streams import Stream
from regard.errors import UserError, suggest
from regard.files import make_folder, write_atomically
from regard.models.config import ModelConfig
from regard.models.recipe import with_preset
from regard.nn.config import BY_TEXT
from regard.nn.parts import check_split
from regard.predict.bundle import Bundle, Predictor
from regard.progress import stage
from regard.settings import from_dict, to_dict
from regard.text.config import TextConfig
from regard.text.gpt2 import read_gpt2
from regard.text.sentencepiece import load_tokenizer
from regard.text.tokenizer import Tokenizer
from regard.training.config import TrainConfig
from regard.training.history import read_metrics
from regard.training.initialize import complete_from
from regard.training.parallel import HALF
from regard.training.results import AttentionInput, Results, Section, Table
from regard.training.trainer import LOSS, Metric, Objective

Metrics = dict[str, Any]  # of one test set: plain numbers and texts, by name


@dataclass(frozen=True)
class Evaluation:
    """One test set: its examples, their metrics, and the predictions in whatever form the task keeps them."""

    examples: Any
    metrics: Metrics
    predictions: Any = None


class Task(ABC):
    """The tables of a recipe, and their data in `folder`."""

    NAME: ClassVar[str]  # `task` in the recipe
    TABLES: ClassVar[Mapping[str, type]]  # the tables besides [model] and [train], each with its dataclass
    DEFAULTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # settings that differ from the dataclasses' defaults
    MODEL: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # what [model] must be, if not what the predictor requires
    PLACEHOLDERS: ClassVar[Mapping[str, int]] = {"vocab_size": 8}  # for `model_sizes`, to check [model] before the data
    UNUSED: ClassVar[tuple[str, ...]] = ()  # settings of [train] that have no effect here
    METRICS: ClassVar[Mapping[str, Metric]] = {"loss": LOSS}  # the values of `train.metric`
    HEADLINE: tuple[str, str, str]  # the most important test metric: its key, its name, its format
    COLUMNS: ClassVar[Mapping[str, str]] = {}  # the metrics in the report's table: key and heading
    SPLITS: ClassVar[bool] = False  # whether several processes can share a sequence (train.parallel = "context")
    UNIT: ClassVar[str] = "tokens"  # what `Batch.tokens` counts
    LOSS_UNIT: ClassVar[str] = "nats per token"
    EXAMPLE: ClassVar[str]  # a line of [data], for messages
    OPTIONS: ClassVar[tuple[str, ...]] = ("test",)  # the options of `regard evaluate` that apply
    predictor: ClassVar[type[Predictor[Any, Any]]]

    file_options: Mapping[str, str] | None = None  # those of `regard evaluate` about --files; None: there are no files
    data: Any
    text: TextConfig
    tokenizers: dict[str, Tokenizer]  # by their names in `regard.text.sentencepiece.TOKENIZERS`
    model_config: ModelConfig

    def __init__(self, tables: Mapping[str, Any], folder: Path, device: torch.device) -> None:
        tables = {name: table for name, table in tables.items() if name != "task"}
        known = (*self.TABLES, "model", "train")
        for name, table in tables.items():
            if name not in known:
                raise UserError(f"[{name}]: unknown table; {suggest(name, known)}")
            if not isinstance(table, dict):
                raise UserError(f"{name} = {table!r}: must be a table [{name}]")
        tables = self.complete(complete_from(tables, self.DEFAULTS, folder))
        self.folder, self.device, self.tokenizers = folder, device, {}
        self.config = from_dict(TrainConfig, tables.get("train", {}), "train.")
        if self.config.metric not in self.METRICS:
            near = suggest(self.config.metric, self.METRICS)
            raise UserError(f"train.metric = {self.config.metric!r}: is not a metric of {self.NAME}; {near}")
        for name in self.UNUSED:
            if value := getattr(self.config, name):
                raise UserError(f"train.{name} = {value}: has no effect in {self.NAME}; remove it")
        if self.config.parallel == "context" and not self.SPLITS:
            raise UserError(
                f"train.parallel = 'context': {self.NAME} does not divide sequences between processes; "
                "use 'ddp' or 'fsdp'"
            )
        self.model_fields = dict(tables.get("model", {}))
        self.read_tables(tables)

    @classmethod
    def complete(cls, tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The tables with this task's defaults in them."""
        names = dict.fromkeys(("model", "train", *tables, *cls.DEFAULTS))
        complete = {name: {**cls.DEFAULTS.get(name, {}), **tables.get(name, {})} for name in names}
        length = cls.row_length(complete)
        if length is not None and complete["train"].setdefault("pack", length) != length:
            raise UserError(f"train.pack = {complete['train']['pack']}: the data decides this ({length}); remove it")
        return complete

    @classmethod
    def row_length(cls, tables: Mapping[str, Any]) -> int | None:
        """`train.pack` where it is not for the recipe to choose: an image is a row of as many patches."""
        model = with_preset(tables["model"])
        if model.get("input", "tokens") == "tokens":
            return None
        config = from_dict(ModelConfig, {**model, **cls.PLACEHOLDERS}, "model.")
        return config.source_length if config.input == "patches" else 0

    def read_tables(self, tables: Mapping[str, Any]) -> None:
        """Each table becomes an attribute: [data] is `self.data`."""
        for name, kind in self.TABLES.items():
            setattr(self, name, from_dict(kind, tables.get(name, {}), f"{name}."))

    def own_tables(self) -> dict[str, Any]:
        """The same tables, complete, for the recipe in the folder."""
        return {name: to_dict(getattr(self, name)) for name in self.TABLES}

    @property
    def recipe(self) -> dict[str, Any]:
        return {
            "task": self.NAME, **self.own_tables(), "model": to_dict(self.model_config), "train": to_dict(self.config)
        }  # fmt: skip

    @property
    def summary(self) -> dict[str, Any]:
        """What `regard runs` has to know of the task, which would take seconds to import."""
        metric, (key, name, _) = self.METRICS[self.config.metric], self.HEADLINE
        return {
            "task": self.NAME, "steps": self.config.steps, "metric": metric.key, "higher": metric.higher,
            "headline": name, "test": key,
        }  # fmt: skip

    # --- data

    @property
    def files(self) -> dict[str, Sources]:
        """The files of each set."""
        return {name: files for name, files in {"train": self.data.train, **self.data.sets}.items() if files}

    def find_files(self) -> None:
        """Raise a UserError unless all files exist."""
        for files in self.files.values():
            self.data.find(files)

    @abstractmethod
    def check_data(self) -> None:
        """Read everything once: a mistake in a test set must not show only after training."""

    def prepare_data(self) -> None:  # noqa: B027
        """Prepare what `stream` and `evaluate` read, under RUN/data."""

    def prepare_evaluation(self) -> None:  # noqa: B027
        """Prepare what `examples` reads, for a run that is only evaluated."""

    @abstractmethod
    def stream(self) -> Stream:
        """The training batches. Each has `to(device)` and `tokens`, the count that the loss is a sum over."""

    # --- tokenizers

    def tokenizer_names(self) -> tuple[str, ...]:
        return ("tokenizer",) if "text" in self.TABLES else ()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers["tokenizer"]

    def training_texts(self) -> Iterable[str]:
        """The texts from which the tokenizer is learned."""
        return ()

    def make_tokenizers(self) -> dict[str, Tokenizer]:
        """New ones, by their names; called where the folder has none."""
        return {name: self.learn_tokenizer(self.training_texts()) for name in self.tokenizer_names()}

    def learn_tokenizer(self, texts: Iterable[str], side: int = 0) -> Tokenizer:
        """The tokenizer that [text] describes, learned from `texts` or read from a file."""
        text, folder = self.text, home(self.data.folder)
        if text.tokenizer_files:
            return load_tokenizer(folder / home(text.tokenizer_files[side]))
        if text.kind == "gpt2":
            return read_gpt2(folder / home(text.vocab_dir or ""), text.normalize)
        kind = text.target_kind or text.kind if side == 1 else text.kind
        try:
            with stage("training the tokenizer", "texts") as done:
                return Tokenizer.train(done.each(texts), kind, text.vocab_size, normalize=text.normalize)
        except UserError as error:
            raise UserError(str(error).replace("vocab_size", "text.vocab_size")) from None

    # --- model

    def model_sizes(self) -> dict[str, int | None]:
        """The fields of [model] that the tokenizers and the data decide."""
        return {"vocab_size": len(self.tokenizer)}

    def model_defaults(self) -> dict[str, Any]:
        """Fields of [model] that follow from the data unless the recipe sets them."""
        return {}

    def check_model(self, config: ModelConfig) -> None:  # noqa: B027
        """Raise a UserError where [model] does not fit the other tables."""

    def make_model_config(self, sizes: Mapping[str, int | None]) -> ModelConfig:
        """[model] with its preset, the defaults and these sizes."""
        fields = with_preset({**self.model_defaults(), **self.model_fields})
        config = from_dict(ModelConfig, {**fields, **sizes}, "model.")
        required = self.MODEL or self.predictor.MODEL
        if any(getattr(config, name) not in values for name, values in required.items()):
            found = ", ".join(f"model.{name} = {getattr(config, name)!r}" for name in required)
            needed = ", ".join(f"{name} = {' or '.join(map(repr, values))}" for name, values in required.items())
            raise UserError(f"{found}: {self.NAME} needs {needed}")
        self.check_model(config)
        if self.config.parallel == "context":
            check_split(config)
        kinds = {config.mixer_of(layer) for layer in range(config.layers)} & {*BY_TEXT}
        if self.config.cuda_graph and config.input == "tokens" and config.architecture != "decoder":
            if kinds:
                raise UserError(
                    f"train.cuda_graph = true: mixer = '{min(kinds)}' computes packed texts of similar length "
                    "together; a graph has fixed shapes: set train.cuda_graph = false"
                )
            if config.global_projections:
                raise UserError(
                    "train.cuda_graph = true: global_projections = true computes as many global tokens as a packed row "
                    "has; a graph has fixed shapes: set train.cuda_graph = false"
                )
        return config

    def settle_model(self) -> ModelConfig:
        """The model, once the tokenizers and the data are known."""
        sizes = self.model_sizes()
        for name, size in sizes.items():
            if self.model_fields.get(name, size) != size:
                raise UserError(
                    f"model.{name} = {self.model_fields[name]}: the data decides this, and requires {size}; "
                    f"remove {name} from [model]"
                )
        return self.make_model_config(sizes)

    def check_positions(self, config: ModelConfig, length: int, what: str) -> None:
        """Learned positions, and the projections of a Linformer, must reach as far as the longest sequence."""
        if config.position_limit is not None and length > config.position_limit:
            if config.position == "learned":
                raise UserError(
                    f"{what} = {length}: learned positions end at model.max_length = {config.max_length}; raise "
                    "model.max_length, or choose another model.position"
                )
            raise UserError(
                f"{what} = {length}: mixer = 'linformer' has parameters for model.max_length = {config.max_length} "
                "tokens; raise model.max_length, or choose another model.mixer"
            )

    def use(self, bundle: Bundle) -> None:
        """Take tokenizers and model from a saved run, to evaluate it."""
        self.tokenizers, self.model_config = bundle.tokenizers, bundle.config

    # --- training and evaluation

    @abstractmethod
    def objective(self) -> Objective:
        """(model, batch) -> (summed loss, what it is a sum over)."""

    def make_objective(self, loss: Callable[..., tuple[Tensor, Tensor]], **options: Any) -> Objective:
        """`loss` with these options and with the settings of [train] that have an effect here."""
        names = {"label_smoothing", "r_drop", "loss_chunk"} - {*self.UNUSED}
        return partial(loss, **{name: getattr(self.config, name) for name in names}, **options)

    @property
    def sets(self) -> Sequence[str]:
        """The names of the sets that are evaluated after training: "valid" and the test sets."""
        return [name for name in self.files if name != "train"]

    @property
    def has_validation(self) -> bool:
        """Whether the model is evaluated during training."""
        return "valid" in self.sets

    @abstractmethod
    def evaluate(self, model: Any) -> dict[str, float]:
        """Validation metrics during training: "valid_loss", and what METRICS names."""

    @torch.inference_mode()
    def sum_loss(self, objective: Objective, model: Any, batches: Iterable[Any]) -> tuple[float, int]:
        """(summed loss, what it is a sum over) of all batches."""
        total, count = 0.0, 0
        for batch in batches:
            loss, tokens = objective(model, batch.to(self.device))
            total, count = total + loss.item(), count + int(tokens)
        return total, count

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of training, for evaluation on a GPU."""
        half = HALF.get(self.config.precision) if self.device.type == "cuda" else None
        return torch.autocast(self.device.type, half, enabled=half is not None)

    @abstractmethod
    def examples(self, name: str) -> Any:
        """One of `sets`, as `score` takes it."""

    def inputs(self, name: str, count: int) -> list[Any]:
        """The first inputs of one of `sets`, or none: texts, vectors [N, features] or bytes [channels, side, side]."""
        return []

    def as_example(self, input: Any) -> Any:
        """An input as a user gives it: numbers as text."""
        return input

    def references(self, name: str, count: int) -> list[str]:
        """The targets of the first inputs of a set, as text; none if the inputs are their own targets."""
        return []

    def read_files(self, files: Sequence[str]) -> Any:
        """The same for the files of `regard evaluate --files`."""
        raise UserError(f"--files: task = {self.NAME!r} evaluates the sets of its recipe; remove --files")

    @abstractmethod
    def score(self, predictor: Any, examples: Any, **options: Any) -> tuple[Metrics, Any]:
        """Test metrics of the predictor on examples, and the predictions for the report."""

    def bundle(self, model: Any) -> Bundle:
        """The model in memory with what is needed to predict."""
        return Bundle(model, self.tokenizers, self.recipe, self.folder, self.predictor)

    def score_sets(self, predictor: Any, names: Iterable[str], **options: Any) -> dict[str, Evaluation]:
        evaluations = {}
        for name in names:
            with stage(f"evaluating {name}"):
                examples = self.examples(name)
                evaluations[name] = Evaluation(examples, *self.score(predictor, examples, **options))
        return evaluations

    def records(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        """The prediction for each example and its reference, for JSON; [] for a task that saves none.

        A "hypothesis" is also saved as a line of text.
        """
        return []

    def save_predictions(self, evaluations: Mapping[str, Evaluation], folder: Path) -> None:
        """NAME.jsonl of each set, and NAME.txt with one hypothesis per line, as sacrebleu reads it."""
        for name, one in evaluations.items():
            if not (records := self.records(one)):
                continue
            make_folder(folder)
            lines = [json.dumps(record, ensure_ascii=False) for record in records]
            write_atomically(folder / f"{name}.jsonl", "".join(f"{line}\n" for line in lines).encode())
            if "hypothesis" in records[0]:
                texts = (" ".join(record["hypothesis"].splitlines()) for record in records)
                write_atomically(folder / f"{name}.txt", "".join(f"{text}\n" for text in texts).encode())

    @staticmethod
    @abstractmethod
    def format_metrics(metrics: Metrics) -> list[str]:
        """Test metrics as lines of text, the most important in the first."""

    # --- report

    def results(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> Results:
        """What report.html shows."""
        key, name, form = self.HEADLINE
        scored = {test: one.metrics for test, one in evaluations.items()}
        headline = [(f"{name} on {test}", f"{found[key]:{form}}") for test, found in scored.items() if key in found]
        rows = [[test, *(found.get(column) for column in self.COLUMNS)] for test, found in scored.items()]
        table = Section("Metrics", [Table(["set", *self.COLUMNS.values()], rows)])
        return Results(
            title=self.folder.resolve().name,
            headline=headline[-2:],
            history=read_metrics(self.folder),
            loss_unit=self.LOSS_UNIT,
            sections=[*([table] if rows else []), *self.sections(predictor, evaluations)],
            attention=self.attention_inputs(predictor, evaluations),
        )

    def sections(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[Section]:
        """The sections of the report after the table of metrics."""
        return []

    def attention_inputs(self, predictor: Any, evaluations: Mapping[str, Evaluation]) -> list[AttentionInput]:
        """Inputs whose attention the report draws."""
        return []


def own_tables(kind: type[Task], bundle: Bundle) -> dict[str, Any]:
    """The tables of a bundle's recipe that the task reads."""
    return {name: table for name, table in bundle.recipe.items() if name in (*kind.TABLES, "model", "train")}


def run_inputs(kind: type[Task], bundle: Bundle, count: int) -> tuple[str, list[Any]]:
    """The name of a set of the run's own data, the last test set if possible, and its first inputs.

    ("", []) where there is none: the data was moved, or the model was not trained here.
    """
    try:
        task = kind(own_tables(kind, bundle), bundle.path or Path(), bundle.device)
        task.use(bundle)
        task.prepare_evaluation()
        for name in reversed(task.sets):
            if inputs := task.inputs(name, count):
                return name, inputs
    except UserError:
        pass
    return "", []


def evaluate_bundle(kind: type[Task], bundle: Bundle, options: Mapping[str, Any]) -> dict[str, Metrics]:
    """Test metrics of a saved model, on the sets of its recipe or on other files: `regard evaluate`.

    `options` are those of `kind.OPTIONS`; None means that an option was not given.
    """
    given = {name: value for name, value in options.items() if value is not None}
    files, test, out = given.pop("files", ()), given.pop("test", None), given.pop("out", None)
    if out is not None:
        make_folder(Path(out))
    tables = own_tables(kind, bundle)
    if not isinstance(tables.get("data"), dict):
        if not files:
            other = "; name files with --files" if "files" in kind.OPTIONS else ""
            raise UserError(f"{bundle.name}: its recipe has no table [data]{other}")
        tables["data"] = {"train": files}
    task = kind(tables, bundle.path or Path(), bundle.device)
    task.use(bundle)
    if files:
        with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # for what is prepared of the files
            how = {"encoding": given.pop("encoding")} if "encoding" in given else {}
            if how and not isinstance(task.data, TextFiles):
                raise UserError(f"--encoding {how['encoding']}: has no effect for task = {kind.NAME!r}; remove it")
            task.data, task.folder = replace(task.data, folder=".", **how), Path(folder)
            task.file_options = {name: given.pop(name) for name in ("task", "column") if name in given}
            examples = task.read_files(files)
            evaluations = {"files": Evaluation(examples, *task.score(bundle.predictor, examples, **given))}
            return _metrics(task, evaluations, out)
    task.prepare_evaluation()
    if test is not None and test not in task.sets:
        raise UserError(f"--test {test}: is not a set of the recipe; {suggest(test, task.sets)}")
    if not task.sets:
        other = "name files with --files" if "files" in kind.OPTIONS else "add one to [data]"
        raise UserError(f"{bundle.name}: its recipe has no validation or test set; {other}")
    names = [name for name in task.sets if test in (None, name)]
    return _metrics(task, task.score_sets(bundle.predictor, names, **given), out)


def _metrics(task: Task, evaluations: Mapping[str, Evaluation], out: str | None) -> dict[str, Metrics]:
    """The metrics of each set; the predictions are saved in the folder `out`."""
    if out is not None:
        task.save_predictions(evaluations, Path(out))
    return {name: one.metrics for name, one in evaluations.items()}
