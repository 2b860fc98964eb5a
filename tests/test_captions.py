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

from regard.cli import main
from regard.data.captions import CaptionData, ScenesData, read_captions
from regard.data.captionsets import SceneStream, Targets, scene_sets
from regard.data.features import open_features
from regard.data.pictures import read_idx
from regard.data.scenes import COUNTS, NOUNS, PLACES, Group, SceneMaker, coverage, describe, places_of
from regard.decode.caption import Captioner
from regard.errors import UserError
from regard.explore.captions import noun_attention
from regard.models import ModelConfig, build
from regard.text.tokenizer import Tokenizer
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


def maker(part: str = "train", **options: object) -> SceneMaker:
    pixels, labels = (read_idx(SAMPLE / f"{part}-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
    return SceneMaker(pixels, labels, 48, **options)  # type: ignore[arg-type]


# --- the grammar


def test_captions_say_what_the_material_says() -> None:
    sneaker, coats = Group("sneaker", 1, "normal"), Group("coat", 2, "normal")
    for language, caption in (("en", "a sneaker left of two coats"), ("ko", "코트 두 벌 왼쪽에 운동화 하나")):
        assert describe(sneaker, coats, False, language).text == caption
    # the group with fewer items is named first in English, last in Korean
    assert describe(coats, sneaker, False, "en").text == "a sneaker right of two coats"
    assert describe(coats, sneaker, True, "en").text == "a sneaker below two coats"
    assert describe(sneaker, coats, True, "ko").text == "코트 두 벌 위에 운동화 하나"
    # of equal ones, the left or upper one
    both = Group("bag", 2, "small"), Group("trousers", 2, "large")
    assert describe(*both, True, "en").text == "two small bags above two large pairs of trousers"
    assert describe(*both, True, "ko").text == "큰 바지 두 벌 위에 작은 가방 둘"


@pytest.mark.parametrize("language", ["en", "ko"])
def test_every_scene_has_one_caption_and_no_two_kinds_of_scene_share_one(language: str) -> None:
    captions = maker().all_captions(language)
    count = len(NOUNS) * (len(NOUNS) - 1) * len(COUNTS) * 9 * 2
    assert sum(map(bool, captions)) == len(set(filter(None, captions))) == count
    scenes = maker().draw(300, False, 5)
    phrases = maker().phrases(scenes, language)
    assert [captions[number] for number in maker().numbers(scenes)] == [phrase.text for phrase in phrases]
    for phrase in phrases:
        (before, noun, group), (_, other, partner) = phrase.nouns()
        assert phrase.text.startswith(f"{before} {noun}".strip()) and {group, partner} == {0, 1}
        words = {word for one in NOUNS.values() for word in (one.one, one.several, one.korean)}
        assert {noun, other} <= {word.split()[-1] for word in words}


# --- scenes


def test_scenes_follow_from_their_seed() -> None:
    one, again, other = (maker().draw(50, False, 1, seed) for seed in (2, 2, 3))
    for name in vars(one):
        assert torch.equal(getattr(one, name), getattr(again, name))
    assert not torch.equal(one.item, other.item)


def test_items_stand_in_their_quarter_without_overlap() -> None:
    scenes = maker().draw(400, False, 1)
    assert scenes.count.sum(dim=1).min() == 2 and scenes.count.sum(dim=1).max() == 4
    used = scenes.item >= 0
    assert torch.equal(used.sum(dim=1), scenes.count.sum(dim=1)) and (scenes.noun[:, 0] != scenes.noun[:, 1]).all()
    place = places_of(scenes.vertical, scenes.lane).gather(1, scenes.group)  # [N, 4]
    top, left, side = scenes.box.unbind(dim=2)
    for start, half in ((top, place // 2), (left, place % 2)):
        assert (start >= 24 * half)[used].all() and (start + side <= 24 * half + 24)[used].all()
    # the first group is to the left of the second, or above it
    both = places_of(scenes.vertical, scenes.lane)
    step = torch.where(scenes.vertical, 2, 1)
    assert torch.equal(both[:, 1] - both[:, 0], step)
    inside = torch.zeros(400, 48, 48, dtype=torch.int)
    for row, boxes in enumerate(scenes.box.tolist()):
        for y, x, s in boxes:
            inside[row, y : y + s, x : x + s] += 1
    painted = maker().paint(scenes)
    assert inside.max() == 1 and not painted[:, 0][inside == 0].any()
    assert painted.flatten(1).any(dim=1).all() and painted.dtype == torch.uint8


def test_an_item_is_painted_as_it_is() -> None:
    """Of a canvas whose large size is 28 pixels, the item itself."""
    pixels, labels = read_idx(SAMPLE / "train-images-idx3-ubyte.gz"), read_idx(SAMPLE / "train-labels-idx1-ubyte.gz")
    own = SceneMaker(pixels, labels, 116, sizes=["large"])  # 0.242 · 116 = 28
    scenes = own.draw(20, False, 1)
    painted = own.paint(scenes)[:, 0]
    for row in range(20):
        for item, (top, left, side) in zip(scenes.item[row].tolist(), scenes.box[row].tolist(), strict=True):
            if item >= 0:
                assert side == 28 and torch.equal(painted[row, top : top + 28, left : left + 28], pixels[item])
                assert int(labels[item]) in [NOUNS[own.nouns[noun]].label for noun in scenes.noun[row].tolist()]


def test_pairs_that_are_kept_out_are_in_no_training_scene_and_in_every_held_out_one() -> None:
    own = maker()
    config = ScenesData(valid=40, test=40)
    sets = scene_sets(config, own, maker("t10k"))

    def pairs(scenes) -> list[set[str]]:
        return [
            {f"{own.nouns[noun]} {PLACES[place]}" for noun, place in zip(nouns, places, strict=True)}
            for nouns, places in zip(
                scenes.noun.tolist(), places_of(scenes.vertical, scenes.lane).tolist(), strict=True
            )
        ]

    kept_out = set(config.held_out)
    seen = pairs(own.draw(2000, False, 1, 1))
    assert not any(one & kept_out for one in seen)
    assert set().union(*seen) == {f"{noun} {place}" for noun in own.nouns for place in PLACES} - kept_out
    assert all(one & kept_out for one in pairs(sets["held-out"].scenes))
    assert not any(one & kept_out for name in ("valid", "test") for one in pairs(sets[name].scenes))


def test_a_stream_goes_on_from_any_point() -> None:
    own = maker(sizes=["normal"], nouns=["bag", "boot"], held_out=[])
    captions = own.all_captions("en")
    tokenizer = Tokenizer.train(filter(None, captions), "word")
    targets = Targets.of(tokenizer, captions, 20)
    stream = SceneStream(own, targets, rows=4, count=12, seed=3)
    walk = iter(stream)
    for _ in range(4):
        next(walk)
    position = stream.position
    after = next(walk)
    again = SceneStream(own, targets, rows=4, count=12, seed=3)
    again.seek(position)
    other = next(iter(again))
    assert torch.equal(after.source, other.source) and torch.equal(after.target, other.target)
    for row in range(4):
        ids = [id for id in after.expected[row].tolist() if id >= 0]
        assert ids[-1] == tokenizer.eos and tokenizer.decode(ids) in captions
        assert after.target[row, : len(ids)].tolist() == [tokenizer.bos, *ids[:-1]]


# --- where nouns look


def test_coverage_counts_pixels() -> None:
    scenes = maker().draw(30, False, 1)
    for group in (0, 1):
        covered = torch.zeros(30, 48, 48)
        for row in range(30):
            for item, own, (top, left, side) in zip(
                scenes.item[row].tolist(), scenes.group[row].tolist(), scenes.box[row].tolist(), strict=True
            ):
                if item >= 0 and own == group:
                    covered[row, top : top + side, left : left + side] = 1
        expected = torch.nn.functional.avg_pool2d(covered[:, None], 8).flatten(1)
        torch.testing.assert_close(coverage(scenes, group, 48, 6), expected)


def test_attention_spread_evenly_gives_chance() -> None:
    own = maker()
    data = scene_sets(ScenesData(valid=20, test=5), own, own)["valid"]
    tokenizer = Tokenizer.train(filter(None, own.all_captions("en")), "word")
    small = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 16, "image_size": 48, "patch_size": 8, "channels": 1}
    model = build(ModelConfig(**small, source="patches", vocab=len(tokenizer))).eval()
    with torch.no_grad():
        model.decoder.blocks[0].cross.q.weight.zero_()
        model.decoder.blocks[0].cross.q.bias.zero_()
    found = noun_attention(Captioner(model, tokenizer), data)
    assert found["inside"] == pytest.approx(found["inside_chance"], rel=1e-4)
    assert found["inside_best"] == pytest.approx(found["inside_chance"], rel=1e-4)


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
        ("none.npy", None, None, "there is no such file"), ("x.pt", None, None, "ending in .npy or .safetensors"),
        ("objects.npy", None, None, "objects, a pickle"), ("text.npy", None, None, "cannot be read as features"),
        ("flat.npy", None, None, r"has shape \(7,\); give \[regions, size\]"),
        ("many.npy", None, None, "holds 2 pictures; say which"), ("many.npy", 2, None, "holds 2 pictures"),
        ("words.npy", None, None, "not numbers"), ("nan.npy", None, None, "region 1, number 0 is nan"),
        ("two.safetensors", None, None, "holds 2 tensors"), ("two.safetensors", "c", None, "has no tensor 'c'"),
        ("text.safetensors", None, None, "damaged or incomplete"),
        ("many.npy", 0, 2048, "each region has 7 numbers, but the model reads feature_dim = 2,048"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            open_features(tmp_path / name, key, size)


def test_rows_are_named_by_file_and_line(tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    rows = [
        {"picture": "a.png", "caption": " a   picture "}, {"picture": "none.png", "caption": "x"}, {"caption": "x"},
        {"picture": "a.png", "caption": " "}, {"picture": "a.png", "caption": "x", "key": 1.5},
    ]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\nnot json\n")
    config = CaptionData(train=("t.jsonl",), folder=str(tmp_path))
    with pytest.raises(UserError) as caught:
        read_captions(config.train, config, "patches")
    told = str(caught.value)
    for message in ("line 2: .*none.png: there is no such file", "line 3: write", "line 4: \"caption\" is empty",
                    "line 5: \"key\" is 1.5", "line 6: is not JSON", "5 problems, 1 good rows"):  # fmt: skip
        assert re.search(message, told)
    config = CaptionData(train=("t.jsonl",), folder=str(tmp_path), skip_bad=True)
    assert [row.caption for row in read_captions(config.train, config, "patches")] == ["a picture"]


# --- runs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    lines: dict[str, list[str]] = {"pictures": [], "features": []}
    for number in range(12):
        bright = number % 2
        caption = ("a dark square", "밝은 네모 하나")[bright]
        picture = chance.integers(0, 60, (12, 12)) + 150 * bright
        Image.fromarray(picture.astype(np.uint8)).save(f"{number}.png")
        np.save(f"{number}.npy", chance.normal(size=(3 + number % 3, 6)) + 3 * bright)
        lines["pictures"].append(json.dumps({"picture": f"{number}.png", "caption": caption}))
        lines["features"].append(json.dumps({"features": f"{number}.npy", "caption": caption}))
    for name, some in lines.items():
        Path(f"{name}.jsonl").write_text("\n".join(some) + "\n")
        data = f'[data]\ntrain = ["{name}.jsonl"]\nvalid = ["{name}.jsonl"]\n'
        model = (
            "[model]\nimage_size = 12\npatch_size = 4\nchannels = 1\n"
            if name == "pictures"
            else '[model]\nsource = "features"\n'
        )
        Path(f"{name}.toml").write_text(f'task = "captioning"\n{data}{model}')
    scenes = (
        '[data.scenes]\nnouns = ["bag", "boot", "coat"]\ntrain = 24\nvalid = 6\ntest = 6\nheld_out = ["bag top left"]\n'
    )
    model = "[model]\nimage_size = 24\npatch_size = 8\nchannels = 1\nposition_axes = 2\n"
    Path("scenes.toml").write_text(f'task = "captioning"\n[data]\nfolder = "sample:fashion-mnist"\n{scenes}{model}')
    return tmp_path


def train(recipe: str, *options: str) -> int:
    return main(["train", recipe, *SMALL, *options, "--device", "cpu"])


@pytest.mark.parametrize("name", ["pictures", "features"])
def test_files_with_captions_are_learned(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    learn = ("--set=train.steps=60", "--set=train.lr=0.01", "--set=train.metric=exact")
    assert train(f"{name}.toml", *learn, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["scores"]["valid"]["exact"] == 1.0 and "inside" not in told["scores"]["valid"]
    run, ending = f"runs/{name}", {"pictures": "png", "features": "npy"}[name]
    files = [f"{number}.{ending}" for number in (0, 1, 2)]
    assert main(["caption", run, *files, "--beam", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == ["a dark square", "밝은 네모 하나", "a dark square"]
    assert main(["caption", run, files[1], "--beam", "3", "--n-best", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["caption"] == "밝은 네모 하나" and len(answer["n_best"]) == 2 and answer["file"] == files[1]
    assert main(["evaluate", run, "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out) == told["scores"]


def test_a_run_of_scenes_is_complete(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("scenes.toml", "--set=data.scenes.language=ko") == 0
    out = capsys.readouterr().out
    scores = json.loads(Path("runs/scenes/scores.json").read_text())
    assert list(scores) == ["valid", "test", "held-out"] and "exact" in out
    assert all(0 < one["inside_chance"] < 0.5 and 0 < one["inside"] < 1 for one in scores.values())
    report = Path("runs/scenes/report.html").read_text()
    assert "never occurs in training" in report and "가방" in report and "Orange: where it looked" in report
    assert main(["caption", "runs/scenes", "runs/scenes/data/examples/0.png"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    Image.new("RGB", (50, 40)).save("wide.png")
    assert main(["caption", "runs/scenes", "wide.png"]) == 0
    assert "wide.png: 50 x 40 pixels are resized to 24 x 24" in capsys.readouterr().err
    rows = [json.loads(line) for line in Path("runs/scenes/data/examples/captions.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all((Path("runs/scenes/data/examples") / row["picture"]).is_file() for row in rows)


@pytest.mark.parametrize("recipe", ["scenes.toml", "pictures.toml", "features.toml"])
def test_a_stopped_run_goes_on_as_if_it_had_not(here: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    assert train(recipe, "-o", "whole") == 0
    interrupt_at(monkeypatch, 2)
    assert train(recipe, "-o", "parts") == 130
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    assert_same_weights("whole", "parts")


@pytest.mark.parametrize(("recipe", "changes", "message"), [
    ("scenes", ["data.scenes.held_out=['hat left']"], "'hat left' is no pair of noun and place"),
    ("scenes", ["data.scenes.nouns=['bag']"], r"nouns = \['bag'\]: give 2 or more"),
    ("scenes", ["data.scenes.nouns=['bag', 'hat']"], "'hat' is not known"),
    ("scenes", ["data.scenes.language=fr"], "language = 'fr'"),
    ("scenes", ["model.channels=3"], "scenes are grey pictures"),
    ("scenes", ["data.train=['x.jsonl']"], "and not both"),
    ("scenes", ["train.pack=3"], "train.pack = 3"), ("scenes", ["data.max_length=3"], "more than data.max_length = 3"),
    ("pictures", ["model.shape=encoder"], "captions need shape = 'encoder-decoder'|there are no tokens"),
    ("pictures", ["model.source=tokens"], "captions need shape"),
    ("pictures", ["data.train=['none.jsonl']"], "no such file"),
    ("pictures", ["model.position=learned", "model.max_length=9", "text.kind=char"], "model.max_length = 9"),
    ("features", ["model.feature_dim=2048"], "each region has 6 numbers, but the model reads feature_dim = 2,048"),
    ("features", ["train.graph=true"], "graph = true records one step"),
    ("features", ["data.train=['pictures.jsonl']"], r'line 1: write  {"features"'),
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
    for arguments, message in (
        (["runs/pictures", "none.png"], "none.png: there is no such file"),
        (["runs/pictures", "0.png", "text.png"], "text.png: cannot be read as a picture"),
        (["runs/features", "wide.npy"], "each region has 9 numbers"),
        (["runs/features", "0.png"], "0.png: features stand in a file ending in .npy"),
        (["runs/pictures", "0.png", "--beam", "0"], "beam = 0"),
    ):
        assert main(["caption", *arguments]) == 2
        out = capsys.readouterr()
        assert message in out.err and out.out == ""
    assert main(["translate", "runs/pictures", "hello"]) == 2
    assert "regard caption" in capsys.readouterr().err


# --- the recipe, in its small form


def test_scenes_are_learned(tmp_path: Path) -> None:
    """Of 72 captions each is right once in 72 tries by chance; the small model finds most of them."""
    scores = smoke_run("recipes/fashion-scenes.toml", tmp_path / "run")["test"]
    assert scores["exact"] > 0.5 and scores["inside"] > 1.5 * scores["inside_chance"]


@pytest.mark.cuda
def test_scenes_composed_on_a_gpu_are_those_of_a_cpu(here: Path) -> None:
    own = maker()
    scenes = own.draw(20, False, 1)
    painted = own.paint(scenes)
    assert torch.equal(own.to(torch.device("cuda")).paint(scenes).cpu(), painted)
    for graph in ("false", "true"):
        options = [f"--set=train.graph={graph}", "--set=train.steps=12", "-o", f"graph-{graph}"]
        assert main(["train", "scenes.toml", *SMALL, *options, "--device", "cuda"]) == 0
    plain, recorded = (Path(f"graph-{graph}/metrics.jsonl").read_text().splitlines() for graph in ("false", "true"))
    for one, other in zip(plain, recorded, strict=True):
        for name in {"loss", "valid_loss"} & json.loads(one).keys():
            assert json.loads(one)[name] == pytest.approx(json.loads(other)[name], rel=1e-3)
