"""Which labelled texts: the [data] table of a classifier's recipe, and the rows of its files.

    [data]
    train = ["train.tsv"]                 tables with a header; the ending says which kind: .csv, .jsonl, .parquet,
    valid = ["valid.tsv"]                 and TSV for any other
    test = { test = ["test.tsv"] }        named sets, for the end
    text = "review"                       the columns of the text and of its label
    label = "stars"

Any file may be gzipped, and * and ? stand for several. A label is text, or a whole number, or true or false; `names`
gives it a better name. The classes are those of `classes`, in that order, or all that occur in `train`.

An empty text is a text too: some data sets have a few, and their published figures count them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from regard.data.config import Files, check_list, check_word_dropout, expand_all
from regard.data.lines import Notes, Problem, refusal
from regard.data.read import SHOWN, remedy_for
from regard.data.table import Row, csv_rows, jsonl_rows, parquet_rows, tsv_rows
from regard.errors import UserError, suggest
from regard.settings import check_types

MOST = 1000  # classes that are taken from the data without being asked; more of them are no classes
REMEDY = "Set text and label in [data] to the names of the columns; header = false if the first line is data"


@dataclass(frozen=True)
class LabelData:
    """Where the texts are, and which of them are used."""

    train: Files
    valid: Files = ()
    valid_fraction: float = 0.0  # of the rows of `train`, the same share of every class, held out in place of `valid`
    test: dict[str, Files] = field(default_factory=dict)
    text: str = "text"  # name of the column
    label: str = "label"
    header: bool = True  # TSV and CSV; without one, columns are counted: text = "2", label = "3"
    classes: tuple[str, ...] = ()  # in their order; left out: those of `train`, sorted
    names: dict[str, str] = field(default_factory=dict)  # what a label in the file is called here: { "0" = "bad" }
    class_weights: Literal["none", "balanced"] | dict[str, float] = "none"  # of a class in the loss
    fraction: float = 1.0  # share of the training labels that is used, of every class; drawn by train.seed
    max_length: int = 256  # tokens of a text, its two ends included; what is longer is cut
    word_dropout: float = 0.0  # probability that a token of a training text is masked
    skip_bad: bool = False  # leave out rows that cannot be used, instead of asking you to mend them
    folder: str = "."  # where relative names start

    def __post_init__(self) -> None:
        for name, files in (("train", self.train), ("valid", self.valid)):
            check_list(name, files)
        if not isinstance(self.test, dict):
            raise UserError(f'test = {self.test!r}: give each set a name:  test = {{ test = ["test.tsv"] }}')
        for name, files in self.test.items():
            check_list(f"test.{name}", files)
        if isinstance(self.class_weights, dict):
            whole = {name: float(w) if type(w) is int else w for name, w in self.class_weights.items()}
            object.__setattr__(self, "class_weights", whole)
        check_types(self)
        self._check_values()

    def _check_values(self) -> None:
        if not self.folder or "\0" in self.folder:
            raise UserError(f"folder = {self.folder!r}: is no name of a folder; leave it out for the recipe's own")
        if not self.train:
            raise UserError('train = []: names no file; write  train = ["train.tsv"]')
        if not 0 <= self.valid_fraction < 1:
            raise UserError(f"valid_fraction = {self.valid_fraction}: must be at least 0 and below 1, such as 0.05")
        if self.valid_fraction and self.valid:
            raise UserError(
                f"valid_fraction = {self.valid_fraction}: there is valid = {list(self.valid)} too; choose one"
            )
        if self.text == self.label:
            raise UserError(f"text = label = {self.text!r}: they are two columns")
        if not self.header and not (self.text.isdecimal() and self.label.isdecimal() and "0" not in self.columns):
            raise UserError(
                f"header = false with text = {self.text!r}, label = {self.label!r}: columns are counted then, from "
                'text = "1" on'
            )
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction = {self.fraction}: must be above 0 and at most 1, such as 0.1")
        check_word_dropout(self.word_dropout)
        if self.max_length < 3:
            raise UserError(f"max_length = {self.max_length}: a token and the two ends make 3; give 3 or more")
        if len(set(self.classes)) < len(self.classes) or len(self.classes) == 1:
            raise UserError(f"classes = {list(self.classes)}: name two or more, each once, or leave them out")
        if self.classes and (extra := set(self.names.values()) - set(self.classes)):
            raise UserError(f"names: {min(extra)!r} is not one of classes = {list(self.classes)}")
        if isinstance(self.class_weights, dict) and not all(weight > 0 for weight in self.class_weights.values()):
            raise UserError(f"class_weights = {self.class_weights}: a weight must be above 0")

    @property
    def columns(self) -> tuple[str, str]:
        return self.text, self.label

    @property
    def sets(self) -> dict[str, Files]:
        """Files of their own that are judged."""
        return {name: files for name, files in {"valid": self.valid, **self.test}.items() if files}


class Example(NamedTuple):
    """A text, the name of its class, and where it stands."""

    text: str
    label: str
    file: str
    row: int


@dataclass(frozen=True)
class LabelReport:
    """What one pass over some files found."""

    counts: dict[str, int]  # examples by class
    bad: list[Problem]  # the first that are left out
    bad_count: int
    notes: list[str]

    @property
    def count(self) -> int:
        return sum(self.counts.values())


def examples(files: Sequence[str], config: LabelData, classes: Sequence[str] = ()) -> Iterator[Example]:
    """The rows of `files`, one after another; a label that is not among `classes` (where given) is a mistake."""
    for item in _scan(files, config, classes, Counter()):
        if isinstance(item, Example):
            yield item
        elif item.fatal or not config.skip_bad:
            raise UserError(f"{item}\n{remedy_for(item.fatal)}")


def check_examples(files: Sequence[str], config: LabelData, classes: Sequence[str] = ()) -> LabelReport:
    """Read everything once; what is wrong becomes one UserError, or part of the report where it is skipped."""
    notes: Notes = Counter()
    counts: Counter[str] = Counter()
    bad_count = 0
    bad: list[Problem] = []
    fatal: list[Problem] = []
    for item in _scan(files, config, classes, notes):
        if isinstance(item, Example):
            counts[item.label] += 1
            if len(counts) > MOST and not classes:
                raise UserError(
                    f"{item.file}: column {config.label!r} has more than {MOST:,} different labels, such as "
                    f"{item.label[:40]!r}: set label in [data] to the right column, or name them all in classes"
                )
            continue
        bad_count += 1
        shown = fatal if item.fatal else bad
        if len(shown) < SHOWN:
            shown.append(item)
    good = f"{counts.total():,} good row{'s' * (counts.total() != 1)}"
    if fatal or (bad and not config.skip_bad):
        raise refusal(files, good, (fatal + bad)[:SHOWN], bad_count, remedy_for(bool(fatal)))
    if not counts:
        left = f" ({bad_count:,} bad ones are left out, such as  {bad[0]})" if bad else ""
        raise UserError(f"{', '.join(files)}: no labelled texts{left}; put one into each row")
    return LabelReport(dict(counts), bad, bad_count, [f"{file}: {n:,} x {what}" for (file, what), n in notes.items()])


def settle_classes(config: LabelData, found: LabelReport) -> tuple[str, ...]:
    """The classes in their order: numbers by size, else by name, unless `classes` says."""
    if config.classes:
        return config.classes
    names = list(found.counts)
    if len(names) < 2:
        raise UserError(
            f"{', '.join(config.train)}: every row has the label {names[0]!r} in column {config.label!r}, so there is "
            "nothing to tell apart: give texts of two classes or more"
        )
    numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name), name) if numbers else (0, name)))


def find_tables(files: Sequence[str], folder: str | Path = ".") -> list[Path]:
    """The files on disk; whatever is missing is named in one error."""
    return [path for paths in expand_all(files, folder) for path in paths]


def table_rows(path: Path, names: Sequence[str], notes: Notes, header: bool, remedy: str) -> Iterator[Row | Problem]:
    """The rows of a table by its ending; in the second of the columns numbers are welcome."""
    match Path(path.name.lower().removesuffix(".gz")).suffix:
        case ".csv":
            return csv_rows(path, names, notes, header=header, remedy=remedy)
        case ".jsonl":
            return jsonl_rows(path, names, notes, remedy=remedy, numbers=names[1:])
        case ".parquet":
            return parquet_rows(path, names, remedy=remedy, numbers=names[1:])
    return tsv_rows(path, names, notes, header=header, remedy=remedy)


def _scan(files: Sequence[str], config: LabelData, classes: Sequence[str], notes: Notes) -> Iterator[Example | Problem]:
    """Everything there is, the good and the bad, in order."""
    for path in find_tables(files, config.folder):
        for row in table_rows(path, config.columns, notes, config.header, REMEDY):
            if isinstance(row, Problem):
                yield row
                continue
            number, (text, label) = row
            yield _example(text, label.strip(), str(path), number, config, classes)
            if not text or text.isspace():
                notes[str(path), "an empty text, kept"] += 1


def _example(
    text: str, label: str, file: str, row: int, config: LabelData, classes: Sequence[str]
) -> Example | Problem:
    if "\0" in text:
        return Problem(file, row, f"column {config.text!r} holds a NUL character; is this text?")
    if not label:
        return Problem(file, row, f"column {config.label!r} is empty: a text needs its label")
    name = config.names.get(label, label)
    if classes and name not in classes:
        return Problem(file, row, f"label {label[:40]!r} is not a class that training knows; {suggest(name, classes)}")
    return Example(text, name, file, row)
