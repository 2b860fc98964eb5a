"""Ensembles: the mean of probabilities, whatever the members are, and refusals that name what differs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import main
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.predict import SearchConfig, sample
from regard.predict.beam import beam
from regard.predict.bundle import Bundle
from regard.predict.captioner import Captioner
from regard.predict.ensemble import Ensemble
from regard.text.tokenizer import Tokenizer
from test_beam import BOS, EOS, log_probability, padded, recurrent, transformer, with_end

LINES = ["one two three", "two", "", "four five one two", "three three three three three", "다섯 🙂", "five"]
SIZES = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 32, "dropout": 0.0, "embed_dropout": 0.0}
CONFIGS = [
    SearchConfig(max_length=9),
    SearchConfig(beam=4, n_best=4, length_penalty=0.6, max_length=9),
    SearchConfig(beam=3, n_best=3, no_repeat_ngram=2, min_length=2, max_length=9),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_run(folder: Path, seed: int = 1, lines: list[str] = LINES, **changes: object) -> Path:
    torch.manual_seed(seed)
    tokenizer = Tokenizer.train(lines, "word")
    recurrent = changes.get("architecture") == "recurrent"
    sizes = {name: SIZES[name] for name in SIZES if not (recurrent and name in ("heads", "ff_dim"))}
    model = build(ModelConfig(**{**sizes, "vocab_size": len(tokenizer), **changes}))  # type: ignore[arg-type]
    save(model, folder, tokenizers={"tokenizer": tokenizer})
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [
        make_run(tmp_path / "one"),
        make_run(tmp_path / "two", 2, position="rope", layers=2),
        make_run(tmp_path / "three", 3, architecture="recurrent"),
    ]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_with_itself_is_the_model_alone(config: SearchConfig, dtype: torch.dtype) -> None:
    model, (source, is_real) = transformer(dtype=dtype), padded(8)
    alone = beam(model, source, is_real, config, BOS, EOS)
    both = beam(Ensemble([model, model]), source, is_real, config, BOS, EOS)
    for some, others in zip(alone, both, strict=True):
        assert [one.tokens for one in others] == [one.tokens for one in some]
        assert [one.score for one in others] == pytest.approx([one.score for one in some], abs=1e-5)


@pytest.mark.parametrize("beams", [1, 4])
def test_scores_are_means_of_probabilities(beams: int) -> None:
    models, (source, is_real) = [transformer(), transformer(position="rope"), recurrent()], padded()
    config = SearchConfig(beam=beams, n_best=beams, max_length=8)
    for row, some in enumerate(beam(Ensemble(models), source, is_real, config, BOS, EOS)):
        for one in some:
            tokens, total = with_end(one), 0.0
            for end in range(1, len(tokens) + 1):  # log p of each token, by teacher forcing without a cache
                each = [
                    math.exp(
                        log_probability(model, source[row : row + 1], is_real[row : row + 1], tokens[:end])
                        - (log_probability(model, source[row : row + 1], is_real[row : row + 1], tokens[: end - 1])
                           if end > 1 else 0.0)
                    )
                    for model in models
                ]  # fmt: skip
                total += math.log(sum(each) / len(models))
            assert one.log_probability == pytest.approx(total, abs=1e-9)


def test_samples_are_those_of_the_mean() -> None:
    model, (source, is_real) = transformer(), padded()
    config = SearchConfig(sample=True, n_best=3, top_p=0.9, max_length=8)
    alone = sample(model, source, is_real, config, BOS, EOS)
    both = sample(Ensemble([model, model]), source, is_real, config, BOS, EOS)
    assert [[one.tokens for one in some] for some in both] == [[one.tokens for one in some] for some in alone]
    assert both != sample(Ensemble([model, transformer()]), source, is_real, config, BOS, EOS)


@pytest.mark.parametrize("options", [{"beam": 3, "n_best": 2}, {}, {"sample": True}])
def test_the_batch_changes_nothing(runs: list[Path], options: dict[str, object]) -> None:
    translator = regard.load(runs[0], ensemble=runs[1:]).predictor
    whole = translator.translate(LINES, max_length=7, **options)
    assert [
        translator.translate([line], max_length=7, first=at, **options)[0] for at, line in enumerate(LINES)
    ] == whole
    assert translator.translate(LINES, max_length=7, batch=2, **options) == whole


def test_given_outputs_are_scored_by_the_mean(runs: list[Path]) -> None:
    translator = regard.load(runs[0], ensemble=runs[1:]).predictor
    lines = [line for line in LINES if line]
    pairs = list(zip(lines, reversed(lines), strict=True))
    each = [regard.load(run).predictor.score(pairs) for run in runs]
    for row, one in enumerate(translator.score(pairs)):
        for at, token in enumerate(one.tokens):
            mean = sum(math.exp(some[row].tokens[at].log_probability) for some in each) / len(runs)
            assert token.log_probability == pytest.approx(math.log(mean), abs=1e-6)


def test_command_takes_folders_after_run_as_an_ensemble(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in LINES if line]
    assert main(["translate", *map(str, runs), *lines, "--beam", "2", "--max-length", "6", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    translator = regard.load(runs[0], ensemble=runs[1:]).predictor
    expected = translator.predict(lines, beam=2, max_length=6)
    assert [(row["source"], row["translation"], row["score"]) for row in rows] == [
        (line, one.text, one.score) for line, one in zip(lines, expected, strict=True)
    ]
    assert expected != regard.load(runs[0]).predict(lines, beam=2, max_length=6)


def test_captions_of_an_ensemble() -> None:
    tokenizer = Tokenizer.train(LINES, "word")
    sizes = {**SIZES, "input": "patches", "image_size": 8, "patch_size": 4, "channels": 1, "vocab_size": len(tokenizer)}
    bundles = [Bundle(build(ModelConfig(**sizes)), {"tokenizer": tokenizer}) for _ in range(2)]  # type: ignore[arg-type]
    first = bundles[0]
    images = torch.rand(3, 1, 8, 8)
    alone = Captioner(first).decode(images, beam=2, max_length=6)
    twice = Captioner(Bundle(first.model, first.tokenizers, others=[first])).decode(images, beam=2, max_length=6)
    assert [one.text for one in twice] == [one.text for one in alone]
    both = Captioner(Bundle(first.model, first.tokenizers, others=bundles[1:])).decode(images, beam=2, max_length=6)
    assert [one.score for one in both] != [one.score for one in alone]
    other = Bundle(build(ModelConfig(**{**sizes, "image_size": 12})), {"tokenizer": tokenizer})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="image_size = 12, but model has 8"):
        Bundle(first.model, first.tokenizers, others=[other])


def test_evaluate_an_ensemble(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.en", tmp_path / "a.de"]
    for file in files:
        file.write_text("one two\nthree\nfive four\n", encoding="utf-8")
    assert main(["evaluate", *map(str, runs), "--files", *map(str, files), "--device", "cpu", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["files"]
    assert metrics["lines"] == 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lines": [*LINES, "six"]}, "source tokenizer has 12 tokens instead of 11, compared with"),
        ({"lines": ["six", *(line.replace("five", "six") for line in LINES)]}, "tokenizer has another vocabulary"),
        ({"architecture": "decoder"}, "an encoder-decoder from text to text"),
    ],
)
def test_what_differs_is_named(tmp_path: Path, capsys, changes: dict[str, object], expected: str) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", **changes)  # type: ignore[arg-type]
    assert main(["translate", str(one), str(two), "one"]) == 2
    assert expected in capsys.readouterr().err


def test_limits_are_the_lowest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    learned = make_run(tmp_path / "two", position="learned", max_length=5)
    translator = regard.load(run, ensemble=[learned]).predictor
    assert translator.configured(beam=2).max_length == 5
    with pytest.raises(UserError, match="max_length = 5: split the line"):
        translator.translate(["one two three four five one"])


def test_other_predictors_refuse(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(LINES, "word")
    model = build(ModelConfig(**SIZES, architecture="decoder", vocab_size=len(tokenizer)))  # type: ignore[arg-type]
    one = Bundle(model, {"tokenizer": tokenizer})
    save(model, tmp_path / "lm", tokenizers={"tokenizer": tokenizer})
    with pytest.raises(UserError, match="that translate or caption"):
        _ = regard.load(tmp_path / "lm", ensemble=[tmp_path / "lm"]).predictor
    with pytest.raises(UserError, match="coverage_penalty: Ensemble has no cross attention"):
        pair = Ensemble([transformer(), transformer()])
        beam(pair, *padded(), SearchConfig(beam=2, coverage_penalty=0.1), BOS, EOS)
    assert one.others == ()
