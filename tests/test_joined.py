"""Texts joined to long documents: whole texts, the label of the majority, and no text in two sets."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from regard.data.joined import Join
from regard.data.labels import LabelData
from regard.errors import UserError
from regard.tasks.text_classification import TextClassification
from smoke import smoke_run

LABELS = {"a": 300, "b": 260, "c": 280}
ROWS = [(f"{label}{number}", label) for label, count in LABELS.items() for number in range(count)]


@pytest.mark.parametrize("texts", [2, 9, 20])
@pytest.mark.parametrize("classes", [2, 3])
def test_a_document_has_whole_texts_and_the_label_of_most(texts, classes):
    rows = [row for row in ROWS if row[1] in "abc"[:classes]]
    join = Join(texts=texts, majority=0.6, copies=3, separator="\n")
    made = list(join.documents(rows, "train"))
    known, counts, right = dict(rows), Counter[str](), []
    for document, label in made:
        parts = document.split("\n")
        assert len(parts) == texts
        (best, most), *others = Counter(known[part] for part in parts).most_common()
        assert best == label and all(count < most for _, count in others)
        counts.update(parts)
        right.append(most / texts)
    assert max(counts.values()) <= 3
    assert sum(counts.values()) > 0.75 * 3 * min(LABELS.values()) * classes
    if texts == 20:
        assert 0.5 < sum(right) / len(right) < 0.72
    amounts = Counter(label for _, label in made)
    assert max(amounts.values()) < 1.5 * min(amounts.values())


def test_the_first_text_tells_as_much_as_the_majority_says():
    join = Join(texts=51, majority=0.65, copies=40)
    known = dict(ROWS)
    rows = [row for row in ROWS if row[1] != "c"]
    made = list(join.documents(rows, "train"))
    right = sum(known[document.partition("\n")[0]] == label for document, label in made) / len(made)
    assert abs(right - 0.65) < 4 * (0.65 * 0.35 / len(made)) ** 0.5 + 0.005


def test_the_same_seed_gives_the_same_documents():
    join = Join(texts=9, copies=2)
    first = list(join.documents(ROWS, "train"))
    assert list(join.documents(iter(ROWS), "train")) == first
    assert list(Join(texts=9, copies=2, seed=2).documents(ROWS, "train")) != first
    assert len(list(join.documents(ROWS, "test"))) < 0.6 * len(first)  # one copy


@pytest.mark.parametrize(
    ("rows", "message"),
    [(ROWS[:100], "have the label 'a' only"), (ROWS[290:310], "the 20 texts of train are too few for one document")],
)
def test_texts_of_which_no_document_can_be_made(rows, message):
    with pytest.raises(UserError, match=message):
        list(Join().documents(rows, "train"))


def test_settings_that_do_not_fit():
    for settings, message in (
        ({"fraction": 0.5}, r"fraction = 0\.5: is not possible with \[data\.join\]"),
        ({"train": ({"files": ["a"]}, {"files": ["b"], "weight": 2})}, "train in groups with weights"),
    ):
        with pytest.raises(UserError, match=message):
            LabelData(**{"train": ("a.tsv",), "join": Join(), **settings})
    with pytest.raises(UserError, match="texts = 1"):
        Join(texts=1)
    with pytest.raises(UserError, match="majority"):
        Join(majority=1.5)


def test_no_text_is_in_documents_of_two_sets(tmp_path: Path):
    rows = random.Random(1).sample(ROWS, len(ROWS))
    for name, part in (("train.tsv", rows[:600]), ("test.tsv", rows[600:])):
        lines = ["text\tlabel", *(f"{text}\t{label}" for text, label in part)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    tables = {
        "data": {
            "train": ["train.tsv"], "test": {"test": ["test.tsv"]}, "valid_fraction": 0.2, "folder": str(tmp_path),
            "join": {"texts": 5, "copies": 2},
        },
        "text": {"kind": "char"}, "model": {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 16},
    }  # fmt: skip
    task = TextClassification(tables, tmp_path / "run", torch.device("cpu"))
    task.check_data()
    assert list(task.sets) == ["valid", "test"] and task.data.classes == ("a", "b", "c")
    texts = {name: {part for one in task.examples(name) for part in one.text.split("\n")} for name in
             ("train", "valid", "test")}  # fmt: skip
    assert all(texts.values()) and not texts["train"] & texts["valid"] and not texts["train"] & texts["test"]
    task.tokenizers = task.make_tokenizers()
    task.prepare_data()
    assert task.valid_texts is not None and len(task.valid_texts) == len(task.examples("valid"))
    assert len(task.train_texts) == len(task.examples("train")) > len(task.valid_texts)
    newline = task.tokenizer.encode("\n")[0]
    assert newline != task.tokenizer.unk
    assert (task.train_texts.texts.joined() == newline).sum() == 4 * len(task.train_texts)


@pytest.mark.slow
def test_the_small_form_learns(tmp_path):
    test = smoke_run("recipes/nsmc-long.toml", tmp_path / "run")["test"]
    assert test["accuracy"] > test["majority"] + 0.12
