"""The lean step of a language model: the numbers of the model's own, and the model's own where it does not serve."""

from __future__ import annotations

import pytest
import torch

from regard.errors import UserError
from regard.models.transformer import Decoder
from regard.nn.trace import trace
from regard.predict import SearchConfig, engine
from regard.predict.generator import lay_columns
from regard.predict.lean import LeanDecoder
from test_generate import make

MODELS = [
    {"position": "learned"},
    {"position": "sinusoidal", "norm_order": "post", "embed_norm": True},
    {"position": "rope", "norm": "rms", "activation": "swiglu", "bias": False},
    {"position": "rope", "pairs": "halves", "kv_heads": 1, "qk_norm": True},
    {"position": "none", "heads": 4, "head_dim": 6, "value_dim": 3, "norm": "none", "residual": False},
    {"position": "learned", "embed_scale": False, "tie_embeddings": False, "attention_scale": 0.3},
]


@pytest.mark.parametrize("changes", MODELS, ids=str)
@torch.inference_mode()
def test_the_numbers_are_those_of_the_model(changes):
    model = make(**changes).model
    lean = engine.lean(model)
    assert isinstance(lean, LeanDecoder)
    ids = torch.randint(4, 260, (3, 20))
    expected = model(ids)
    state = lean.start(capacity=4)  # so that it grows, too
    torch.testing.assert_close(lean.step(ids[:, :5], state, last=True), expected[:, 4:5])
    for at in range(5, 19):
        torch.testing.assert_close(lean.step(ids[:, at : at + 1], state, last=True), expected[:, at : at + 1])
    rows = torch.tensor([2, 0])
    state.reorder(rows)
    torch.testing.assert_close(lean.step(ids[rows, 19:], state, last=True), expected[rows, 19:])


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "alibi"}, {"position": "t5"}, {"window": 4}, {"experts": 2}, {"attention": "reference"},
        {"attention_score": "multiplicative", "attention": "reference"},
    ],
    ids=str,
)  # fmt: skip
def test_other_models_stay_as_they_are(changes):
    model = make(**changes).model
    assert engine.lean(model) is model


def test_who_looks_or_trains_gets_the_model():
    model = make().model
    assert isinstance(engine.lean(model), LeanDecoder)
    with trace(model):
        assert engine.lean(model) is model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert engine.lean(model) is model
    hook = model.decoder.blocks[0].register_forward_hook(lambda *_: None)
    assert engine.lean(model) is model
    hook.remove()
    assert engine.lean(model.train()) is model


def test_positions_end_where_the_table_does():
    model = make(position="learned", max_length=3).model
    lean = engine.lean(model)
    state = lean.start()
    with torch.inference_mode():
        for _ in range(3):
            lean.step(torch.tensor([[5]]), state, last=True)
        with pytest.raises(UserError, match="sequence of 4 tokens is longer than max_length = 3"):
            lean.step(torch.tensor([[5]]), state, last=True)


def test_text_with_and_without(monkeypatch):
    generator = make(position="learned", max_length=24)
    config = SearchConfig(sample=True, max_length=60, n_best=3, top_k=20)
    found = generator.generate("To be", config=config, overflow="slide")
    monkeypatch.setattr("regard.predict.generator.lean", lambda model: model)
    expected = generator.generate("To be", config=config, overflow="slide")
    assert [sample.ids for sample in found] == [sample.ids for sample in expected]
    assert isinstance(generator.model, Decoder)


def test_a_model_that_has_written_can_still_learn():
    model = make().model
    with torch.inference_mode():
        lay_columns(model)
    model(torch.randint(4, 260, (2, 6))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
