"""`regard train` with task = "text-to-text": several tasks by prefix, and text with holes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from commanded import training
from regard.cli import main
from regard.data.mixture import SENTINELS
from regard.models.folder import load_tokenizers, read_weights
from regard.settings import read_toml
from regard.tasks.text_to_text import TextToText
from regard.training.trainer import Trainer

WORDS = {"one": "하나", "two": "둘", "three": "셋", "four": "넷"}
RECIPE = """task = "text-to-text"
[data]
max_length = 64
[data.tasks.korean]
prefix = "korean: "
weight = 4
train = ["numbers.tsv"]
valid = ["numbers.tsv"]
test = { test = ["numbers.tsv"] }
[data.tasks.size]
kind = "labels"
prefix = "size: "
train = ["sizes.tsv"]
valid_fraction = 0.25
test = { all = ["sizes.tsv"] }
names = { "0" = "small", "1" = "large" }
weight = 2
[data.tasks.holes]
kind = "denoise"
train = ["sizes.tsv"]
valid_fraction = 0.25
test = { more = ["sizes.tsv"] }
[train]
steps = 6
"""
SMALL = [
    f"--set={setting}"
    for setting in (
        "text.kind=word", "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "model.position=rope",
        "model.norm_order=pre", "train.batch_tokens=256", "train.warmup=2", "train.lr=0.01", "train.log_every=2",
        "train.save_every=4",
    )
]  # fmt: skip


@pytest.fixture
def here(empty_folder: Path) -> Path:
    names = list(WORDS)
    pairs = [(a, b) for a in names for b in names]
    (empty_folder / "numbers.tsv").write_text("".join(f"{a} {b}\t{WORDS[a]} {WORDS[b]}\n" for a, b in pairs))
    rows = [f"{a} {b} and {c}\t{int(names.index(c) >= 2)}\n" for a, b in pairs for c in names if a != c]
    (empty_folder / "sizes.tsv").write_text("text\tlabel\n" + "".join(rows))
    (empty_folder / "other.tsv").write_text("text\tlabel\none two\t7\n")
    (empty_folder / "mine.toml").write_text(RECIPE)
    return empty_folder


train = training(SMALL, "mine.toml")


def test_all_tasks_in_one_run(here, capsys):
    assert train("--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert scores.keys() == {"korean.valid", "korean.test", "size.valid", "size.all", "holes.valid", "holes.more"}
    assert "exact" in scores["size.valid"] and "exact" not in scores["holes.valid"]
    assert scores["size.valid"]["lines"] == 12  # a quarter of 48
    recipe, tokenizer = read_toml("runs/mine/recipe.toml"), load_tokenizers("runs/mine")["tokenizer"]
    assert set(recipe["data"]["tasks"]) == {"korean", "size", "holes"}
    assert all(tokenizer.token_to_id(name) is not None for name in SENTINELS)
    report = Path("runs/mine/report.html").read_text()
    assert "Metrics" in report and "Outputs on korean.test" in report
    assert main(["evaluate", "runs/mine", "--test", "holes.valid", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["holes.valid"] == pytest.approx(scores["holes.valid"])


@pytest.mark.slow
def test_the_prefix_decides(here):
    """The same text, two prefixes, two correct outputs."""
    settings = ["train.steps=300", "train.schedule=cosine", "train.label_smoothing=0", "model.dim=32"]
    settings += ["model.dropout=0", "model.embed_dropout=0"]
    assert train(*(f"--set={setting}" for setting in settings)) == 0
    scores = json.loads(Path("runs/mine/scores.json").read_text())
    assert scores["korean.test"]["exact"] > 0.9 and scores["size.all"]["exact"] > 0.8
    holes = scores["holes.valid"]
    assert holes["loss"] < 1.8  # of words, sentinels and ends there are a dozen


@pytest.mark.parametrize("pack", [0, 32])
def test_interrupted_and_resumed_is_the_uninterrupted_run(here, monkeypatch, pack):
    """Twenty steps go through more than one epoch, and the holes of the second are other ones."""
    settings = [f"--set=train.pack={pack}", "--set=train.steps=20"]
    assert train(*settings, "-o", "whole") == 0
    real, sent = Trainer._update, []

    def update(self, batches):
        if self.step == 13 and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)
        return real(self, batches)

    monkeypatch.setattr(Trainer, "_update", update)
    assert train(*settings, "-o", "parts") == 130
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    first, second = (read_weights(Path(run) / "model.safetensors") for run in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_denoising_is_a_run_that_others_start_from(here, capsys):
    start, end = RECIPE.index("[data.tasks.korean]"), RECIPE.index("[data.tasks.holes]")
    Path("mine.toml").write_text(RECIPE[:start] + RECIPE[end:])
    assert train("-o", "holes") == 0
    Path("mine.toml").write_text(RECIPE[:end] + '[train]\nsteps = 4\ninit_from = "holes"\n')
    capsys.readouterr()
    assert main(["train", "mine.toml", "-o", "fine", "--set=train.batch_tokens=256", "--device", "cpu"]) == 0
    assert "initialized from" in capsys.readouterr().err
    assert Path("holes/tokenizer.json").read_text() == Path("fine/tokenizer.json").read_text()
    assert main(["translate", "fine", "korean: one two", "--device", "cpu"]) == 0
    preset = ["--set=model.preset=tiny", "--set=text.kind=word"]  # what the other run has may be said again
    same = [one for one in SMALL if not one.startswith("--set=text")]
    assert main(["train", "mine.toml", "-o", "again", *preset, *same, "--device", "cpu"]) == 0
    capsys.readouterr()
    assert main(["train", "mine.toml", "-o", "other", *preset, "--device", "cpu"]) == 2
    assert re.search("model.preset = 'tiny', dim = .*: train.init_from = .* has dim = 16", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[data.tasks.korean]", "[data.tasks]", "data.tasks: no task"),
        ('kind = "labels"', 'kind = "label"', "data.tasks.size.kind"),
        ("weight = 2", "weight = 0", "data.tasks.size.weight = 0"),
        ("weight = 2", "fraction = 0.5", "not for a task of kind = 'labels'"),
        ("weight = 2", "density = 0.5", "not for a task of kind = 'labels'"),
        ("weight = 2", "nope = 1", "data.tasks.size.nope: unknown setting"),
        ('kind = "denoise"', 'kind = "denoise"\ndensity = 1.5', "data.tasks.holes.density"),
        ('train = ["numbers.tsv"]', 'train = ["gone.tsv"]', "no such file"),
        ("max_length = 64", "max_length = 4", "data.max_length = 4"),
        ('test = { all = ["sizes.tsv"] }', 'test = { all = ["other.tsv"] }', "label '7' is not a class"),
        ("[train]", "[text]\njoint = false\n[train]", "share one tokenizer"),
        ("[train]\nsteps = 6", "[train]\nsteps = 6\nmetric = 'accuracy'", "is not a metric of text-to-text"),
    ],
)
def test_a_mistake_is_told_and_leaves_nothing(here, capsys, old, new, said):
    assert old in RECIPE
    Path("mine.toml").write_text(RECIPE.replace(old, new, 1))
    assert train() == 2
    assert said in capsys.readouterr().err and not Path("runs").exists()


def test_bleu_is_told_of_sentences_and_not_of_single_words() -> None:
    figures = {"loss": 1.0, "perplexity": 2.7, "exact": 0.5, "bleu": 0.0, "chrf": 50.0, "lines": 10, "tokens": 20}
    figures |= {"signature": "nrefs:1"}
    assert "BLEU" not in " ".join(TextToText.format_metrics({**figures, "reference_tokens": 15}))
    assert "BLEU" in " ".join(TextToText.format_metrics({**figures, "reference_tokens": 80}))
