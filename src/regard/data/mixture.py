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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from regard.data.denoise import Noise
from regard.data.documents import Piece, TextData, part, pieces, survey
from regard.data.labels import LabelData, check_examples, choose_classes, read_labelled
from regard.data.pairs import Pair, PairData, read_pairs
from regard.data.sets import Files, home
from regard.data.sets import fingerprint as file_fingerprint
from regard.data.streams import sample_rows
from regard.errors import UserError
from regard.samples import sample_folder
from regard.settings import check_types, from_dict, to_dict

HOLD_OUT = 0  # seed of what `valid_fraction` holds out of labelled texts
NOISE = ("density", "span")
KINDS = {  # of tasks: the class of their data, and keys that they do not have
    "pairs": (PairData, ("max_length", *NOISE)),
    "labels": (
        LabelData, ("classes", "class_weights", "fraction", "max_length", "word_dropout", "header", *NOISE)
    ),
    "denoise": (TextData, ()),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaskOptions(Noise):
    """The keys of a task besides its data."""

    kind: Literal["pairs", "labels", "denoise"] = "pairs"
    prefix: str = ""  # before every source
    repeat: int = 1  # times that each of its pairs occurs in an epoch
    folder: str = "."  # where its files are, from [data] folder on

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

    @property
    def sets(self) -> dict[str, Files]:
        """The sets that are evaluated; what `valid_fraction` holds out is part of the training files."""
        held_out = {"valid": self.data.train} if getattr(self.data, "valid_fraction", 0) else {}
        return {**held_out, **self.data.sets}

    @property
    def files(self) -> list[Files]:
        """Those of every set."""
        return [files for files in (self.data.train, *self.data.sets.values()) if files]

    def paths(self) -> list[Path]:
        """All files on disk."""
        return [path for files in self.files for path in self.data.find(files)]

    def check(self) -> None:
        """Read everything once; a label that is not in the training data is a problem elsewhere."""
        known: tuple[str, ...] = ()
        for files in self.files:
            match self.data:
                case TextData():
                    report = pieces(files, self.data).check()
                case PairData():
                    report = read_pairs(files, self.data).check()
                case LabelData():
                    counted = report = check_examples(files, self.data, known)
                    known = known or choose_classes(self.data, counted)
            report.print(files)

    def lines(self, name: str) -> Iterator[Pair]:
        """The pairs of a set, "train" or one of `sets`, each source with the prefix."""
        prefix, files = self.options.prefix, {"train": self.data.train, **self.sets}[name]
        if isinstance(self.data, PairData):
            for pair in read_pairs(files, self.data):
                yield pair._replace(source=prefix + pair.source)
        elif isinstance(self.data, LabelData):
            chosen = _chosen(self.data, name)
            for number, one in enumerate(read_labelled(files, self.data)):
                if chosen is None or chosen[number]:
                    yield Pair(prefix + one.text, one.label, one.file, one.row)

    def texts(self, name: str) -> Iterator[Piece]:
        """The text to be denoised: "train" or one of `sets`."""
        assert isinstance(self.data, TextData)
        stream = pieces({"train": self.data.train, **self.sets}[name], self.data)
        fraction = self.data.valid_fraction
        if not fraction or name in self.data.test:
            return iter(stream)
        count = survey(self.data.train, self.data).characters
        border = int(count * (1 - fraction))
        return part(stream, 0, border) if name == "train" else part(stream, border, count)

    def table(self) -> dict[str, Any]:
        """The complete table for a recipe."""
        unused = (*KINDS[self.options.kind][1], "skip_bad")
        every = {**to_dict(self.data), **to_dict(self.options)}
        return {name: value for name, value in every.items() if name not in unused}


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
    kind, refused = KINDS[options.kind]
    for key in (*refused, "skip_bad"):
        if key in table:
            raise UserError(f"{where}{key} = {table[key]!r}: not for a task of kind = {options.kind!r}; remove it")
    data = {key: value for key, value in table.items() if key not in known} | {"skip_bad": common.skip_bad}
    data["folder"] = str(sample_folder(options.folder) or home(common.folder) / home(options.folder))
    if options.kind == "pairs":
        data["max_length"] = common.max_length
    return TextTask(name, options, from_dict(kind, data, where))


def fingerprint(tasks: Mapping[str, TextTask], *others: object) -> str:
    """A digest of the tasks, their files (names, sizes, times) and of anything else."""
    paths = (path for one in tasks.values() for path in one.paths())
    return file_fingerprint(paths, {name: one.table() for name, one in tasks.items()}, [str(one) for one in others])
