"""Bundles: `regard.load` opens every kind of model folder, reads its recipe once and predicts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

import regard
from prediction_models import KINDS, SMALL, make_run
from regard.cli import main
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.predict.bundle import Bundle
from regard.predict.generator import Generator


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, empty_folder: Path) -> str:
    """The name of a kind of model, of which the folder "run" has an untrained one."""
    make_run(request.param)
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


def test_a_long_stream_is_what_predict_gives(empty_folder: Path) -> None:
    """Samples depend on the index of a line, and every line has its own prefix."""
    make_run("translate")
    bundle = regard.load("run")
    inputs = ["one two", "three four five"] * 50
    prefixes = ["one", "two three"] * 50
    options = {"sample": True, "max_length": 4, "prefixes": prefixes}
    assert list(bundle.stream(inputs, **options)) == bundle.predict(inputs, **options)
