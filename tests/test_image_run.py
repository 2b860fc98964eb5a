"""Images: reading files, idx and folders; augmentation; a classifier from recipe to prediction; mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import regard
from commanded import training
from regard.cli import main
from regard.data.images import read_idx
from regard.settings import read_toml
from smoke import smoke_run
from squares import write_squares
from stopping import assert_same_weights, interrupt_at

SMALL = [
    f"--set={setting}"
    for setting in (
        "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "train.steps=6", "train.warmup=2",
        "train.log_every=2", "train.save_every=3", "train.batch_tokens=64",
    )
]  # fmt: skip


@pytest.fixture
def here(empty_folder: Path) -> Path:
    write_squares(empty_folder)
    return empty_folder


train = training(SMALL)


# --- runs


@pytest.mark.parametrize("recipe", ["idx.toml", "folders.toml"])
def test_a_run_is_complete_and_recognises(here: Path, capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    assert train(recipe, "--json", "--set=train.steps=40", "--set=train.lr=0.01") == 0
    out = capsys.readouterr()
    assert " images/s" in out.err and "tokens/s" not in out.err
    result, run = json.loads(out.out), here / "runs" / recipe.removesuffix(".toml")
    saved = read_toml(run / "recipe.toml")
    assert saved["train"]["pack"] == 17 and sorted(saved["data"]["classes"]) == ["bright", "dark"]
    assert saved["model"]["classes"] == 2 and result["scores"]["test"]["accuracy"] == 1.0
    assert "Confusion matrix" in (run / "report.html").read_text()
    assert main(["evaluate", str(run), "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == result["scores"]
    big = Image.open(here / "photos/test/bright/1.png").resize((30, 20))
    big.save("big.png")
    assert main(["classify", str(run), "photos/test/dark/0.png", "big.png", "--device", "cpu"]) == 0
    out = capsys.readouterr()
    header, *rows = out.out.splitlines()
    assert header.split("\t")[0] == "label" and [row.split("\t")[0] for row in rows] == ["dark", "bright"]
    assert "big.png: 30 x 20 pixels are resized to 8 x 8" in out.err
    assert main(["classify", str(run), "big.png", "--json", "--device", "cpu"]) == 0
    output = json.loads(capsys.readouterr().out)
    found = regard.load(run).predict(["big.png"])[0]
    assert output == {"image": "big.png", "label": found.label, "probabilities": found.probabilities}
    assert sum(found.probabilities.values()) == pytest.approx(1, abs=1e-5)
    assert main(["classify", str(run), "big.png", "none.png", "--device", "cpu"]) == 3
    out = capsys.readouterr()
    assert out.out.endswith("\n\t\t\tnone.png\n") and "none.png: no such file" in out.err
    assert main(["classify", str(run), ".", "--device", "cpu"]) == 2
    assert ".: is a folder; name a file in it" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "forms"), [
    ("idx", [["test-images", "test-labels"], ["moved/test"]]), ("folders", [["moved/test"]]),
])  # fmt: skip
def test_other_pictures_are_judged(here: Path, capsys: pytest.CaptureFixture[str], name: str, forms) -> None:
    """The test set elsewhere, and in the other form, has the same figures; the training data is not needed."""
    assert train(f"{name}.toml") == 0
    run = f"runs/{name}"
    expected = json.loads(Path(run, "scores.json").read_text())["test"]
    (here / "photos").rename(here / "moved")
    (here / "train-images").unlink()
    before = sorted(Path(run).rglob("*"))
    capsys.readouterr()
    for files in forms:
        assert main(["evaluate", run, "--files", *files, "--json", "--device", "cpu"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found.keys() == {"files"} and found["files"]["accuracy"] == expected["accuracy"]
        assert found["files"]["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    (here / "moved/test/green").mkdir()
    for options, message in (
        (["--files", "moved/test"], "'green' is not a class of the training data"),
        (["--files", "none"], "none: no such file; the folder contains"),
        (["--files", "moved/train/dark/0.png"], "or folders with one folder per class"),
        (["--files", "moved/train", "--test", "test"], "remove one of them"),
        (["--beam", "4"], "--beam 4: has no effect for a model of task image-classification"),
    ):
        assert main(["evaluate", run, *options, "--device", "cpu"]) == 2
        out, err = capsys.readouterr()
        assert message in err and out == ""
    assert sorted(Path(run).rglob("*")) == before


def test_pixels_are_scaled_by_the_training_set(here: Path) -> None:
    assert train("idx.toml") == 0
    model = read_toml("runs/idx/recipe.toml")["model"]
    pixels = read_idx(here / "train-images").double() / 255
    assert model["pixel_mean"] == [pytest.approx(pixels.mean().item(), abs=1e-3)]
    assert model["pixel_std"] == [pytest.approx(pixels.std().item(), abs=1e-3)]


@pytest.mark.parametrize("recipe", ["idx.toml", "folders.toml"])
def test_a_stopped_run_goes_on_as_if_it_had_not(here: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    options = ("--set=model.dropout=0.1", "--set=train.ema=0.9")
    assert train(recipe, *options, "-o", "whole") == 0
    interrupt_at(monkeypatch, 2)
    assert train(recipe, *options, "-o", "parts") == 130
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    assert_same_weights("whole", "parts")


@pytest.mark.parametrize(("changes", "message"), [
    (["data.train=['none', 'train-labels']"], "none: no such file"),
    (["data.train=['train-labels', 'train-images']"], "have 1 and 3 axes; the first must contain images"),
    (["data.train=['train-images', 'test-labels']"], "24 images, but .* has 8 labels"),
    (["data.train=['photos']"], "'dark' is no class|'test' is no class|is no class|dark"),
    (["data.classes=['only']"], r"train-labels, row 2: label 1, but data.classes names 1"),
    (["data.classes=['a', 'a']"], "names a twice"),
    (["model.architecture=decoder"], "needs architecture = 'encoder'|a decoder model reads tokens"),
    (["model.output_head=none"], "needs architecture = 'encoder'"),
    (["model.patch_size=3"], "patch_size = 3 does not divide"),
    (["augment.crop=8"], "augment.crop = 8: must be below"), (["augment.flip=2"], "augment.flip = 2"),
    (["augment.mixup=-1"], "augment.mixup = -1"), (["augment.erse=1"], "did you mean 'erase'"),
    (["train.pack=9"], r"train.pack = 9: the data decides this \(17\)"), (["train.r_drop=1.0"], "train.r_drop = 1.0"),
    (["train.batch_tokens=5"], "pack = 17: must be at most batch_tokens = 5"),
    (["train.cuda_graph=true"], "a CUDA graph needs an NVIDIA GPU"),
    (["train.cuda_graph=true", "model.position_axes=2", "model.position=learned"], "'rope', or set position_axes = 1"),
])  # fmt: skip
def test_a_mistake_is_told_and_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str], changes, message) -> None:
    import re

    assert train("idx.toml", *[f"--set={one}" for one in changes]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


def test_image_run_that_cannot_be_read_are_named_and_can_be_left_out(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "photos/train/dark/notes.txt").write_text("not a picture")
    Image.new("L", (1, 1)).save(here / "photos/train/bright/dot.png")
    Image.new("L", (9, 9)).save(here / "photos/train/dark/nine.png")
    assert train("folders.toml") == 2
    result = capsys.readouterr().err
    assert (
        "27 images: 2 problems, 25 good images" in result and "notes.txt" in result and "dot.png: has 1 x 1" in result
    )
    assert not (here / "runs").exists() or not any((here / "runs").iterdir())
    assert train("folders.toml", "--skip-bad-lines") == 0
    result = capsys.readouterr().err
    assert "left out: 2 bad lines of 27 images" in result and "note: 1 image of 9 x 9 resized to 8 x 8" in result
    Path("photos/test/green").mkdir()
    assert train("folders.toml", "-o", "other") == 2
    assert "'green' is not a class of the training data" in capsys.readouterr().err and not Path("other").exists()


def test_data_can_be_checked_before_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "folders.toml"]) == 0
    assert "all files of [data] can be read" in capsys.readouterr().out
    (here / "photos/test/dark/0.png").write_text("no picture")
    assert main(["data", "check", "folders.toml"]) == 2
    assert "0.png: cannot be read as an image" in capsys.readouterr().err
    Path("evil.toml").write_text((here / "idx.toml").read_text().replace("{ test =", '{ "../x" ='))
    assert train("evil.toml") == 2
    assert "test.../x: choose another name" in capsys.readouterr().err


# --- the recipe, in its small form


@pytest.mark.slow
def test_fashion_is_learned(tmp_path: Path) -> None:
    """On 1,000 pictures: five times as often right as by naming one class always."""
    scores = smoke_run("recipes/fashion-mnist-vit.toml", tmp_path / "run")["test"]
    assert scores["majority"] == pytest.approx(0.1) and scores["accuracy"] > 0.55


def test_the_recipe_keeps_to_a_million_parameters() -> None:
    from regard.cost import cost
    from regard.models.recipe import read_model

    root = Path(__file__).parent.parent
    assert sum(cost(read_model(root / "recipes/fashion-mnist-vit.toml")).parameters.values()) <= 1_000_000


@pytest.mark.cuda
def test_a_recorded_step_learns_what_a_plain_one_does(here: Path) -> None:
    """Augmentation is part of what a CUDA graph records; its draws come with each batch."""
    for graph in ("false", "true"):
        options = [f"--set=train.cuda_graph={graph}", "--set=train.steps=12", "-o", f"graph-{graph}"]
        assert main(["train", "idx.toml", *SMALL, *options, "--device", "cuda"]) == 0
    plain, recorded = (Path(f"graph-{graph}/metrics.jsonl").read_text().splitlines() for graph in ("false", "true"))
    for one, other in zip(plain, recorded, strict=True):
        assert json.loads(one)["loss"] == pytest.approx(json.loads(other)["loss"], rel=1e-3)
