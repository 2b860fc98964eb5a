"""Before training: sizes, epochs, time, a smaller preset where it takes long, and whether the model can be exported."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from corpus import train, write_corpus
from regard import api
from regard.cli import main
from regard.cost import cost
from regard.cost.smaller import SLOWER, smaller
from regard.errors import UserError
from regard.interop.convert import family_of
from regard.models.config import ModelConfig
from regard.models.folder import weights_of
from regard.models.recipe import preset, with_preset
from regard.progress import rounded
from regard.settings import from_dict
from regard.training import progress
from regard.training.progress import Pace
from reversal import TRAIN, assert_same, make_trainer


def test_the_pace_leaves_out_the_first_steps_and_what_is_not_a_step(monkeypatch):
    clock, synchronized = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    pace = Pace(3, lambda: synchronized.append(clock[0]))
    found = []
    for number in range(20):
        clock[0] += 100.0 if number < 3 else 0.5  # compilation
        found.append(pace.step())
        if number == 4:  # an evaluation
            clock[0] += 50.0
            pace.restart()
    assert [one for one in found if one is not None] == [0.5]
    assert found[8] == 0.5  # 2 s after the evaluation
    assert synchronized == [100.0, 200.0, 300.0, 351.0, 353.0]  # never again once it is known


def test_the_estimate_changes_nothing_and_tells_epochs_and_time(tmp_path, monkeypatch, capsys):
    plain = make_trainer(tmp_path / "plain")
    assert plain.run() and "about" not in capsys.readouterr().err  # over before two seconds
    monkeypatch.setattr(progress, "MEASURED", (0.0, 2))
    measured = make_trainer(tmp_path / "measured")
    measured.advise = lambda seconds: f"note: {seconds < 60}"
    assert measured.run()
    assert_same(weights_of(plain.model), weights_of(measured.model))
    per_epoch = len(measured.batches.plan(0))
    assert measured.epochs == TRAIN.steps / per_epoch
    epochs = rounded(TRAIN.steps / per_epoch)
    line = rf"23 steps \({epochs} epochs\): about \d+ s on this machine, \S+ s per step\nnote: True"
    assert re.search(line, capsys.readouterr().err)


def test_a_resumed_run_tells_what_remains(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "MEASURED", (0.0, 2))
    make_trainer(tmp_path, replace(TRAIN, steps=7)).run()
    capsys.readouterr()
    again = make_trainer(tmp_path)
    assert again.resume() and again.run()
    assert re.search(r"23 steps \(.* epochs\), the remaining 13: about 0 s", capsys.readouterr().err)


def test_training_starts_with_parameters_and_data(empty_folder, capsys):
    write_corpus(empty_folder)
    assert train() == 0
    model = api.load("runs/mine").model
    parameters = sum(one.numel() for one in model.parameters())
    error = capsys.readouterr().err
    assert re.search(rf"^{parameters:,} parameters; training data: 60 examples, [\d,]+ tokens$", error, re.M)
    assert train() == 0 and "parameters;" not in capsys.readouterr().err  # finished already


def test_a_dry_run_estimates_and_leaves_nothing(empty_folder, monkeypatch, capsys):
    write_corpus(empty_folder)
    before = sorted(empty_folder.rglob("*"))
    monkeypatch.setattr(progress, "MEASURED", (0.0, 2))
    monkeypatch.setattr(api, "HOUR", 1e-9)
    assert train("mine.toml", "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["examples"] == 60 and found["steps"] == 6 and found["device"] == "cpu"
    assert found["seconds"] == pytest.approx(6 * found["seconds_per_step"])
    assert "--set train.steps=1" in found["advice"] and found["export"] is None
    assert train("mine.toml", "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{found['parameters']:,} parameters; training data: 60 examples, ")
    assert re.fullmatch(r"6 steps \(.* epochs\): about 0 s on this CPU, \S+ s per step", lines[1])
    assert sorted(empty_folder.rglob("*")) == before


def test_a_dry_run_of_a_missing_file_says_so(empty_folder, capsys):
    write_corpus(empty_folder)
    (empty_folder / "train.ko").unlink()
    assert train("mine.toml", "--dry-run") == 2
    assert "train.ko: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "name", "settings"),
    [
        ({"preset": "big"}, "small", {"preset": "small"}),
        ({"preset": "vit-base", "classes": 10}, "vit-small", {"preset": "vit-small"}),
        ({"preset": "gpt2"}, "base", {"dim": 512, "layers": 6, "heads": 8, "ff_dim": 2048}),  # none is smaller
        ({"preset": "big", "dim": 512}, "small", {"dim": 256, "layers": 4, "heads": 4, "ff_dim": 1024}),
    ],
)
def test_the_smaller_preset_fits_by_flops_and_is_reached_by_its_settings(table, name, settings):
    config, seq = preset(**{"name": table["preset"]} | {k: v for k, v in table.items() if k != "preset"}), 64

    def flops(config):
        found = cost(config, seq=None if config.input == "patches" else seq)
        return found.train + found.recomputed

    changed = from_dict(ModelConfig, with_preset({**table, **settings, "vocab_size": config.vocab_size}))
    needed = SLOWER * flops(changed) / flops(config)
    found = smaller(config, table, seq, 1000.0, 1000.0 * needed * 1.01)
    assert found is not None and (found.preset, found.settings) == (name, settings)
    assert found.seconds == pytest.approx(1000.0 * needed, rel=1e-6)
    below = smaller(config, table, seq, 1000.0, 1000.0 * needed * 0.99)
    assert below is None or below.seconds < found.seconds
    assert smaller(config, table, seq, 1000.0, 1e-9) is None


def test_advice_is_for_new_runs_on_a_cpu_that_take_more_than_an_hour():
    def advice(seconds, device="cpu", started=0, **table):
        fields = {"preset": "base", **table}
        task = SimpleNamespace(model_config=preset("base", **table), model_fields=fields)
        run = SimpleNamespace(task=task, config=SimpleNamespace(steps=20_000, pack=0))
        return api._advice(run, SimpleNamespace(device=SimpleNamespace(type=device), started=started), seconds)

    assert advice(3600.0) == advice(1e6, "cuda") == advice(1e6, started=5) == ""
    assert "--set model.preset=small (as preset 'small': about" in advice(4000.0)
    assert "or  --set train.steps=7200" in advice(10_000.0)
    assert "--set model.dim=256 --set model.layers=4" in advice(4000.0, layers=5)
    assert advice(1e9).endswith("To stay below:  --set train.steps=1")


# --- export


def test_a_model_that_cannot_be_exported_is_told_before_training(empty_folder, capsys):
    write_corpus(empty_folder)
    assert train("mine.toml", "--set", "model.position=rope") == 0
    error = capsys.readouterr().err
    note = next(line for line in error.splitlines() if "cannot be exported" in line)
    assert error.index("cannot be exported") < error.index("parameters;")
    config = api.load("runs/mine").config
    with pytest.raises(UserError) as refusal:
        family_of(config)
    differences = re.search(r"differs in (.*): train", str(refusal.value))[1]
    assert differences in note and "position = 'rope'" in differences
    assert main(["export", "runs/mine", "--hf", "out"]) == 2
    assert train("mine.toml", "-o", "runs/plain") == 0
    assert "cannot be exported" not in capsys.readouterr().err
    assert main(["export", "runs/plain", "--hf", "out"]) == 0
