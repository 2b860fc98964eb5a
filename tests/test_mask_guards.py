"""Padding and other documents stay masked, whatever mask or intervention is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mask_strategies import combined
from regard.models.config import ModelConfig
from regard.models.transformer import Decoder, Encoder, EncoderDecoder, Recurrent, build
from regard.nn.mask import (
    AttentionMask,
    Mask,
    Positions,
    causal,
    everything,
    from_tensor,
    padding,
    same_document,
    window,
)
from regard.nn.trace import drop, trace

CPU = torch.device("cpu")
IS_REAL = torch.tensor([[False, False, True, True, True, True], [True, True, True, False, True, False]])
DOCUMENT = torch.tensor([[1, 1, 2, 2, 2, 3], [4, 4, 4, 4, 5, 5]])
first = Mask("first", lambda q, k: k.pos == 0)
WIDENED = [  # each would attend to padding if `padding` anywhere in the mask were enough
    padding | window(3),
    window(3) | padding,
    causal & (padding | window(3)),
    (padding & causal) | first,
    ~padding,
    ~(padding & window(2)),
    ~~(padding | everything),
    padding | from_tensor(torch.ones(6, 6, dtype=torch.bool)),
]


def model(architecture: str, **changes: object) -> Encoder | Decoder | EncoderDecoder | Recurrent:
    values = {
        "dim": 8,
        "layers": 2,
        "heads": 2,
        "ff_dim": 12,
        "vocab_size": 11,
        "max_length": 32,
        "architecture": architecture,
    }
    made = build(ModelConfig(**{**values, **changes})).double().eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


leaves = st.sampled_from([causal, window(1), window(3), first, padding, same_document, everything])
masks = combined(leaves, 6)


@settings(max_examples=80, deadline=None)
@given(masks)
def test_no_mask_shows_padding_or_another_document(mask: Mask) -> None:
    """And apart from these two it shows what it says."""
    positions = Positions.of(6, CPU, IS_REAL, DOCUMENT)
    allowed = (IS_REAL[:, None] & (DOCUMENT[:, :, None] == DOCUMENT[:, None]))[:, None]
    seen = AttentionMask(mask, positions, positions).dense().expand(2, 1, 6, 6)
    assert not (seen & ~allowed).any()
    free = Positions(positions.pos, torch.ones_like(IS_REAL), torch.zeros_like(DOCUMENT))  # nothing to mask
    if not any(part in str(mask) for part in ("padding", "same_document")):
        assert torch.equal(seen, allowed & AttentionMask(mask, free, free).dense())


@settings(max_examples=10, deadline=None)
@given(masks)
def test_neither_does_any_rendering(mask: Mask) -> None:
    from torch.nn.attention.flex_attention import create_mask

    positions = Positions.of(6, CPU, IS_REAL, DOCUMENT)
    attention_mask = AttentionMask(mask, positions, positions)
    expected = attention_mask.dense().expand(2, 1, 6, 6)
    dense, is_causal = attention_mask.fused()
    assert dense is not None and not is_causal and torch.equal(dense.expand_as(expected), expected)
    blocks = attention_mask.blocks(2)
    assert blocks is not None and torch.equal(create_mask(blocks.mask_mod, 2, 1, 6, 6, "cpu"), expected)


@pytest.mark.parametrize("part", [padding, same_document], ids=str)
def test_a_part_is_added_only_where_it_is_missing(part: Mask) -> None:
    positions = Positions.of(6, CPU, IS_REAL, DOCUMENT)
    settled = causal & (window(2) & (padding & same_document))
    assert AttentionMask(settled, positions, positions).mask is settled
    assert AttentionMask(part | causal, positions, positions).mask.name.count(part.name) == 2


# What a model sees


@torch.no_grad()
@pytest.mark.parametrize("mask", WIDENED, ids=str)
@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
def test_weights_on_padding_are_exactly_zero(architecture: str, mask: Mask) -> None:
    made, tokens = model(architecture), torch.randint(11, (2, 6))
    with trace(made) as seen:
        out = made(tokens, IS_REAL, mask=mask)
    weights = seen.stack("*.attention.weights")  # [layers, B, H, Nq, Nk]
    assert (weights.movedim(-1, 2)[:, ~IS_REAL] == 0).all()
    other = torch.where(IS_REAL, tokens, (tokens + 3) % 11)  # other padding, same numbers; also untraced
    torch.testing.assert_close(made(other, IS_REAL, mask=mask)[IS_REAL], out[IS_REAL], atol=1e-10, rtol=0.0)


EDITS: dict[str, Callable[[Mask], Mask]] = {
    "widened": lambda mask: mask | window(3),
    "widened by all": lambda mask: mask | everything,
    "turned round": lambda mask: ~mask | window(2),
    "taken out": drop(padding),
    "replaced": lambda mask: window(2),
}


def check(made: nn.Module, edit: Callable[[Mask], Mask], run: Callable[[], object], is_real: dict[str, Tensor]) -> None:
    """`is_real` says for each kind of attention who is real among its keys."""
    with trace(made, {"*.mask": edit}) as seen:
        run()
    names = [name for name in seen if name.endswith(".weights")]
    assert names
    for name in names:
        real = next(mark for part, mark in is_real.items() if part in name)
        assert (seen[name].movedim(-1, 1)[~real] == 0).all(), name
    assert any((seen[name] > 0).any() for name in names)


@torch.no_grad()
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
def test_no_intervention_shows_padding(architecture: str, edit: Callable[[Mask], Mask]) -> None:
    made, tokens = model(architecture), torch.randint(11, (2, 6))
    check(made, edit, lambda: made(tokens, IS_REAL), {"attention": IS_REAL})


@torch.no_grad()
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_no_intervention_shows_padding_of_a_source(edit: Callable[[Mask], Mask]) -> None:
    """Encoder, decoder and cross attention, at once and in cached steps."""
    made, source, target = model("encoder-decoder"), torch.randint(11, (2, 6)), torch.randint(11, (2, 6))
    is_real = {"encoder": IS_REAL, "cross": IS_REAL, "decoder": IS_REAL.flip(0)}
    check(made, edit, lambda: made(source, target, IS_REAL, IS_REAL.flip(0)), is_real)
    state = made.start(source, IS_REAL)
    made.step(target[:, :5], state, IS_REAL.flip(0)[:, :5])
    check(made, edit, lambda: made.step(target[:, 5:], state, IS_REAL.flip(0)[:, 5:]), is_real)


@torch.no_grad()
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_no_intervention_shows_padding_to_a_recurrent_decoder(edit: Callable[[Mask], Mask]) -> None:
    made, source, target = model("recurrent"), torch.randint(11, (2, 6)), torch.randint(11, (2, 3))
    check(made, edit, lambda: made(source, target, IS_REAL), {"": IS_REAL})


@torch.no_grad()
@pytest.mark.parametrize("mask", [same_document | window(3), ~same_document | causal, same_document | first], ids=str)
def test_no_mask_joins_packed_documents(mask: Mask) -> None:
    made, tokens = model("decoder"), torch.randint(11, (2, 6))
    apart = DOCUMENT[:, :, None] != DOCUMENT[:, None]
    for edits, asked in (({}, mask), ({"*.mask": lambda own: own | mask}, everything)):
        with trace(made, edits) as seen:
            made(tokens, document=DOCUMENT, mask=asked)
        weights = seen.stack("*.attention.weights")  # [layers, B, H, Nq, Nk]
        assert (weights.movedim(2, -1)[:, apart] == 0).all()
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))
