"""A mixture of tasks: each maps a text to a text, and a prefix says which is meant (Raffel et al. 2020).

    [data.tasks.german]
    prefix = "translate English to German: "
    train = ["train.en", "train.de"]          sentence pairs, as `regard.data.pairs` reads them

    [data.tasks.sentiment]
    kind = "labels"                           labelled texts, as `regard.data.labels` reads them: the label is generated
    prefix = "sentiment: "
    train = ["train.tsv"]

    [data.tasks.reviews]
    kind = "denoise"                          plain text, as `regard.data.documents` reads it, with spans to restore
    train = ["train.tsv"]

All pairs of all tasks make an epoch, those of a task `repeat` times: so tasks occur in proportion to their sizes.

"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from regard.data.denoise import Noise
from regard.data.documents import Piece, TextData, find_texts, part, pieces, survey
from regard.data.labels import LabelData, check_examples, choose_classes, read_labelled
from regard.data.pairs import Pair, PairData, find_pairs, read_pairs
from regard.data.sets import Files, find_files, home
from regard.data.sets import fingerprint as file_fingerprint
from regard.data.streams import sample_rows
from regard.errors import UserError
from regard.samples import sample_folder
from regard.settings import check_types, from_dict, to_dict

HOLD_OUT = 0  # seed of what `valid_fraction` holds out of labelled texts
LABELS_ONLY = (
    "classes",
    "class_weights",
    "fraction",
    "max_length",
    "word_dropout",
    "header",
)  # of a classifier, not of a text


@dataclass(frozen=True)
class TaskOptions:
    """The keys of a task besides its data."""

    kind: Literal["pairs", "labels", "denoise"] = "pairs"
    prefix: str = ""  # before every source
    repeat: int = 1  # times that each of its pairs occurs in an epoch
    density: float = 0.15  # denoise: fraction of the tokens that is removed
    span: float = 3.0  # denoise: mean tokens of a span

    def __post_init__(self) -> None:
        check_types(self)
        if self.repeat < 1:
            raise UserError(f"repeat = {self.repeat}: must be 1 or more")
        if not 0 < self.density < 1:
            raise UserError(f"density = {self.density}: must be above 0 and below 1, such as 0.15")
        if self.span < 1:
            raise UserError(f"span = {self.span}: must be 1 token or more")


@dataclass(frozen=True)
class TextTask:
    """One task: its options, and its data by kind."""

    name: str
    options: TaskOptions
    data: PairData | LabelData | TextData
    folder: str  # as the recipe has it

    @property
    def sets(self) -> dict[str, Files]:
        """The sets that are evaluated by what the model generates; denoising is evaluated by its loss alone."""
        if isinstance(self.data, TextData):
            return {}
        held = {"valid": self.data.train} if getattr(self.data, "valid_fraction", 0) else {"valid": self.data.valid}
        return {name: files for name, files in {**held, **self.data.test}.items() if files}

    @property
    def validated(self) -> bool:
        """Whether it has validation data."""
        return bool(self.data.valid or getattr(self.data, "valid_fraction", 0))

    @property
    def noise(self) -> Noise:
        return Noise(self.options.density, self.options.span)

    def paths(self) -> list[Path]:
        """All files on disk."""
        paths: list[Path] = []
        for files in (self.data.train, self.data.valid, *self.data.test.values()):
            if not files:
                continue
            match self.data:
                case PairData():
                    paths += [path for some in find_pairs(files, self.data.folder) for path in some]
                case LabelData():
                    paths += find_files(files, self.data.folder)
                case TextData():
                    paths += find_texts(files, self.data.folder)
        return paths

    def check(self) -> None:
        """Read everything once; a label that is not in the training data is a problem elsewhere."""
        known: tuple[str, ...] = ()
        for files in (self.data.train, self.data.valid, *self.data.test.values()):
            if not files:
                continue
            match self.data:
                case TextData():
                    for note in survey(files, self.data).notes:
                        print(f"note: {note}", file=sys.stderr)
                case PairData():
                    read_pairs(files, self.data).check().print(files)
                case LabelData():
                    report = check_examples(files, self.data, known)
                    known = known or choose_classes(self.data, report)
                    report.print(files)

    def lines(self, name: str) -> Iterator[Pair]:
        """The pairs of a set, "train" or one of `sets`, each source with the prefix."""
        prefix = self.options.prefix
        if isinstance(self.data, PairData):
            for pair in read_pairs({"train": self.data.train, **self.sets}[name], self.data):
                yield pair._replace(source=prefix + pair.source)
        elif isinstance(self.data, LabelData):
            chosen = _chosen(self.data, name)
            for number, one in enumerate(read_labelled({"train": self.data.train, **self.sets}[name], self.data)):
                if chosen is None or chosen[number]:
                    yield Pair(prefix + one.text, one.label, one.file, one.row)

    @property
    def noise_sets(self) -> list[str]:
        """The sets of text to be denoised that are evaluated."""
        if not isinstance(self.data, TextData):
            return []
        return [*(["valid"] if self.validated else []), *(name for name, files in self.data.test.items() if files)]

    def texts(self, name: str) -> Iterator[Piece]:
        """The text to be denoised: "train" or one of `noise_sets`."""
        assert isinstance(self.data, TextData)
        fraction = self.data.valid_fraction
        if not fraction or name in self.data.test:
            files = {"train": self.data.train, "valid": self.data.valid, **self.data.test}[name]
            return iter(pieces(files, self.data))
        count = survey(self.data.train, self.data).characters
        border = int(count * (1 - fraction))
        span = (0, border) if name == "train" else (border, count)
        return part(pieces(self.data.train, self.data), *span)

    def table(self) -> dict[str, Any]:
        """The complete table for a recipe."""
        own = {name: value for name, value in to_dict(self.data).items() if name not in ("folder", "skip_bad")}
        unused = {PairData: ("max_length",), LabelData: LABELS_ONLY, TextData: ()}[type(self.data)]
        options = to_dict(self.options)
        if self.options.kind != "denoise":
            options = {name: value for name, value in options.items() if name not in ("density", "span")}
        return {**options, **{name: value for name, value in own.items() if name not in unused}, "folder": self.folder}


def _chosen(data: LabelData, name: str) -> list[bool] | None:
    """Which rows of labelled training data a set has, where some are held out."""
    if not data.valid_fraction or name not in ("train", "valid"):
        return None
    labels: dict[str, int] = {}
    numbers = [labels.setdefault(one.label, len(labels)) for one in read_labelled(data.train, data)]
    held = sample_rows(torch.tensor(numbers), data.valid_fraction, HOLD_OUT, keep=True)
    chosen: list[bool] = (held if name == "valid" else ~held).tolist()
    return chosen


@dataclass(frozen=True)
class TasksData:
    """The [data] table but for its tasks."""

    max_length: int = 256  # longest sequence a model is trained on
    skip_bad: bool = False
    folder: str = "."

    def __post_init__(self) -> None:
        check_types(self)
        if self.max_length < 8:
            raise UserError(f"max_length = {self.max_length}: give 8 or more")


def read_tasks(table: Mapping[str, Any]) -> tuple[TasksData, dict[str, TextTask]]:
    """[data] of a recipe: what holds for all tasks, and the tasks."""
    common = from_dict(TasksData, {name: value for name, value in table.items() if name != "tasks"}, "data.")
    tasks = table.get("tasks")
    if not isinstance(tasks, dict) or not tasks or not all(isinstance(one, dict) for one in tasks.values()):
        raise UserError(
            'data.tasks: no task; write tables such as  [data.tasks.german]  with  prefix = "to German: "  and '
            'train = ["train.en", "train.de"]'
        )
    return common, {name: _read_task(name, one, common) for name, one in tasks.items()}


def _read_task(name: str, table: Mapping[str, Any], common: TasksData) -> TextTask:
    where = f"data.tasks.{name}."
    if not name or "." in name or "/" in name:
        raise UserError(f"data.tasks.{name!r}: is not a task name; use letters, digits and -")
    known = {field.name for field in dataclasses.fields(TaskOptions)}
    options = from_dict(TaskOptions, {key: value for key, value in table.items() if key in known}, where)
    rest = {key: value for key, value in table.items() if key not in known}
    folder = rest.pop("folder", ".")
    if not isinstance(folder, str):
        raise UserError(f"{where}folder = {folder!r}: expected a string in quotes")
    base = sample_folder(folder) or home(common.folder) / home(folder)
    shared: dict[str, Any] = {"folder": str(base), "skip_bad": common.skip_bad}
    kind = {"pairs": PairData, "labels": LabelData, "denoise": TextData}[options.kind]
    refused = {"pairs": ("max_length",), "labels": LABELS_ONLY, "denoise": ()}[options.kind]
    for key in (*refused, "skip_bad", *(() if options.kind == "denoise" else ("density", "span"))):
        if key in table:
            raise UserError(f"{where}{key} = {table[key]!r}: not for a task of kind = {options.kind!r}; remove it")
    if options.kind == "pairs":
        shared["max_length"] = common.max_length
    return TextTask(name, options, from_dict(kind, {**rest, **shared}, where), folder)


def fingerprint(tasks: Mapping[str, TextTask], *others: object) -> str:
    """A digest of the tasks, their files (names, sizes, times) and of anything else."""
    paths = (path for one in tasks.values() for path in one.paths())
    return file_fingerprint(paths, {name: one.table() for name, one in tasks.items()}, [str(one) for one in others])
