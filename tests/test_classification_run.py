"""`regard train` with task = "text-classification": training, resuming, evaluation, predictions."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import regard
from commanded import training
from regard.cli import main
from regard.data.batch import PairBatch
from regard.models.recipe import override, read_recipe
from regard.settings import read_toml
from regard.tasks.text_classification import TextClassification
from regard.training.history import read_metrics
from regard.training.run import Run
from stopping import assert_same_weights, interrupt_at

GOOD, BAD = ("최고", "재밌다", "감동", "great"), ("최악", "지루", "별로", "awful")
NEUTRAL = ("영화", "배우", "그냥", "film", "이야기", "봤다")
RECIPE = """task = "text-classification"
[data]
train = ["train.tsv"]
valid = ["valid.tsv"]
test = { test = ["test.tsv"] }
[train]
steps = 6
"""
SMALL = [
    f"--set={setting}"
    for setting in (
        "text.vocab_size=300", "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32",
        "model.position=rope",
        "model.norm_order=pre", "train.batch_tokens=256", "train.warmup=2", "train.lr=0.01", "train.log_every=2",
        "train.save_every=4",
    )
]  # fmt: skip


def table(count: int, seed: int, share: float = 0.5) -> str:
    """Reviews whose class one word gives away; `share` of them are good."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        good = draw.random() < share
        words = [*draw.choices(NEUTRAL, k=draw.randint(1, 5)), draw.choice(GOOD if good else BAD)]
        draw.shuffle(words)
        rows.append(f"{' '.join(words)}\t{'good' if good else 'bad'}\n")
    return "text\tlabel\n" + "".join(rows)


@pytest.fixture
def here(empty_folder: Path) -> Path:
    for seed, (name, count) in enumerate((("train", 120), ("valid", 40), ("test", 40))):
        (empty_folder / f"{name}.tsv").write_text(table(count, seed))
    (empty_folder / "mine.toml").write_text(RECIPE)
    return empty_folder


train = training(SMALL, "mine.toml")


def tables(*settings: str) -> dict:
    given = [setting.removeprefix("--set=") for setting in (*SMALL, *settings)]
    return override(read_recipe("mine.toml"), given)


def test_a_few_lines_make_a_complete_run(here, capsys):
    assert train("--json") == 0
    result = json.loads(capsys.readouterr().out)
    run = here / "runs" / "mine"
    recipe = read_toml(run / "recipe.toml")
    assert recipe["task"] == "text-classification" and recipe["data"]["classes"] == ["bad", "good"]
    assert recipe["model"]["classes"] == 2 and recipe["model"]["pooling"] == "mean"
    # the figures are those of the weights that are kept
    classifier = regard.load(run).predictor
    rows = list(TextClassification(tables(), run, torch.device("cpu")).data.read(("test.tsv",)))
    given = [one.label for one in classifier.predict([one.text for one in rows])]
    right = sum(label == one.label for label, one in zip(given, rows, strict=True))
    assert result["scores"]["test"]["accuracy"] == pytest.approx(right / len(rows))
    evaluations = [line for line in read_metrics(run) if "accuracy" in line]
    best = min(evaluations, key=lambda line: line["valid_loss"])
    assert best["accuracy"] == pytest.approx(result["scores"]["valid"]["accuracy"])
    report = (run / "report.html").read_text()
    for part in ("Confusion matrix on test", "Reliability", "calibration error", "Errors", "macro-F1", "nats per text"):
        assert part in report


@pytest.mark.parametrize("settings", [[], ["--set=train.pack=32"], ["--set=model.pooling=cls"]], ids=str)
def test_it_learns(here, settings):
    """Words that give the class away: far better than the most frequent class, on texts never seen."""
    assert train("--set=train.steps=80", "--set=train.metric=accuracy", "--set=train.evaluate_every=20", *settings) == 0
    scores = json.loads(Path("runs/mine/scores.json").read_text())
    assert scores["test"]["accuracy"] > scores["test"]["majority"] + 0.3


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["--set=train.pack=32", "--set=train.r_drop=1.0", "--set=data.word_dropout=0.2"],
        ["--set=data.fraction=0.5"],
    ],
    ids=["padded", "packed", "fraction"],
)
def test_interrupted_and_resumed_is_the_uninterrupted_run(here, monkeypatch, settings):
    assert train(*settings, "-o", "whole") == 0
    interrupt_at(monkeypatch, 2)
    assert train(*settings, "-o", "parts") == 130
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    assert_same_weights("whole", "parts")


def test_class_weights_are_those_of_the_formula(here):
    Path("train.tsv").write_text(table(100, 7, share=0.1))
    run = TextClassification(tables("data.class_weights=balanced"), here / "run", torch.device("cpu"))
    Run(run).prepare()
    counts = run.train_texts.labels.bincount()
    weight = run.class_weight()
    assert weight is not None and torch.allclose(weight, 100 / (2 * counts))
    model = regard.build(run.model_config).eval()
    batch = run.train_texts.batch(torch.arange(30))
    logits, right = model(batch.text, batch.is_real), batch.labels[:, 0]
    loss, count = run.objective()(model, batch)
    torch.testing.assert_close(loss, F.cross_entropy(logits, right, weight=100 / (2 * counts), reduction="sum"))
    assert int(count) == 30
    given = TextClassification(tables("data.class_weights={good = 3}"), here / "other", torch.device("cpu"))
    Run(given).prepare()
    weight = given.class_weight()
    assert weight is not None and weight[1] / weight[0] == pytest.approx(3.0)
    assert float((weight * counts).sum()) == pytest.approx(100)


def test_validation_is_held_out_whatever_the_seed_and_a_fraction_is_drawn_by_it(here):
    Path("mine.toml").write_text(RECIPE.replace('valid = ["valid.tsv"]', "valid_fraction = 0.25\nfraction = 0.5"))
    found = []
    for seed in (1, 2):
        run = TextClassification(tables(f"train.seed={seed}"), here / f"run{seed}", torch.device("cpu"))
        Run(run).prepare()
        assert run.valid_texts is not None
        found.append(run)
        for label in (0, 1):
            whole = (run.train_texts.labels == label).sum() / 0.5 + (run.valid_texts.labels == label).sum()
            rows = run.data.read(run.data.train)
            assert abs(int(whole) - sum(one.label == run.data.classes[label] for one in rows)) < 3
        held = [run.tokenizer.encode(one.text) for one in run.examples("valid")]
        stored = run.valid_texts.texts
        assert [row[1:-1].tolist() for row in stored.joined().split(stored.lengths.tolist())] == held
    assert [one.text for one in found[0].examples("valid")] == [one.text for one in found[1].examples("valid")]
    first, second = (run.train_texts.texts.joined().tolist() for run in found)
    assert first != second


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_other_forms_of_the_same_data_give_the_same_model(here, form):
    assert train("-o", "plain") == 0
    for name in ("train", "valid", "test"):
        rows = [line.split("\t") for line in Path(f"{name}.tsv").read_text().splitlines()]
        lines = [",".join(row) for row in rows]
        if form == "jsonl":
            lines = [json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows[1:]]
        Path(f"{name}.{form}").write_text("\n".join(lines) + "\n")
    Path("mine.toml").write_text(RECIPE.replace(".tsv", f".{form}"))
    assert train("-o", "other") == 0
    assert_same_weights("plain", "other")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("valid.tsv", "bad", "awful"), "valid.tsv, line"),
        (("train.tsv", "label", "lable"), "did you mean 'lable'"),
        (("mine.toml", "[train]", "[tarin]"), "unknown table"),
        (("mine.toml", "steps = 6", "steps = 6\nmetric = 'bleu'"), "is not a metric of text-classification"),
        (("mine.toml", "[train]", "class_weights = { nope = 2 }\n[train]"), "'nope' is not a class"),
        (("mine.toml", "[train]", "[model]\narchitecture = 'decoder'\noutput_head = 'tokens'\n[train]"),
        "needs architecture = 'encoder'"),
        (("mine.toml", "[train]", "[model]\nclasses = 5\n[train]"), "requires 2"),
        (("mine.toml", "[train]", "[model]\nposition = 'learned'\nmax_length = 8\n[train]"), "learned positions"),
        (("mine.toml", "train.tsv", "gone.tsv"), "Name the folder of the data with  --data DIR.\n"),
        (("mine.toml", "steps = 6", "steps = 6\nloss_chunk = 8"), "remove it"),
        (("mine.toml", "[data]", "[data]\nword_dropout = 1.0"), "word_dropout = 1.0"),
        (("mine.toml", "[data]", '[data]\nclasses = ["bad", "good", "fair"]'), "has no text of 'fair'"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_and_leaves_nothing(here, capsys, change, said):
    name, old, new = change
    content = Path(name).read_text()
    assert old in content
    Path(name).write_text(content.replace(old, new, 1))
    settings = [one for one in SMALL if "position" not in one or "learned" not in new]
    assert main(["train", "mine.toml", *settings, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err and not Path("runs").exists()


def test_missing_data_is_told_with_what_to_do(here, capsys):
    assert train() == 0
    err = capsys.readouterr().err
    assert " texts/s" in err and "tokens/s" not in err
    recipe = Path("mine.toml")
    recipe.write_text(recipe.read_text().replace("train.tsv", "gone.tsv") + "\n[smoke.data]\ntrain = ['train.tsv']\n")
    for options, data, smoke in (([], True, True), (["--data", "."], False, False)):
        assert train("-o", "other", *options) == 2
        err = capsys.readouterr().err
        assert "gone.tsv: no such file" in err and ("--data DIR" in err, "--smoke" in err) == (data, smoke)
    assert main(["data", "check", "mine.toml"]) == 2 and "--data DIR" in capsys.readouterr().err


# --- predictions


@pytest.fixture
def run(here) -> str:
    assert train("--set=train.steps=40") == 0
    return "runs/mine"


def read_rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


def test_classify_gives_a_table_of_probabilities(run, capsys):
    capsys.readouterr()
    assert main(["classify", run, "최고 영화", "지루\t봤다", "", "--device", "cpu"]) == 0
    head, *rows = read_rows(capsys.readouterr().out)
    assert head == ["label", "bad", "good", "text"] and [row[3] for row in rows] == ["최고 영화", "지루 봤다", ""]
    for label, bad, good, _ in rows:
        assert float(bad) + float(good) == pytest.approx(1, abs=2e-4)
        assert label == ("bad" if float(bad) > float(good) else "good")
    assert main(["classify", run, "최고 영화", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == "최고 영화" and sum(found["probabilities"].values()) == pytest.approx(1)
    assert main(["classify", run, "최고 영화", "영화 " * 5000, "--device", "cpu"]) == 0
    assert "note: 1 text was truncated to the model's" in capsys.readouterr().err
    Path("shoe.png").touch()
    Path("a b").touch()
    for texts, said in (
        (["shoe.png", "최고"], "note: shoe.png: the name of a file"),
        (["a b", "x" * 300, "\0", "~"], ""),
    ):
        assert main(["classify", run, *texts, "--device", "cpu"]) == 0
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == 1 + len(texts) and said in err and ("--files reads files" in err) == bool(said)


def test_classify_reads_files_and_writes_one(run, capsys, monkeypatch):
    from regard.predict.classifier import TextClassifier

    monkeypatch.setattr(TextClassifier, "BATCH", 16)
    capsys.readouterr()
    assert main(["classify", run, "--files", "test.tsv", "-o", "out.tsv", "--device", "cpu"]) == 0
    rows = read_rows(Path("out.tsv").read_text())
    texts = [line.split("\t")[0] for line in Path("test.tsv").read_text().splitlines()[1:]]
    assert [row[-1] for row in rows[1:]] == texts
    Path("lines.txt").write_text("\n".join(texts) + "\n")
    assert main(["classify", run, "--files", "lines.txt", "--json", "--device", "cpu"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["label"] for one in found] == [row[0] for row in rows[1:]] and found[2]["row"] == 3
    for files, said in (
        (["gone.tsv"], "no such file"), (["test.tsv", "--column", "review"], "column 'review' is missing")
    ):  # fmt: skip
        assert main(["classify", run, "--files", *files, "-o", "never.tsv", "--device", "cpu"]) == 2
        err = capsys.readouterr().err
        assert said in err and "--data" not in err and not Path("never.tsv").exists()


@pytest.mark.parametrize("place", [0, 20, 39])
def test_classify_predicts_the_texts_beside_a_mistake(run, capsys, monkeypatch, place):
    from regard.commands import inputs
    from regard.predict.classifier import TextClassifier

    monkeypatch.setattr(TextClassifier, "BATCH", 4)
    monkeypatch.setattr(inputs, "PIECE", 64)
    rows = [json.dumps({"text": f"영화 {number}"}).encode() for number in range(40)]
    Path("good.jsonl").write_bytes(b"\n".join(rows))
    rows[place] = b'{"text": "\xff"}'
    Path("bad.jsonl").write_bytes(b"\n".join(rows))
    capsys.readouterr()
    for arguments, lines in (
        (["--files", "good.jsonl", "bad.jsonl"], 81), (["--files", "bad.jsonl", "--json"], 40),
        ([], 41), (["--json"], 40),
    ):  # fmt: skip
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path("bad.jsonl").read_bytes())))
        assert main(["classify", run, *arguments, "--device", "cpu"]) == 3
        out, err = capsys.readouterr()
        assert len(out.splitlines()) == lines and f"line {place + 1}: " in err and "not UTF-8" in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path("good.jsonl").read_bytes())))
    assert main(["classify", run, "--device", "cpu"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 41
    monkeypatch.setattr("sys.stdin", None)
    assert main(["classify", run, "--device", "cpu"]) == 2 and "standard input is closed" in capsys.readouterr().err
    assert main(["classify", run, "최고", "--device", "cpu"]) == 0


def test_classify_answers_in_any_batches(run):
    classifier = regard.load(run).predictor
    texts = [line.split("\t")[0] for line in Path("train.tsv").read_text().splitlines()[1:]] + ["", "최고 " * 500]
    together = classifier.probabilities(texts)
    alone = torch.cat([classifier.probabilities([text]) for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(classifier.probabilities(texts, tokens=40), alone, atol=1e-5, rtol=1e-4)


def test_evaluate_and_runs(run, capsys):
    capsys.readouterr()
    assert main(["evaluate", run, "--test", "test", "--json", "--device", "cpu"]) == 0
    kept = json.loads((Path(run) / "scores.json").read_text())
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"test"} and found["test"]["confusion"] == kept["test"]["confusion"]
    assert main(["evaluate", run, "--files", "test.tsv", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["accuracy"] == kept["test"]["accuracy"]
    assert main(["runs"]) == 0
    assert "classification" in capsys.readouterr().out
    for options, said in (
        (["--test", "tst"], "did you mean 'test'"), (["--beam", "4"], "has no effect"),
        (["--test", "test", "--files", "test.tsv"], "--test test: is a set of the recipe, but --files names others"),
    ):  # fmt: skip
        assert main(["evaluate", run, *options, "--device", "cpu"]) == 2
        assert said in capsys.readouterr().err


def test_a_data_folder_is_checked(here, capsys):
    assert main(["data", "check", "mine.toml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["train"]["texts"] == 120 and set(found["test"]["classes"]) == {"bad", "good"}


def test_no_other_kind_of_model_classifies(here, capsys):
    regard.save(regard.build(regard.ModelConfig(vocab_size=8, dim=8, heads=2, layers=1, ff_dim=8)), "other")
    assert main(["classify", "other", "x", "--device", "cpu"]) == 2
    assert "use  regard translate other" in capsys.readouterr().err


def test_expected_places_of_packed_rows_have_no_more_than_the_texts(here):
    run = TextClassification(tables("train.pack=32"), here / "run", torch.device("cpu"))
    Run(run).prepare()
    count, make = run.stream().open(0)
    assert sum(int((make(i).labels != PairBatch.IGNORE).sum()) for i in range(count)) == 120
