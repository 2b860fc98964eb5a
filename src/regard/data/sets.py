"""Which files: what every [data] table has in common, and how names become files on disk.

    [data]
    train = ["part-*.tsv"]                files to learn from; * and ? match several, read in order of name
    train = [{ files = ["a.tsv"], weight = 2 }, { files = ["b.tsv"] }]       or groups of them with weights
    valid = ["valid.tsv"]                 to evaluate during training
    test = { news = ["news.tsv.gz"] }     named sets, evaluated at the end
    skip_bad = false                      stop at rows that cannot be used, or leave them out
    encoding = "cp949"                    of text files and tables, any that Python knows (default: "utf-8")
    delimiter = "|"                       of the cells in .csv, .tsv and .txt tables, where it is not recognised
    folder = "."                          where relative names start: the recipe's folder unless given

Any file may be compressed (gzip or Zstandard), and for one that is missing the name with .gz or .zst is tried. What the
rows of the files mean is up to the subclasses of `DataConfig`: `regard.data.pairs`, `labels`, `documents`, `images`,
`captions` and `numeric`.
"""

from __future__ import annotations

import difflib
import filecmp
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from regard.data.lines import UTF8, check_encoding
from regard.errors import MissingFiles, UserError
from regard.settings import check_fields, from_dict, to_dict

Files = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Training files whose rows have the same weight: how often each occurs in an epoch, on average if fractional."""

    files: Files  # names, or patterns with * and ?
    weight: float = 1.0  # how often each row occurs in an epoch

    def __post_init__(self) -> None:
        check_files("files", self.files)
        check_fields(self)
        if not self.files:
            raise UserError("files = []: no files")
        if not 0 < self.weight <= 1000:
            raise UserError(f"weight = {self.weight:g}: must be above 0 and at most 1000")


Sources = Files | tuple[Group, ...]


def file_groups(files: Sequence[str] | Sequence[Group]) -> list[Group]:
    """Groups of files; names without a group are one of weight 1."""
    grouped = [one for one in files if isinstance(one, Group)]
    return grouped or [Group(tuple(one for one in files if isinstance(one, str)))]


def file_names(files: Sequence[str] | Sequence[Group]) -> Files:
    """The names of all files."""
    return tuple(name for one in files for name in ([one] if isinstance(one, str) else one.files))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The keys that every [data] table has."""

    train: Sources = ()  # files to learn from; * and ? match several; or groups of files with weights
    valid: Files = ()  # files to evaluate during training
    test: dict[str, Files] = field(default_factory=dict)  # named sets of files, evaluated at the end
    skip_bad: bool = False  # leave out rows that cannot be used, instead of stopping
    folder: str = "."  # folder that relative file names start from

    EXAMPLE: ClassVar[str] = "train.tsv"  # of a file, for messages
    WEIGHTED: ClassVar[bool] = False  # whether files of `train` may have weights
    GENERATORS: ClassVar[tuple[str, ...]] = ()  # tables that generate the data, instead of files

    def __post_init__(self) -> None:
        self._read_groups()
        check_files("valid", self.valid)
        if not isinstance(self.test, dict):
            raise UserError(f"test = {self.test!r}: give each set a name:  test = {{ new = [{self.EXAMPLE!r}] }}")
        for name, files in self.test.items():
            check_files(f"test.{name}", files)
            if name in ("train", "valid") or not re.fullmatch(r"\w[\w .-]*", name):
                raise UserError(f"test.{name}: choose another name for the set, of letters, digits, '-' and '_'")
        check_fields(self)
        if not self.folder or "\0" in self.folder:
            raise UserError(f"folder = {self.folder!r}: not a folder name; remove it to use the recipe's folder")
        origins = [name for name in ("train", *self.GENERATORS) if getattr(self, name)]
        if len(origins) != 1:
            tables = "".join(f", or a table [data.{name}]" for name in self.GENERATORS)
            what = f"{' and '.join(origins)}: choose one" if origins else "train = []: no files"
            raise UserError(f"{what}; write  train = [{self.EXAMPLE!r}]{tables}")
        if origins != ["train"] and self.sets:
            raise UserError(f"valid and test: [data.{origins[0]}] generates its own; remove them")

    def _read_groups(self) -> None:
        train: Any = self.train
        if not isinstance(train, list | tuple) or not any(isinstance(one, dict | Group) for one in train):
            check_files("train", train)
            return
        if not all(isinstance(one, dict | Group) for one in train):
            raise UserError(
                f"train = {train!r}: write all files as names, or all in groups {{ files = […], weight = 2 }}"
            )
        if not self.WEIGHTED:
            raise UserError(f"train = {train!r}: these files have no weights; write a list of names")
        tables = (one if isinstance(one, Group) else from_dict(Group, one, "train.") for one in train)
        object.__setattr__(self, "train", tuple(tables))

    @property
    def weights(self) -> list[float]:
        """Those of the groups of training files; a generator is one group."""
        return [group.weight for group in file_groups(self.train)] if self.train else [1.0]

    @property
    def sets(self) -> dict[str, Files]:
        """The sets with files of their own that are evaluated."""
        return {name: files for name, files in {"valid": self.valid, **self.test}.items() if files}

    def find(self, files: Sequence[str] | Sequence[Group]) -> list[Path]:
        """The files on disk, in order."""
        return find_files(file_names(files), self.folder)

    def fingerprint(self, files: Sequence[str] | Sequence[Group]) -> str:
        """A digest of what decides the rows of `files`, or of a generator: the files and the settings."""
        names = ("train", "valid", "test", "folder")
        settings = {name: value for name, value in to_dict(self).items() if name not in names}
        groups = [len(group.files) for group in file_groups(files)] if files else []
        return fingerprint(self.find(files) if files else [], settings, groups)

    def repeated(self) -> Iterator[str]:
        """Sets that contain a file of the training data, under its own or another name."""
        train = self.find(self.train) if self.train else []
        for name, files in self.sets.items():
            for path in self.find(files):
                if any(
                    path.samefile(one) or (path.is_file() and filecmp.cmp(path, one, shallow=False)) for one in train
                ):
                    key = "valid" if name == "valid" else f"test.{name}"
                    yield f"data.{key}: {path} is also training data, so its results say nothing about new data"

    def check_valid_fraction(self, fraction: float) -> None:
        """`valid_fraction` of the training data replaces `valid`."""
        check_fields(self, ("valid_fraction",))
        if fraction and self.valid:
            raise UserError(f"valid_fraction = {fraction} and valid = {list(self.valid)}: choose one")


def check_columns(source: str | None, target: str | None) -> None:
    """The columns of pairs: both have names, or neither."""
    if (source is None) != (target is None):
        named, other = ("source", "target") if target is None else ("target", "source")
        raise UserError(f"{named} = {source or target!r} without {other}: name both columns or neither")
    if source is not None and source == target:
        raise UserError(f"source = target = {source!r}: a pair needs two columns")


@dataclass(frozen=True, kw_only=True)
class TextFiles(DataConfig):
    """The keys that every [data] table has whose files are text or tables."""

    encoding: str = UTF8  # encoding of text files and tables: any that Python knows
    delimiter: str | None = None  # separates the cells of CSV and TSV; none: recognised in CSV, a tab in TSV

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "encoding", check_encoding(self.encoding))
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n\0'):
            raise UserError(f'delimiter = {self.delimiter!r}: must be one character, such as "|", and not a quote')

    @property
    def format(self) -> dict[str, Any]:
        """How its tables are read: fields of `regard.data.tables.Table`."""
        return {"encoding": self.encoding, "delimiter": self.delimiter}


def check_files(name: str, files: Any) -> None:
    if isinstance(files, list | tuple) and any(isinstance(one, dict) for one in files):
        raise UserError(f"{name} = {files!r}: only training files have weights; write a list of names")
    if isinstance(files, str):
        raise UserError(f"{name} = {files!r}: write a list, {name} = [{files!r}]")
    if not isinstance(files, list | tuple) or not all(isinstance(f, str) and f and "\0" not in f for f in files):
        raise UserError(f'{name} = {files!r}: expected a list of file names, such as ["train.en", "train.de"]')


def fingerprint(paths: Iterable[Path], *parts: object) -> str:
    """A digest of files (names, sizes, times) and of settings: equal only where the same data would be read."""
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.exists()]
    return hashlib.sha256(json.dumps([files, parts], sort_keys=True).encode()).hexdigest()


def find_files(names: Sequence[str], folder: str | Path = ".", *, folders: bool = False) -> list[Path]:
    """The files on disk, in order. With `folders`, a folder stands for all files in it, in order of name.

    All missing files are named in one error, with the nearest name that exists.
    """
    paths: list[Path] = []
    missing: list[str] = []
    for name in names:
        path = home(folder) / home(name)
        matches = _inside(path) if folders and path.is_dir() else _expand(name, path)
        if isinstance(matches, str):
            missing.append(matches)
        else:
            paths += matches
    if missing:
        raise MissingFiles("\n".join(missing))
    return paths


def home(name: str | Path) -> Path:
    return Path(os.path.expanduser(name))  # unlike Path's own, it leaves an unknown ~user as it is


def _inside(folder: Path) -> list[Path] | str:
    """The files in a folder, hidden ones excepted."""
    entries = (entry for entry in folder.rglob("*") if entry.is_file())
    shown = (entry for entry in entries if not any(p.startswith(".") for p in entry.relative_to(folder).parts))
    return sorted(shown) or f"{folder}: the folder is empty; name one that contains text"


def _expand(name: str, path: Path) -> list[Path] | str:
    """The files that a name or pattern matches, or what is wrong with it."""
    for candidate in (path, path.with_name(path.name + ".gz"), path.with_name(path.name + ".zst")):
        if candidate.is_file():
            return [candidate]
    if path.is_dir():
        return f"{path}: is a folder; name a file in it"
    if path.exists():
        return f"{path}: is not a regular file, and it has to be read more than once; save it as one first"
    if glob.has_magic(name):
        matches = sorted(match for match in map(Path, glob.glob(str(path))) if match.is_file())
        return matches or f"{path}: no file matches{_near(path)}"
    return f"{path}: no such file{_near(path)}"


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
    return f"; the folder contains {', '.join(names[:5]) or 'no files'}{', …' if len(names) > 5 else ''}"


def wildcards(name: str, folder: str | Path, path: Path) -> tuple[str, ...]:
    """What the wildcards of a name match in one of its files."""
    parts = re.split(r"(\*+|\?|\[[^\]]+\])", str(home(folder) / home(name)))
    escaped = (re.escape(part) if i % 2 == 0 else "(.*)" if part[0] == "*" else "(.)" for i, part in enumerate(parts))
    match = re.fullmatch("".join(escaped), str(path), re.DOTALL)
    return match.groups() if match else (str(path),)
