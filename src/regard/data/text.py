"""Which text a language model learns from: the [data] table of its recipe.

    [data]
    train = ["input.txt"]                 a file, a pattern ("part-*.txt"), a folder with all that is in it
    valid_fraction = 0.1                     the last tenth of its characters is held out; or
    valid = ["valid.jsonl"]               text of its own to be judged by
    test = { wiki = ["wiki.parquet"] }    named sets, for the end

A text file is a document; `separator` cuts it into several. In a table (.jsonl, .parquet, .tsv with a header) every
row is a document, and `column` names its text; `table` says so of files whose ending does not. Any file may be
gzipped, and one that is missing is looked for with .gz at its end. Relative names start in `folder`, which is the
recipe's own unless it says otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from regard.data.config import Files, check_list, expand_all, home
from regard.errors import UserError
from regard.models.recipe import read_recipe, recipe_path
from regard.settings import check_types, from_dict


@dataclass(frozen=True)
class TextData:
    """Where the text is, and which of it is used."""

    train: Files
    valid: Files = ()
    valid_fraction: float = 0.0  # of the characters of `train`, the last of them, held out in place of `valid`
    test: dict[str, Files] = field(default_factory=dict)
    column: str = "text"  # of a table
    table: Literal["tsv", "csv", "jsonl", "parquet"] | None = None  # what every file is, whatever its ending
    separator: str | None = None  # stands between the documents of a text file, such as "<|endoftext|>"
    skip_bad: bool = False  # leave out rows of a table that cannot be used, instead of asking you to mend them
    folder: str = "."  # where relative names start

    def __post_init__(self) -> None:
        for name, files in (("train", self.train), ("valid", self.valid)):
            check_list(name, files)
        if not isinstance(self.test, dict):
            raise UserError(f'test = {self.test!r}: give each set a name:  test = {{ wiki = ["wiki.txt"] }}')
        for name, files in self.test.items():
            check_list(f"test.{name}", files)
        check_types(self)
        if not self.folder or "\0" in self.folder:
            raise UserError(f"folder = {self.folder!r}: is no name of a folder; leave it out for the recipe's own")
        if not self.train:
            raise UserError('train = []: names no file; write  train = ["input.txt"]')
        if not 0 <= self.valid_fraction < 1:
            raise UserError(f"valid_fraction = {self.valid_fraction}: must be at least 0 and below 1, such as 0.1")
        if self.valid_fraction and self.valid:
            raise UserError(
                f"valid_fraction = {self.valid_fraction}: there is valid = {list(self.valid)} too; choose one"
            )
        if self.separator == "":
            raise UserError("separator = '': leave it out, and a text file is one document")


def read_text(recipe: str | Path, folder: str | Path | None = None, skip_bad: bool = False) -> TextData:
    """The [data] table of a recipe; `folder` (what --data gives) replaces the one relative names start in."""
    path = recipe_path(recipe)
    table = read_recipe(path).get("data")
    if not isinstance(table, dict):
        raise UserError(f'{path}: has no table [data]; write one, such as  [data]  with  train = ["input.txt"]')
    try:
        config = from_dict(TextData, {"train": (), **table}, "data.")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    base = home(folder) if folder is not None else path.parent / home(config.folder)
    return replace(config, folder=str(base.resolve()), skip_bad=skip_bad or config.skip_bad)


def find_texts(files: Sequence[str], folder: str | Path = ".") -> list[Path]:
    """The files on disk, those of a folder in order of name; whatever is missing is named in one error."""
    found: list[Path] = []
    for name in files:
        path = home(folder) / home(name)
        if not path.is_dir():
            found += expand_all([name], folder)[0]
            continue
        inside = sorted(entry for entry in path.rglob("*") if entry.is_file() and not _hidden(entry, path))
        if not inside:
            raise UserError(f"{path}: the folder holds no files; name one that holds text")
        found += inside
    return found


def _hidden(entry: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in entry.relative_to(folder).parts)


def fingerprint(files: Sequence[str], config: TextData) -> str:
    """A digest of what decides the text: the files (names, sizes, times) and how they are read."""
    paths = [path.resolve() for path in find_texts(files, config.folder)]
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    parts = [states, config.column, config.separator, config.skip_bad, config.table]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
