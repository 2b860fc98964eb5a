"""`regard train RECIPE --smoke`: the small form of every recipe for texts learns, on sample data, within a minute.

"Learns" means that what it has never seen is told better than by someone who only knows what is frequent.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from regard.cli import main
from regard.errors import UserError
from regard.recipe import read_recipe, smoke
from regard.run import load_tokenizers
from regard.samples import HERE, sample_folder
from regard.train.task import task_of
from regard.train.texttotext import TextToTextRun
from smoke import ROOT, smoke_run

CLASSIFIED, MASKED, DENOISED = 0.12, 0.25, 0.6  # margins: share of right answers, nats a token


@pytest.mark.parametrize("name", ["nsmc", "naver-sentiment"])
def test_reviews(name, tmp_path):
    test = smoke_run(f"recipes/{name}.toml", tmp_path / "run")["test"]
    assert test["accuracy"] > test["majority"] + CLASSIFIED


@pytest.mark.parametrize("name", ["nsmc", pytest.param("naver", marks=pytest.mark.slow)])
def test_masked_reviews_and_a_classifier_that_starts_from_them(name, tmp_path):
    valid = smoke_run(f"recipes/{name}-masked.toml", tmp_path / "masked")["valid"]
    assert valid["loss"] < valid["unigram_loss"] - MASKED
    test = smoke_run(
        f"recipes/{name}-pretrained.toml", tmp_path / "run", "--set", f"train.init_from={tmp_path / 'masked'}"
    )["test"]
    assert test["accuracy"] > test["majority"] + CLASSIFIED


def test_text_to_text(tmp_path):
    scores = smoke_run("recipes/text-to-text.toml", tmp_path / "run")
    months = Counter(line.split("\t")[2] for line in (HERE / "dates" / "test.tsv").read_text().splitlines()[1:])
    most = max(months.values()) / months.total()
    assert scores["month.test"]["exact"] > most + 0.4
    assert scores["sentiment.test"]["exact"] > 0.5 + CLASSIFIED


def test_denoised_reviews(tmp_path):
    found = smoke_run("recipes/denoise.toml", tmp_path / "run")["reviews.valid"]
    run = TextToTextRun(read_recipe(tmp_path / "run"), tmp_path / "run", torch.device("cpu"))
    run.tokenizers = load_tokenizers(tmp_path / "run")
    run.model_config = run.settle_model()
    run.prepare_data()
    assert run.valid_pairs is not None
    size = len(run.target)
    counts = torch.ones(size).index_add(
        0, run.train_pairs.targets.joined().long(), torch.ones(int(run.train_pairs.targets.lengths.sum()))
    )
    wanted = run.valid_pairs.targets.joined().long()
    wanted = wanted[wanted != run.target.bos]
    unigram = -(counts / counts.sum()).log()[wanted].mean().item()
    assert found["tokens"] == len(wanted) and found["loss"] < unigram - DENOISED


# --- the option itself


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.toml")), ids=lambda path: path.stem)
def test_every_recipe_says_what_it_means_in_both_forms(path, tmp_path):
    """All settings are known; where a recipe has a small form, that too."""
    tables = read_recipe(path)
    forms = [smoke(tables, path)] if "smoke" in tables else []
    forms.append({name: table for name, table in tables.items() if name != "smoke"})
    for form in forms:
        if form["train"].pop("init_from", None):  # that run is not there, nor its tokenizer
            form.pop("text", None)
        task_of(form)(form, tmp_path / "run", torch.device("cpu"))


def test_the_small_form_changes_what_it_names(tmp_path, monkeypatch, capsys):
    tables = {"data": {"folder": "a", "train": ["x"]}, "train": {"steps": 9}, "smoke": {"train": {"steps": 2}}}
    assert smoke(tables, "r.toml") == {"data": {"folder": "a", "train": ["x"]}, "train": {"steps": 2}}
    assert tables["train"] == {"steps": 9}
    with pytest.raises(UserError, match="has no small form"):
        smoke({"train": {}}, "r.toml")
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('task = "classification"\n[data]\ntrain = ["a.tsv"]\n[train]\nsteps = 4\n')
    assert main(["train", "mine.toml", "--smoke"]) == 2
    assert "has no small form" in capsys.readouterr().err


def test_a_sample_is_a_folder_by_its_name(tmp_path):
    assert sample_folder("sample:nsmc") == HERE / "nsmc" and sample_folder("nsmc") is None
    with pytest.raises(UserError, match="did you mean 'nsmc'"):
        sample_folder("sample:nsmcc")
    for folder in (path for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert (folder / "README.md").is_file(), f"{folder.name}: where does it come from, and under which licence?"


def test_options_of_the_command_win_over_the_small_form(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [
        "--set",
        "train.steps=2",
        "--set",
        "text.kind=char",
        "--set",
        "text.vocab=none",
        "--set",
        "text.alpha=none",
    ]
    assert main(["train", str(ROOT / "recipes" / "nsmc.toml"), "--smoke", *options, "--device", "cpu", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == 2 and told["run"] == "runs/nsmc-smoke" and math.isfinite(told["scores"]["test"]["loss"])
