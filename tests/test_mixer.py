"""Mixers: a pattern gives each layer its own kind, and impossible combinations are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard.errors import UserError
from regard.nn.block import Stack
from regard.nn.config import StackConfig
from regard.nn.mask import Positions, from_tensor
from regard.nn.trace import trace

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"dim": 16, "heads": 2, "ff_dim": 16, "layers": 3, "dropout": 0.0, "embed_dropout": 0.0}


def test_no_mixer_means_a_window_if_there_is_one() -> None:
    assert [StackConfig().mixer_of(layer) for layer in range(3)] == ["full"] * 3
    config = StackConfig(window=5)
    assert [(config.mixer_of(layer), config.window_of(layer)) for layer in (0, 5)] == [("window", 5)] * 2


def test_a_pattern_is_repeated_over_the_layers() -> None:
    config = StackConfig(mixer="window, window( 7 ),full", window=5, layers=5)
    pattern = [("window", 5), ("window", 7), ("full", None)] * 2
    assert [(config.mixer_of(layer), config.window_of(layer)) for layer in range(6)] == pattern


@pytest.mark.parametrize("causal", [False, True])
def test_every_layer_has_the_mask_of_its_mixer(causal: bool) -> None:
    stack, x = (
        Stack(StackConfig(**SMALL, mixer="window(2), full, window(3)"), causal=causal).eval(),
        torch.randn(2, 6, 16),
    )
    with trace(stack) as t:
        stack(x, Positions.of(6, CPU))
    distance = torch.arange(6)[:, None] - torch.arange(6)
    for layer, size in enumerate((2, 6, 3)):
        visible = (distance.abs() < size) & ((distance >= 0) | (not causal))
        assert torch.equal(t[f"{layer}.attention.weights"][0, 0] > 0, visible)


def test_a_pattern_of_windows_computes_what_the_windows_do() -> None:
    torch.manual_seed(0)
    one = Stack(StackConfig(**SMALL, mixer="window(2)"), causal=True).eval()
    other = Stack(StackConfig(**SMALL), causal=True).eval()
    other.load_state_dict(one.state_dict())
    x, positions = torch.randn(2, 6, 16), Positions.of(6, CPU)
    near = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 2
    torch.testing.assert_close(one(x, positions), other(x, positions, mask=from_tensor(near)))


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"mixer": "windw", "window": 4}, ["mixer = 'windw'", "did you mean 'window'"]),
    ({"mixer": "full,"}, ["''", "Choose one of"]),
    ({"mixer": "window"}, ["set window", "window(256)"]),
    ({"mixer": "full", "window": 4}, ["window = 4", "no layer", "remove one of them"]),
    ({"mixer": "linear(4)"}, ["only window(n)"]),
    ({"mixer": "window(0)"}, ["1 or more"]),
    ({"dilation": 2}, ["dilation = 2", "no layer uses it", "mixer = 'window'"]),
    ({"features": 64}, ["features = 64", "mixer = 'performer'"]),
    ({"window": 4, "global_projections": True}, ["global_tokens = 1"]),
    ({"mixer": "full, linear", "attention_score": "additive", "attention": "reference"}, ["'linear'", "remove"]),
    ({"mixer": "fourier", "position": "rope"}, ["'rope'", "'learned'"]),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=str)
def test_impossible_combinations_are_refused(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        StackConfig(**fields)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("kind", ["linformer", "fourier"])
def test_a_causal_stack_refuses_mixers_that_see_the_future(kind: str) -> None:
    with pytest.raises(UserError, match="later ones"):
        Stack(StackConfig(**SMALL, mixer=kind), causal=True)
