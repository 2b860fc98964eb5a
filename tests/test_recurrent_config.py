"""The recurrent baseline as a config: what it reads, what it refuses, what it costs, how it is saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.cost import cost
from regard.errors import UserError
from regard.interop.convert import config_to_hf
from regard.models import EncoderDecoder, ModelConfig, Recurrent, SequenceToSequence, build
from regard.models.folder import load, save
from regard.models.presets import preset
from regard.settings import from_dict, to_dict
from test_recurrent import CELLS, EVERY, config, make, tokens


def test_the_same_config_with_one_key_changed() -> None:
    """What describes Transformer blocks is not read, so a Transformer's recipe needs one change."""
    table = {"vocab_size": 11, "dim": 6, "layers": 1, "heads": 2, "ff_dim": 16, "position": "rope", "head_dim": 4}
    transformer = build(from_dict(ModelConfig, table))
    recurrent = build(from_dict(ModelConfig, {**table, "architecture": "recurrent"}))
    assert isinstance(transformer, EncoderDecoder) and transformer.config.attention_score == "dot"
    assert isinstance(recurrent, Recurrent) and recurrent.config.attention_score == "additive"
    assert isinstance(recurrent, SequenceToSequence)
    for changes in ({"heads": 7, "head_dim": None}, {"position": "learned", "max_length": 1}, {"experts": 4}):
        torch.manual_seed(0)
        one = build(recurrent.config).eval()
        torch.manual_seed(0)
        other = build(replace(recurrent.config, **changes)).eval()
        source, target = torch.randint(11, (2, 5)), torch.randint(11, (2, 4))
        assert torch.equal(one(source, target), other(source, target))
        assert cost(one.config, seq=5) == cost(other.config, seq=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_score": "concat"}, "attention_score = 'concat'.*attention_score = 'additive'"),
        ({"input": "patches"}, "input = 'patches': a recurrent model reads tokens"),
        ({"output_head": "none"}, "output_head = 'none': a recurrent model predicts tokens"),
        ({"embed_dim": 0}, "embed_dim = 0: must be 1 or more"),
        ({"cell": "rnn"}, "cell = 'rnn'.*gru, lstm"),
        ({"target_vocab_size": 9}, "share_embeddings = true needs one vocabulary"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config(**changes)


def test_inputs_that_cannot_be_read_are_refused() -> None:
    model, source = make(), tokens(2, 5)
    with pytest.raises(UserError, match=r"document.*packing"):
        model.encode(source, document=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(UserError, match=r"document.*packing"):
        model.decode(source, model.encode(source), document=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(UserError, match=r"source has shape \(2, 0\)"):
        model(tokens(2, 0), source)
    with pytest.raises(UserError, match=r"target has shape \(2, 0\)"):
        model(source, tokens(2, 0))
    with pytest.raises(UserError, match="is_real has dtype"):
        model(source, source, torch.ones(2, 5))
    with pytest.raises(UserError, match=r"no Hugging Face family.*architecture = 'recurrent'"):
        config_to_hf(model.config)


@pytest.mark.parametrize("cell", CELLS)
def test_saved_and_loaded_it_is_the_same(cell: str, tmp_path: Path) -> None:
    model = build(config(cell=cell, share_embeddings=False, target_vocab_size=9, tie_embeddings=False)).eval()
    save(model, tmp_path)
    again = load(tmp_path)
    source, target = tokens(2, 5), torch.randint(9, (2, 4))
    assert again.config == model.config == from_dict(ModelConfig, to_dict(model.config))
    assert torch.equal(again(source, target), model(source, target))


SIZES = [
    {
        "cell": cell,
        "attention_score": score,
        "layers": 1 + (score == "dot"),
        "decoder_layers": decoder_layers,
        "bias": bias,
    }
    for cell, score in EVERY
    for decoder_layers, bias in ((None, True), (3, False))
]


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    "changes",
    [*SIZES, {"share_embeddings": False, "tie_embeddings": False, "logit_bias": True, "target_vocab_size": 9}],
)
def test_parameters_and_operations_by_formula(changes: dict[str, Any]) -> None:
    found, model = cost(config(**changes), seq=5, target_seq=4, batch=3), build(config(**changes))
    assert sum(found.parameters.values()) == sum(parameter.numel() for parameter in model.parameters())
    cross = sum(parameter.numel() for parameter in model.decoder.cross.parameters())
    assert found.parameters.get("decoder.cross", 0) == cross
    assert found.parameters["encoder.cells"] == sum(p.numel() for p in model.encoder.parameters())
    source, target = tokens(3, 5), torch.randint(9, (3, 4))
    with torch.backends.mkldnn.flags(enabled=False):  # whose LSTM the counter does not see into
        with FlopCounterMode(display=False) as forward:
            logits = model(source, target)
        with FlopCounterMode(display=False) as backward:
            logits.sum().backward()
        state = model.start(source)
        with FlopCounterMode(display=False) as step, torch.no_grad():
            model.step(target[:, :1], state)
    assert forward.get_total_flops() == sum(found.forward.values())
    assert backward.get_total_flops() == found.backward
    assert step.get_total_flops() == found.step


@pytest.mark.parametrize("cell", CELLS)
def test_the_state_is_as_large_as_the_formula_says(cell: str) -> None:
    model, found = build(config(cell=cell)), cost(config(cell=cell), seq=5, target_seq=4, batch=3, dtype="fp32")
    state = model.start(tokens(3, 5))
    model.step(tokens(3, 4), state)
    assert found.kv_cache["self"] == sum(part.nbytes for layer in state.layers for part in layer)
    assert found.kv_cache["cross"] == state.k.nbytes + state.v.nbytes


def test_presets() -> None:
    """Bahdanau et al. 2015, appendix B: 1000 hidden units each way, 620 numbers a word, 30 000 words."""
    paper, small = preset("rnn-2015"), preset("rnn-small")
    assert (paper.dim, paper.token_dim, paper.vocab_size, paper.target_vocab_size) == (1000, 620, 30000, 30000)
    sizes = [sum(cost(one).parameters.values()) for one in (small, preset("small"))]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
