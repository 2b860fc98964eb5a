"""Sentence pairs: the [data] table of a recipe that translates.

    [data]
    train = ["train.en", "train.de"]      line n of one file belongs to line n of the other
    valid = ["valid.tsv"]                 or tables: .tsv, .csv, .jsonl, .parquet
    source = "en"                         in tables, the names of the two columns; a TSV or CSV file then has a header
    target = "de"

Without names, they are columns 1 and 2 of a TSV or CSV file without a header, and "source" and "target" elsewhere.
[data.generator] generates pairs by a rule instead of reading files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from regard.data.korean import examples
from regard.data.lines import Notes, Problem
from regard.data.sets import Group, TextFiles, check_columns, file_groups, file_names, find_files, wildcards
from regard.data.tables import TABLES, Row, Rows, Table, aligned_rows, table_kind
from regard.errors import UserError, listed
from regard.settings import check_fields

REMEDY = "Set source and target in [data]; if the file has no header, remove them"


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Pairs by a rule: English dates and numbers with their Korean (`regard.data.korean`)."""

    name: Literal["korean-dates"]  # the rule
    train: int = 40_000  # examples
    test: int = 2_000  # dates and numbers that never occur in training
    seed: int = 1  # of the data; it does not depend on train.seed

    def __post_init__(self) -> None:
        check_fields(self, train=1, test=1)

    def pairs(self, split: Literal["train", "test"]) -> Iterator[Pair]:
        count = self.train if split == "train" else self.test
        for number, example in enumerate(examples(split, count, self.seed), 1):
            yield Pair(example.source, example.target, f"data.generator, {split}", number)


@dataclass(frozen=True, kw_only=True)
class PairData(TextFiles):
    """Where the pairs are, and which of them are used."""

    source: str | None = None  # name of the column, in a table
    target: str | None = None  # and of that of the target
    max_length: int = 256  # longest sequence in training: the tokens of a sentence and one for its end
    generator: Generator | None = None  # instead of files

    WEIGHTED: ClassVar[bool] = True
    GENERATORS: ClassVar[tuple[str, ...]] = ("generator",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator is not None:
            object.__setattr__(self, "folder", ".")  # so that the recipe does not depend on where it was read
        check_columns(self.source, self.target)
        check_fields(self, max_length=2)  # a token and its end

    def _find_pairs(self, files: Sequence[str] | Sequence[Group]) -> list[tuple[Path, ...]]:
        return [paths for group in file_groups(files) for paths in find_pairs(group.files, self.folder)]

    def find(self, files: Sequence[str] | Sequence[Group]) -> list[Path]:
        return [path for paths in self._find_pairs(files) for path in paths]

    def groups(self, name: str) -> list[Iterable[Pair]]:
        """The pairs of a set, "train" or one of `sets`, by groups of files; a generator has "train" and "test"."""
        if self.generator is not None:
            return [self.generator.pairs("train" if name == "train" else "test")]
        return [self.read(group.files) for group in file_groups({"train": self.train, **self.sets}[name])]

    def read(self, files: Sequence[str] | Sequence[Group]) -> Rows[Pair]:
        columns, header = (self.source or "source", self.target or "target"), self.source is not None

        def scan(notes: Notes) -> Iterator[Pair | Problem]:
            for paths in self._find_pairs(files):
                names = columns if len(paths) == 1 else ()
                rows: Iterable[Row | Problem] = (
                    Table(paths[0], columns, notes, header=header, remedy=REMEDY, **self.format)
                    if names
                    else aligned_rows(paths[0], paths[1], notes, self.encoding)
                )
                for row in rows:
                    pair = row if isinstance(row, Problem) else _pair(row, paths, names)
                    if isinstance(pair, Pair) and pair.source == pair.target:
                        notes[pair.file, "source and target are identical"] += 1
                    yield pair

        return Rows(file_names(files), scan, self.skip_bad, what="sentence pairs", remedy="put a sentence in each line")


class Pair(NamedTuple):
    """A sentence and its translation, and where they are."""

    source: str
    target: str
    file: str
    line: int


def find_pairs(files: Sequence[str], folder: str | Path = ".") -> list[tuple[Path, ...]]:
    """The files on disk: [(table,), …] for tables, [(source, target), …] where lines are aligned.

    Two patterns match the same parts: part-2.en and part-2.de.
    """
    kinds = {table_kind(name) for name in files}
    if (None in kinds and (len(kinds) > 1 or len(files) != 2)) or not files:
        endings = listed((f".{kind}" for kind in TABLES), "or")
        raise UserError(
            f"{listed(files) or 'no files'}: give two files whose lines belong together, or tables ending in {endings}"
        )
    if len(files) != len(set(files)):
        raise UserError(f"{listed(files)}: contains a file twice; name the other file")
    found = find_files(files, folder)
    if None not in kinds:
        return [(path,) for path in found]
    if len(found) == 2:
        return [(found[0], found[1])]
    sides = [{wildcards(name, folder, path): path for path in find_files([name], folder)} for name in files]
    if alone := [sides[0].get(key) or sides[1][key] for key in sides[0].keys() ^ sides[1].keys()]:
        raise UserError(
            f"{listed(files)}: match {len(sides[0])} and {len(sides[1])} files; without a partner: "
            f"{', '.join(map(str, sorted(alone)[:10]))}"
        )
    return [(path, sides[1][key]) for key, path in sides[0].items()]


def _pair(row: Row, paths: Sequence[Path], columns: Sequence[str]) -> Pair | Problem:
    """A pair of two files, or of two columns in one, unless a side is blank."""
    blank = [not side or side.isspace() for side in row.cells]
    if not any(blank):
        return Pair(row.cells[0], row.cells[1], row.file, row.line)
    side = blank.index(True)
    which = f"column {columns[side]!r} " if columns else ""
    other = (columns or paths)[1 - side]
    what = "is empty on both sides" if all(blank) else f"is empty, but {other} has a sentence there"
    return Problem(row.file if columns else str(paths[side]), row.line, which + what)
