"""Dropout on a CPU: the distribution and the gradient of the formula."""

from __future__ import annotations

import pytest
import torch

from regard.nn.dropout import dropout


@pytest.mark.parametrize("chance", [0.0, 0.001, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_how_many_are_left_out_and_what_becomes_of_the_rest(chance):
    torch.manual_seed(0)
    x = torch.randn(1000, 1001, dtype=torch.float64)
    y = dropout(x, chance)
    gone = (y == 0).double().mean().item()
    assert gone == pytest.approx(chance, abs=5 * (chance * (1 - chance) / x.numel()) ** 0.5 + 1 / 2**17)
    if chance < 1:
        torch.testing.assert_close(y[y != 0], x[y != 0] / (1 - chance))


def test_each_element_is_decided_apart():
    """Neighbours share a draw of 64 bits, but not its outcome: pairs at every distance are independent."""
    torch.manual_seed(1)
    kept = (dropout(torch.ones(1 << 20), 0.3) != 0).double()
    for distance in (1, 2, 3, 4, 5, 8, 64):
        both = (kept[:-distance] * kept[distance:]).mean().item()
        assert both == pytest.approx(0.49, abs=0.003)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (0,), (2, 0, 3), (2, 3, 5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_shape_and_type(shape, dtype):
    y = dropout(torch.ones(shape, dtype=dtype), 0.5)
    assert y.shape == shape and y.dtype == dtype
    assert set(y.flatten().tolist()) <= {0.0, 2.0}


def test_the_gradient_is_the_mask():
    x = torch.randn(50, 3, requires_grad=True)
    y = dropout(x, 0.4)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient * x, y)


def test_the_seed_decides():
    x = torch.ones(100)
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(dropout(x, 0.5))
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
