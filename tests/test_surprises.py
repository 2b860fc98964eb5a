"""Data that would train a wrong model in silence is refused or reported."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
import torch

from regard.data.images import ImageData, list_set
from regard.data.pairs import PairData
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.predict.bundle import Bundle
from regard.predict.translator import Translator
from regard.text.tokenizer import Tokenizer

PAIRS = [("A dog runs.", "Ein Hund rennt."), ("Two men talk.", "Zwei Männer reden.")]


def write(path: Path, rows: list[tuple[str, ...]], separator: str = "\t") -> str:
    path.write_text("".join(separator.join(row) + "\n" for row in rows), encoding="utf-8")
    return path.name


@pytest.mark.parametrize("header", [("en", "de"), ("Source", "Target"), ("English", " German ")])
@pytest.mark.parametrize("ending, separator", [("tsv", "\t"), ("csv", ",")])
def test_a_header_is_not_a_pair(tmp_path: Path, header: tuple[str, ...], ending: str, separator: str) -> None:
    name = write(tmp_path / f"train.{ending}", [header, *PAIRS], separator)
    unnamed = PairData(train=(name,), folder=str(tmp_path))
    with pytest.raises(UserError, match=r"line 1: looks like a header: name its columns in \[data\]: source = "):
        unnamed.read(unnamed.train).check()
    named = PairData(train=(name,), folder=str(tmp_path), source=header[0].strip(), target=header[1].strip())
    assert [pair[:2] for pair in named.read(named.train)] == PAIRS


def test_a_first_pair_of_ordinary_words_is_a_pair(tmp_path: Path) -> None:
    name = write(tmp_path / "train.tsv", [("hello", "hallo"), *PAIRS])
    data = PairData(train=(name,), folder=str(tmp_path))
    assert data.read(data.train).check().count == 3


def test_identical_sides_are_reported(tmp_path: Path) -> None:
    name = write(tmp_path / "train.tsv", [*PAIRS, ("Berlin", "Berlin"), ("Paris", "Paris")])
    data = PairData(train=(name,), folder=str(tmp_path))
    assert data.read(data.train).check().notes == [f"{tmp_path / name}: 2 x source and target are identical"]
    write(tmp_path / "a.en", [("one",)])
    with pytest.raises(UserError, match="contains a file twice"):
        PairData(train=("a.en", "a.en"), folder=str(tmp_path)).read(("a.en", "a.en")).check()


def test_decomposed_text_is_reported(tmp_path: Path) -> None:
    pairs = [("I go to school.", "나는 학교에 간다."), ("Hello", unicodedata.normalize("NFD", "안녕하세요"))]
    data = PairData(train=(write(tmp_path / "train.tsv", [*PAIRS, *pairs]),), folder=str(tmp_path))
    (note,) = data.read(data.train).check().notes
    assert "1 x a line with decomposed letters (not NFC)" in note


def test_training_data_in_another_set_is_reported(tmp_path: Path) -> None:
    train, copy = write(tmp_path / "train.tsv", PAIRS), write(tmp_path / "copy.tsv", PAIRS)
    other = write(tmp_path / "other.tsv", PAIRS[:1])
    data = PairData(train=(train,), valid=(train,), test={"new": (copy,), "good": (other,)}, folder=str(tmp_path))
    assert [line.split(": ")[0] for line in data.repeated()] == ["data.valid", "data.test.new"]


def test_an_empty_folder_is_not_a_class(tmp_path: Path) -> None:
    for name in ("cat", "dog", "emptied"):
        (tmp_path / "train" / name).mkdir(parents=True)
    for name in ("cat", "dog"):
        (tmp_path / "train" / name / "1.png").write_bytes(b"")
    config = ImageData(train=("train",), folder=str(tmp_path))
    with pytest.raises(UserError, match="the class 'emptied' has no images"):
        list_set(config.train, config)
    assert len(list_set(config.train, config, ("cat", "dog", "emptied")).labels) == 2  # of another set it may be


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_a_blank_line_has_no_translation(kind: str) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer.train([text + " \t\u3000" for pair in PAIRS for text in pair], kind)
    model = build(ModelConfig(dim=16, heads=2, layers=1, ff_dim=32, vocab_size=len(tokenizer)))
    bundle = Bundle(model, {"tokenizer": tokenizer}, predictor=Translator)
    texts = ["A dog", "", " ", "\t \u3000", "talk."]
    outputs = bundle.predict(texts, max_length=5, min_length=3)
    assert [one.log_probability < 0 for one in outputs] == [True, False, False, False, True]
    assert {one.text for one in outputs[1:4]} == {""}
