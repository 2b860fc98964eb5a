"""What a study consists of: a base recipe, rows of named changes to it, and seeds.

    STUDY/study.toml            seeds, [base.…] (the recipe, complete), [rows.NAME.…] (what the row changes)
    STUDY/runs/ROW/SEED/        a run as `regard train` makes it; the row of the base is called "base"
    STUDY/claims/, STUDY/failed/, STUDY/logs/       see `regard.study.claim` and `regard.study.worker`

A file with rows has one table per row, with the settings below it:

    [heads-1]                           [d_model-half]
    model.heads = 1                     model.dim = "x0.5"      half of what the base has
    paper = 24.9                        model.ff_dim = "x1"     as in the base, whatever else would follow from dim

A run of row r with seed s is the base with the changes of r and `train.seed = s`. The seed decides the order of the
data and the initial weights, and with them what the rows have in common: differences to the base are paired by seed.
Rows and seeds can be added to a study later; its base cannot change.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from regard.errors import UserError, suggest
from regard.models.config import ModelConfig
from regard.models.recipe import override
from regard.settings import read_toml, to_dict, write_toml
from regard.study import claim
from regard.study.finished import flat
from regard.tasks.registry import task_of
from regard.training.task import Task

STUDY = "study.toml"
BASE = "base"  # the name of its row
BUILT_IN = ("table3",)
FACTOR = re.compile(r"x(\d+(?:\.\d+)?)")  # a value relative to that of the base
NAME = re.compile(r"\w[\w.+-]*")  # of a row: it is the name of a folder
# Fields of a model that others are derived from; the derived ones are compared
RAW = {"head_dim", "value_dim", "kv_heads", "attention_scale", "final_norm"}
DERIVED = {
    "head_dim": "key_dim", "value_dim": "val_dim", "kv_heads": "key_heads", "attention_scale": "scale",
    "embed_dim": "token_dim",
}  # fmt: skip

Tables = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Named changes to the base; `seeds` of its own in addition to those of the study."""

    name: str
    changes: Tables
    paper: float | None = None  # the result of the same change in a paper
    note: str = ""
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Planned:
    """One run of a study."""

    row: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.row}@{self.seed}"


@dataclass(frozen=True)
class Study:
    folder: Path
    title: str
    base: Tables
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    test: str | None = None  # the test set of the table; None: the first
    metric: str | None = None  # one of scores.json; None: the most important of the task

    @classmethod
    def read(cls, folder: str | Path) -> Study:
        path = Path(folder) / STUDY
        if not path.is_file():
            raise UserError(f"{path}: missing, so this is not a study; name a recipe, or the folder of a study")
        tables = read_toml(path)
        try:
            rows = tuple(_row(name, table, str(path)) for name, table in tables.get("rows", {}).items())
            seeds, test, metric = tuple(tables["seeds"]), tables.get("test"), tables.get("metric")
            return cls(
                Path(folder), str(tables.get("title", path.parent.name)), tables["base"], rows, seeds, test, metric
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged ({error!r}); restore it, or start in another folder") from None

    def save(self) -> None:
        """Write it, with the rows and seeds that other processes have added since it was read."""
        while (own := claim.take(self.folder / "claims", "study")) is None:
            time.sleep(0.05)
        try:
            known = Study.read(self.folder) if (self.folder / STUDY).exists() else self
            joined(known, self)._write()
        finally:
            own.release()

    def _write(self) -> None:
        options = {"test": self.test, "metric": self.metric}
        rows = {
            row.name: {
                **({} if row.paper is None else {"paper": row.paper}),
                **({"note": row.note} if row.note else {}),
                **({"seeds": list(row.seeds)} if row.seeds else {}),
                **row.changes,
            }
            for row in self.rows
        }
        given = {name: value for name, value in options.items() if value is not None}
        tables = {"title": self.title, "seeds": list(self.seeds), **given, "base": self.base, "rows": rows}
        write_toml(self.folder / STUDY, tables)

    def row(self, name: str) -> Row:
        if name == BASE:
            return Row(BASE, {}, seeds=tuple(sorted({seed for row in self.rows for seed in row.seeds})))
        found = next((row for row in self.rows if row.name == name), None)
        if found is None:
            raise UserError(f"{name}: the study has no such row; {suggest(name, self.names)}")
        return found

    @property
    def names(self) -> list[str]:
        return [BASE, *(row.name for row in self.rows)]

    def seeds_of(self, name: str) -> list[int]:
        return sorted({*self.seeds, *self.row(name).seeds})

    def runs(self, only: Iterable[str] = ()) -> Iterator[Planned]:
        """All runs, or those of some rows and of the base: the first seed of every row, then the second, …"""
        names = [name for name in self.names if name in {BASE, *only}] if only else self.names
        seeds = {name: self.seeds_of(name) for name in names}
        for seed in sorted({seed for some in seeds.values() for seed in some}):
            yield from (Planned(name, seed) for name in names if seed in seeds[name])

    def tables(self, run: Planned) -> Tables:
        """The recipe of a run."""
        return merged(merged(self.base, self.row(run.row).changes), {"train": {"seed": run.seed}})

    def run_folder(self, run: Planned) -> Path:
        return self.folder / "runs" / run.row / str(run.seed)


def merged(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> Tables:
    """The tables with changes, those in nested tables too."""
    result = copy.deepcopy(dict(tables))
    for name, value in changes.items():
        before = result.get(name)
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        result[name] = merged(before, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return result


# --- rows


def _row(name: str, table: Any, where: str) -> Row:
    if not isinstance(table, dict):
        raise UserError(f"{where}: {name} = {table!r}: write a table [{name}] with settings, such as model.heads = 1")
    if name == BASE or not NAME.fullmatch(name):
        raise UserError(f"{where}: [{name}]: is no name for a row; use letters, digits, '.', '+', '-', and not 'base'")
    rest = dict(table)
    paper, note, seeds = rest.pop("paper", None), rest.pop("note", ""), rest.pop("seeds", [])
    if paper is not None and (isinstance(paper, bool) or not isinstance(paper, int | float)):
        raise UserError(f"{where}: [{name}] paper = {paper!r}: must be a number, such as 24.9")
    if not isinstance(seeds, list) or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise UserError(f"{where}: [{name}] seeds = {seeds!r}: must be a list of whole numbers, such as [4, 5]")
    for key, value in rest.items():
        if key != "task" and not isinstance(value, dict):
            raise UserError(f"{where}: [{name}] {key} = {value!r}: name its table, such as model.{key} or train.{key}")
    return Row(name, rest, None if paper is None else float(paper), str(note), tuple(seeds))


def read_rows(source: str | Path) -> list[Row]:
    """The rows of a file, or of a study that comes with Regard."""
    if str(source) in BUILT_IN and not Path(source).exists():
        with resources.as_file(resources.files("regard.study") / f"{source}.toml") as path:
            tables = read_toml(path)
    else:
        if not Path(source).is_file():
            raise UserError(f"--rows {source}: no such file; {suggest(str(source), BUILT_IN)}")
        tables = read_toml(source)
    if not tables:
        raise UserError(f"--rows {source}: has no rows; add a table [NAME] with settings, such as model.heads = 1")
    return [_row(name, table, str(source)) for name, table in tables.items()]


def row_of(name: str, assignments: Sequence[str]) -> Row:
    """The row of  --set-row NAME key=value …"""
    if not assignments:
        raise UserError(f"--set-row {name}: it changes nothing. Write  --set-row {name} model.heads=1")
    if bare := [one for one in assignments if "." not in one.partition("=")[0]]:
        raise UserError(f"--set-row {name} {bare[0]}: name its table, such as model.{bare[0]} or train.{bare[0]}")
    changes = override({}, assignments)
    keys = [one.partition("=")[0].strip() for one in assignments]
    if missing := [key for key in keys if key not in flat(changes)]:
        raise UserError(f"--set-row {name}: {missing[0]} = none: a row cannot remove a setting; give it a value")
    return _row(name, changes, "--set-row")


# --- what rows mean for a base


def make_task(tables: Mapping[str, Any]) -> Task:
    """The task of a recipe, to ask what its settings mean; it reads and writes nothing."""
    return task_of(tables)(tables, Path(), torch.device("cpu"))


def resolved(tables: Mapping[str, Any]) -> Tables:
    """All settings with defaults, presets and derived values; two recipes with the same ones train the same model."""
    task = make_task(tables)
    config = task.make_model_config(task.PLACEHOLDERS)
    model = {field.name: getattr(config, field.name) for field in fields(ModelConfig) if field.name not in RAW}
    model["decoder_layers"] = config.decoder_layers or config.layers
    train = {name: value for name, value in to_dict(task.config).items() if name != "seed"}
    return {"task": task.NAME, **task.own_tables(), "model": model, "train": train}


def scaled(base: Mapping[str, Any], row: Row) -> Row:
    """The row with numbers for factors such as "x0.5"."""
    factors = {key: value for key, value in flat(row.changes).items() if isinstance(value, str)}
    factors = {key: value for key, value in factors.items() if FACTOR.fullmatch(value)}
    if not factors:
        return row
    task = make_task(base)
    config, changes = task.make_model_config(task.PLACEHOLDERS), copy.deepcopy(row.changes)
    for key, value in factors.items():
        *path, name = key.split(".")
        home: Any = {"model": config, "train": task.config}.get(key.partition(".")[0])
        before = None if home is None or len(path) > 1 else getattr(home, DERIVED.get(name, name), None)
        if not isinstance(before, int | float) or isinstance(before, bool):
            raise UserError(f"[{row.name}] {key} = {value!r}: the base has no number for it; write a number")
        after = before * float(value[1:])
        table = changes
        for part in path:
            table = table[part]
        table[name] = round(after) if isinstance(before, int) else after
        if isinstance(before, int) and abs(after - round(after)) > 1e-9:
            raise UserError(f"[{row.name}] {key} = {value!r}: {before} times {value[1:]} is not a whole number")
    return replace(row, changes=changes)


def fitting(base: Mapping[str, Any], rows: Iterable[Row], lenient: bool) -> tuple[list[Row], list[str]]:
    """The rows that change something, with numbers for factors; and why others are left out.

    `lenient`: a row that is impossible with this base is left out, not refused.
    """
    kept: list[Row] = []
    notes: list[str] = []
    known = {BASE: resolved(base)}
    for row in rows:
        try:
            row = scaled(base, row)
            settings = resolved(merged(base, row.changes))
        except UserError as error:
            if not lenient:
                raise UserError(f"row {row.name}: {error}") from None
            notes.append(f"row {row.name} is left out: {error}")
            continue
        same = next((name for name, others in known.items() if others == settings), None)
        if same is None:
            kept.append(row)
            known[row.name] = settings
        else:
            notes.append(f"row {row.name} is left out: the same as {'the base' if same == BASE else f'row {same}'}")
    return kept, notes


# --- a study in a folder


def begin(folder: Path, title: str, base: Tables, test: str | None = None, metric: str | None = None) -> Study:
    """A new study, or the one in the folder, if it has the same base."""
    if not (folder / STUDY).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder}: is not empty and not a study; name another folder with -o")
        return Study(folder, title, base, (), (), test, metric)
    study = Study.read(folder)
    if resolved(study.base) != resolved(base):
        before, after = flat(resolved(study.base)), flat(resolved(base))
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        raise UserError(
            f"{folder}: is a study of another base ({keys[0]} = {before.get(keys[0])!r} there, "
            f"{after.get(keys[0])!r} here); name another folder with -o"
        )
    return replace(study, test=test or study.test, metric=metric or study.metric)


def joined(known: Study, study: Study) -> Study:
    """The rows and seeds of both; the other fields are those of `study`."""
    both, seeds = extended(known, study.rows, study.seeds), {row.name: row.seeds for row in study.rows}
    rows = (replace(row, seeds=tuple(sorted({*row.seeds, *seeds.get(row.name, ())}))) for row in both.rows)
    return replace(study, rows=tuple(rows), seeds=both.seeds)


def extended(study: Study, rows: Iterable[Row], seeds: Iterable[int], only: Sequence[str] = ()) -> Study:
    """The study with more rows and seeds; the seeds are for all rows, or for those named in `only`."""
    known = {row.name: row for row in study.rows}
    for row in rows:
        before = known.setdefault(row.name, row)
        if before.changes != row.changes:
            raise UserError(
                f"row {row.name}: the study has it with other changes ({before.changes}); choose another name"
            )
    study = replace(study, rows=tuple(known.values()))
    if not only:
        return replace(study, seeds=tuple(sorted({*study.seeds, *seeds})))
    for name in only:
        study.row(name)  # a mistake shows here
    more = {*seeds}
    own = (replace(row, seeds=tuple(sorted({*row.seeds, *more}))) if row.name in only else row for row in study.rows)
    return replace(study, rows=tuple(own))
