"""`regard train RECIPE --smoke`: the small form of every recipe for texts learns, on sample data, within a minute.

"Learns" means that unseen examples are predicted better than by the frequencies of the training data.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from regard.cli import main
from regard.errors import UserError
from regard.metrics.bleu import score
from regard.models.folder import load_tokenizers
from regard.models.recipe import read_recipe, smoke_form
from regard.samples import HERE, sample_folder
from regard.tasks.registry import task_of
from regard.tasks.text_to_text import TextToText
from smoke import ROOT, results, smoke_run
from variants import slow

CLASSIFIED, MASKED, DENOISED = 0.12, 0.25, 0.6  # margins: fraction correct, nats per token
TRANSLATED, CHRF, FORESEEN = 0.5, 30, 0.25  # fraction correct, chrF, bits per character


TRANSLATIONS = [
    "multi30k-en-de",
    *slow("tatoeba-en-ko", "multi30k-en-de-best", "multi30k-en-de-fast", "multi30k-en-fr", "multi30k-raw-en-de"),
]  # fmt: skip
LANGUAGE = [
    "shakespeare-char",
    *slow(
        "shakespeare-16k",
        "shakespeare-char-best",
        "shakespeare-char-fast",
        "shakespeare-bpe",
        "gpt2-124m",
        "english-small",
    ),
]


@pytest.mark.parametrize("name", slow("nsmc", "naver-sentiment"))
def test_reviews(name, tmp_path):
    test = smoke_run(f"recipes/{name}.toml", tmp_path / "run")["test"]
    assert test["accuracy"] > test["majority"] + CLASSIFIED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nsmc", *slow("naver")])
def test_masked_reviews_and_a_classifier_that_starts_from_them(name, tmp_path):
    valid = smoke_run(f"recipes/{name}-masked.toml", tmp_path / "masked")["valid"]
    assert valid["loss"] < valid["unigram_loss"] - MASKED
    test = smoke_run(
        f"recipes/{name}-pretrained.toml", tmp_path / "run", "--set", f"train.init_from={tmp_path / 'masked'}"
    )["test"]
    assert test["accuracy"] > test["majority"] + CLASSIFIED


@pytest.mark.slow
def test_the_small_korean_model(tmp_path):
    valid = smoke_run("recipes/korean-small.toml", tmp_path / "run")["valid"]
    assert valid["loss"] < valid["unigram_loss"] - MASKED


@pytest.mark.slow
def test_text_to_text(tmp_path):
    scores = smoke_run("recipes/text-to-text.toml", tmp_path / "run")
    months = Counter(line.split("\t")[2] for line in (HERE / "dates" / "test.tsv").read_text().splitlines()[1:])
    most = max(months.values()) / months.total()
    assert scores["month.test"]["exact"] > most + 0.4
    assert scores["sentiment.test"]["exact"] > 0.5 + CLASSIFIED


@pytest.mark.slow
def test_denoised_reviews(tmp_path):
    found = smoke_run("recipes/denoise.toml", tmp_path / "run")["reviews.valid"]
    run = TextToText(read_recipe(tmp_path / "run"), tmp_path / "run", torch.device("cpu"))
    run.tokenizers = load_tokenizers(tmp_path / "run")
    run.model_config = run.settle_model()
    run.prepare_data()
    assert run.valid_pairs is not None
    size, train = len(run.target), run.train_pairs.at(0)
    counts = torch.ones(size).index_add(0, train.targets.joined().long(), torch.ones(int(train.targets.lengths.sum())))
    wanted = run.valid_pairs.targets.joined().long()
    wanted = wanted[wanted != run.target.bos]
    unigram = -(counts / counts.sum()).log()[wanted].mean().item()
    assert found["tokens"] == len(wanted) and found["loss"] < unigram - DENOISED


# --- translation


@pytest.fixture(scope="module")
def remembered():
    """The figures of a memory: it outputs with the Korean of the most similar English it was trained on."""

    def parts(text):
        return Counter(text[at : at + 3] for at in range(len(text) - 2))

    def alike(one, other):
        return (one & other).total() / (one.total() + other.total())

    def pairs(name):
        rows = [line.split("\t") for line in (HERE / "dates" / name).read_text(encoding="utf-8").splitlines()]
        return [(parts(row[rows[0].index("date")]), row[rows[0].index("korean")]) for row in rows[1:]]

    known, asked = pairs("train.tsv"), pairs("test.tsv")
    outputs = [max(known, key=lambda pair: alike(pair[0], date))[1] for date, _ in asked]
    return score(outputs, [korean for _, korean in asked])


@pytest.fixture(scope="module")
def trained(once):
    """Train a recipe's small form; recipes with the same small form share one run."""

    def train(name):
        path = ROOT / "recipes" / f"{name}.toml"
        form = hashlib.sha256(json.dumps(smoke_form(read_recipe(path), path), sort_keys=True).encode()).hexdigest()
        folder = once(f"smoke-{form[:16]}", lambda folder: smoke_run(f"recipes/{name}.toml", folder))
        return results(folder)

    return train


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_translated_dates(name, trained, remembered):
    test = trained(name)["test"]
    assert test["exact"] > remembered["exact"] + TRANSLATED  # a memory has none right: no date of the test was learned
    assert test["chrf"] > remembered["chrf"] + CHRF


# --- language models


@pytest.fixture(scope="module")
def bigram():
    """Bits a character of the held-out tenth, for someone who knows how often which character follows which."""
    with gzip.open(HERE / "shakespeare" / "input.txt.gz", "rt", encoding="utf-8", newline="") as file:
        text = file.read()
    border = int(len(text) * 0.9)
    learned, held_out = text[:border], text[border:]
    pairs, firsts, size = Counter(pairwise(learned)), Counter(learned[:-1]), len(set(text))
    follow = list(pairwise(held_out))
    return -sum(math.log2((pairs[one, two] + 1) / (firsts[one] + size)) for one, two in follow) / len(follow)


@pytest.mark.parametrize("name", LANGUAGE)
def test_shakespeare(name, tmp_path, bigram):
    """Bits a character can be compared, whatever the tokens are."""
    valid = smoke_run(f"recipes/{name}.toml", tmp_path / "run")["valid"]
    assert valid["unknown"] == 0 and valid["bits_per_character"] < bigram - FORESEEN


# --- the option itself


@pytest.mark.parametrize("path", sorted(ROOT.glob("recipes/*.toml")), ids=lambda path: path.stem)
def test_every_recipe_says_what_it_means_in_both_forms(path, tmp_path):
    """All settings are known, those of the small form too, which none may lack."""
    tables = read_recipe(path)
    small, whole = smoke_form(tables, path), {name: table for name, table in tables.items() if name != "smoke"}
    for form in (small, whole):
        if form["train"].pop("init_from", None):  # that run is not there, nor its tokenizer
            form.pop("text", None)
        task_of(form)(form, tmp_path / "run", torch.device("cpu"))


def test_the_small_form_changes_what_it_names(tmp_path, monkeypatch, capsys):
    tables = {"data": {"folder": "a", "train": ["x"]}, "train": {"steps": 9}, "smoke": {"train": {"steps": 2}}}
    assert smoke_form(tables, "r.toml") == {"data": {"folder": "a", "train": ["x"]}, "train": {"steps": 2}}
    assert tables["train"] == {"steps": 9}
    with pytest.raises(UserError, match="has no tables for --smoke"):
        smoke_form({"train": {}}, "r.toml")
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('task = "text-classification"\n[data]\ntrain = ["a.tsv"]\n[train]\nsteps = 4\n')
    assert main(["train", "mine.toml", "--smoke"]) == 2
    assert "has no tables for --smoke" in capsys.readouterr().err


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
        "text.vocab_size=none",
    ]
    assert main(["train", str(ROOT / "recipes" / "nsmc.toml"), "--smoke", *options, "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["steps"] == 2 and result["run"] == "runs/nsmc-smoke" and math.isfinite(result["scores"]["test"]["loss"])
    )
