"""Perplexity and bits against the chain rule written out, and at lengths that training never saw."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from regard.data.columns import Store
from regard.data.documents import Piece
from regard.data.encode import store_tokens
from regard.errors import UserError
from regard.metrics.perplexity import perplexity
from regard.models.config import ModelConfig
from regard.models.transformer import Decoder
from regard.text.tokenizer import Tokenizer

TEXT = "Über allen Gipfeln ist Ruh, in allen Wipfeln spürest du kaum einen Hauch. 한국어 😀"
BYTES = Tokenizer.train(["x"], "byte")


def make_model(**changes) -> Decoder:
    settings = {"position": "rope", "norm_order": "pre", "max_length": 16, **changes}
    shape = {"architecture": "decoder", "vocab_size": len(BYTES), "dim": 16, "layers": 2, "heads": 2, "ff_dim": 32}
    return Decoder(ModelConfig(**shape, **settings)).double().eval()


def make_text(folder: Path, *documents: str) -> Store:
    pieces = [Piece(document, True) for document in documents]
    return store_tokens([pieces], folder / "text", BYTES, state="")


@torch.no_grad()
def cross_entropy(model, ids: list[int], place: int, first: int) -> float:
    """-log p(token at `place` | those from `first` on)."""
    logits = model(torch.tensor([ids[first:place]]))[0, -1]
    return -logits.log_softmax(-1)[ids[place]].item()


@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (500, 500), (500, 2), (1, 1)])
def test_every_token_given_those_before_it_in_its_window(tmp_path, context, stride):
    model, text = make_model(), make_text(tmp_path, TEXT, "Ende.")
    ids = text.columns["ids"].tolist()
    assert ids == [*BYTES.encode(TEXT), BYTES.eos, *BYTES.encode("Ende.")]
    losses = []
    for place in range(1, len(ids)):
        late = max(0, math.ceil((place - context) / stride))  # the first window that reaches so far
        losses.append(cross_entropy(model, ids, place, late * stride))
    found = perplexity(model, text, context, stride)
    total = sum(losses)
    assert found["tokens"] == len(losses) and found["documents"] == 2 and found["unknown"] == 0
    assert found["loss"] == pytest.approx(total / len(losses), rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(total / len(losses)), rel=1e-6)
    paid = len((TEXT + "Ende.").encode()) - 1  # the first token is the first of two bytes of "Ü"
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / paid, rel=1e-6)
    assert found["bits_per_character"] == pytest.approx(total / math.log(2) / len(TEXT + "Ende."), rel=1e-6)


def test_the_first_token_is_given_and_not_paid_for(tmp_path):
    text = make_text(tmp_path, "abc")
    found = perplexity(make_model(), text, 8)
    assert (found["tokens"], found["characters"], found["bytes"]) == (2, 2, 2)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


def test_a_model_without_an_opinion_has_the_perplexity_of_its_vocabulary(tmp_path):
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found = perplexity(model, make_text(tmp_path, TEXT), 8)
    assert found["perplexity"] == pytest.approx(len(BYTES)) and found["loss"] == pytest.approx(math.log(len(BYTES)))


def test_the_loss_of_each_position(tmp_path):
    model, text = make_model(), make_text(tmp_path, TEXT)
    ids, context = text.columns["ids"].tolist(), 8
    found = perplexity(model, text, context)
    for position in range(context):
        positions = [
            start + position + 1 for start in range(0, len(ids) - 1, context) if start + position + 1 < len(ids)
        ]
        expected = sum(cross_entropy(model, ids, place, place - position - 1) for place in positions) / len(positions)
        assert found["loss_per_position"][position] == pytest.approx(expected, rel=1e-6)
    assert perplexity(model, make_text(tmp_path / "short", "abc"), 8)["loss_per_position"][2:] == [None] * 6


@pytest.mark.parametrize(
    "changes",
    [{"position": "rope"}, {"position": "rope", "window": 4}, {"position": "none", "window": 4}, {"position": "alibi"}],
    ids=str,
)
def test_eight_times_the_length_of_training(tmp_path, changes):
    model, text = make_model(**changes), make_text(tmp_path, TEXT * 3)
    found = perplexity(model, text, 8 * model.config.max_length)
    assert math.isfinite(found["loss"]) and found["loss_per_position"][127] is not None
    if "window" in changes and changes["position"] == "none":
        # nothing beyond layers x (window - 1) tokens reaches a token, so more context changes nothing
        ids = text.columns["ids"].tolist()
        assert cross_entropy(model, ids, 120, 0) == pytest.approx(cross_entropy(model, ids, 120, 110), rel=1e-9)


def test_learned_positions_end(tmp_path):
    text = make_text(tmp_path, TEXT)
    with pytest.raises(UserError, match="max_length = 16"):
        perplexity(make_model(position="learned"), text, 17)


def test_one_token_is_too_little(tmp_path):
    with pytest.raises(UserError, match="1 token"):
        perplexity(make_model(), make_text(tmp_path, "a"), 8)
