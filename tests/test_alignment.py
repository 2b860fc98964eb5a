"""Word alignment by cross-attention: on models whose correct alignment is known, and of every kind of tokenizer."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli import main
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.nn.trace import trace
from regard.predict import Bundle, Translator
from regard.predict.alignment import alignment_layer, link_words, pharaoh
from regard.text.tokenizer import Tokenizer
from variants import slow

WORDS = [f"{a}{b}" for a in "bdgkmn" for b in ("a", "ee", "oo", "u")]  # 24 words, of one or more characters


def lines(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.sample(WORDS, generator.randint(2, 5))) for _ in range(count)]


def reversed_line(line: str) -> str:
    return " ".join(line.upper().split()[::-1])


RECIPES: dict[str, dict[str, Any]] = {
    "words": {"text": {"kind": "word", "joint": False}, "model": {"layers": 1}},
    "characters": {
        "text": {"kind": "word", "joint": False, "target_kind": "char"}, "model": {"layers": 2, "position": "rope"}
    },
    "recurrent": {
        "text": {"kind": "word", "joint": False}, "model": {"layers": 1, "architecture": "recurrent"}
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=slow("characters", "words", "recurrent"))
def reversing(request: Any, tmp_path_factory: pytest.TempPathFactory, once: Any) -> Translator:
    """A model that writes the words of a line backwards, in capitals."""

    def train(folder: Path) -> None:
        data = tmp_path_factory.mktemp("data")
        for split, count in (("train", 4000), ("valid", 100)):
            sources = lines(count, len(split))
            (data / f"{split}.tsv").write_text("".join(f"{line}\t{reversed_line(line)}\n" for line in sources))
        tables = RECIPES[request.param]
        regard.train(
            {"task": "translation", "data": {"train": ["train.tsv"], "valid": ["valid.tsv"]}, **tables},
            data,
            folder,
            device="cpu",
            model={**tables["model"], "dim": 32, "heads": 2, "ff_dim": 64, "dropout": 0.0, "embed_dropout": 0.0},
            train={"steps": 400, "lr": 5e-3, "batch_tokens": 512, "label_smoothing": 0.0},
        )

    predictor: Translator = regard.load(once(f"reversing-{request.param}", train)).predictor
    return predictor


def test_the_alignment_of_a_reversal_is_the_reversal(reversing: Translator) -> None:
    sources = lines(60, 99)
    for config in ({}, {"beam": 3}):
        outputs = reversing.translate(sources, **config)
        correct = [pair for pair in zip(sources, outputs, strict=True) if reversed_line(pair[0]) == pair[1]]
        assert len(correct) >= 0.8 * len(sources)
        links = reversing.align(correct)
        expected = [{(len(s.split()) - 1 - j, j) for j in range(len(s.split()))} for s, _ in correct]
        hits = sum(len({*some} & known) for some, known in zip(links, expected, strict=True))
        assert hits >= 0.9 * sum(map(len, expected))
        assert links == [reversing.align([pair])[0] for pair in correct]  # whatever the rest of the batch is


def make(kind: str, **changes: Any) -> Translator:
    texts = ["one two three", "하나 둘, 셋 😀 넷", "a  b\tc "]
    tokenizer = Tokenizer.train(texts, kind, 300 if kind in ("bpe", "unigram") else None)  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"dim": 16, "heads": 2, "ff_dim": 32, "layers": 2, "vocab_size": len(tokenizer)}
    return Translator(Bundle(build(ModelConfig(**{**sizes, **changes})), {"tokenizer": tokenizer}))


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe", "unigram"])
def test_every_target_word_has_one_link_to_a_word(kind: str) -> None:
    texts = ["one two three", " 하나  둘, 셋 😀 ", "\u1112\u1161\u11ab \u1100\u1173\u11af", "x", "a" * 300]
    pairs = [(source, target) for source in texts for target in texts]
    for (source, target), links in zip(pairs, make(kind).align(pairs), strict=True):
        assert sorted(j for _, j in links) == list(range(len(target.split())))
        assert all(0 <= i < len(source.split()) for i, _ in links) and list(links) == sorted(links)
    assert make(kind).align([("", "one"), ("one", ""), ("", ""), (" \t ", "one"), ("one", " ")]) == [()] * 5
    assert make(kind).align([]) == []


@pytest.mark.parametrize("kind", ["word", "char", "byte", "bpe", "unigram"])
def test_the_word_of_every_token(kind: str) -> None:
    tokenizer = make(kind).source
    for text in ("one two, three", " 하나  둘, 셋 😀 ", "", "  "):
        ids, words = tokenizer.encode_words(text)
        assert ids == tokenizer.encode(text) and len(ids) == len(words)
        assert {word for word in words if word >= 0} == set(range(len(text.split())))
        for number, word in enumerate(text.split()):
            part = tokenizer.decode([id for id, at in zip(ids, words, strict=True) if at == number])
            assert part.replace(" ", "") == word or tokenizer.unk in ids


def test_links_are_maxima_over_tokens() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.0, 0.1, 0.4], [0.1, 0.1, 0.6, 0.2]])
    assert link_words(weights, [0, -1, 1], [0, 0, 1]) == ((0, 0), (1, 1))  # the last column is </s>
    assert link_words(weights, [0, 0, 1], [0, 2, 2]) == ((1, 0), (1, 2))  # a word without tokens has no link
    assert pharaoh(((0, 0), (1, 2))) == "0-0 1-2" and pharaoh(()) == ""


def test_the_layer() -> None:
    for layers, name in ((1, "decoder.0"), (2, "decoder.1"), (3, "decoder.1"), (6, "decoder.4")):
        assert alignment_layer(make("word", layers=layers).model) == f"{name}.cross.weights"
    model = make("word", layers=2)
    assert alignment_layer(model.model, 0) == "decoder.0.cross.weights"
    assert alignment_layer(make("word", architecture="recurrent").model) == "decoder.cross.weights"
    for layer in (-1, 2):
        with pytest.raises(UserError, match="layers 0 to 1"):
            model.align([("one", "two")], layer)


def test_beside_another_thread() -> None:
    model, pairs = make("word", layers=2), [("one two three", "two one")]
    links = model.align(pairs)
    with trace(model.model) as seen:  # as another thread that aligns
        assert model.align(pairs) == links
        assert model.model.decoder.blocks[0].tap is seen, "it is still being traced"
    assert "decoder.0.cross.weights" not in seen, "and has read nothing of the others"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("word", position="learned", max_length=20, logit_bias=True)
    model.model.output_head.bias.data[:3] = -30.0  # outputs are words
    save(model.model, tmp_path / "run", tokenizers=model.bundle.tokenizers, recipe={"decode": {"max_length": 5}})
    command = ["translate", str(tmp_path / "run"), "--device", "cpu", "--alignments"]
    inputs = ["one two three", "", "하나 둘, 셋"]
    outputs = model.translate(inputs, max_length=5)
    links = model.align(list(zip(inputs, outputs, strict=True)))
    assert main([*command, *inputs]) == 0
    lines = [f"{text} ||| {pharaoh(some)}" for text, some in zip(outputs, links, strict=True)]
    assert capsys.readouterr().out.splitlines() == lines and any(links)
    assert main([*command, *inputs, "--beam", "3", "--n-best", "2", "--json"]) == 0
    for line, source in zip(capsys.readouterr().out.splitlines(), inputs, strict=True):
        value = json.loads(line)
        assert value["alignment"] == value["n_best"][0]["alignment"]
        for one in value["n_best"]:
            assert [*map(tuple, one["alignment"])] == [*model.align([(source, one["translation"])])[0]]
    assert main([*command, "one two", "--beam", "3", "--n-best", "2"]) == 0
    for line in capsys.readouterr().out.splitlines():
        number, _, text = line.split("\t")
        assert number == "1" and " ||| " in text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\n" + b"one " * 50 + b"\ntwo\n")))
    assert main(command) == 3
    assert [" ||| " in line for line in capsys.readouterr().out.splitlines()] == [True, False, True]
    for options, message in ((["--alignment-layer", "2"], "layers 0 to 1"), ([], "there are no --alignments")):
        assert main([*command, "one", *options] if options else [*command[:-1], "one", "--alignment-layer", "0"]) == 2
        out, err = capsys.readouterr()
        assert message in err and out == ""
