"""The studies of tasks with long inputs: their rows are possible, and one command trains them and writes the result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from regard.api import open_recipe
from regard.nn.config import Mixer
from regard.study.definition import fitting, read_rows
from smoke import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import long_inputs
import table

pytest.importorskip("scipy", reason="regard ablate: pip install 'regard[study]'")


@pytest.mark.parametrize("smoke", [False, True], ids=["whole", "small"])
@pytest.mark.parametrize("task", long_inputs.ROWS)
def test_every_row_fits_its_recipe_and_changes_it(task: str, smoke: bool) -> None:
    base, _ = open_recipe(str(ROOT / "recipes" / f"{task}.toml"), None, smoke=smoke)
    rows = read_rows(ROOT / "recipes" / "rows" / f"{long_inputs.ROWS[task]}.toml")
    kept, notes = fitting(base, rows, lenient=False)
    assert [row.name for row in kept] == [row.name for row in rows] and not notes


def test_listops_has_a_row_for_every_mixer() -> None:
    rows = read_rows(ROOT / "recipes" / "rows" / "listops.toml")
    named = {"full", *(row.changes["model"]["mixer"] for row in rows)}
    assert {*get_args(Mixer)} <= named


SMALLER: dict[str, list[str]] = {
    "listops": ["data.listops.train=200", "data.listops.test=50", "data.listops.valid=20"],
    "nsmc-long": ["data.join.copies=1"],
    "shakespeare-16k": ["model.dim=32", "model.ff_dim=64", "model.max_length=64"],
}


@pytest.mark.parametrize(
    "task", ["listops", *(pytest.param(name, marks=pytest.mark.slow) for name in SMALLER if name != "listops")]
)
def test_one_command_trains_a_study_and_writes_its_result(
    task: str, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["train.steps=4", *SMALLER[task]]
    arguments = [task, "--smoke", "--seeds", "2", "--only", "window", "--device", "cpu", "--set", *settings]
    monkeypatch.setattr(sys, "argv", [long_inputs.__file__, *arguments, "-o", "out.json"])
    long_inputs.main()
    result: dict[str, Any] = json.loads(Path("out.json").read_text())
    trained = {row["name"]: row for row in result["rows"] if row["scores"]}
    assert trained.keys() == {"full", "window"} and all(len(row["scores"]) == 2 for row in trained.values())
    assert all(row["parameters"] > 0 and row["flops"] > 0 and row["seconds"] > 0 for row in trained.values())
    wanted = {
        "listops": {"most frequent class", "first operator alone"},
        "nsmc-long": {"most frequent class", "label of one text"},
        "shakespeare-16k": {"single characters"},
    }
    assert result["baselines"].keys() == wanted[task]
    assert table.table(Path("out.json")).count("\n") >= 4
