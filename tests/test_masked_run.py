"""`regard train` with task = "masked-language-modeling", and classifiers that start from such a run."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import main
from regard.data.columns import Store
from regard.models.folder import load_tokenizers, read_weights
from regard.settings import read_toml
from regard.training.history import read_metrics
from stopping import assert_same_weights, interrupt_at

TEXT = "text\tlabel\n" + "".join(
    f"{n} green bottles hanging on the wall, 초록 병 {n}개.\t{'even' if n % 2 == 0 else 'odd'}\n" for n in range(80)
)
MASKED = """task = "masked-language-modeling"
[data]
train = ["a.tsv"]
valid_fraction = 0.2
[train]
steps = 6
pack = 32
"""
CLASSES = """task = "text-classification"
[data]
train = ["a.tsv"]
valid_fraction = 0.2
[train]
steps = 6
init_from = "masked"
"""
FAST = ["train.batch_tokens=192", "train.warmup=2", "train.lr=0.01", "train.log_every=2", "train.save_every=4"]
SMALL = [
    "text.kind=char", "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "model.position=rope",
    "model.norm_order=pre",
]  # fmt: skip


@pytest.fixture
def here(empty_folder: Path) -> Path:
    (empty_folder / "a.tsv").write_text(TEXT)
    (empty_folder / "masked.toml").write_text(MASKED)
    (empty_folder / "classes.toml").write_text(CLASSES)
    return empty_folder


def train(recipe: str, *arguments: str, settings: list[str] = SMALL) -> int:
    given = [f"--set={setting}" for setting in (*FAST, *settings)]
    return main(["train", f"{recipe}.toml", *given, *arguments, "--device", "cpu"])


@pytest.fixture
def masked(here) -> Path:
    assert train("masked", "-o", "masked") == 0
    return here / "masked"


def test_a_few_lines_make_a_complete_run(masked, capsys):
    recipe, tokenizer = read_toml(masked / "recipe.toml"), load_tokenizers(masked)["tokenizer"]
    assert tokenizer.mask is not None and recipe["model"]["vocab_size"] == len(tokenizer)
    assert recipe["mask"] == {"fraction": 0.15, "whole_words": False, "mask": 0.8, "random": 0.1}
    train_text, valid_text = (Store.open(masked / "data" / name) for name in ("train", "valid"))
    words = [line.split("\t")[0] for line in TEXT.splitlines()[1:]]
    count = sum(int(one.columns["text"].lengths.sum()) for one in (train_text, valid_text))
    assert count >= len("".join(words)) + 2 * 80  # every character, and the frames of 80 documents or their parts
    scores = json.loads((masked / "scores.json").read_text())["valid"]
    evaluations = [line for line in read_metrics(masked) if "accuracy" in line]
    assert min(line["valid_loss"] for line in evaluations) == pytest.approx(scores["loss"])
    report = (masked / "report.html").read_text()
    assert "Predictions" in report and "most probable tokens" in report and "▢" in report
    capsys.readouterr()
    assert main(["evaluate", str(masked), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] == pytest.approx(scores)


def test_it_learns_more_than_frequencies(here):
    settings = [*SMALL, "train.steps=200", "train.batch_tokens=512", "model.dropout=0", "model.embed_dropout=0"]
    assert train("masked", settings=settings) == 0
    scores = json.loads(Path("runs/masked/scores.json").read_text())["valid"]
    assert scores["loss"] < scores["unigram_loss"] - 1.0


@pytest.mark.parametrize(
    "settings", [[], ["mask.whole_words=true", "train.gradient_accumulation=2"]], ids=["tokens", "words"]
)
def test_interrupted_and_resumed_is_the_uninterrupted_run(here, monkeypatch, settings):
    assert train("masked", "-o", "whole", settings=SMALL + settings) == 0
    interrupt_at(monkeypatch, 2)
    assert train("masked", "-o", "parts", settings=SMALL + settings) == 130
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    assert_same_weights("whole", "parts")


def test_fill(masked, capsys):
    capsys.readouterr()
    assert main(["fill", str(masked), "<mask>0 green bottles", "--top", "3", "--device", "cpu"]) == 0
    head, *rows = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert head == ["text", "mask", "rank", "token", "probability"] and [row[2] for row in rows] == ["1", "2", "3"]
    assert main(["fill", str(masked), "a <mask> b <mask>", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["masks"]) == 2 and len(found["masks"][0]) == 5
    assert main(["fill", str(masked), "no gap", "--device", "cpu"]) == 2
    assert "write <mask>" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_fill_predicts_the_texts_beside_a_mistake(masked, capsys, monkeypatch, options):
    from regard.commands import inputs

    monkeypatch.setattr(inputs, "PIECE", 64)
    capsys.readouterr()
    good = ["<mask> green bottles"] * 20
    for lines, said in (
        ([*good, "no gap"], "'no gap': has no mask"),
        (["no gap", *good], "'no gap': has no mask"),
        ([*good, "<mask>" * 40], "shorten it"),
    ):
        for given in (lines, []):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
            assert main(["fill", str(masked), "--top", "1", *given, *options, "--device", "cpu"]) == 3
            out, err = capsys.readouterr()
            assert len(out.splitlines()) == 21 + (not options) and said in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(good).encode())))
    assert main(["fill", str(masked), "--top", "1", *options, "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 20 + (not options)


# --- classifiers that start from it


def test_a_classifier_begins_with_the_encoder_and_the_tokenizer(masked, capsys):
    assert train("classes", "-o", "run", "--set=train.lr=1e-30", settings=["model.dropout=0.3"]) == 0
    assert "tensors; initialized randomly: classifier.weight and classifier.bias" in capsys.readouterr().err
    before, after = read_weights(masked / "model.safetensors"), read_weights(Path("run/model.safetensors"))
    taken = [name for name in after if name.startswith(("embedding.", "encoder."))]
    assert taken and all(torch.equal(before[name], after[name]) for name in taken)  # the rate is too small to move them
    assert (masked / "tokenizer.json").read_text() == Path("run/tokenizer.json").read_text()
    theirs, ours = (read_toml(run / "recipe.toml")["model"] for run in (masked, Path("run")))
    assert ours["dropout"] == 0.3 and ours["output_head"] == "classes" and ours["classes"] == 2
    assert all(
        ours[name] == theirs[name] for name in ("dim", "layers", "heads", "position", "norm_order", "vocab_size")
    )


def test_what_was_inherited_is_not_needed_again(masked):
    assert train("classes", "-o", "whole", settings=[]) == 0
    assert train("classes", "-o", "half", "--set=train.steps=3", settings=[]) == 0
    shutil.rmtree(masked)
    recipe = read_toml("half/recipe.toml")
    assert main(["resume", "half", "--device", "cpu"]) == 0
    assert read_toml("half/recipe.toml") == recipe
    regard.load("half")


def test_a_resumed_run_that_inherited_is_the_uninterrupted_one(masked, monkeypatch):
    assert train("classes", "-o", "whole", settings=[]) == 0
    interrupt_at(monkeypatch, 3)
    assert train("classes", "-o", "parts", settings=[]) == 130
    shutil.rmtree(masked)
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    assert_same_weights("whole", "parts")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.dim=32"], "has dim = 16; remove dim"),
        (["model.position=learned"], "has position = 'rope'; remove position"),
        (["model.preset=tiny"], "remove preset"),
        (["text.kind=bpe"], "the tokenizer comes from train.init_from"),
        (["train.init_from=nowhere"], "there is no such folder; train that run first"),
        (["train.init_from=language"], "architecture = 'decoder'"),
        (["train.init_from=unfinished"], "let that run finish first"),
        (["train.init_from=foreign"], "needs tokenizer.json there"),
    ],
)
def test_what_does_not_fit_is_told_and_leaves_nothing(masked, capsys, settings, said):
    shape = {"dim": 8, "heads": 2, "layers": 1, "ff_dim": 8, "vocab_size": 8}
    regard.save(regard.build(regard.ModelConfig(architecture="decoder", **shape)), "language")
    regard.save(regard.build(regard.ModelConfig(architecture="encoder", output_head="none", **shape)), "foreign")
    shutil.copytree(masked, "unfinished", ignore=shutil.ignore_patterns("model.safetensors"))
    assert train("classes", "-o", "run", settings=settings) == 2
    assert said in capsys.readouterr().err and not Path("run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.r_drop=1.0"], "train.r_drop"),
        (["mask.fraction=2.0"], "mask.fraction"),
        (["train.pack=3"], "must be 4 or more"),
        (["model.architecture=decoder"], "needs architecture = 'encoder'"),
        (["data.column=nope"], "column 'nope' is missing"),
        (["train.metric=bleu"], "is not a metric of masked-language-modeling"),
        (
            ["model.position=sinusoidal", "model.mixer=linformer", "model.max_length=31"],
            "train.pack = 32: mixer = 'linformer' has parameters for model.max_length = 31 tokens",
        ),
        (["model.position=none", "model.mixer=fourier", "train.cuda_graph=true"], "mixer = 'fourier' computes"),
        (["model.position=learned", "model.mixer=linformer", "train.cuda_graph=true"], "mixer = 'linformer' computes"),
        (
            ["model.window=4", "model.global_tokens=1", "model.global_projections=true", "train.cuda_graph=true"],
            "train.cuda_graph = true: global_projections = true computes",
        ),
    ],
)
def test_a_mistake_is_told_and_leaves_nothing(here, capsys, settings, said):
    assert train("masked", settings=SMALL + settings) == 2
    assert said in capsys.readouterr().err and not Path("runs").exists()


def test_a_classifier_of_longer_texts_has_other_masks(masked, capsys):
    mixed = ['--set=model.mixer="bigbird(4), window(3)"', "--set=model.global_tokens=1", "--set=model.block_size=4"]
    assert train("classes", *mixed, "-o", "sparse", settings=[]) == 0
    assert read_toml("sparse/recipe.toml")["model"]["mixer"] == "bigbird(4), window(3)"
    assert "initialized from" in capsys.readouterr().err
    again = ["--set=train.init_from=sparse", "-o", "again"]
    assert train("classes", "--set=model.mixer=full", *again, settings=[]) == 0
    assert regard.load("again").config.all_full
    assert train("classes", "--set=model.mixer=linear", "-o", "linear", settings=[]) == 2
    assert "model.mixer = 'linear': train.init_from = " in capsys.readouterr().err


@pytest.mark.parametrize("mixer", ["fourier", "linformer"])
def test_mixers_of_whole_texts_are_trained_on_packed_ones(here, mixer):
    settings = [*SMALL, "model.position=learned", f'model.mixer="{mixer}"', "train.steps=40"]
    assert train("masked", "-o", "run", settings=settings) == 0
    losses = [line["valid_loss"] for line in read_metrics(here / "run") if "valid_loss" in line]
    assert losses[-1] < losses[0] - 0.3


def test_any_file_may_be_called_a_table(here):
    assert train("masked", "-o", "plain") == 0
    shutil.copy("a.tsv", "a.txt")
    assert train("masked", "-o", "named", '--set=data.train=["a.txt"]', "--set=data.table=tsv") == 0
    first, second = (read_weights(Path(run) / "model.safetensors") for run in ("plain", "named"))
    assert all(torch.equal(first[name], second[name]) for name in first)
