"""The cost of mixers by formula, against models that are really run: operations and states exactly, activations within
5 %."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.cost import cost
from regard.cost.measure import loss_of, random_inputs
from regard.cost.operations import visible_pairs
from regard.cost.shapes import StackShape
from regard.models.config import ModelConfig
from regard.models.transformer import build
from test_cost import counted
from test_cost_memory import kept_bytes

pytestmark = pytest.mark.grid

SMALL: dict[str, Any] = {"dim": 48, "heads": 4, "layers": 2, "ff_dim": 24, "vocab_size": 20, "max_length": 200,
                         "dropout": 0.0, "embed_dropout": 0.0}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "linear": {"mixer": "linear"},
    "linear, shared keys": {"mixer": "linear", "kv_heads": 2},
    "performer": {"mixer": "performer", "features": 20},
    "performer, shared keys": {"mixer": "performer, full", "kv_heads": 2},
    "gated-linear": {"mixer": "gated-linear", "kv_heads": 2, "value_dim": 8},
    "window": {"mixer": "window(5)", "kv_heads": 2},
    "window, dilated": {"mixer": "window(3), full", "dilation": 2},
}
ENCODERS = {
    "linformer": {"mixer": "linformer", "projected_length": 16},
    "linformer, shared keys": {"mixer": "linformer", "projected_length": 8, "kv_heads": 2},
    "fourier": {"mixer": "fourier, full"},
    "fourier, projected": {"mixer": "fourier", "embed_projection": True},
    "longformer": {"window": 9, "global_tokens": 2, "global_projections": True},
    "longformer, shared keys": {
        "mixer": "window(5), full",
        "global_tokens": 1,
        "global_projections": True,
        "kv_heads": 2,
    },
}
EVERY = [(name, architecture) for name in CASES for architecture in ("decoder", "encoder")]
EVERY += [(name, "encoder") for name in ENCODERS]


def config_of(name: str, architecture: str, **fields: Any) -> ModelConfig:
    return ModelConfig(**SMALL, **(CASES | ENCODERS)[name], architecture=architecture, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 16, 40, 150])
@pytest.mark.parametrize(("name", "architecture"), EVERY)
def test_operations(name: str, architecture: str, length: int) -> None:
    config = config_of(name, architecture, attention="reference")
    found, model = cost(config, seq=length, batch=2), build(config)
    out: list[Tensor] = []
    given = random_inputs(config, found)
    assert counted(lambda: out.append(model(*given))) == sum(found.forward.values())
    assert counted(lambda: out[0].sum().backward()) == found.backward + found.recomputed


@pytest.mark.parametrize("name", CASES)
def test_a_step_and_its_state(name: str) -> None:
    config = config_of(name, "decoder", attention="reference")
    found, model = cost(config, seq=30, batch=2, dtype="fp32"), build(config).eval()
    tokens, state = torch.randint(20, (2, 30)), model.start(capacity=30)  # type: ignore[call-arg]
    with torch.no_grad():
        model.step(tokens[:, :-1], state)  # type: ignore[union-attr]
        assert counted(lambda: model.step(tokens[:, -1:], state)) == found.step  # type: ignore[union-attr]
    assert found.kv_cache["self"] == state.cache.nbytes
    if "full" not in config.mixer:
        longer = cost(config, seq=190, batch=2, dtype="fp32")
        assert (longer.step, longer.kv_cache) == (found.step, found.kv_cache)


@pytest.mark.parametrize(("name", "architecture"), EVERY)
def test_activations(name: str, architecture: str) -> None:
    config = config_of(name, architecture)
    found, model = cost(config, seq=192, batch=2, dtype="fp32"), build(config)
    given = random_inputs(config, found)
    kept = kept_bytes(model, lambda: loss_of(config, model(*given)))
    assert kept == pytest.approx(sum(found.activations.values()), rel=0.05), found.activations


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fields", [{}, {"dilation": 2}, {"global_tokens": 2}, {"dilation": 3, "global_tokens": 1}])
@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_pairs_of_a_pattern(causal: bool, fields: dict[str, int], length: int) -> None:
    architecture: Any = "decoder" if causal else "encoder"
    config = ModelConfig(vocab_size=9, mixer="window(3), full, linear", architecture=architecture, **fields)  # type: ignore[arg-type]
    step, first = fields.get("dilation", 1), fields.get("global_tokens", 0)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    near = ((i - j).abs() < 3 * step) & ((i - j) % step == 0) | (i < first) | (j < first)
    past = (i >= j) if causal else torch.ones(length, length, dtype=torch.bool)
    assert visible_pairs(config, StackShape(architecture, 3, length)) == int((near & past).sum() + past.sum())


@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
@pytest.mark.parametrize("mixer", ["window(40)", "window(60), full"])
def test_a_long_window_is_computed_in_blocks(mixer: str, architecture: Any) -> None:
    """Only its visible pairs count, and it has no mask of all pairs; a CPU stores its output once more."""
    config = ModelConfig(**SMALL | {"max_length": 1200}, mixer=mixer, architecture=architecture, position="rope")
    found, model = cost(config, seq=1200, batch=2, dtype="fp32"), build(config)
    i, j = torch.arange(1200)[:, None], torch.arange(1200)
    visible = [(i - j).abs() < (config.window_of(layer) or 1200) for layer in range(2)]
    if architecture == "decoder":  # full attention counts all pairs, masked or not
        visible = [one if config.window_of(layer) is None else one & (i >= j) for layer, one in enumerate(visible)]
    assert found.forward[f"{architecture}.scores"] == 2 * 2 * 4 * 24 * sum(int(one.sum()) for one in visible)
    twice = sum(config.window_of(layer) is not None for layer in range(2)) * 2 * 1200 * 48 * 4
    kept = kept_bytes(model, lambda: loss_of(config, model(*random_inputs(config, found))))
    assert kept == pytest.approx(sum(found.activations.values()) + twice, rel=0.05)


def test_growth() -> None:
    """Twice the tokens: twice the operations of a linear mixer, four times the scores of attention."""
    few, many = (cost(config_of("linear", "decoder"), seq=n, batch=1) for n in (6400, 12800))
    assert many.forward["decoder.mixing"] == 2 * few.forward["decoder.mixing"]
    full = [cost(ModelConfig(**SMALL, architecture="decoder"), seq=n).forward["decoder.scores"] for n in (6400, 12800)]
    assert full[1] == 4 * full[0]
    long = [cost(ModelConfig(**SMALL, mixer="window(64)", architecture="decoder"), seq=n) for n in (6400, 12800)]
    assert long[1].forward["decoder.scores"] < 2.02 * long[0].forward["decoder.scores"]
    assert long[1].kv_cache == long[0].kv_cache and long[0].masked == 0
