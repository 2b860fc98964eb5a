"""`regard evaluate`: predictions saved as files, other files for every kind of task, and its hints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commanded import training
from regard.cli import main

WORDS = {"one": "하나", "two": "둘", "three": "셋", "four": "넷"}
PAIRS = [
    (f"{a} {b} {c} {d}", " ".join(WORDS[word] for word in (a, b, c, d)))
    for a in WORDS for b in WORDS for c in WORDS for d in ("one", "two")
]  # fmt: skip
SMALL = [
    f"--set={setting}"
    for setting in (
        "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "train.batch_tokens=512",
        "train.warmup=2", "train.lr=0.01", "train.steps=20",
    )
]  # fmt: skip
train = training(SMALL)
EVALUATE = ("--device", "cpu", "--json")


def records(path: str | Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def here(empty_folder: Path) -> Path:
    Path("pairs.tsv").write_text("".join("\t".join(pair) + "\n" for pair in PAIRS))
    Path("test.en").write_text("".join(f"{source}\n" for source, _ in PAIRS[::3]))
    Path("test.ko").write_text("".join(f"{target}\n" for _, target in PAIRS[::3]))
    Path("labels.tsv").write_text("text\tlabel\n" + "".join(f"{a}\t{a.split()[0]}\n" for a, _ in PAIRS))
    Path("translation.toml").write_text(
        '[data]\ntrain = ["pairs.tsv"]\ntest = {held-out = ["test.en", "test.ko"]}\n[text]\nkind = "word"\n'
    )
    Path("classes.toml").write_text(
        'task = "text-classification"\n[data]\ntrain = ["labels.tsv"]\nvalid = ["labels.tsv"]\n[text]\nkind = "word"\n'
    )
    Path("text.toml").write_text('task = "language-modeling"\n[data]\ntrain = ["test.en"]\n[text]\nkind = "char"\n')
    tasks = '[data.tasks.korean]\nprefix = "ko: "\ntrain = ["pairs.tsv"]\n[data.tasks.first]\nkind = "labels"\n'
    tasks += 'prefix = "first: "\ntrain = ["labels.tsv"]\n[data.tasks.holes]\nkind = "denoise"\ntrain = ["test.en"]\n'
    Path("tasks.toml").write_text(f'task = "text-to-text"\n{tasks}[text]\nkind = "word"\n')
    return empty_folder


def test_hypotheses_give_the_same_bleu_with_sacrebleu(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("translation.toml", "--set=train.steps=60") == 0
    saved = Path("runs/translation/predictions")
    assert {path.name for path in saved.iterdir()} == {"held-out.jsonl", "held-out.txt"}
    bleu = json.loads(Path("runs/translation/scores.json").read_text())["held-out"]["bleu"]
    command = [sys.executable, "-m", "sacrebleu", "test.ko", "-b", "-w", "6"]
    with (saved / "held-out.txt").open() as hypotheses:
        printed = subprocess.run(command, stdin=hypotheses, capture_output=True, text=True, check=True, timeout=60)
    assert float(printed.stdout) == pytest.approx(bleu, abs=1e-5) and 0 < bleu < 100
    rows = records(saved / "held-out.jsonl")
    assert [(row["source"], row["reference"]) for row in rows] == PAIRS[::3]
    assert [row["hypothesis"] for row in rows] == (saved / "held-out.txt").read_text().splitlines()
    assert all((row["chrf"] > 99.9) == (row["hypothesis"] == row["reference"]) for row in rows)
    capsys.readouterr()
    assert main(["evaluate", "runs/translation", "--files", "test.en", "test.ko", "-o", "new/out", *EVALUATE]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["bleu"] == pytest.approx(bleu)
    assert Path("new/out/files.txt").read_bytes() == (saved / "held-out.txt").read_bytes()
    assert main(["evaluate", "runs/translation", "-o", "test.en", *EVALUATE]) == 2
    assert "is a file" in capsys.readouterr().err


def test_classes_and_their_probabilities(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("classes.toml") == 0
    rows = records("runs/classes/predictions/valid.jsonl")
    assert len(rows) == len(PAIRS) and not Path("runs/classes/predictions/valid.txt").exists()
    accuracy = sum(row["label"] == row["reference"] for row in rows) / len(rows)
    assert accuracy == json.loads(Path("runs/classes/scores.json").read_text())["valid"]["accuracy"]
    for row, (text, _) in zip(rows, PAIRS, strict=True):
        probabilities = row["probabilities"]
        assert row["text"] == text and sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert probabilities[row["label"]] == max(probabilities.values())
    capsys.readouterr()
    assert main(["classify", "runs/classes", PAIRS[5][0], *EVALUATE]) == 0
    assert json.loads(capsys.readouterr().out)["probabilities"] == pytest.approx(rows[5]["probabilities"], abs=1e-5)


def test_files_of_a_task_of_text_to_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("tasks.toml") == 0
    run = ["evaluate", "runs/tasks", *EVALUATE]
    capsys.readouterr()
    assert main([*run, "--files", "test.en", "test.ko", "--task", "korean", "-o", "out"]) == 0
    metrics = json.loads(capsys.readouterr().out)["files"]
    assert metrics["lines"] == len(PAIRS[::3]) and metrics["loss"] > 0
    assert [row["source"] for row in records("out/files.jsonl")] == [f"ko: {source}" for source, _ in PAIRS[::3]]
    assert main([*run, "--files", "labels.tsv", "--task", "first"]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["lines"] == len(PAIRS)
    assert main([*run, "--files", "test.en", "--task", "holes"]) == 0
    assert set(json.loads(capsys.readouterr().out)["files"]) == {"loss", "perplexity", "tokens"}
    for arguments, message in (
        (["--files", "test.en", "test.ko"], "Name it with --task: korean, first or holes"),
        (["--files", "test.en", "test.ko", "--task", "Korean"], "did you mean 'korean'?"),
        (["--task", "korean"], "--task korean: is about --files, and there are none"),
    ):
        assert main([*run, *arguments]) == 2
        assert message in capsys.readouterr().err


def test_files_of_a_language_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("text.toml") == 0
    run = ["evaluate", "runs/text", *EVALUATE, "--files"]
    Path("named.jsonl").write_text("".join(json.dumps({"line": source}) + "\n" for source, _ in PAIRS))
    capsys.readouterr()
    assert main([*run, "named.jsonl", "--column", "line"]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["documents"] == len(PAIRS)
    assert main([*run, "named.jsonl"]) == 2
    assert "Name it with --column" in capsys.readouterr().err
    assert main([*run, "test.en", "-o", "out"]) == 2
    assert "--out out: has no effect for a model of task language-modeling" in capsys.readouterr().err
    assert not Path("out").exists()


def test_files_of_a_masked_language_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[data]\ntrain = ["test.en"]\nvalid = ["test.en"]\n[text]\nkind = "word"\n'
    Path("masked.toml").write_text(f'task = "masked-language-modeling"\n{text}')
    assert train("masked.toml", "--set=model.max_length=32") == 0
    capsys.readouterr()
    assert main(["evaluate", "runs/masked", *EVALUATE]) == 0
    valid = json.loads(capsys.readouterr().out)["valid"]
    assert main(["evaluate", "runs/masked", *EVALUATE, "--files", "test.en"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == {**valid, "unigram_loss": None}
    assert main(["evaluate", "runs/masked", "--device", "cpu", "--files", "test.en"]) == 0
    assert "masked tokens" in capsys.readouterr().out
