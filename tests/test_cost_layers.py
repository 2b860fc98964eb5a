"""Table 1 of the paper: the formulas against counted operations, real gradients and the numbers of the paper."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from regard.cli import main
from regard.cost.layer_modules import build_layer
from regard.cost.layers import (
    ATTENTION,
    CONVOLUTION,
    DILATED,
    GRU,
    LSTM,
    RESTRICTED,
    TABLE,
    LayerSizes,
    complexity,
    crossing,
    first_above,
    fitted,
    operations,
    path_length,
    sequential_operations,
)
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Positions, window
from regard.nn.multihead import Context, MultiHead

SIZES = LayerSizes(dim=16, heads=4, kernel=5, window=7)


def run(capsys, *arguments: str) -> str:
    assert main(["cost", "--layers", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("n", [1, 3, 7, 20, 35])
@pytest.mark.parametrize("kind", TABLE)
def test_operations_are_those_that_pytorch_counts(kind, n):
    layer, x = build_layer(kind, SIZES, attention="reference"), torch.randn(2, n, SIZES.dim)
    # oneDNN's recurrent layer is a single operation that the counter does not know
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        assert layer(x).shape == x.shape
    assert counter.get_total_flops() == 2 * operations(kind, SIZES, n)


@pytest.mark.parametrize("n", [1, 2, 6, 7, 8, 30])
@pytest.mark.parametrize("path", ["fused", "reference"])
def test_restricted_attention_is_attention_with_a_window(n, path):
    restricted, x = build_layer(RESTRICTED, SIZES, attention=path), torch.randn(3, n, SIZES.dim)
    full = MultiHead(StackConfig(dim=SIZES.dim, heads=SIZES.heads, attention="reference"))
    full.load_state_dict(restricted.state_dict())
    positions = Positions.of(n, x.device)
    expected = full(x, Context(AttentionMask(window(4), positions, positions)))  # 3 on each side
    torch.testing.assert_close(restricted(x), expected)


@pytest.mark.parametrize("kind", [ATTENTION, RESTRICTED, CONVOLUTION, DILATED])
@pytest.mark.parametrize("n", [2, 13, 40])
def test_a_signal_needs_as_many_layers_as_the_path_is_long(kind, n):
    """The gradient of the last output reaches the first input through `path_length` layers, not through fewer."""
    torch.manual_seed(0)
    length = path_length(kind, SIZES, n)
    for layers in {max(1, length - 1), length}:
        stack = nn.Sequential(*(build_layer(kind, SIZES, dilation=SIZES.kernel**i) for i in range(layers))).double()
        x = torch.randn(1, n, SIZES.dim, dtype=torch.double, requires_grad=True)
        stack(x)[0, -1].sum().backward()
        assert (x.grad[0, 0].abs().max() > 0) == (layers == length)


@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_a_recurrent_layer_has_a_path_of_n_steps(kind):
    assert path_length(kind, SIZES, 50) == sequential_operations(kind, 50) == 50
    x = torch.randn(1, 50, SIZES.dim, requires_grad=True)
    build_layer(kind, SIZES)(x)[0, -1].sum().backward()
    assert (x.grad[0, 0].abs().max() > 0).item()


def test_the_orders_of_growth_of_the_paper():
    sizes = LayerSizes(dim=512, kernel=3, window=65)
    # self-attention is faster than a recurrent layer when n < d (section 4)
    assert complexity(ATTENTION, sizes, 511) < complexity(LSTM, sizes, 511)
    assert complexity(ATTENTION, sizes, 512) == complexity(LSTM, sizes, 512) == 512**3
    # "convolutional layers are generally more expensive than recurrent layers, by a factor of k"
    assert complexity(CONVOLUTION, sizes, 100) == 3 * complexity(GRU, sizes, 100)
    assert complexity(RESTRICTED, sizes, 1000) == 65 * 1000 * 512
    assert {TABLE[kind].path for kind in (CONVOLUTION, DILATED)} == {"n/k", "log_k(n)"}
    assert [sequential_operations(kind, 9) for kind in TABLE] == [1, 1, 9, 9, 1, 1]
    # doubling the length: n² grows fourfold, the others twofold, the path of a dilated stack by log_3(2) layers
    for kind in TABLE:
        assert complexity(kind, sizes, 2000) / complexity(kind, sizes, 1000) == (4 if kind == ATTENTION else 2)
    assert [path_length(DILATED, sizes, n) for n in (3, 4, 9, 27, 28)] == [1, 2, 2, 3, 4]


def test_crossings():
    sizes = LayerSizes(dim=512, kernel=3, window=65)

    def above(cost, kind):
        return first_above(lambda n: cost(ATTENTION, sizes, n), lambda n: cost(kind, sizes, n))

    assert above(complexity, LSTM) == 513 and above(complexity, CONVOLUTION) == 3 * 512 + 1
    assert above(operations, LSTM) == 2 * 512 + 1  # 8·n·d² + 4·n²·d = 16·n·d²
    assert above(operations, GRU) == 512 + 1
    assert above(operations, CONVOLUTION) == 1  # the projections alone cost more than a convolution with k = 3
    assert first_above(lambda n: n, lambda n: 2 * n) is None
    ns = [16, 64, 256, 1024]
    assert crossing(ns, [n * n for n in ns], [100 * n for n in ns]) == pytest.approx(100)
    assert crossing(ns, [n * n for n in ns], [1] * 4) == 16
    assert crossing(ns, ns, [n * n for n in ns]) is None and crossing([], [], []) is None
    # noise at the beginning: the last change counts
    assert 256 < crossing(ns, [2, 1, 1, 4], [1, 2, 2, 2]) < 1024


def test_the_theory_line_goes_through_the_upper_half():
    assert fitted([5.0, 5.0, 8.0, 16.0], [1, 2, 4, 8]) == pytest.approx(2)
    assert fitted([3.0], [1.5]) == pytest.approx(2)


def test_the_tables(capsys, tmp_path):
    file = tmp_path / "layers.csv"
    text = run(capsys, "--sweep", "seq=256:1024", "--csv", str(file))
    assert text.startswith("one layer: d = 512, 8 heads, kernel k = 3, neighbourhood r = 65, batch 1\n")
    assert "dilated convolution   k·n·d²      1                      log_k(n)" in text
    assert "LSTM                            n > 512                 n > 1,024" in text
    rows = list(csv.DictReader(file.open()))
    assert len(rows) == 3 * len(TABLE)
    assert rows[0] == {
        "layer": "self-attention", "n": "256", "complexity": str(256 * 256 * 512), "sequential_operations": "1",
        "path_length": "1", "forward_flops": str(8 * 256 * 512**2 + 4 * 256**2 * 512),
    }  # fmt: skip


def test_measured_layers_and_their_plot(capsys, tmp_path):
    plot = tmp_path / "layers.svg"
    arguments = ("--dim", "16", "--window", "9", "--sweep", "seq=16:64", "--measure", "--device", "cpu")
    result = json.loads(run(capsys, *arguments, "--batch", "2", "--json", "--plot", str(plot)))
    assert result["sizes"] == {"dim": 16, "heads": 8, "kernel": 3, "window": 9} and result["stopped"] == []
    assert all(0 < row["seconds"] < 5 and row["peak_bytes"] > 2 * row["n"] * 16 * 4 for row in result["rows"])
    assert set(result["crossings"]["LSTM"]) == {"formula", "flops", "time"}
    labels = [element.text for element in ElementTree.fromstring(plot.read_text()).iter() if element.text]
    assert any(label.startswith("n = 32:") and "LSTM" in label for label in labels)  # 2·d
    assert any("thin: constant · FLOPs" in label for label in labels)


def test_measuring_layers_stops_at_its_limits(capsys):
    text = run(capsys, "--dim", "16", "--sweep", "seq=32", "--measure", "--device", "cpu", "--max-seconds", "1e-9")
    assert text.splitlines()[-1].startswith("dilated convolution: measuring stopped at n = 32: it would take")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["base"], ["--layers compares single layers", "remove 'base'"]),
        (["--set", "heads=2"], ["remove --set"]),
        (["--kernel", "1"], ["kernel = 1", "use 3"]),
        (["--window", "1"], ["window = 1", "use 3"]),
        (["--window", "64"], ["window = 64", "use 65"]),
        (["--dim", "0"], ["--dim 0: must be 1 or more"]),
        (["--seq", "8"], ["--seq 8", "--sweep seq=8"]),
        (["--sweep", "batch=1,2"], ["over the length"]),
        (["--sweep", "seq=0,1"], ["must be 1 or more"]),
        (["--batch", "0"], ["must be 1 or more"]),
        (["--plot", "a.gif"], [".svg or .png"]),
    ],
)
def test_errors_are_one_line_with_the_remedy(capsys, monkeypatch, tmp_path, arguments, parts):
    monkeypatch.chdir(tmp_path)
    assert main(["cost", "--layers", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err
