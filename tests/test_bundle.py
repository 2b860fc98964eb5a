"""Bundles: `regard.load` opens every kind of model folder, reads its recipe once and predicts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.cli import main
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.predict.bundle import Bundle
from regard.predict.captioner import Captioner
from regard.predict.classifier import ImageClassifier, TextClassifier
from regard.predict.generator import Generator
from regard.predict.mask_predictor import MaskPredictor
from regard.predict.regressor import Regressor
from regard.predict.translator import Translator
from regard.text.tokenizer import MASK_NAMES, Tokenizer

LINES = ["one two three", "four five"]
WORDS = Tokenizer.train(LINES, "word")
MASKED = WORDS.with_special_tokens(MASK_NAMES[:1])
SMALL = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 32, "image_size": 8, "patch_size": 4, "channels": 1}
DATA = {"context": 3, "horizon": 2, "period": 1, "mean": [5.0], "std": [2.0], "train": ["a.csv"]}

# name: (fields of the config, tokenizer, tables of the recipe, predictor, inputs, command line after RUN)
KINDS: dict[str, tuple[dict[str, Any], Tokenizer | None, dict[str, Any], type, list[Any], list[str]]] = {
    "translate": ({}, WORDS, {}, Translator, LINES, ["one two"]),
    "recurrent": ({"architecture": "recurrent"}, WORDS, {}, Translator, LINES, ["one two"]),
    "generate": ({"architecture": "decoder"}, WORDS, {}, Generator, LINES, ["one", "--max-tokens", "3"]),
    "classify": (
        {"architecture": "encoder", "output_head": "classes", "classes": 2, "pooling": "mean"},
        WORDS, {"data": {"classes": ["bad", "good"]}}, TextClassifier, LINES, ["one two"],
    ),
    "images": (
        {"architecture": "encoder", "input": "patches", "output_head": "classes", "classes": 2},
        None, {}, ImageClassifier, ["a.png"], ["a.png"],
    ),
    "fill": ({"architecture": "encoder"}, MASKED, {}, MaskPredictor, ["one <mask>"], ["one <mask>"]),
    "caption": ({"input": "patches"}, WORDS, {}, Captioner, ["a.png"], ["a.png"]),
    "predict": (
        {"input": "features", "output_head": "values", "feature_dim": 1},
        None, {"data": DATA}, Regressor, [[1.0, 2.0, 3.0]], ["1 2 3"],
    ),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder "run" with an untrained model, as `regard.save` writes it: no task in the recipe."""
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save("a.png")
    fields, tokenizer, recipe, *_ = KINDS[request.param]
    sizes = {} if tokenizer is None else {"vocab_size": len(tokenizer)}
    torch.manual_seed(1)
    model = regard.build(ModelConfig(**{**SMALL, **sizes, **fields}))
    tokenizers = {} if tokenizer is None else {"tokenizer": tokenizer}
    regard.save(model, "run", tokenizers=tokenizers, recipe=recipe)
    return str(request.param)


def test_load_finds_the_predictor_and_predicts(kind: str) -> None:
    _, _, _, predictor, inputs, _ = KINDS[kind]
    bundle = regard.load("run")
    assert type(bundle.predictor) is predictor and bundle.predictor is bundle.predictor
    predictions = bundle.predict(inputs)
    assert len(predictions) == len(inputs) and all(isinstance(one.to_dict(), dict) for one in predictions)
    streamed = list(bundle.stream(inputs))
    if predictor is Generator:
        text = "".join(token.text for token in streamed if token.prompt == 1 and token.sample == 0)
        assert text == predictions[1].text
    else:
        assert streamed == predictions


def test_the_recipe_is_parsed_once_per_command(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, loads = [], tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or loads(text))
    command = {"recurrent": "translate", "images": "classify"}.get(kind, kind)
    assert main([command, "run", *KINDS[kind][-1]]) == 0
    assert len(parsed) == 1


@pytest.mark.parametrize("kind", ["translate", "recurrent", "generate", "classify", "fill"], indirect=True)
@pytest.mark.parametrize("command", ["attend", "figure"])
def test_the_recipe_is_parsed_once_per_look(kind: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, loads = [], tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: parsed.append(text) or loads(text))
    out = ["-o", "figure.svg"] if command == "figure" else []
    assert main([command, "run", "one two", *out]) == 0
    assert len(parsed) == 1


def test_another_kind_of_model_is_refused_with_its_command(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = KINDS[kind][3].COMMAND
    for command in {"translate", "generate", "classify", "fill", "caption", "predict"} - {own}:
        assert main([command, "run", "one"]) == 2
        assert f"use  regard {own} run" in capsys.readouterr().err


def test_a_bundle_in_memory_predicts_as_one_from_disk(kind: str) -> None:
    _, _, recipe, predictor, inputs, _ = KINDS[kind]
    loaded = regard.load("run")
    bundle = Bundle(loaded.model, loaded.tokenizers, recipe, predictor=predictor)
    bundle.own = True  # the weights of a language model are stored in the same order, so rounding is the same
    assert bundle.predict(inputs) == loaded.predict(inputs) and bundle.path is None


def test_a_model_without_a_predictor_can_still_be_loaded(tmp_path: Path) -> None:
    config = ModelConfig(architecture="encoder", vocab_size=8, output_head="pooled", **SMALL)
    regard.save(regard.build(config), tmp_path)
    bundle = regard.load(tmp_path)
    assert bundle.config == config and bundle.tokenizers == {}
    with pytest.raises(UserError, match=r"output_head = 'pooled'.*regard.load"):
        bundle.predict(["one"])


@pytest.mark.parametrize(
    ("fields", "recipe", "positions", "source", "context"),
    [
        ({"position": "learned", "max_length": 7}, {}, 7, 7, 7),
        ({"position": "sinusoidal", "max_length": 7}, {}, None, None, 7),
        ({"architecture": "recurrent", "position": "learned"}, {}, None, None, 512),
        ({"architecture": "decoder", "position": "rope"}, {"train": {"pack": 64}}, None, None, 64),
        ({"architecture": "encoder", "position": "learned", "max_length": 9}, {"data": {"max_length": 20}}, 9, 9, 9),
        ({"architecture": "encoder", "position": "rope", "max_length": 9}, {"data": {"max_length": 20}}, None, 20, 9),
    ],
)
def test_limits(
    fields: dict[str, Any], recipe: dict[str, Any], positions: int | None, source: int | None, context: int
) -> None:
    bundle = Bundle(regard.build(ModelConfig(**{**SMALL, "vocab_size": 8, **fields})), recipe=recipe)
    limits = bundle.limits
    assert (limits.positions, limits.source) == (positions, source)
    assert limits.context == context


def test_class_names_come_from_the_recipe_the_import_or_are_numbers() -> None:
    config = ModelConfig(architecture="encoder", vocab_size=8, output_head="classes", classes=2, **SMALL)
    model = regard.build(config)
    assert Bundle(model).classes == ("0", "1")
    assert Bundle(model, recipe={"hf": {"id2label": {"0": "bad", "1": "good"}}}).classes == ("bad", "good")
    assert Bundle(model, recipe={"data": {"classes": ["no", "yes"]}}).classes == ("no", "yes")
    with pytest.raises(UserError, match="names 1 classes, but the model has 2"):
        Bundle(model, recipe={"data": {"classes": ["no"]}}).classes  # noqa: B018
