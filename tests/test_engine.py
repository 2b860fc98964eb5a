"""Engines fail closed: what an engine does not know is computed by the model itself, never approximated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import Decoder, EncoderDecoder
from regard.nn.norm import LayerNorm
from regard.nn.position import Sinusoidal
from regard.predict import SearchConfig
from regard.predict.beam import beam
from regard.predict.engine import lean
from regard.predict.lean import Lean, LeanDecoder
from regard.predict.recorded import recordable
from regard.predict.scoring import pair_scores
from test_beam import BOS, EOS, padded
from test_decode import slow_greedy

SMALL = {"vocab_size": 20, "dim": 16, "layers": 2, "heads": 2, "ff_dim": 32, "norm_order": "pre"}
KINDS = {"encoder-decoder": (EncoderDecoder, Lean), "decoder": (Decoder, LeanDecoder)}


class TanhNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class ShiftedNorm(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Doubled(Sinusoidal):
    def embed(self, pos: Tensor) -> Tensor:
        return 2 * super().embed(pos)


def make(architecture: str, **changes: object) -> EncoderDecoder | Decoder:
    torch.manual_seed(1)
    model = KINDS[architecture][0](ModelConfig(architecture=architecture, **{**SMALL, **changes}))  # type: ignore[arg-type]
    return model.eval()


def use_norm(norm: nn.Module, model: EncoderDecoder | Decoder) -> None:
    model.decoder.blocks[1].feedforward_norm = norm


def use_activation(model: EncoderDecoder | Decoder) -> None:
    model.decoder.blocks[0].feedforward.activation = "sine"  # type: ignore[union-attr]


def use_position(model: EncoderDecoder | Decoder) -> None:
    model.decoder.position = Doubled(model.decoder.config)


def use_forward(model: EncoderDecoder | Decoder) -> None:
    model.decoder.blocks[0].feedforward.forward = lambda x: x  # type: ignore[method-assign, union-attr]


CHANGES = {
    "unknown norm": lambda model: use_norm(TanhNorm(), model),
    "norm derived from a known one": lambda model: use_norm(ShiftedNorm(16), model),
    "unknown activation": use_activation,
    "position derived from a known one": use_position,
    "replaced forward": use_forward,
}


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_an_unknown_part_is_left_to_the_model(architecture: str, change: str) -> None:
    model = make(architecture)
    assert isinstance(lean(model), KINDS[architecture][1]) and recordable(model)
    CHANGES[change](model)
    assert lean(model) is model and not recordable(model)


@pytest.mark.parametrize("architecture", KINDS)
def test_a_norm_added_to_the_code_is_refused(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.nn.block.make_norm", lambda config: TanhNorm())
    model = make(architecture)
    assert lean(model) is model and not recordable(model)


def test_a_search_with_an_unknown_norm_is_that_of_the_model() -> None:
    """The lean engine once took an unknown norm for the identity."""
    model = make("encoder-decoder")
    use_norm(TanhNorm(), model)
    source, is_real = padded()
    found = beam(model, source, is_real, SearchConfig(max_length=8), BOS, EOS)
    for row, real, some in zip(source, is_real, found, strict=True):
        assert some[0].tokens == slow_greedy(model, row, real, 8)


@pytest.mark.parametrize(
    ("changes", "is_lean", "is_recordable"),
    [
        ({"position": "alibi"}, False, False),
        ({"position": "t5"}, False, True),
        ({"window": 3}, False, True),
        ({"experts": 2}, False, False),
        ({"attention": "reference"}, False, True),
        ({"attention_score": "additive", "attention": "reference"}, False, True),
        ({"norm": "rms", "activation": "swiglu"}, True, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", KINDS)
def test_what_each_engine_takes(architecture: str, changes: dict, is_lean: bool, is_recordable: bool) -> None:
    model = make(architecture, **changes)
    assert isinstance(lean(model), KINDS[architecture][1]) == is_lean
    assert recordable(model) == is_recordable


def test_a_decoder_without_a_causal_mask_is_left_to_the_model() -> None:
    """The recorded engine needs the mask to exclude slots that are not yet written."""
    model = make("encoder-decoder", causal=False)
    assert lean(model) is model and not recordable(model)
    source, is_real = padded()
    config = SearchConfig(max_length=8)
    found = beam(model, source, is_real, config, BOS, EOS)
    for row, real, some in zip(source, is_real, found, strict=True):
        assert some[0].tokens == beam(model, row[real][None], None, config, BOS, EOS)[0][0].tokens
    with pytest.raises(UserError, match="causal = false"):
        pair_scores([model], source, is_real, source, source)


def test_an_unknown_embedding_of_the_target_is_left_to_the_model() -> None:
    model = make("encoder-decoder")
    assert isinstance(lean(model), Lean)
    model.target_embedding.forward = lambda ids: model.source_embedding(ids) + 1  # type: ignore[method-assign, union-attr]
    assert lean(model) is model
    typed = make("encoder-decoder")
    typed.target_embedding.token_types = nn.Embedding(2, 16)  # type: ignore[union-attr]
    assert lean(typed) is typed
