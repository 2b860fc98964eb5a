"""Labelled texts: the [data] table of a recipe that classifies texts.

    [data]
    train = ["train.tsv"]                 tables with a header: .csv, .jsonl, .parquet, and TSV for any other ending
    text = "review"                       the columns of the text and of its label
    label = "stars"

A label is text, a whole number, or true or false; `names` gives it a better name. The classes are those of `classes`,
in that order, or all that occur in `train`. An empty text is kept: some data sets have a few, and their published
results count them.

    [data.join]                           the texts of the files, joined to long documents (`regard.data.joined`)
    [data.listops]                        no files: generated expressions and their values (`regard.data.listops`)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

from regard.data.joined import Join
from regard.data.lines import Notes
from regard.data.listops import DIGITS, ListOps, Split
from regard.data.sets import Group, TextFiles, file_groups, file_names
from regard.data.tables import Report, Row, Rows, label, read_rows
from regard.errors import UserError, suggest
from regard.settings import check_fields

MOST = 1000  # classes that are taken from the data; with more of them, the column is probably the wrong one
REMEDY = "Set text and label in [data] to the names of the columns; header = false if the first line is data"


@dataclass(frozen=True, kw_only=True)
class LabelData(TextFiles):
    """Where the texts are, and which of them are used."""

    valid_fraction: float = 0.0  # fraction of the rows of `train`, equal in every class, used in place of `valid`
    text: str = "text"  # name of the column of texts
    label: str = "label"  # name of the column of labels
    header: bool = True  # TSV and CSV have one; without it, columns are counted: text = "2", label = "3"
    classes: tuple[str, ...] = ()  # names of the classes, in their order; empty: those of `train`, sorted
    names: dict[str, str] = field(default_factory=dict)  # what a label in the file is called here: { "0" = "bad" }
    class_weights: Literal["none", "balanced"] | dict[str, float] = "none"  # weight of a class in the loss
    fraction: float = 1.0  # fraction of the training labels that is used, equal in every class; sampled by train.seed
    max_length: int = 256  # tokens of a text, its two ends included; longer ones are truncated
    word_dropout: float = 0.0  # probability that a token of a training text is masked
    join: Join | None = None  # several texts are joined to one long document
    listops: ListOps | None = None  # generated ListOps expressions, instead of files

    GENERATORS: ClassVar[tuple[str, ...]] = ("listops",)
    WEIGHTED: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_valid_fraction(self.valid_fraction)
        check_fields(self, ("word_dropout",), max_length=3)  # a token and the two ends
        if self.text == self.label:
            raise UserError(f"text = label = {self.text!r}: name two different columns")
        if not self.header and not (self.text.isdecimal() and self.label.isdecimal() and "0" not in self.columns):
            raise UserError(
                f"header = false with text = {self.text!r}, label = {self.label!r}: without a header, columns are "
                'counted from text = "1"'
            )
        if not 0 < self.fraction <= 1:
            raise UserError(f"fraction = {self.fraction}: must be above 0 and at most 1, such as 0.1")
        if len(set(self.classes)) < len(self.classes) or len(self.classes) == 1:
            raise UserError(f"classes = {list(self.classes)}: name two or more, each once, or remove them")
        if self.classes and (extra := set(self.names.values()) - set(self.classes)):
            raise UserError(f"names: {min(extra)!r} is not one of classes; {suggest(min(extra), self.classes)}")
        if isinstance(self.class_weights, dict) and not all(weight > 0 for weight in self.class_weights.values()):
            raise UserError(f"class_weights = {self.class_weights}: a weight must be above 0")
        self._check_made()

    def _check_made(self) -> None:
        """What generated and joined texts cannot be combined with."""
        if self.join is not None and (self.fraction < 1 or len(file_groups(self.train)) > 1):
            what = f"fraction = {self.fraction}" if self.fraction < 1 else "train in groups with weights"
            raise UserError(f"{what}: is not possible with [data.join]; remove it, or set join.copies")
        if self.listops is None:
            return
        object.__setattr__(self, "folder", ".")  # so that the recipe does not depend on where it was read
        object.__setattr__(self, "classes", tuple(map(str, range(DIGITS))))
        others = {"valid_fraction": self.valid_fraction, "fraction < 1": self.fraction < 1, "[data.join]": self.join}
        if wrong := [name for name, given in others.items() if given]:
            raise UserError(f"{wrong[0]}: is for files, but [data.listops] generates its sets; remove it")
        if self.max_length < self.listops.below + 1:  # the longest has below - 1 tokens, and the two ends
            raise UserError(
                f"max_length = {self.max_length}: a truncated expression has another value; set it to listops.below "
                f"+ 1 = {self.listops.below + 1} or more"
            )

    @property
    def is_made(self) -> bool:
        """Whether the sets are generated or joined, and not rows of files."""
        return self.listops is not None or self.join is not None

    def expressions(self, split: Split) -> Iterator[Example]:
        """The generated texts of a set."""
        assert self.listops is not None
        for row, (text, value) in enumerate(self.listops.expressions(split), 1):
            yield Example(text, value, f"data.listops, {split}", row)

    @property
    def columns(self) -> tuple[str, str]:
        return self.text, self.label

    def read(self, files: Sequence[str] | Sequence[Group]) -> Rows[Example]:
        """The rows of `files`; a label that is not among `classes` (if any) is a problem. `totals` are by class."""

        def tally(one: Example, totals: Counter[str]) -> None:
            totals[one.label] += 1
            if len(totals) > MOST and not self.classes:
                raise UserError(
                    f"{one.file}: column {self.label!r} has more than {MOST:,} different labels, such as "
                    f"{one.label[:40]!r}: set label in [data] to the right column, or name them all in classes"
                )

        how = {"header": self.header, "convert": {self.label: label}, "remedy": REMEDY, "make": self._example}
        rows = read_rows(file_names(files), self.columns, self.folder, self.skip_bad, **how, **self.format)
        return replace(rows, what="labelled texts", remedy="put one in each row", tally=tally)

    def _example(self, row: Row, notes: Notes) -> Example:
        text, raw = row.cells[0], row.cells[1].strip()
        name = self.names.get(raw, raw)
        if not raw:
            raise ValueError(f"column {self.label!r} is empty: a text needs its label")
        if self.classes and name not in self.classes:
            raise ValueError(f"label {raw[:40]!r} is not a class of the training data; {suggest(name, self.classes)}")
        if not text or text.isspace():
            notes[row.file, "an empty text, kept"] += 1
        return Example(text, name, row.file, row.line)

    def with_classes(self, report: Report) -> LabelData:
        """The same with all classes of a report on `train`, sorted, numbers by size; or with its own."""
        if self.classes:
            return self
        names = list(report.totals)
        if len(names) < 2:
            raise UserError(
                f"{', '.join(file_names(self.train))}: every row has the label {names[0]!r} in column {self.label!r}; "
                "a classifier needs texts of two classes or more"
            )
        numbers = all(name.removeprefix("-").isdecimal() for name in names)
        ordered = sorted(names, key=lambda name: (int(name), name) if numbers else (0, name))
        return replace(self, classes=tuple(ordered))


class Example(NamedTuple):
    """A text, the name of its class, and where it is."""

    text: str
    label: str
    file: str
    row: int


def balanced_weights(counts: Sequence[int]) -> list[float]:
    """w_c = N / (C n_c): every class counts as much as the others, and the mean over the examples is 1."""
    return [sum(counts) / (len(counts) * count) for count in counts]
