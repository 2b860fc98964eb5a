"""Run folders become rows: runs that differ in `train.seed` alone belong together.

    runs/base-1 runs/base-2 runs/rope-1 runs/rope-2   ─→   {"base": {1: …, 2: …}, "rope": {1: …, 2: …}}

Two runs with the same settings and the same seed belong to different rows, as before and after a change to the code:
a run goes to the first row with its settings that lacks its seed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from regard.errors import UserError, listed, program
from regard.models.recipe import RECIPE
from regard.study.finished import SEED, FinishedRun


def group_runs(folders: Iterable[str | Path]) -> dict[str, dict[int, Path]]:
    """{row: {seed: folder}}, in the order of the folders; each is a run, or a folder of runs."""
    runs = [FinishedRun(path) for folder in folders for path in _expand(Path(folder))]
    seen: dict[Path, Path] = {}
    for run in runs:
        if (path := run.folder.resolve()) in seen:
            raise UserError(f"{run.folder}: is the same run as {seen[path]}; name each run once")
        seen[path] = run.folder
        if not run.scores:
            remedy = f"{program()} resume {run.folder}"
            raise UserError(f"{run.folder}: has no scores.json, so it is not finished; continue it:  {remedy}")
    tasks = {str(run.recipe.get("task", "translation")): run.folder for run in runs}
    if len(tasks) > 1:
        parts = (f"{folder} ({task})" for task, folder in tasks.items())
        raise UserError(f"{listed(parts)}: have different tasks; compare runs of one task")
    rows: list[tuple[dict[str, Any], dict[int, Path]]] = []
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name != SEED}
        row = next((row for known, row in rows if known == settings and run.seed not in row), None)
        if row is None:
            rows.append((settings, row := {}))
        row[run.seed] = run.folder
    return dict(zip(_names([[*row.values()] for _, row in rows]), (row for _, row in rows), strict=True))


def check_seeds(rows: Mapping[str, Mapping[int, Path]]) -> None:
    """A UserError unless every row can be compared with the first, over common seeds or as two single models."""
    base, *others = rows.items()
    for name, row in others:
        if not base[1].keys() & row.keys() and max(len(base[1]), len(row)) > 1:
            one, two = (f"{name} (seeds {listed(sorted(seeds))})" for name, seeds in (base, (name, row)))
            raise UserError(
                f"{one} and {two}: have no seed in common, and differences are paired by seed; train them with the "
                "same values of train.seed"
            )


def _expand(folder: Path) -> list[Path]:
    """The folder of a run, or the runs in it."""
    if (folder / RECIPE).is_file():
        return [folder]
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name the folders of finished runs")
    found = [path.parent for path in folder.glob(f"*/{RECIPE}")]
    if not found:
        rows = {path.parent.parent for depth in ("*", "runs/*") for path in folder.glob(f"{depth}/*/{RECIPE}")}
        names = " ".join(map(str, sorted(rows, key=lambda row: (row.name != "base", row))))  # as in a study
        remedy = f"; name those in it: {names}" if names else ""
        raise UserError(f"{folder}: is not a run ({RECIPE} is missing), nor a folder of runs{remedy}")
    return sorted(found, key=lambda path: (int(path.name) if path.name.isdecimal() else 0, path.name))


def _names(rows: Sequence[Sequence[Path]]) -> list[str]:
    """A name for each row, from its folders."""
    names = [*map(_name, rows)]
    if len({*names}) < len(names):  # runs/a/base and runs/b/base
        names = [str(paths[0]) if names.count(name) > 1 else name for name, paths in zip(names, rows, strict=True)]
    return names


def _name(folders: Sequence[Path]) -> str:
    """What the names of the folders have in common: "base" of base-1 and base-2, "rope" of rope/1 and rope/2."""
    paths = [path.resolve() for path in folders]
    names = [path.name for path in paths]
    if all(name.isdecimal() for name in names) and len({path.parent for path in paths}) == 1:
        return paths[0].parent.name
    if len(names) == 1:
        return names[0]
    equal = takewhile(lambda chars: len({*chars}) == 1, zip(*names, strict=False))
    prefix = "".join(chars[0] for chars in equal)
    if any(name[len(prefix) :][:1].isdecimal() for name in names):
        prefix = prefix.rstrip("0123456789")  # base-1 and base-10 have base-1 in common
    return re.sub(r"[-_. =]*(seed)?[-_. =]*$", "", prefix) or names[0]
