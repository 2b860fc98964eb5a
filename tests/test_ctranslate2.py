"""Models for CTranslate2 compute what ours do, exactly in float32, nearly in int8; what they would not is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard.cli import main
from regard.errors import UserError
from regard.interop.ctranslate2 import LEVELS, export_ctranslate2, make_spec, quantize, refuse, vocabulary
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.predict.bundle import Bundle
from regard.text.tokenizer import Tokenizer

pytestmark = pytest.mark.grid

ctranslate2 = pytest.importorskip("ctranslate2", reason="install it with  pip install 'regard[ctranslate2]'")

ENGLISH = "the animal did not cross the street because it was too tired . a cat sat on the mat in the sun"
KOREAN = "동물은 너무 피곤해서 길을 건너지 않았다 . 고양이가 햇볕을 쬐며 매트 위에 앉아 있다"
TOKENS = Tokenizer.train([ENGLISH, KOREAN], "bpe", 400)
SMALL = {"dim": 32, "layers": 2, "heads": 4, "ff_dim": 64, "vocab_size": len(TOKENS)}
VARIANTS: list[dict[str, Any]] = [
    {"position": "sinusoidal"}, {"position": "sinusoidal", "pairs": "halves"}, {"position": "learned"},
    {"position": "rope"}, {"position": "rope", "pairs": "halves", "rope_base": 500.0}, {"position": "none"},
    {"position": "relative", "position_distance": 5},
    {"position": "t5", "position_distance": 20, "position_buckets": 8},
    {"norm_order": "pre"}, {"norm_order": "pre", "norm": "rms"}, {"embed_norm": True}, {"embed_scale": False},
    {"activation": "gelu"}, {"activation": "gelu-tanh"}, {"activation": "silu"}, {"activation": "swiglu"},
    {"activation": "geglu"}, {"kv_heads": 2}, {"kv_heads": 1, "position": "relative"}, {"head_dim": 16},
    {"bias": False}, {"attention_scale": 0.5}, {"logit_bias": True, "logit_scale": 0.5}, {"tie_embeddings": False},
    {"norm_order": "pre", "norm": "rms", "position": "t5", "bias": False, "tie_embeddings": False},
]  # fmt: skip
OF_DECODERS: list[dict[str, Any]] = [{"position": "alibi"}, {"position": "alibi", "heads": 2}, {"qk_norm": True}]
OF_ENCODER_DECODERS: list[dict[str, Any]] = [{"share_embeddings": False}, {"decoder_layers": 1}]


def make(**changes: Any) -> Bundle:
    """Random weights, also of norms and biases, so that none of them can be left out unnoticed."""
    torch.manual_seed(1)
    model = build(ModelConfig(**{**SMALL, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Bundle(model, {"tokenizer": TOKENS})


def random_rows(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, len(TOKENS), (length,), generator=generator).tolist() for length in lengths]


def names(rows: list[list[int]]) -> list[list[str]]:
    words = vocabulary(TOKENS, len(TOKENS))
    return [[words[id] for id in row] for row in rows]


@pytest.mark.parametrize("changes", VARIANTS + OF_ENCODER_DECODERS, ids=str)
def test_an_encoder_decoder_is_exact(tmp_path: Path, changes: dict[str, Any]) -> None:
    bundle = make(**changes)
    export_ctranslate2(bundle, tmp_path)
    sources, targets = random_rows(5, 40, 9), random_rows(30, 3, 12)
    engine = ctranslate2.Translator(str(tmp_path), compute_type="float32")
    model: Any = bundle.model
    for source, target, result in zip(
        sources, targets, engine.score_batch(names(sources), names(targets)), strict=True
    ):
        logits = model(torch.tensor([source]), torch.tensor([[TOKENS.bos, *target]]))[0]
        ours = logits.log_softmax(-1)[range(len(target) + 1), [*target, TOKENS.eos]]
        np.testing.assert_allclose(result.log_probs, ours.detach(), atol=1e-4)


@pytest.mark.parametrize("changes", VARIANTS + OF_DECODERS, ids=str)
def test_a_decoder_is_exact(tmp_path: Path, changes: dict[str, Any]) -> None:
    bundle = make(architecture="decoder", **changes)
    export_ctranslate2(bundle, tmp_path)
    rows = random_rows(5, 40, 9)
    engine = ctranslate2.Generator(str(tmp_path), compute_type="float32")
    model: Any = bundle.model
    for row, result in zip(rows, engine.score_batch(names(rows)), strict=True):
        logits = model(torch.tensor([row]))[0, :-1]
        ours = logits.log_softmax(-1)[range(len(row) - 1), row[1:]]
        np.testing.assert_allclose(result.log_probs, ours.detach(), atol=1e-4)


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"position": "alibi"}, "position = 'alibi' in an encoder-decoder"),
        ({"qk_norm": True}, "qk_norm = true in an encoder-decoder"),
        ({"window": 4}, "window = 4"),
        ({"experts": 2}, "experts = 2"),
        ({"value_dim": 4}, "value_dim = 4"),
        ({"norm": "none"}, "norm = 'none'"),
        ({"residual": False}, "residual = false"),
        ({"causal": False}, "causal = false"),
        ({"final_norm": True}, "final_norm"),
        ({"architecture": "recurrent"}, "architecture = 'recurrent'"),
        ({"architecture": "encoder"}, "architecture = 'encoder'"),
        ({"pruned": {"decoder.0.cross": (1,)}}, "pruned"),
    ],
)
def test_what_would_be_wrong_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    bundle = make(**changes)
    assert reason in refuse(bundle.config)
    with pytest.raises(UserError, match="cannot be exported to CTranslate2"):
        export_ctranslate2(bundle, tmp_path)
    assert not list(tmp_path.iterdir())


def test_int8_has_few_levels_and_small_errors(tmp_path: Path) -> None:
    bundle = make()
    for int8 in (False, True):
        (tmp_path / str(int8)).mkdir()
        export_ctranslate2(bundle, tmp_path / str(int8), int8=int8)
    sizes = [(tmp_path / str(int8) / "model.bin").stat().st_size for int8 in (False, True)]
    matrices = sum(parameter.numel() for parameter in bundle.model.parameters() if parameter.dim() > 1)
    assert sizes[0] - sizes[1] > 2.8 * matrices  # 3 of 4 bytes; the scales take some
    spec = make_spec(bundle)
    spec.validate()
    spec.optimize(quantization=None)
    quantize(spec)
    part = spec.encoder.layer[0].ffn.linear_0
    weights = part.weight.numpy()
    assert weights.dtype == np.int8 and np.abs(weights).max(axis=1).tolist() == [LEVELS] * len(weights)
    exact = bundle.model.encoder.blocks[0].feedforward.up.weight.detach().numpy()  # type: ignore[union-attr]
    step = np.abs(exact).max(axis=1, keepdims=True) / LEVELS
    assert (np.abs(weights / part.weight_scale.numpy()[:, None] - exact) <= step / 2 + 1e-6).all()


@pytest.mark.parametrize("int8", [False, True])
def test_the_folder_translates(tmp_path: Path, int8: bool, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", tmp_path / "ct2"
    save(make().model, run, tokenizers={"tokenizer": TOKENS}, recipe={"decode": {"beam": 3, "length_penalty": 0.6}})
    out.mkdir()
    bundle = regard.load(run)
    export_ctranslate2(bundle, out, int8=int8)
    lines = ["the animal was tired", "", "고양이가 매트 위에", "sun " * 30, "a cat"]
    options = {"max_length": 20, "n_best": 2}
    ours, theirs = bundle.predict(lines, **options), regard.load(out).predict(lines, **options)
    assert [len(one.n_best) for one in theirs] == [2, 1, 2, 2, 2] and theirs[1].text == ""
    if not int8:
        assert [one.text for one in theirs] == [one.text for one in ours]
        assert [one.score for one in theirs] == pytest.approx([one.score for one in ours], abs=1e-2)
        pairs = [(lines[0], "a cat"), (lines[2], "고양이가")]
        expected, scores = (one.predictor.score(pairs) for one in (bundle, regard.load(out)))
        assert [one.log_probability for one in scores] == pytest.approx(
            [one.log_probability for one in expected], abs=1e-3
        )
    assert main(["translate", str(out), "a cat", "--json", "--max-length", "20", "--device", "cpu"]) == 0
    assert '"translation"' in capsys.readouterr().out
    assert main(["translate", str(out), "a cat " * 1000, "--device", "cpu"]) == 2
    assert "max_length = 1024" in capsys.readouterr().err
    assert main(["translate", str(out), "a cat", "--prefix", "a", "--device", "cpu"]) == 2
    assert "prefixes and constraints" in capsys.readouterr().err
    assert main(["translate", str(out), "a cat", "--sample", "--device", "cpu"]) == 2
    assert "sample = True: CTranslate2 does not compute it" in capsys.readouterr().err


def test_the_folder_generates(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "ct2"
    model = make(architecture="decoder", position="rope", max_length=64).model
    save(model, run, tokenizers={"tokenizer": TOKENS})
    out.mkdir()
    export_ctranslate2(regard.load(run), out)
    ours, theirs = regard.load(run), regard.load(out)
    for prompt in ("the cat", "고양이가"):
        greedy = {"sample": True, "top_k": 1, "max_length": 20}
        expected, generated = (bundle.predict([prompt], **greedy)[0].samples[0] for bundle in (ours, theirs))
        assert (generated.ids, generated.text, generated.ended) == (expected.ids, expected.text, expected.ended)
        assert generated.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-3)
    assert len(theirs.predict(["the"], n_best=3, max_length=5)[0].samples) == 3
    assert theirs.predict(["the"], sample=True, max_length=500)[0].samples[0].ended in ("context", "end")
    with pytest.raises(UserError, match="seed = 3"):
        theirs.predict(["the"], seed=3)


def export(run: Path, out: Path, *options: str) -> int:
    return main(["export", str(run), "--ctranslate2", str(out), *options])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("changes", [{}, {"architecture": "decoder", "position": "rope", "max_length": 64}], ids=str)
def test_an_export_verifies_itself(
    tmp_path: Path, changes: dict[str, Any], int8: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "ct2"
    save(make(**changes).model, run, tokenizers={"tokenizer": TOKENS})
    assert export(run, out, "--json", *["--int8"] * int8) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["format"], printed["int8"]) == ("ctranslate2", int8) and "model.bin" in printed["files"]
    saved = json.loads((out / "export.json").read_text())
    assert saved.items() <= printed.items() and saved["values"] > 100 and saved["compared"] > 20
    assert 0 < saved["mean_difference"] < saved["difference"] < (0.5 if int8 else 1e-4)
    assert int8 or saved["identical"] == saved["compared"]
    assert export(run, out) == 2 and "already exists" in capsys.readouterr().err
    assert export(run, out, "--force") == 0 and "identical to those of the run" in capsys.readouterr().out


@pytest.mark.parametrize("int8", [False, True])
def test_a_wrong_export_leaves_nothing(
    tmp_path: Path, int8: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from regard.interop import ctranslate2 as module

    run, out = tmp_path / "run", tmp_path / "ct2"
    save(make().model, run, tokenizers={"tokenizer": TOKENS})
    monkeypatch.setattr(module, "set_norm", lambda spec, norm, right=module.set_norm: right(spec, nn.LayerNorm(32)))
    assert export(run, out, *["--int8"] * int8) == 2
    message = capsys.readouterr().err
    assert "differs from the run" in message and ("on average" if int8 else "of the largest value") in message
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_language_model_is_evaluated_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out, text = tmp_path / "run", tmp_path / "ct2", tmp_path / "text.txt"
    save(make(architecture="decoder", position="rope", max_length=16).model, run, tokenizers={"tokenizer": TOKENS})
    text.write_text(f"{ENGLISH}\n{KOREAN}\n" * 3, encoding="utf-8")
    assert export(run, out) == 0
    capsys.readouterr()
    losses = []
    for folder in (run, out):
        assert main(["evaluate", str(folder), "--files", str(text), "--json", "--device", "cpu"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["files"]["loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    texts = [ENGLISH, "", KOREAN * 4, "고양이"]  # longer than the context: windows that overlap
    ours, theirs = (regard.load(folder).predictor.score(texts) for folder in (run, out))
    for one, other in zip(ours, theirs, strict=True):
        assert [token.id for token in other.tokens] == [token.id for token in one.tokens]
        values = ([token.log_probability for token in score.tokens] for score in (one, other))
        np.testing.assert_allclose(*values, atol=1e-4)


def test_what_needs_the_model_itself_needs_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.commands.explore.page_missing", lambda: None)  # in checkouts without Node.js it is
    run, out = tmp_path / "run", tmp_path / "ct2"
    save(make().model, run, tokenizers={"tokenizer": TOKENS})
    assert export(run, out) == 0
    for command in (
        ["attend", str(out), "a cat"],
        ["figure", str(out), "a cat", "-o", str(tmp_path / "figure.svg")],
        ["heads", str(out), "--data", str(tmp_path)],
        ["prune", str(out), "--heads", "encoder.0.1", "-o", str(tmp_path / "small")],
        ["export", str(out), "--hf", str(tmp_path / "hf")],
        ["explore", str(out), "--no-browser"],
    ):
        assert main(command) == 2
        assert "is an export, which computes outputs only; use the run" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ct2", "run"]
