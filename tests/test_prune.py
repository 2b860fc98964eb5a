"""Pruning: a model without heads computes what it computed with those heads off, and is smaller by what they held."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import regard
from regard.cost import cost
from regard.cost.operations import count_parameters
from regard.errors import UserError
from regard.interop.convert import config_to_hf
from regard.models.config import ModelConfig
from regard.models.prune import prune
from regard.models.transformer import build
from regard.nn.multihead import HeadList
from regard.nn.trace import trace, zero_heads
from regard.predict.beam import beam
from regard.predict.config import SearchConfig

pytestmark = pytest.mark.grid

POSITIONS = ("sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none")
OFF = {
    "encoder": {"encoder.0.attention": [1], "encoder.1.attention": [0, 1, 2]},
    "decoder": {"decoder.0.attention": [1], "decoder.1.attention": [0, 1, 2]},
    "encoder-decoder": {"encoder.0.attention": [0, 3], "decoder.0.attention": [2], "decoder.1.cross": [0, 2]},
}


def make(architecture: str, **changes: object):
    values = {
        "dim": 16,
        "layers": 2,
        "heads": 4,
        "ff_dim": 24,
        "vocab_size": 11,
        "max_length": 32,
        "architecture": architecture,
    }
    torch.manual_seed(0)
    return build(ModelConfig(**{**values, **changes})).double().eval()


def inputs(architecture: str) -> tuple[torch.Tensor, ...]:
    return (
        (torch.randint(11, (2, 6)), torch.randint(11, (2, 5)))
        if architecture == "encoder-decoder"
        else (torch.randint(11, (2, 6)),)
    )


def with_heads_off(model, off: dict[str, list[int]], given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with torch.no_grad(), trace(model, {f"{place}.heads": zero_heads(*heads) for place, heads in off.items()}):
        return model(*given)


KINDS = [
    {"position": position, "kv_heads": kv_heads, "bias": bias}
    for position, kv_heads, bias in itertools.product(POSITIONS, (None, 2, 1), (True, False))
] + [{"attention_score": score, "attention": "reference"} for score in ("multiplicative", "additive", "concat")]
KINDS.append({"qk_norm": True, "position": "rope", "kv_heads": 2})


@pytest.mark.parametrize("architecture", OFF)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_a_pruned_model_is_the_model_with_those_heads_off(architecture: str, kind: dict[str, object]) -> None:
    model, given = make(architecture, value_dim=3, **kind), inputs(architecture)
    small = prune(model, OFF[architecture])
    wanted = with_heads_off(model, OFF[architecture], given)
    with torch.no_grad():
        torch.testing.assert_close(small(*given), wanted)
        with trace(small):  # the written-out path, too
            torch.testing.assert_close(small(*given), wanted)
    size = sum(parameter.numel() for parameter in small.parameters())
    assert size < sum(parameter.numel() for parameter in model.parameters())
    assert size == sum(count_parameters(small.config).values())


@pytest.mark.parametrize("kind", [{}, {"kv_heads": 2}, {"position": "t5"}, {"position": "alibi", "attention": "flex"}])
def test_a_pruned_model_generates_with_its_cache(kind: dict[str, object]) -> None:
    model = make("decoder", **kind)
    small, tokens = prune(model, OFF["decoder"]), torch.randint(11, (2, 6))
    state = small.start()
    with torch.no_grad():
        steps = torch.cat([small.step(tokens[:, at : at + 1], state) for at in range(6)], dim=1)
    torch.testing.assert_close(steps, with_heads_off(model, OFF["decoder"], (tokens,)))


@pytest.mark.parametrize("architecture", OFF)
def test_saved_loaded_and_pruned_again(architecture: str, tmp_path: Path) -> None:
    """Heads are numbered as they are now; the config keeps their original numbers."""
    model, given = make(architecture), inputs(architecture)
    small = prune(model, OFF[architecture])
    regard.save(small, tmp_path)
    loaded = regard.load(tmp_path).model
    assert torch.equal(loaded(*given), small(*given)) and loaded.config == small.config
    place, gone = next(iter(OFF[architecture].items()))
    again = {place: [0]}
    wanted = with_heads_off(small, again, given)
    smaller = prune(loaded, again)
    torch.testing.assert_close(smaller(*given), wanted)
    born = next(head for head in range(4) if head not in gone)
    assert smaller.config.pruned[place] == tuple(sorted([*gone, born]))


def test_training_continues_after_pruning() -> None:
    small = prune(make("decoder"), OFF["decoder"]).train()
    small(torch.randint(11, (2, 6))).sum().backward()
    assert all(parameter.grad is not None for parameter in small.parameters())


def test_pruning_leaves_the_model_and_the_seed_alone() -> None:
    model = make("decoder").float()
    before, state = [parameter.clone() for parameter in model.parameters()], torch.get_rng_state()
    small = prune(model, OFF["decoder"])
    assert torch.equal(torch.get_rng_state(), state) and small.output_head.project.weight.dtype == torch.float32
    assert all(torch.equal(own, old) for own, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({"decoder.0.attention": [4]}, "no head 4; its heads are 0 to 3"),
        ({"decoder.0.attention": [0, 1, 2, 3]}, "at least one"),
        ({"encoder.0.attention": [0]}, "this model has no encoder.0.attention"),
    ],
)
def test_invalid_heads_are_reported(heads: dict[str, list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prune(make("decoder"), heads)


@pytest.mark.parametrize(
    ("pruned", "message"),
    [
        ({"decoder.0": (1,)}, "is not a layer"),
        ({"decoder.7.attention": (1,)}, "this model has no decoder.7.attention"),
        ({"decoder.0.cross": (1,)}, "this model has no decoder.0.cross"),
        ({"decoder.0.attention": (4,)}, "its heads are 0 to 3"),
        ({"decoder.0.attention": (0, 1, 2, 3)}, "keep at least one"),
    ],
)
def test_a_config_with_wrong_heads_is_refused(pruned: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make("decoder", pruned=pruned)


def test_exports_refuse_pruned_models() -> None:
    small = prune(make("decoder", norm_order="pre", position="learned"), {"decoder.0.attention": [1]})
    with pytest.raises(UserError, match="pruned"):
        cost(small.config)
    with pytest.raises(UserError, match="pruned"):
        config_to_hf(small.config)
    with pytest.raises(UserError, match="pruned heads"):
        HeadList.of(small.decoder.blocks[0].attention)
    with pytest.raises(UserError, match="one head"):
        prune(build(ModelConfig(architecture="recurrent", vocab_size=11, dim=8)), {"decoder.cross": [0]})


@pytest.mark.parametrize("kind", [{}, {"kv_heads": 2}])
def test_a_pruned_model_is_searched_as_the_model_with_those_heads_off(kind: dict[str, object]) -> None:
    """Beam search, whose beams share the keys of their sentence."""
    off = OFF["encoder-decoder"]
    model, source = make("encoder-decoder", **kind), torch.randint(11, (3, 6))
    config = SearchConfig(beam=3, n_best=3, max_length=6)
    with trace(model, {f"{place}.heads": zero_heads(*heads) for place, heads in off.items()}, only="encoder.output"):
        wanted = beam(model, source, None, config, 2, 3)
    for own, other in zip(beam(prune(model, off), source, None, config, 2, 3), wanted, strict=True):
        assert [one.tokens for one in own] == [one.tokens for one in other]
        assert [one.score for one in own] == pytest.approx([one.score for one in other])
