"""Mixers: a pattern gives each layer its own kind, and impossible combinations are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import UserError
from regard.nn.block import Stack
from regard.nn.cache import Cache
from regard.nn.config import StackConfig
from regard.nn.mask import Positions, from_tensor
from regard.nn.patterns import random_blocks
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


@pytest.mark.parametrize("causal", [False, True])
def test_longformer_and_bigbird_layers_see_what_the_papers_say(causal: bool) -> None:
    fields: dict[str, Any] = {"mixer": "window(3), bigbird(2)", "dilation": 2, "global_tokens": 1, "random_blocks": 1}
    stack = Stack(StackConfig(**{**SMALL, "layers": 4}, **fields, block_size=4), causal=causal).eval()
    with trace(stack) as t:
        stack(torch.randn(1, 24, 16), Positions.of(24, CPU))
    row, column = torch.arange(24)[:, None], torch.arange(24)
    past = (row >= column) | (not causal)
    near = ((row - column).abs() < 6) & ((row - column) % 2 == 0)
    weights = [t[f"{layer}.attention.weights"][0, 0] > 0 for layer in range(4)]
    assert torch.equal(weights[0], (near | (row < 1) | (column < 1)) & past) and torch.equal(weights[0], weights[2])
    plain = (((row - column).abs() < 2) | (row < 1) | (column < 1)) & past
    assert bool((weights[1] | ~plain).all()) and not torch.equal(weights[1], weights[3])
    others = (weights[1] & ~plain).view(6, 4, 6, 4).any(3).any(1).tril(-1)  # random earlier blocks of each block
    assert 3 <= int(others.sum()) <= 5 and int(others.sum(1).max()) == 1


def test_random_blocks_do_not_depend_on_the_length() -> None:
    long, short = (random_blocks(2, 4, seed=3).draw(length).split("\n") for length in (40, 24))
    assert [line[:47] for line in long[:24]] == short
    assert random_blocks(2, 4, seed=4).draw(40).split("\n") != long


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
    ({"mixer": f"full, window({2**31})"}, [f"window = {2**31}: must be an integer from 1 to {2**31 - 1}"]),
    ({"window": 4, "dilation": 2**31}, [f"dilation = {2**31}: must be an integer from 1 to {2**31 - 1}"]),
    ({"window": 4, "global_tokens": 10**20}, [f"global_tokens = {10**20}: must be an integer from 0"]),
    (
        {"mixer": "bigbird(4)", "random_blocks": 99999999},
        ["random_blocks = 99999999: must be an integer from 0 to 1024"],
    ),
    ({"mixer": "performer", "features": 10**12}, ["features = 1000000000000: must be an integer from 1 to 65536"]),
    ({"mixer": "linformer", "projected_length": 10**12}, ["must be an integer from 1 to 65536"]),
    ({"mixer": "bigbird(4)", "block_size": 2**31}, [f"block_size = {2**31}: must be an integer from 1"]),
    ({"window": 4, "global_tokens": 1, "global_projections": True, "position": "t5"}, ["'t5'", "'learned'"]),
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


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["rope", "t5", "learned"])
@pytest.mark.parametrize("mixer", ["full", "window(4)", "bigbird(3), window(2)"])
def test_padding_on_either_side_and_packing_change_nothing(mixer: str, position: Any, causal: bool) -> None:
    fields: dict[str, Any] = {"global_tokens": 2, "dilation": 2} if "window" in mixer else {}
    if "bigbird" in mixer:
        fields |= {"block_size": 4, "random_blocks": 1}
    stack = Stack(StackConfig(**SMALL, mixer=mixer, position=position, **fields), causal=causal).double().eval()
    x, other = torch.randn(1, 30, 16).double(), torch.randn(1, 7, 16).double()
    alone, index = stack(x, Positions.of(30, CPU)), torch.arange(37)[None]
    left = stack(torch.cat((other, x), 1), Positions.of(37, CPU, index >= 7))[:, 7:]
    right = stack(torch.cat((x, other), 1), Positions.of(37, CPU, index < 30))[:, :30]
    packed = stack(torch.cat((other, x), 1), Positions.of(37, CPU, document=(index >= 7).long()))
    for same in (left, right, packed[:, 7:]):
        torch.testing.assert_close(same, alone)
    torch.testing.assert_close(packed[:, :7], stack(other, Positions.of(7, CPU)))


@torch.no_grad()
@pytest.mark.parametrize("position", ["rope", "alibi", "learned", "relative"])
@pytest.mark.parametrize(
    "mixer", ["window(5)", "window(5), window(3)", "window(4), full", "window(3), bigbird(2)", "window(3), global"]
)
def test_a_cache_of_windows_rolls(mixer: str, position: Any) -> None:
    """Pieces of any size give the logits of the whole sequence, and the keys of a window take constant memory."""
    fields: dict[str, Any] = {"mixer": mixer, "position": position, "position_distance": 5, "dilation": 2}
    if "global" in mixer:
        fields |= {"mixer": "window(3)", "global_tokens": 2}
    if "bigbird" in mixer:
        fields |= {"block_size": 4, "random_blocks": 1}
    stack = Stack(StackConfig(**SMALL, **fields), causal=True).double().eval()
    x = torch.randn(2, 60, 16, dtype=torch.double)
    whole, cache, outputs, sizes = stack(x, Positions.of(60, CPU)), Cache(), list[Tensor](), list[int]()
    for piece in x.split((7, 1, 1, 12, *[1] * 39), dim=1):
        outputs.append(stack(piece, cache.next_positions(piece.shape[1], CPU), cache=cache))
        sizes.append(cache.nbytes)
        if len(outputs) == 20:
            cache.reorder(torch.tensor([1, 0]))
            x, whole = x.flip(0), whole.flip(0)
            outputs = [output.flip(0) for output in outputs]
            break
    rest = x[:, sum(output.shape[1] for output in outputs) :]
    for piece in rest.split(1, dim=1):
        outputs.append(stack(piece, cache.next_positions(1, CPU), cache=cache))
        sizes.append(cache.nbytes)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
    assert cache.length == 60
    if not any(kind in mixer for kind in ("full", "bigbird", "global")):
        assert sizes[-1] == sizes[10] and cache.positions is not None and cache.positions.length < 12


@torch.no_grad()
def test_a_long_prompt_leaves_no_more_than_the_window() -> None:
    stack = Stack(StackConfig(**SMALL, mixer="window(5)"), causal=True).double().eval()
    x, cache = torch.randn(2, 402, 16, dtype=torch.double), Cache()
    outputs, sizes = [], []
    for piece in x.split((400, 1, 1), dim=1):
        outputs.append(stack(piece, cache.next_positions(piece.shape[1], CPU), cache=cache))
        sizes.append(cache.nbytes)
    torch.testing.assert_close(torch.cat(outputs, dim=1), stack(x, Positions.of(402, CPU)))
    assert sizes[1] == sizes[2] == sizes[0] * 10 // 400
