"""The driver of many runs: who waits for whom, what is written, and what is said about a run that failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import table
import tasks

from regard.models.recipe import override, read_recipe
from regard.tasks.registry import task_of

RECIPES = Path(__file__).parent.parent / "recipes"
TRAIN = """
import json, sys
from pathlib import Path
folder, test, figure, score, needed = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5]
if score < 0 or (needed and not Path(needed).is_file()):
    sys.exit("it broke")
folder.mkdir(parents=True)
(folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "seconds": 2.5}) + "\\n")
(folder / "model.safetensors").write_bytes(b"")
(folder / "scores.json").write_text(json.dumps({test: {figure: score}}))
"""


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Runs that do nothing but score what stands here, plus a thousandth for every seed; below 0 they break."""
    real, found = tasks.Bench._run, dict.fromkeys(tasks.TASKS, 0.5)

    def run(self: tasks.Bench, name: str, seed: int) -> tasks.Run:
        made, task = real(self, name, seed), tasks.TASKS[name]
        score = found[name] + seed / 1000
        needed = str(made.after or "")
        made.command = [sys.executable, "-c", TRAIN, str(made.folder), task.test, task.figure, str(score), needed]
        return made

    monkeypatch.setattr(tasks.Bench, "_run", run)
    return found


def start(tmp_path: Path, *arguments: str, out: Path | None = None) -> list[dict]:
    out = out or tmp_path / "out"
    tasks.main([*arguments, "--device", "cpu", "--work", str(tmp_path / "runs"), "-o", str(out)])
    found = out / "tasks.json"
    return json.loads(found.read_text())["rows"] if found.exists() else []


def test_what_starts_from_another_run_waits_for_it(tmp_path: Path, scores: dict[str, float]) -> None:
    only = ["nsmc-pretrained", "vit", "nsmc-masked"]
    rows = {row["task"]: row for row in start(tmp_path, "--only", *only, "--jobs", "3")}
    assert rows.keys() == {*only}
    assert rows["vit"] == {
        "task": "vit", "test": "test", "figure": "accuracy", "goal": 0.94, "mean": 0.502, "least": 0.501,
        "most": 0.503, "seeds": [1, 2, 3], "training_seconds": 2.5,
    }  # fmt: skip
    assert rows["nsmc-masked"]["seeds"] == [1]  # one pre-training for all
    result = json.loads((tmp_path / "out" / "quality-vit.json").read_text())
    assert [run["seed"] for run in result["runs"]] == [1, 2, 3] and result["recipe"] == "fashion-mnist-vit.toml"
    scores["vit"] = 0.6
    later = {
        row["task"]: row for row in start(tmp_path / "later", "--only", "vit", "--seeds", "3", out=tmp_path / "out")
    }
    assert later["vit"]["most"] == 0.603 and later["vit"]["seeds"] == [1, 2, 3] and later.keys() == {*only}
    shown = table.table(tmp_path / "out" / "tasks.json")
    assert "| vit | accuracy on test | 0.5353 (0.5010 to 0.6030) | 0.94 | 3 | 2.5 |" in shown


def test_a_run_that_fails_is_told_and_the_others_go_on(
    tmp_path: Path, scores: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    scores["nsmc-masked"] = -1
    rows = start(tmp_path, "--only", "nsmc-pretrained", "nsmc-masked", "vit", "--jobs", "2", "--seeds", "1")
    assert [row["task"] for row in rows] == ["vit"]
    said = capsys.readouterr()
    assert "nsmc-masked, seed 1: FAILED" in said.out and "it broke" in said.out
    assert "left out: 1 runs" in said.err and "has failed" in said.err
    start(tmp_path, "--only", "naver-pretrained", "--seeds", "1")
    assert "add it to --only" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name, task in tasks.TASKS.items() if not task.start])
def test_every_task_is_a_recipe_with_settings_that_it_takes(name: str, tmp_path: Path) -> None:
    import torch

    task = tasks.TASKS[name]
    tables = read_recipe(RECIPES / f"{task.recipe}.toml")
    tables = {key: value for key, value in override(tables, task.settings).items() if key != "smoke"}
    tables["train"] = {**tables["train"], "cuda_graph": False}
    task_of(tables)(tables, tmp_path, torch.device("cpu"))
