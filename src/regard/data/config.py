"""Which sentence pairs: the [data] table of a recipe.

    [data]
    train = ["train.en", "train.de"]      line n of one file belongs to line n of the other
    valid = ["valid.tsv"]                 or one table: .tsv, .jsonl, .parquet
    test = { news = ["news.*.tsv"] }      named sets; * and ? stand for several files, read in order of name

Any file may be gzipped, and one that is missing is looked for with .gz at its end. Relative names start in
`folder`, which is the recipe's own unless it says otherwise. In a table, `source` and `target` name the
columns; a TSV file then has a header. Left out, they are columns 1 and 2 of a TSV file without one, and
"source" and "target" elsewhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.errors import MissingFiles, UserError
from regard.models.recipe import read_recipe, recipe_path
from regard.settings import check_types, from_dict

TABLES = (".tsv", ".jsonl", ".parquet")
Files = tuple[str, ...]


@dataclass(frozen=True)
class DataConfig:
    """Where the pairs are, and which of them are used."""

    train: Files
    valid: Files = ()
    test: dict[str, Files] = field(default_factory=dict)
    source: str | None = None  # name of the column, in a table
    target: str | None = None
    max_length: int = 256  # longest sequence a model is trained on: a sentence's tokens and one for its end
    skip_bad: bool = False  # leave out lines that cannot be used, instead of asking you to mend them
    folder: str = "."  # where relative names start

    def __post_init__(self) -> None:
        for name, files in (("train", self.train), ("valid", self.valid)):
            check_list(name, files)
        if not isinstance(self.test, dict):
            raise UserError(f'test = {self.test!r}: give each set a name:  test = {{ news = ["a.en", "a.de"] }}')
        for name, files in self.test.items():
            check_list(f"test.{name}", files)
        check_types(self)
        if not self.folder or "\0" in self.folder:
            raise UserError(f"folder = {self.folder!r}: is no name of a folder; leave it out for the recipe's own")
        if not self.train:
            raise UserError('train = []: names no file; write  train = ["train.en", "train.de"]')
        if (self.source is None) != (self.target is None):
            given, other = ("source", "target") if self.target is None else ("target", "source")
            raise UserError(f"{given} = {getattr(self, given)!r} without {other}: name both columns or neither")
        if self.source is not None and self.source == self.target:
            raise UserError(f"source = target = {self.source!r}: a pair needs two columns")
        if self.max_length < 2:
            raise UserError(f"max_length = {self.max_length}: a token and its end make 2; give 2 or more")


def check_list(name: str, files: Any) -> None:
    if isinstance(files, str):
        raise UserError(f"{name} = {files!r}: write a list, {name} = [{files!r}]")
    if not isinstance(files, tuple) or not all(isinstance(file, str) and file and "\0" not in file for file in files):
        raise UserError(f'{name} = {files!r}: expected a list of file names, such as ["train.en", "train.de"]')


def check_word_dropout(word_dropout: float) -> None:
    if not 0 <= word_dropout < 1:
        raise UserError(f"word_dropout = {word_dropout}: must be at least 0 and below 1, such as 0.1")


def check_tests(test: Any, example: str) -> None:
    """Named sets: lists of files under names that can be folders of a run, and are not those of the other sets."""
    if not isinstance(test, dict):
        raise UserError(f"test = {test!r}: give each set a name:  test = {{ new = [{example!r}] }}")
    for name, files in test.items():
        check_list(f"test.{name}", files)
        if name in ("train", "valid") or not re.fullmatch(r"\w[\w .-]*", name):
            raise UserError(f"test.{name}: choose another name for the set, of letters, digits, '-' and '_'")


def read_data(recipe: str | Path, folder: str | Path | None = None) -> DataConfig:
    """The [data] table of a recipe; `folder` (what --data gives) replaces the one relative names start in."""
    path = recipe_path(recipe)
    table = read_recipe(path).get("data")
    if not isinstance(table, dict):
        raise UserError(f'{path}: has no table [data]; write one, such as  [data]  with  train = ["a.en", "a.de"]')
    try:
        config = from_dict(DataConfig, {"train": (), **table} if "train" not in table else table, "data.")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    base = home(folder) if folder is not None else path.parent / home(config.folder)
    return dataclasses.replace(config, folder=str(base.resolve()))


def find(files: Sequence[str], folder: str | Path = ".") -> list[tuple[Path, ...]]:
    """The files on disk: [(source, target), …] where lines are aligned, [(table,), …] for tables.

    Whatever is missing is named in one error, with the nearest name that is there.
    """
    kinds = {table_kind(name) for name in files}
    if len(kinds - {None}) == len(kinds) and files:
        return [(path,) for paths in expand_all(files, folder) for path in paths]
    if len(kinds) > 1 or len(files) != 2:
        raise UserError(
            f"{list(files)}: give two files whose lines belong together, or tables ending in {', '.join(TABLES)}"
            + ("; write CSV as TSV, without quotes" if any(".csv" in name for name in files) else "")
        )
    sources, targets = expand_all(files, folder)
    _check_partners(files, sources, targets, home(folder))
    return list(zip(sources, targets, strict=True))


def table_kind(name: str | Path) -> str | None:
    """The ending ".tsv", ".jsonl" or ".parquet"; None for text with a sentence a line."""
    suffix = Path(str(name).lower().removesuffix(".gz")).suffix
    return suffix if suffix in TABLES else None


def home(name: str | Path) -> Path:
    return Path(os.path.expanduser(name))  # unlike Path's own, it leaves an unknown ~user as it is


def expand_all(names: Sequence[str], folder: str | Path) -> list[list[Path]]:
    found = [_expand(name, home(folder)) for name in names]
    if missing := [entry for entry in found if isinstance(entry, str)]:
        raise MissingFiles("\n".join(missing))
    return [entry for entry in found if not isinstance(entry, str)]


def _expand(name: str, folder: Path) -> list[Path] | str:
    """The files that a name or pattern stands for, or what is wrong with it."""
    path = folder / home(name)
    for candidate in (path, path.with_name(path.name + ".gz")):
        if candidate.is_file():
            return [candidate]
    if path.is_dir():
        return f"{path}: is a folder; name a file in it"
    if path.exists():
        return f"{path}: is not an ordinary file, and it has to be read more than once; write it to one first"
    if glob.has_magic(name):
        matches = sorted(match for match in map(Path, glob.glob(str(path))) if match.is_file())
        return matches or f"{path}: no file matches{_near(path)}"
    return f"{path}: there is no such file{_near(path)}"


def _near(path: Path) -> str:
    """The end of an error about a missing file: what there is instead."""
    if not path.parent.is_dir():
        return f", nor the folder {path.parent}; relative names start in the recipe's folder, or give --data DIR"
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.is_file())
    except OSError as error:
        return f"; its folder cannot be read: {error.strerror}"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    return f"; the folder holds {', '.join(names[:5]) or 'no files'}{', …' if len(names) > 5 else ''}"


def _check_partners(names: Sequence[str], sources: list[Path], targets: list[Path], folder: Path) -> None:
    """Two patterns must match the same parts: part-2.en belongs to part-2.de, never to part-3.de."""
    if len(sources) == 1 and len(targets) == 1:
        return
    keys = [
        {_wildcards(folder / home(name), path): path for path in paths}
        for name, paths in zip(names, (sources, targets), strict=True)
    ]
    lonely = [keys[0].get(key) or keys[1][key] for key in keys[0].keys() ^ keys[1].keys()]
    if lonely:
        raise UserError(
            f"{list(names)}: match {len(sources)} and {len(targets)} files; without a partner: "
            f"{', '.join(map(str, sorted(lonely)[:10]))}"
        )


def _wildcards(pattern: Path, path: Path) -> tuple[str, ...]:
    """What the wildcards of `pattern` stand for in `path`."""
    parts = re.split(r"(\*+|\?|\[[^\]]+\])", str(pattern))
    escaped = (re.escape(part) if i % 2 == 0 else "(.*)" if part[0] == "*" else "(.)" for i, part in enumerate(parts))
    match = re.fullmatch("".join(escaped), str(path), re.DOTALL)
    return match.groups() if match else (str(path),)
