"""Mistakes in recipes, settings and data: each is named before training, and nothing is left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from corpus import train, write_corpus
from regard.cli import main


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_corpus(tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trian.lr=1", "[trian]: unknown table; did you mean 'train'?"),
        ("train.stepz=1", "train.stepz: unknown setting; did you mean 'steps'?"),
        ("train.lr=fast", "train.lr = 'fast': expected a number"),
        ("train.schedule=cosin", "train.schedule = 'cosin': did you mean 'cosine'?"),
        ("model.dmi=8", "model.dmi: unknown setting; did you mean 'dim'?"),
        ("model.preset=tny", "model.preset = 'tny': unknown preset; did you mean 'tiny'?"),
        ("model.architecture=decoder", "model.architecture = 'decoder'"),
        ("model.vocab_size=7", "model.vocab_size = 7: the data decides this, and requires 300"),
        ("model.heads=3", "model."),
        ("text.kind=bpee", "text.kind = 'bpee': did you mean 'bpe'?"),
        ("text.vocab_size=99", "text.vocab_size = 99: too small"),
        ("text.joint=maybe", "text.joint = 'maybe': expected true or false"),
        ("data.trian=1", "data.trian: unknown setting; did you mean 'train'?"),
        ("data.train=1", "data.train = 1: expected a list"),
        ("data.folder=1", "data.folder = 1: expected a string"),
        ("decode.beem=1", "decode.beem: unknown setting; did you mean 'beam'?"),
        ("decode.beam=0", "decode.beam = 0"),
        ("train.batch_tokens=9", "train.batch_tokens = 9 is too small for a sequence of"),
        ("train.pack=9", "train.pack = 9 is too short for a sequence of"),
        ("data.max_length=2", "all 60 are longer than max_length = 2"),
        ("lr=1", "name its table"),
        ("train.lr", "write name=value"),
    ],
)
def test_a_wrong_setting_is_named_and_leaves_nothing(here, capsys, setting, message):
    assert train("mine.toml", "--set", setting) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/mine").exists()


def test_learned_positions_that_end_too_early(here, capsys):
    assert train("mine.toml", "--set=model.position=learned", "--set=model.max_length=9") == 2
    assert "model.max_length = 9" in capsys.readouterr().err and not Path("runs/mine").exists()


def test_packing_a_recurrent_model_is_refused(here, capsys):
    assert train("mine.toml", "--set=model.architecture=recurrent", "--set=train.pack=64") == 2
    assert "train.pack = 64: a recurrent model reads one sentence per row" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("[train]\nsteps = 2\n", "has no table [data]"),
        ("data = 3\n", "has no table [data]"),
        ("[data]\nvalid = ['a', 'b']\n", "data.train = []: no files"),
        ("train = 3\n[data]\ntrain = ['train.en', 'train.ko']\n", "train = 3: must be a table [train]"),
        ("[data]\ntrain = ['train.en', 'train.kr']\n", "did you mean 'train.ko'"),
        ("[data]\ntrain = ['train.en', 'train.ko']\ntest = { x = ['no.en', 'no.ko'] }\n", "no.en: no such file"),
        ("[data\n", "not readable as TOML"),
    ],
)
def test_a_wrong_recipe(here, capsys, recipe, message):
    Path("mine.toml").write_text(recipe)
    assert main(["train", "mine.toml"]) == 2
    assert message in capsys.readouterr().err and not Path("runs/mine").exists()


def test_a_preset_is_no_recipe(here, capsys):
    assert main(["train", "tiny"]) == 2
    assert "is a preset of a model, without data" in capsys.readouterr().err


def test_bad_lines_stop_training_before_it_begins(here, capsys):
    lines = Path("train.ko").read_text().splitlines()
    lines[4], lines[9] = "", "  "
    Path("train.ko").write_text("\n".join(lines) + "\n")
    assert train() == 2
    error = capsys.readouterr().err
    assert "train.ko:5" in error.replace(", line ", ":") and "train.ko:10" in error.replace(", line ", ":")
    assert not Path("runs/mine").exists()
    assert train("mine.toml", "--skip-bad-lines") == 0
    error = capsys.readouterr().err
    assert "left out: 2 bad lines" in error and error.count("train.ko") >= 3
    assert json.loads(Path("runs/mine/data/train/index.json").read_text())["rows"] == 58


def test_a_bad_line_of_a_test_set_shows_before_training_too(here, capsys):
    Path("valid.ko").write_text("\n".join(["", *Path("valid.ko").read_text().splitlines()[1:]]) + "\n")
    assert train() == 2
    assert "valid.ko" in capsys.readouterr().err and not Path("runs/mine").exists()


def test_an_empty_file(here, capsys):
    for name in ("train.en", "train.ko"):
        Path(name).write_text("")
    assert train() == 2
    assert "no sentence pairs" in capsys.readouterr().err and not Path("runs/mine").exists()


def test_long_pairs_are_left_out_and_counted(here, capsys):
    assert train("mine.toml", "--set=data.max_length=20", "--set=train.steps=2") == 0
    dropped = json.loads(Path("runs/mine/data/train/index.json").read_text())["dropped"]
    said = capsys.readouterr().err
    assert dropped and f"left out: {dropped} pairs longer than data.max_length = 20, the first in " in said
    file, line = re.findall(r"first in (.*), line (\d+)\n", said)[0]
    lengths = [len(line) for line in Path(file).read_text().splitlines()]
    assert lengths[int(line) - 1] > min(lengths)


def test_enough_evaluations_without_progress_are_told(here, capsys):
    lazy = ("train.lr=1e-12", "train.patience=1", "train.evaluate_every=1", "train.steps=9")
    assert train("mine.toml", *(f"--set={setting}" for setting in lazy)) == 0
    assert "stopped before step 9: train.patience = 1 evaluations brought no improvement" in capsys.readouterr().out


def test_a_folder_of_something_else_is_left_alone(here, capsys):
    Path("hf").mkdir()
    Path("hf/tokenizer.json").write_text("{}")
    assert train("mine.toml", "-o", "hf") == 2
    assert "holds tokenizer.json but no recipe.toml" in capsys.readouterr().err
    assert [path.name for path in Path("hf").iterdir()] == ["tokenizer.json"]


def test_a_device_that_is_not_there(here, capsys):
    assert main(["train", "mine.toml", "--device", "toaster"]) == 2
    assert "device = 'toaster' is not available" in capsys.readouterr().err


def test_a_warmup_longer_than_the_run_is_reported_before_it_starts(here, capsys):
    assert train("mine.toml", "--set=train.warmup=50", "--set=train.steps=2") == 0
    assert "warning: train.warmup = 50 >= train.steps = 2: the learning rate never" in capsys.readouterr().err
