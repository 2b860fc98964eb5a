"""The error of random features: it falls as the paper says, and the committed result is complete."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import performer

from regard.nn.config import StackConfig
from regard.nn.linear_attention import LinearAttention
from regard.nn.mask import AttentionMask, Positions, everything
from regard.nn.multihead import Context

ROOT = Path(__file__).parent.parent


def test_the_error_falls_with_the_root_of_the_number_of_features() -> None:
    """A sixteenth of the variance is a quarter of the error."""
    few, many = (performer.measured("orthogonal", count, 5, 0.5)["weights"] for count in (128, 2048))
    assert 0.18 < many / few < 0.4


def test_the_layer_computes_what_is_measured() -> None:
    torch.manual_seed(0)
    layer = LinearAttention(StackConfig(dim=16, heads=1, mixer="performer", features=64), kind="performer").double()
    q, k, v = torch.randn(3, 1, 1, 20, 16, dtype=torch.float64)
    positions = Positions.of(20, torch.device("cpu"))
    context = Context(AttentionMask(everything, positions, positions))
    ours = layer.mix(q, q[:, :, None], k[:, :, None], v[:, :, None], context)[0, 0, 0]
    weights = performer.weights(q[0, 0] / 2, k[0, 0] / 2, layer.features, "orthogonal")  # 16^(-1/4) = 1/2
    torch.testing.assert_close(ours, weights @ v[0, 0])


def test_the_result_file() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "performer-cpu.json").read_text())
    assert {(row["features"], row["scale"]) for row in result["rows"]} == {
        (kind, scale) for kind in performer.KINDS for scale in (0.5, 1.0)
    }
    near = [row for row in result["rows"] if row["features"] == "orthogonal" and row["scale"] == 0.5]
    assert performer.slope(near[3:]) == pytest.approx(-0.5, abs=0.1)
