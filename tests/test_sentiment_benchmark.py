"""The baselines beside our classifiers: same texts, same labels, and better than a constant prediction."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import sentiment
import table

from regard.settings import read_toml
from regard.tasks.text_classification import TextClassification
from regard.training.run import Run

RECIPE = Path(__file__).parent.parent / "recipes" / "nsmc.toml"


@pytest.mark.slow
def test_the_baselines_run_and_learn(tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="pip install 'regard[bench]'")
    monkeypatch.setattr(sentiment, "EPOCHS", 6)
    monkeypatch.setattr(
        sys, "argv", ["sentiment.py", str(RECIPE), "--smoke", "--seeds", "1", "-o", str(tmp_path / "o.json")]
    )
    sentiment.main()
    result = json.loads((tmp_path / "o.json").read_text())
    found = {row["model"]: row["accuracy"]["mean"] for row in result["rows"]}
    assert found["majority"] == 0.5 and found["linear"] > 0.65 and found["cnn"] > 0.55
    assert table.table(tmp_path / "o.json").count("\n") == 4


def test_baselines_use_the_texts_of_a_run_with_the_same_seed(tmp_path):
    args = Namespace(recipe=str(RECIPE), data="sample:nsmc", fraction=0.2, smoke=True)
    texts = sentiment.read(args, seed=3)
    tables = {name: one for name, one in read_toml(RECIPE).items() if name != "smoke"}
    tables["data"] |= {"folder": str(Path(sentiment.sample_folder("sample:nsmc"))), "fraction": 0.2, "max_length": 300}
    tables["text"] = {"kind": "char"}
    tables["train"] |= {"seed": 3}
    task = TextClassification(tables, tmp_path / "run", torch.device("cpu"))
    Run(task).prepare()
    stored = task.train_texts.texts
    ids = [row[1:-1].tolist() for row in stored.joined().split(stored.lengths.tolist())]
    assert ids == [task.tokenizer.encode(one.text) for one in texts.train] and len(ids) == 380
    assert [one.text for one in texts.valid] == [one.text for one in task.examples("valid")]
