"""Parameters and operations by formula, against models that are really built and run: equal to the last digit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cost_models import CASES, drawn, sizes, small
from regard.cost import cost
from regard.cost.measure import random_inputs
from regard.cost.operations import visible_pairs
from regard.cost.shapes import StackShape
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.recipe import PRESETS, preset
from regard.models.transformer import build
from regard.nn.mask import AttentionMask, Positions, causal, everything, window

pytestmark = pytest.mark.grid


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def parameters_of(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


# --- parameters


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_every_preset(name):
    assert sum(cost(preset(name)).parameters.values()) == parameters_of(preset(name))


def test_parameters_of_random_configs():
    for config in drawn(150):
        assert sum(cost(config).parameters.values()) == parameters_of(config), config


@pytest.mark.parametrize("name", CASES)
def test_parameters_of_each_part(name):
    config = small(name, **({"attention": "reference"} if "attention_score" in CASES[name] else {}))
    model, found = build(config), cost(config)
    for part, count in found.parameters.items():
        if "." in part and not part.endswith("norms"):
            stack, kind = part.split(".")
            blocks = getattr(model, stack).blocks
            assert count == sum(p.numel() for block in blocks for p in getattr(block, kind).parameters()), part
    every = model.named_modules()  # those of queries and keys are part of their attention
    own = ("q_norm", "k_norm", "heads_norm")
    norms = [m for name, m in every if isinstance(m, nn.LayerNorm | nn.RMSNorm) and not name.endswith(own)]
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    head_norm = 2 * config.dim if config.head_layer and config.output_head == "tokens" else 0
    count = sum(found.parameters.get(f"{stack}.norms", 0) for stack in ("encoder", "decoder"))
    assert count + head_norm == sum(p.numel() for norm in norms for p in norm.parameters())
    assert found.table_parameters == sum(p.numel() for p in {table.weight for table in tables})


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200),
        ("bert-base", 109_482_240), ("bert-large", 335_141_888), ("t5-small", 60_506_624), ("t5-base", 222_903_552),
        ("vit-base", 86_567_656), ("base", 63_082_496),
    ],
)  # fmt: skip
def test_published_parameters(name, published):
    assert sum(cost(preset(name)).parameters.values()) == published


def test_experts_count_once_for_each_token_that_uses_them():
    sparse = cost(small("experts"))
    dense = cost(small("experts", experts=2, experts_per_token=2))
    router = 2 * 16  # layers · dim, for the third expert's row
    assert sparse.active_parameters == dense.active_parameters + router
    assert dense.active_parameters == sum(dense.parameters.values()) < sum(sparse.parameters.values())


# --- operations


@pytest.mark.parametrize("name", CASES)
def test_operations_forward_and_backward(name):
    config = small(name, attention="reference")
    found, model = cost(config, **sizes(config)), build(config)
    given = random_inputs(config, found)
    out: list[Tensor] = []
    assert counted(lambda: out.append(model(*given))) == sum(found.forward.values())
    assert counted(lambda: out[0].sum().backward()) == found.backward + found.recomputed
    assert (found.recomputed > 0) == ("linear" in config.mixer or "performer" in config.mixer)


def test_operations_of_random_configs():
    for config in drawn(60, seed=1):
        found, model = cost(config, **sizes(config)), build(config)
        given = random_inputs(config, found)
        assert counted(lambda m=model, x=given: m(*x)) == sum(found.forward.values()), config


@pytest.mark.parametrize("name", ["encoder-decoder", "grouped queries", "swiglu", "vit"])
def test_fused_operations_on_a_cpu(name):
    """The counter does not know the CPU's fused kernel, so it sees all but the scores."""
    config = small(name)
    found, model = cost(config, **sizes(config)), build(config)
    seen = sum(count for part, count in found.forward.items() if not part.endswith("scores"))
    assert counted(lambda: model(*random_inputs(config, found))) == seen


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["encoder-decoder", "decoder", "gpt", "vit", "window"])
def test_fused_operations_on_a_gpu(name):
    config = small(name, dim=64)
    found, model = cost(config, **sizes(config)), build(config).cuda()
    given = random_inputs(config, found, "cuda")
    out: list[Tensor] = []
    assert counted(lambda: out.append(model(*given))) == sum(found.forward.values())
    assert counted(lambda: out[0].sum().backward()) == found.backward + found.recomputed


@pytest.mark.parametrize("name", ["encoder-decoder", "gpt", "grouped queries", "relative", "additive", "experts"])
def test_operations_of_a_step_beside_a_full_cache(name):
    config = small(name, attention="reference")
    found, model = cost(config, **sizes(config)), build(config).eval()
    *source, tokens = random_inputs(config, found)
    state = model.start(*source)
    model.step(tokens[:, :-1], state)
    assert counted(lambda: model.step(tokens[:, -1:], state)) == found.step


@pytest.mark.parametrize("reach", [None, 1, 3, 7, 50])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_visible_pairs_are_those_of_the_mask(name, reach):
    positions = Positions.of(7, torch.device("cpu"))
    mask = (causal if name == "decoder" else everything) & (everything if reach is None else window(reach))
    visible = AttentionMask(mask, positions, positions).dense().expand(1, 1, 7, 7).sum().item()
    config = ModelConfig(vocab_size=9, window=reach, attention="flex", architecture=name, layers=1)
    assert visible_pairs(config, StackShape(name, 1, 7)) == visible
    full, sparse = (cost(replace(config, attention=path), seq=7) for path in ("fused", "flex"))
    per_pair = 2 * config.heads * (config.key_dim + config.val_dim)
    assert sparse.forward[f"{name}.scores"] == per_pair * visible
    assert full.forward[f"{name}.scores"] - full.masked == per_pair * visible


def test_published_operations():
    # torchvision lists 17.56 G multiply-adds for ViT-B/16
    assert sum(cost(preset("vit-base")).forward.values()) / 2 == pytest.approx(17.56e9, rel=1e-3)
    # nanoGPT and PaLM's appendix B: 6·N + 12·layers·dim·length operations a token
    gpt = cost(preset("gpt2"), seq=1024)
    rule = 6 * gpt.multiplied_parameters + 12 * 12 * 768 * 1024
    assert gpt.multiplied_parameters == 124_439_808 - 1024 * 768
    assert gpt.train / gpt.tokens == pytest.approx(rule, rel=2e-3)


# --- lengths


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("gpt2", {"seq": 1025}, "seq = 1025: longer than max_length = 1024"),
        ("base", {"seq": 0}, "seq = 0: must be 1 or more"),
        ("base", {"seq": 5, "target_seq": 0}, "target_seq = 0: must be 1 or more"),
        ("base", {"batch": 0}, "batch = 0: must be 1 or more"),
        ("gpt2", {"target_seq": 5}, "target_seq = 5: architecture = 'decoder' has one sequence"),
        ("vit-base", {"seq": 64}, "seq = 64: an image of 224 x 224 in patches of 16 has 197 positions"),
        ("base", {"dtype": "bf61"}, "dtype = 'bf61': .*did you mean 'bf16'"),
        ("base", {"seq": 10**70}, "exceed 1e60"),
    ],
)
def test_lengths_that_cannot_be(name, given, message):
    with pytest.raises(UserError, match=message):
        cost(preset(name), **given)


def test_lengths_that_are_not_given():
    assert cost(preset("gpt2")).seq == 1024
    assert cost(preset("vit-base")).seq == 197
    assert (cost(preset("base"), seq=30).target_seq, cost(preset("base"), seq=30, target_seq=9).tokens) == (30, 9)
