"""Models over pictures and numbers: shifted windows, positions by row and column, the stem, values in and out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.nn.block import Block
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Positions
from regard.nn.multihead import Context
from regard.nn.patterns import tiles
from regard.nn.trace import trace

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "dim": 16, "layers": 2, "heads": 2, "ff_dim": 24, "image_size": 12, "patch_size": 2, "channels": 1, "dropout": 0.0,
    "embed_dropout": 0.0, "architecture": "encoder", "input": "patches", "output_head": "none",
    "pooling": "mean", "norm_order": "pre",
}  # fmt: skip


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(**{**SMALL, **changes})


def visible(mask: Any, count: int) -> Tensor:
    positions = Positions.of(count, CPU)
    return AttentionMask(mask, positions, positions).dense().expand(1, 1, count, count)[0, 0]


# --- shifted windows


@pytest.mark.parametrize(("side", "size", "shift"), [(6, 2, 0), (6, 2, 1), (6, 3, 1), (5, 2, 1), (7, 4, 2)])
def test_squares_are_those_of_a_rolled_picture(side: int, size: int, shift: int) -> None:
    """Swin's way: roll by -shift, cut into windows, and hide what has come round the edge (Liu et al. 2021, fig. 4)."""
    seen = visible(tiles(size, (side, 0), shift), side * side)
    for (i, j), (k, m) in itertools.product(itertools.product(range(side), repeat=2), repeat=2):
        same = True
        for a, b in ((i, k), (j, m)):
            rolled = [(x - shift) % side for x in (a, b)]
            wrapped = [x < shift for x in (a, b)]
            same = same and rolled[0] // size == rolled[1] // size and wrapped[0] == wrapped[1]
        if side % size == 0:  # else Swin pads before it rolls
            assert bool(seen[i * side + j, k * side + m]) == same


def test_a_block_with_squares_is_a_layer_of_swin() -> None:
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    side, dim, heads, size = 6, 16, 2, 3
    theirs_config = swin.SwinConfig(
        window_size=size, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, mlp_ratio=1.5
    )
    theirs_config._attn_implementation = "eager"
    for shift in (0, 1):
        torch.manual_seed(shift)
        theirs = swin.SwinLayer(theirs_config, dim, (side, side), heads, shift_size=shift).eval()
        ours = Block(
            StackConfig(dim=dim, heads=heads, ff_dim=24, norm_order="pre", activation="gelu", dropout=0.0)
        ).eval()
        state = theirs.state_dict()
        table = next(name for name in state if name.endswith("relative_position_bias_table"))
        theirs.load_state_dict({**state, table: torch.zeros_like(state[table])})
        parts = {
            "attention.qkv": ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
            "attention.out": ["attention.o_proj"],
            "attention_norm": ["layernorm_before"],
            "feedforward_norm": ["layernorm_after"],
            "feedforward.up": ["mlp.fc1"],
            "feedforward.down": ["mlp.fc2"],
        }
        weights = {
            f"{own}.{kind}": torch.cat([state[f"{name}.{kind}"] for name in names])
            for own, names in parts.items()
            for kind in ("weight", "bias")
        }
        ours.load_state_dict(weights)
        x, positions = torch.randn(2, side * side, dim), Positions.of(side * side, CPU)
        with torch.no_grad():
            expected = theirs(x, (side, side))[0]
            found = ours(x, Context(AttentionMask(tiles(size, (side, 0), shift), positions, positions)))
        torch.testing.assert_close(found, expected.view_as(found), atol=1e-5, rtol=1e-5)


def test_layers_take_turns_and_information_crosses_the_border() -> None:
    """In the first layer a patch sees its square only; the second, moved by half, joins the squares."""
    model = build(config(shifted_window=2, layers=3)).eval()
    with trace(model, only="*.weights") as seen:
        assert model(torch.rand(1, 1, 12, 12)).shape == (1, 36, 16)
    even, odd = visible(tiles(2, (6, 0)), 36), visible(tiles(2, (6, 0), 1), 36)
    for layer, mask in enumerate((even, odd, even)):
        assert torch.equal(seen[f"encoder.{layer}.attention.weights"][0, 0] > 0, mask)
    model, picture = build(config(shifted_window=2)).eval(), torch.rand(1, 1, 12, 12)
    changed = picture.clone()
    changed[..., 4:6, 4:6] += 1.0  # patch (2, 2)
    moved = (model(picture) - model(changed)).abs().sum(dim=-1).view(6, 6) > 1e-6
    assert moved[1:5, 1:5].all() and moved.sum() == 16


def test_cls_sees_all_squares_and_is_seen() -> None:
    seen = visible(tiles(2, (4, 1)), 17)
    assert seen[0].all() and seen[:, 0].all() and seen[1:, 1:].sum() == 4 * 4**2


# --- positions by row and column


@pytest.mark.parametrize("pairs", ["interleaved", "halves"])
def test_waves_tell_the_row_in_one_half_and_the_column_in_the_other(pairs: str) -> None:
    model = build(config(position="sinusoidal", position_axes=2, pairs=pairs))
    table = model.encoder.position.embed(torch.arange(36)[None])[0]
    order = [*range(0, 16, 2), *range(1, 16, 2)] if pairs == "interleaved" else list(range(16))
    for place in (0, 1, 7, 35):
        angles = [axis / 10000 ** (2 * i / 8) for axis in divmod(place, 6) for i in range(4)]
        expected = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        torch.testing.assert_close(table[place, order].tolist(), expected, atol=1e-6, rtol=0)


def test_scores_of_turned_patches_depend_on_how_far_they_are_apart_along_both_axes() -> None:
    model = build(config(position="rope", position_axes=2, rope_base=100.0)).double()
    cos, sin = model.encoder.position.rotation(torch.arange(36)[None])
    from regard.nn.position import rotate

    q, k = (torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 36, 8) for _ in range(2))
    turned = [rotate(x, (cos, sin), "interleaved")[0, 0] for x in (q, k)]
    scores = (turned[0] @ turned[1].T).view(6, 6, 6, 6)
    for (i, j), (di, dj) in itertools.product(itertools.product(range(4), repeat=2), itertools.product((0, 1), (0, 2))):
        torch.testing.assert_close(scores[i, j, i + di, j + dj], scores[0, 0, di, dj])
    assert abs(float(scores[0, 0, 0, 1] - scores[0, 0, 1, 0])) > 1e-3  # a step down is no step to the right


@pytest.mark.parametrize("position", ["sinusoidal", "rope"])
def test_cls_stands_apart_and_a_decoder_reads_a_line(position: str) -> None:
    seer = build(config(position=position, position_axes=2, pooling="cls", output_head="classes", classes=3)).eval()
    assert seer(torch.rand(2, 1, 12, 12)).shape == (2, 3)
    if position == "sinusoidal":
        table = seer.encoder.position.embed(torch.arange(37)[None])[0]
        assert len({tuple(row.tolist()) for row in table.round(decimals=6)}) == 37
    writer = config(
        position=position, position_axes=2, architecture="encoder-decoder", output_head="tokens", vocab_size=9
    )
    plain = config(position=position, architecture="encoder-decoder", output_head="tokens", vocab_size=9)
    pos = torch.arange(9)[None]
    own, line = (build(one).decoder.position for one in (writer, plain))
    for a, b in zip(own.rotation(pos) or [own.embed(pos)], line.rotation(pos) or [line.embed(pos)], strict=True):
        assert torch.equal(a, b)


# --- pixels


def test_pixels_are_normalised_by_channel() -> None:
    mean, std = (0.1, 0.5, 0.9), (0.2, 1.0, 3.0)
    torch.manual_seed(0)
    result = build(config(channels=3, pixel_mean=mean, pixel_std=std)).eval()
    torch.manual_seed(0)
    plain = build(config(channels=3)).eval()
    picture = torch.rand(2, 3, 12, 12)
    ready = (picture - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(result(picture), plain(ready))
    grey = build(config(pixel_mean=(0.3,), pixel_std=(0.4,)))
    grey.load_state_dict(build(config()).state_dict())
    assert grey.embedding.mean == (0.3,)


def test_means_must_fit_the_channels() -> None:
    with pytest.raises(UserError, match=r"pixel_mean = \[0.5, 0.5\].*or 3"):
        config(channels=3, pixel_mean=(0.5, 0.5), pixel_std=(1.0, 1.0))
    with pytest.raises(UserError, match=r"pixel_std = \[0.0\]: must be greater"):
        config(pixel_std=(0.0,))


def test_a_stem_is_convolutions_then_a_matrix() -> None:
    model = build(config(stem="conv", patch_size=4)).double().eval()
    assert config(stem="conv", patch_size=4).stem_widths == (8, 16)
    x = picture = torch.rand(2, 1, 12, 12, dtype=torch.float64)
    for conv, norm, _ in model.embedding.stem:
        x = F.conv2d(x, conv.weight, conv.bias, stride=2, padding=1)
        centred = x - x.mean(dim=(1, 2, 3), keepdim=True)
        x = centred / (centred.square().mean(dim=(1, 2, 3), keepdim=True) + norm.eps).sqrt()
        x = (x * norm.weight[:, None, None] + norm.bias[:, None, None]).relu()
    expected = x.flatten(2).transpose(1, 2) @ model.embedding.project.weight.flatten(1).T + model.embedding.project.bias
    torch.testing.assert_close(model.embedding(picture), expected)
    assert expected.shape == (2, 9, 16)


# --- numbers


def numbers(**changes: Any) -> ModelConfig:
    small = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 24, "dropout": 0.0, "embed_dropout": 0.0, "feature_dim": 3}
    return ModelConfig(**{**small, "input": "features", "output_head": "values", **changes})


def test_values_are_read_and_written_step_by_step_as_all_at_once() -> None:
    model = build(numbers()).double().eval()
    source, target = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
    whole = model(source, target)
    state = model.start(source)
    steps = torch.cat([model.step(target[:, at : at + 1], state) for at in range(4)], dim=1)
    torch.testing.assert_close(steps, whole)
    changed = target.clone()
    changed[:, 2:] += 1.0
    assert torch.equal(model(source, changed)[:, :2], whole[:, :2]) and whole.shape == (2, 4, 3)


def test_numbers_of_another_width_are_refused() -> None:
    with pytest.raises(UserError, match=r"features have shape \(2, 5, 4\)"):
        build(numbers())(torch.randn(2, 5, 4), torch.randn(2, 4, 3))
