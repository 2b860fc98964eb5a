"""Captions: scenes and their grammar, where nouns look, features and pictures from files, runs, mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from commanded import training
from regard.cli import main
from regard.data.captions import CaptionData, open_features, read_captions
from regard.errors import UserError
from smoke import smoke_run
from stopping import assert_same_weights, interrupt_at

SAMPLE = Path(__file__).parent.parent / "src/regard/samples/fashion-mnist"
SMALL = [
    f"--set={setting}"
    for setting in (
        "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "train.steps=6", "train.warmup=2",
        "train.log_every=2", "train.save_every=3", "train.batch_tokens=72",
    )
]  # fmt: skip


# --- features and pictures from files


def test_features_in_all_their_forms(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    np.save(tmp_path / "one.npy", numbers)
    np.save(tmp_path / "many.npy", np.stack((numbers, numbers + 1)).astype(np.float16))
    save_file({"a": torch.from_numpy(numbers)}, tmp_path / "one.safetensors")
    save_file({"a": torch.from_numpy(numbers), "b": torch.from_numpy(numbers) * 2}, tmp_path / "many.safetensors")
    assert torch.equal(open_features(tmp_path / "one.npy", size=7), torch.from_numpy(numbers))
    torch.testing.assert_close(
        open_features(tmp_path / "many.npy", 1), torch.from_numpy(numbers + 1), atol=1e-2, rtol=0
    )
    assert torch.equal(open_features(tmp_path / "one.safetensors"), torch.from_numpy(numbers))
    assert torch.equal(open_features(tmp_path / "many.safetensors", "b"), 2 * torch.from_numpy(numbers))


def test_what_are_no_features(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{"run": "code"}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "flat.npy", np.zeros(7))
    np.save(tmp_path / "many.npy", np.zeros((2, 5, 7)))
    np.save(tmp_path / "words.npy", np.array([["a"]]))
    np.save(tmp_path / "nan.npy", np.array([[0.0, 1.0], [np.nan, 0.0]]))
    save_file({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}, tmp_path / "two.safetensors")
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    for name, key, size, message in (
        ("none.npy", None, None, "no such file"), ("x.pt", None, None, "ending in .npy or .safetensors"),
        ("objects.npy", None, None, "objects, a pickle"), ("text.npy", None, None, "cannot be read as features"),
        ("flat.npy", None, None, r"has shape \(7,\); give \[regions, size\]"),
        ("many.npy", None, None, r"contains 2 images; choose one \(0 to 1\) .* caption --key 0"),
        ("many.npy", 2, None, "contains 2 images"),
        ("words.npy", None, None, "not numbers"), ("nan.npy", None, None, "region 1, number 0 is nan"),
        ("two.safetensors", None, None, "contains 2 tensors; .*caption --key a"),
        ("two.safetensors", "c", None, "has no tensor 'c'"),
        ("text.safetensors", None, None, "cannot be read as features"),
        ("many.npy", 0, 2048, "each region has 7 numbers, but the model reads feature_dim = 2,048"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            open_features(tmp_path / name, key, size)


def test_rows_are_named_by_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    rows = [
        {"image": "a.png", "caption": " a   picture "}, {"image": "none.png", "caption": "x"}, {"caption": "x"},
        {"image": "a.png", "caption": " "}, {"image": "a.png", "caption": "x", "key": 1.5},
    ]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\nnot json\n")
    config = CaptionData(train=("t.jsonl",), folder=str(tmp_path))
    with pytest.raises(UserError) as caught:
        read_captions(config.train, config, "patches")
    result = str(caught.value)
    for message in ("line 2: .*none.png: no such file", "line 3: column 'image' is missing",
                    "line 4: column 'caption' is empty",
                    "line 5: column 'key' is 1.5", "line 6: is not JSON", "5 problems, 1 good caption"):  # fmt: skip
        assert re.search(message, result)
    config = CaptionData(train=("t.jsonl",), folder=str(tmp_path), skip_bad=True)
    assert [row.caption for row in read_captions(config.train, config, "patches")[0]] == ["a picture"]
    said = capsys.readouterr().err
    assert "left out: 5 bad lines of t.jsonl" in said and "line 4: column 'caption' is empty" in said


def test_features_are_named_by_file_and_line_too(tmp_path: Path) -> None:
    for name, features in (("a", np.ones((2, 5))), ("wide", np.ones((2, 6))), ("nan", np.full((2, 5), np.nan))):
        np.save(tmp_path / f"{name}.npy", features)
    lines = [json.dumps({"features": f"{name}.npy", "caption": name}) for name in ("a", "wide", "nan")]
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    config = CaptionData(train=("t.jsonl",), folder=str(tmp_path))
    with pytest.raises(UserError) as caught:
        read_captions(config.train, config, "features")
    result = str(caught.value)
    assert re.search("line 2: .*wide.npy: each region has 6 numbers", result) and re.search("line 3: .*is nan", result)
    config = CaptionData(train=("t.jsonl",), folder=str(tmp_path), skip_bad=True)
    rows, width = read_captions(config.train, config, "features")
    assert [row.caption for row in rows] == ["a"] and width == 5


# --- runs


@pytest.fixture
def here(empty_folder: Path) -> Path:
    chance = np.random.default_rng(0)
    lines: dict[str, list[str]] = {"pictures": [], "features": []}
    for number in range(12):
        bright = number % 2
        caption = ("a dark square", "밝은 네모 하나")[bright]
        picture = chance.integers(0, 60, (12, 12)) + 150 * bright
        Image.fromarray(picture.astype(np.uint8)).save(f"{number}.png")
        np.save(f"{number}.npy", chance.normal(size=(3 + number % 3, 6)) + 3 * bright)
        lines["pictures"].append(json.dumps({"image": f"{number}.png", "caption": caption}))
        lines["features"].append(json.dumps({"features": f"{number}.npy", "caption": caption}))
    for name, some in lines.items():
        Path(f"{name}.jsonl").write_text("\n".join(some) + "\n")
        data = f'[data]\ntrain = ["{name}.jsonl"]\nvalid = ["{name}.jsonl"]\n'
        model = (
            "[model]\nimage_size = 12\npatch_size = 4\nchannels = 1\n"
            if name == "pictures"
            else '[model]\ninput = "features"\n'
        )
        Path(f"{name}.toml").write_text(f'task = "image-captioning"\n{data}{model}')
    scenes = (
        '[data.scenes]\nnouns = ["bag", "boot", "coat"]\ntrain = 24\nvalid = 6\ntest = 6\nheld_out = ["bag top left"]\n'
    )
    model = "[model]\nimage_size = 24\npatch_size = 8\nchannels = 1\nposition_axes = 2\n"
    Path("scenes.toml").write_text(
        f'task = "image-captioning"\n[data]\nfolder = "sample:fashion-mnist"\n{scenes}{model}'
    )
    return empty_folder


train = training(SMALL)


@pytest.mark.parametrize("name", ["pictures", "features"])
def test_files_with_captions_are_learned(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    learn = ("--set=train.steps=60", "--set=train.lr=0.01", "--set=train.metric=exact")
    assert train(f"{name}.toml", *learn, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["scores"]["valid"]["exact"] == 1.0 and "inside" not in result["scores"]["valid"]
    run, ending = f"runs/{name}", {"pictures": "png", "features": "npy"}[name]
    files = [f"{number}.{ending}" for number in (0, 1, 2)]
    assert main(["caption", run, *files, "--beam", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == ["a dark square", "밝은 네모 하나", "a dark square"]
    assert main(["caption", run, files[1], "--beam", "3", "--n-best", "2", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["caption"] == "밝은 네모 하나" and len(output["n_best"]) == 2 and output["file"] == files[1]
    assert main(["evaluate", run, "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == result["scores"]
    order = ["evaluate", run, "--device", "cpu", "--json", "--files"]
    assert main([*order, f"{name}.jsonl"]) == 0  # the same rows, given by hand
    assert json.loads(capsys.readouterr().out) == {"files": result["scores"]["valid"]}
    rows = [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()[:4]]
    Path("half.jsonl").write_text("".join(json.dumps({**row, "caption": "a dark square"}) + "\n" for row in rows))
    assert main([*order, "half.jsonl"]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["exact"] == 0.5
    other = {"pictures": "features", "features": "pictures"}[name]
    for file, message in (
        (f"{other}.jsonl", "line 1: column '"),
        (files[0], "captions are in tables ending in"),
    ):
        assert main([*order, file]) == 2
        out, err = capsys.readouterr()
        assert message in err and out == ""


def test_a_run_of_scenes_is_complete(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("scenes.toml", "--set=data.scenes.language=ko") == 0
    out = capsys.readouterr().out
    scores = json.loads(Path("runs/scenes/scores.json").read_text())
    assert list(scores) == ["valid", "test", "held-out"] and "exact" in out
    assert all(0 < one["inside_chance"] < 0.5 and 0 < one["inside"] < 1 for one in scores.values())
    report = Path("runs/scenes/report.html").read_text()
    assert "가방" in report and "Orange: attention" in report
    assert main(["caption", "runs/scenes", "runs/scenes/data/examples/0.png"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    Image.new("RGB", (50, 40)).save("wide.png")
    assert main(["caption", "runs/scenes", "wide.png"]) == 0
    assert "wide.png: 50 x 40 pixels are resized to 24 x 24" in capsys.readouterr().err
    rows = [json.loads(line) for line in Path("runs/scenes/data/examples/captions.jsonl").read_text().splitlines()]
    examples = "runs/scenes/data/examples/captions.jsonl"
    assert main(["evaluate", "runs/scenes", "--files", examples, "--device", "cpu"]) == 0
    assert "6 images" in capsys.readouterr().out
    assert len(rows) == 6 and all((Path("runs/scenes/data/examples") / row["image"]).is_file() for row in rows)


@pytest.mark.parametrize("recipe", ["scenes.toml", "pictures.toml", "features.toml"])
def test_a_stopped_run_goes_on_as_if_it_had_not(here: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    assert train(recipe, "-o", "whole") == 0
    interrupt_at(monkeypatch, 2)
    assert train(recipe, "-o", "parts") == 130
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    assert_same_weights("whole", "parts")


@pytest.mark.parametrize(("recipe", "changes", "message"), [
    ("scenes", ["data.scenes.held_out=['hat left']"], "'hat left' is not a noun and a position"),
    ("scenes", ["data.scenes.common=1", "data.scenes.held_out=['bag top left', 'bag top right', 'bag bottom left']"],
     "no scene is left; hold out fewer pairs, or set common = 0"),
    ("scenes", ["data.scenes.common=-1"], "common = -1: must be 0 or more"),
    ("scenes", ["data.scenes.common=99"], "99: with .* never reach the other scenes; lower it"),
    ("scenes", ["data.scenes.held_out=['sandal 2 3']"], "none of its nouns is in nouns"),
    ("scenes", ["data.scenes.nouns=['bag']"], r"nouns = \['bag'\]: give 2 or more"),
    ("scenes", ["data.scenes.nouns=['bag', 'hat']"], "'hat' is not known"),
    ("scenes", ["data.scenes.language=fr"], "language = 'fr'"),
    ("scenes", ["data.word_dropout=1.0"], "word_dropout = 1.0: must be at least 0"),
    ("scenes", ["model.channels=3"], "scenes are grayscale images"),
    ("scenes", ["data.train=['x.jsonl']"], "train and scenes: choose one"),
    ("scenes", ["train.pack=3"], "train.pack = 3"), ("scenes", ["data.max_length=3"], "more than data.max_length = 3"),
    ("pictures", ["model.architecture=encoder"], "image-captioning needs architecture|there are no tokens"),
    ("pictures", ["model.input=tokens"], "image-captioning needs architecture"),
    ("pictures", ["data.train=['none.jsonl']"], "no such file"),
    ("pictures", ["model.position=learned", "model.max_length=9", "text.kind=char"], "model.max_length = 9"),
    ("features", ["model.feature_dim=2048"], "each region has 6 numbers, but the model reads feature_dim = 2,048"),
    ("features", ["train.cuda_graph=true"], "cuda_graph = true records one step"),
    ("features", ["data.train=['pictures.jsonl']"], "column 'features' is missing; .* set  model.input = .patch"),
    ("pictures", ["data.train=['features.jsonl']"], "column 'image' is missing; .* set  model.input = .features"),
])  # fmt: skip
def test_a_mistake_is_told_and_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str], recipe, changes, message):
    assert train(f"{recipe}.toml", *[f"--set={one}" for one in changes]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


def test_what_caption_refuses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("pictures.toml") == 0 and train("features.toml") == 0
    capsys.readouterr()
    np.save("wide.npy", np.zeros((3, 9)))
    Path("text.png").write_text("no picture")
    both = [np.load(f"{number}.npy")[:3] for number in (0, 1)]
    np.save("many.npy", np.stack(both))
    save_file({str(at): torch.from_numpy(one) for at, one in enumerate(both)}, "many.safetensors")
    for arguments, message in (
        (["runs/pictures", "none.png"], "none.png: no such file"),
        (["runs/pictures", "text.png"], "text.png: cannot be read as an image"),
        (["runs/features", "wide.npy"], "each region has 9 numbers"),
        (["runs/features", "0.png"], "0.png: features are in files ending in .npy"),
        (["runs/pictures", "0.png", "--beam", "0"], "beam = 0"),
        (["runs/pictures", "0.png", "--key", "a"], "key = a: is for files of features"),
        (["runs/features", "many.npy"], "choose one (0 to 1)"),
        (["runs/features", "many.npy", "--key", "2"], "(0 to 1)"),
        (["runs/features", "many.npy", "--key", "a"], "(0 to 1)"),
        (["runs/features", "0.npy", "--key", "0"], "remove it"),
        (["runs/features", "many.safetensors"], "regard caption --key 0"),
        (["runs/features", "many.safetensors", "--key", "7"], "has no tensor '7'"),
    ):
        assert main(["caption", *arguments]) == 2
        out = capsys.readouterr()
        assert message in out.err and out.out == ""
    np.save("one.npy", both[1])
    for arguments in (["one.npy"], ["many.npy", "many.safetensors", "--key", "1"]):
        assert main(["caption", "runs/features", *arguments, "--n-best", "1", "--json"]) == 0
    alone, *picked = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [(one["caption"], one["score"]) for one in picked] == [(alone["caption"], pytest.approx(alone["score"]))] * 2
    assert main(["translate", "runs/pictures", "hello"]) == 2
    assert "regard caption" in capsys.readouterr().err


# --- the recipe, in its small form


@pytest.mark.slow
def test_scenes_are_learned(tmp_path: Path) -> None:
    """Of 72 captions each is right once in 72 tries by chance; the small model finds most of them."""
    scores = smoke_run("recipes/fashion-scenes.toml", tmp_path / "run")
    for one in (scores["test"], scores["held-out"]):
        assert one["exact"] > 0.5 and one["inside"] > 1.5 * one["inside_chance"]


@pytest.mark.cuda
def test_a_recorded_step_learns_what_a_plain_one_does(here: Path) -> None:
    for graph in ("false", "true"):
        options = [f"--set=train.cuda_graph={graph}", "--set=train.steps=12", "-o", f"graph-{graph}"]
        assert main(["train", "scenes.toml", *SMALL, *options, "--device", "cuda"]) == 0
    plain, recorded = (Path(f"graph-{graph}/metrics.jsonl").read_text().splitlines() for graph in ("false", "true"))
    for one, other in zip(plain, recorded, strict=True):
        for name in {"loss", "valid_loss"} & json.loads(one).keys():
            assert json.loads(one)[name] == pytest.approx(json.loads(other)[name], rel=1e-3)
