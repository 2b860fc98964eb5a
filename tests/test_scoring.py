"""`regard score` and `predictor.score`: log-probabilities of given outputs, against plain torch and transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regard.cli import main
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.predict import Bundle, SearchConfig, Translator
from regard.predict.captioner import Captioner
from regard.predict.generator import Generator
from regard.predict.mask_predictor import MaskPredictor
from regard.predict.scoring import windows
from regard.text.tokenizer import Tokenizer

SMALL: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "ff_dim": 32, "dropout": 0.0, "embed_dropout": 0.0}
LINES = ["one two three", "two", "four five one two", "하나 둘 셋 😀", "three three three three five"]
PAIRS = [*zip(LINES, reversed(LINES), strict=True), ("", "one"), ("one", ""), ("", "")]


def bundle(kind: str, *specials: str, **changes: Any) -> Bundle:
    torch.manual_seed(1)
    tokenizer = Tokenizer.train(LINES, kind).with_special_tokens(specials)  # type: ignore[arg-type]
    model = build(ModelConfig(**{**SMALL, "vocab_size": len(tokenizer), **changes}))
    return Bundle(model, {"tokenizer": tokenizer})


def run_of(folder: Path, of: Bundle, recipe: dict[str, Any] | None = None) -> str:
    save(of.model, folder, tokenizers=of.tokenizers, recipe=recipe or {})
    return str(folder)


@pytest.mark.parametrize("kind", ["word", "bpe", "byte"])
@pytest.mark.parametrize("changes", [{}, {"architecture": "recurrent"}, {"position": "rope", "decoder_layers": 1}])
@torch.no_grad()
def test_a_pair_as_by_teacher_forcing_alone(kind: str, changes: dict[str, Any], monkeypatch) -> None:
    monkeypatch.setattr("regard.predict.scoring.TOKENS", 40)  # several batches, with padding
    monkeypatch.setattr("regard.predict.scoring.LOGITS", 3 * 270)  # the output head in parts
    translator = Translator(bundle(kind, **changes))
    tokenizer = translator.source
    for (source, target), score in zip(PAIRS, translator.score(PAIRS), strict=True):
        read = [2, *tokenizer.encode(target)]
        logits = translator.model(torch.tensor([[*tokenizer.encode(source), 3]]), torch.tensor([read]))[0]
        expected = [row.log_softmax(-1)[id].item() for row, id in zip(logits, [*read[1:], 3], strict=True)]
        assert [one.id for one in score.tokens] == [*read[1:], 3] and score.tokens[-1].token == "</s>"
        assert [one.log_probability for one in score.tokens] == pytest.approx(expected, abs=1e-5)
        assert score.log_probability == pytest.approx(sum(expected), abs=1e-4)
        assert score.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)
    assert translator.score([]) == []


@pytest.mark.parametrize("config", [SearchConfig(), SearchConfig(beam=4, n_best=4, length_penalty=1.0)])
def test_a_hypothesis_has_the_score_of_the_search(config: SearchConfig) -> None:
    of = bundle("word", logit_bias=True)
    with torch.no_grad():
        of.model.output_head.bias[:4] = torch.tensor([-30.0, -30.0, -30.0, 1.0])  # outputs end, and contain words alone
    translator = Translator(of)
    for line, prediction in zip(LINES, translator.predict(LINES, config=config), strict=True):
        scores = translator.score([(line, one.text) for one in prediction.n_best])
        assert len(scores) == config.n_best
        for one, score in zip(prediction.n_best, scores, strict=True):
            assert score.log_probability == pytest.approx(one.log_probability, abs=1e-4)
            assert one.score == pytest.approx(score.log_probability / config.penalty(len(score.tokens)), abs=1e-4)


@pytest.mark.parametrize("begin", [False, True])
@torch.no_grad()
def test_a_text_as_the_decoder_predicts_it(begin: bool) -> None:
    generator = Generator(bundle("byte", architecture="decoder", max_length=64, norm_order="pre", position="rope"))
    for text, score in zip(LINES, generator.score(LINES, begin=begin), strict=True):
        ids = torch.tensor([*[3] * begin, *generator.tokenizer.encode(text)])
        known = generator.model(ids[None, :-1])[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert [one.log_probability for one in score.tokens] == pytest.approx(known.tolist(), abs=1e-5)
        assert [one.id for one in score.tokens] == ids[1:].tolist()
    assert len(generator.score(["a"], begin=begin)[0].tokens) == begin
    empty = generator.score([""])[0]
    assert (empty.log_probability, empty.per_token, empty.perplexity) == (0.0, None, None)


@pytest.mark.parametrize("context", [1, 2, 3, 4, 7, 8])
def test_windows_count_every_token_once(context: int) -> None:
    for size in range(2, 30):
        counted = []
        for piece, skipped in windows(range(size), context):
            assert 2 <= len(piece) <= context + 1 and (not counted or skipped + 1 > context // 2)
            counted += piece[1 + skipped :]
        assert counted == list(range(1, size))


@torch.no_grad()
def test_a_text_longer_than_the_context() -> None:
    generator = Generator(bundle("byte", architecture="decoder", max_length=8, norm_order="pre", position="learned"))
    text = "one two three four five"
    ids = torch.tensor(generator.tokenizer.encode(text))
    expected = generator.model(ids[None, :8])[0].log_softmax(-1).gather(1, ids[1:9, None])[:, 0].tolist()
    while len(expected) < len(ids) - 1:
        start = len(expected) - 4  # four tokens of context at least
        part = generator.model(ids[None, start : min(start + 8, len(ids) - 1)])[0].log_softmax(-1)
        expected += part.gather(1, ids[start + 1 : start + 9, None])[4:, 0].tolist()
    assert [one.log_probability for one in generator.score([text])[0].tokens] == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_pseudo_log_likelihood_masks_one_token_after_the_other(monkeypatch) -> None:
    monkeypatch.setattr("regard.predict.scoring.TOKENS", 20)
    predictor = MaskPredictor(bundle("char", "<mask>", architecture="encoder", output_head="tokens", max_length=40))
    for text, score in zip([*LINES, ""], predictor.score([*LINES, ""]), strict=True):
        ids = [2, *predictor.tokenizer.encode(text), 3]
        for at, one in enumerate(score.tokens, 1):
            row = torch.tensor([[predictor.mask if i == at else id for i, id in enumerate(ids)]])
            assert one.log_probability == pytest.approx(
                predictor.model(row)[0, at].log_softmax(-1)[ids[at]].item(), abs=1e-5
            )
        assert [one.id for one in score.tokens] == ids[1:-1]
    with pytest.raises(UserError, match="62 tokens, but the model reads 40"):
        predictor.score(["a" * 60])


@torch.no_grad()
def test_a_caption_given_an_image(tmp_path: Path) -> None:
    changes = {"input": "patches", "image_size": 8, "patch_size": 4, "channels": 1}
    captioner = Captioner(bundle("word", **changes))
    pairs = []
    for number, caption in enumerate(("one two", "하나 둘 셋", "")):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        pairs.append((str(tmp_path / f"{number}.png"), caption))
        read = torch.tensor([[2, *captioner.target.encode(caption)]])
        logits = captioner.model(torch.tensor(pixels)[None, None].float() / 255, read)[0].log_softmax(-1)
        expected = logits.gather(1, torch.tensor([*read[0, 1:], 3])[:, None]).sum().item()
        assert captioner.score(pairs)[-1].log_probability == pytest.approx(expected, abs=1e-4)


def test_the_loss_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    of = bundle(
        "byte", architecture="decoder", max_length=32, norm_order="pre", position="learned", activation="gelu-tanh",
        tie_embeddings=True, embed_scale=False,
    )  # fmt: skip
    run = run_of(tmp_path / "run", of)
    assert main(["export", run, "--hf", str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    texts = ("To be, or not", "하나")
    for text, score in zip(texts, Generator(of).score(texts), strict=True):
        ids = torch.tensor([of.tokenizer.encode(text)])
        with torch.no_grad():
            loss = theirs(ids, labels=ids).loss.item()
        assert len(score.tokens) == ids.shape[1] - 1 and score.per_token == pytest.approx(-loss, abs=1e-5)
        assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
