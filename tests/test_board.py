"""TensorBoard and Weights & Biases get the lines of metrics.jsonl; events are read back with TensorBoard itself."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from corpus import train as corpus_train
from corpus import write_corpus
from regard.errors import MissingExtra, UserError
from regard.settings import read_toml
from regard.training.history import read_metrics
from regard.training.progress import Board
from reversal import TRAIN, make_trainer


def test_events_are_the_lines_of_the_log(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(TRAIN, steps=8, log_every=2, save_every=4, tensorboard=True)
    make_trainer(tmp_path, config).run()
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")  # what was logged after step 4 happens again
    again = make_trainer(tmp_path, config)
    assert again.resume() and again.step == 4 and again.run()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    lines = read_metrics(tmp_path)
    for name in ("loss", "lr", "seconds"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        wanted = [(line["step"], line[name]) for line in lines if name in line]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]


def test_without_the_package_it_says_which_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match=r"train.tensorboard = true needs .* pip install 'regard\[tensorboard\]'"):
        Board(tmp_path)


class Wandb(ModuleType):
    """The functions of the package `wandb` that are used, as it documents them; runs are kept by their id."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.runs: dict[str, dict[int, dict[str, float]]] = {}
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def init(self, **arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.calls.append(arguments)
        history = self.runs.setdefault(arguments["id"], {})
        finished: list[bool] = []

        def log(values: dict[str, float], step: int) -> None:
            assert step >= max(history, default=0) and not finished  # W&B drops other steps, with a warning
            history.setdefault(step, {}).update(values)

        first = max(history) + 1 if history else 0
        return SimpleNamespace(step=first, log=log, finish=lambda: finished.append(True))


@pytest.fixture
def wandb(monkeypatch):
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_a_wandb_run_has_the_lines_of_the_log_and_is_continued(tmp_path, wandb):
    config = replace(TRAIN, steps=8, log_every=2, save_every=4, wandb=True)
    make_trainer(tmp_path, config).run()
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")  # what was logged after step 4 happens again
    again = make_trainer(tmp_path, replace(config, steps=12))
    assert again.resume() and again.step == 4 and again.run()
    first, second = wandb.calls
    assert first["id"] == second["id"] == (tmp_path / "wandb" / "id").read_text()
    assert first["resume"] == "allow" and first["dir"] == str(tmp_path) and first["project"] == "regard"
    assert first["config"]["train"]["steps"] == 8 and second["config"]["train"]["steps"] == 12
    lines, history = read_metrics(tmp_path), wandb.runs[first["id"]]
    assert list(history) == [2, 4, 6, 8, 10, 12]
    for line in lines:
        for name in ("loss", "lr"):
            assert history[line["step"]][name] == line[name]
    assert make_trainer(tmp_path, replace(config, steps=12)).resume()
    assert len(wandb.calls) == 2  # only a run that trains is opened


def test_the_recipe_is_the_config_of_the_wandb_run(empty_folder, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    write_corpus(empty_folder)
    assert corpus_train("mine.toml", "--set", "train.wandb=true") == 0
    (call,) = wandb.calls
    assert call["config"] == read_toml("runs/mine/recipe.toml")
    assert (call["project"], call["name"]) == ("mine", "mine")
    assert "valid_loss" in wandb.runs[call["id"]][6]


def test_wandb_that_cannot_start_says_what_to_do(tmp_path, wandb):
    wandb.error = RuntimeError("api_key not configured (no-tty)\nmore")
    with pytest.raises(UserError, match=r"api_key not configured \(no-tty\)\); .*WANDB_MODE=offline"):
        make_trainer(tmp_path, replace(TRAIN, wandb=True)).run()


def test_without_wandb_it_says_which_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtra, match=r"train.wandb = true needs .* pip install 'regard\[wandb\]'"):
        make_trainer(tmp_path, replace(TRAIN, wandb=True))
