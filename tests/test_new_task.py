"""The task of CONTRIBUTING.md: one module, one recipe and one line make `train`, `evaluate` and `regard.load` work."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

import regard
from regard.cli import main
from regard.tasks.registry import TASKS

TAGS = {"a": "DET", "the": "DET", "dog": "NOUN", "cat": "NOUN", "sees": "VERB", "likes": "VERB", "small": "ADJ"}


def sentences(count: int, seed: int) -> str:
    generator = random.Random(seed)
    lines = ["text\ttags"]
    for _ in range(count):
        words = generator.choices(list(TAGS), k=generator.randint(2, 6))
        lines.append(f"{' '.join(words)}\t{' '.join(TAGS[word] for word in words)}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def tagging(tmp_path, monkeypatch) -> Path:
    """The module and the recipe as CONTRIBUTING.md prints them, and their line in the registry."""
    page = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    page = page.split("**A task**")[1].split("**A view of the page.**")[0]
    module, line = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (recipe,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert line == '"tagging": ("regard.tasks.tagging", "Tagging"),\n'
    (tmp_path / "tagging.py").write_text(module, encoding="utf-8")
    (tmp_path / "tagging.toml").write_text(recipe, encoding="utf-8")
    for seed, name in enumerate(("train", "valid", "news")):
        (tmp_path / f"{name}.tsv").write_text(sentences(200 if name == "train" else 20, seed))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tagging", raising=False)
    monkeypatch.setitem(TASKS, "tagging", ("tagging", "Tagging"))
    return tmp_path


def test_a_new_task_is_trained_evaluated_loaded_and_listed(tagging, capsys):
    assert main(["train", "tagging.toml", "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["scores"]["news"]["accuracy"] == 1.0 and result["scores"].keys() == {"valid", "news"}
    assert main(["evaluate", "runs/tagging", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result["scores"]
    (prediction,) = regard.load("runs/tagging").predict(["the small dog likes a cat"])
    assert prediction.tags == ("DET", "ADJ", "NOUN", "VERB", "DET", "NOUN")
    assert main(["runs"]) == 0 and "tagging" in capsys.readouterr().out
    report = Path("runs/tagging/report.html").read_text(encoding="utf-8")
    assert "accuracy on news" in report and "Tags of news" in report


def test_regard_train_returns_the_model_and_resumes(tagging, capsys):
    options = {"out": "runs/api", "device": "cpu", "train": {"steps": 3}, "model": {"dim": 16}}
    bundle = regard.train("tagging.toml", data=tagging, **options)
    assert bundle.config.dim == 16 and len(bundle.predict(["the dog"])[0].tags) == 2
    again = regard.train("tagging.toml", data=tagging, **options)
    assert again.predict(["the dog"]) == bundle.predict(["the dog"])
    text = (tagging / "tagging.toml").read_text()
    assert regard.train(text, out="runs/text", device="cpu", train={"steps": 1}).recipe["train"]["steps"] == 1
    with pytest.raises(regard.errors.UserError, match="train = 3: must be a dict"):
        regard.train(text, out="runs/other", train=3)
