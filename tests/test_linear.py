"""The linear map by oneDNN: the numbers and gradients of nn.Linear, wherever nn.Linear works."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.nn import linear as module
from regard.nn.linear import ROWS, Linear, linear

MANY = ROWS
oneDNN = pytest.mark.skipif(not module._available(), reason="a build of PyTorch without MKL or oneDNN")


def kernel_of(y: Tensor) -> str:
    assert y.grad_fn is not None
    return type(y.grad_fn).__name__


def inputs(*shape: int, out: int = 5, bias: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(out, shape[-1], dtype=dtype)
    return [
        x.requires_grad_(),
        weight.requires_grad_(),
        torch.randn(out, dtype=dtype).requires_grad_() if bias else None,
    ]


def check(given: list[Tensor | None]) -> None:
    """Values and gradients are those of the formula in double precision."""
    y = linear(*given)
    wide = [None if one is None else one.detach().double().requires_grad_() for one in given]
    expected = wide[0] @ wide[1].T + (0.0 if wide[2] is None else wide[2])
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    outer = torch.randn_like(y)
    found = torch.autograd.grad(y, [one for one in given if one is not None], outer)
    right = torch.autograd.grad(expected, [one for one in wide if one is not None], outer.double())
    for ours, theirs in zip(found, right, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@oneDNN
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_full_multiples_take_onednn_and_everything_else_does_not():
    x, weight, bias = inputs(MANY, 3)
    assert kernel_of(linear(x, weight, bias)) == "_ProductBackward"
    others = [linear(x[:-1], weight, bias), linear(*inputs(MANY, 3, dtype=torch.float64))]
    with torch.autocast("cpu", torch.bfloat16):
        others.append(linear(x, weight, bias))
        assert others[-1].dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        others.append(linear(x, weight, bias))
    assert {kernel_of(other) for other in others} <= {"AddmmBackward0", "ToCopyBackward0"}
    assert linear(x.to("meta"), weight.to("meta"), bias.to("meta")).shape == (MANY, 5)


@pytest.mark.parametrize(
    "shape", [(MANY, 1), (3 * MANY, 3), (1, MANY, 7), (16, 48, 33), (2, 4, 32, 64), (128, 1, 2, 16), (MANY + 1, 9)]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [1, 5, 64])
def test_values_and_gradients(shape, bias, out):
    check(inputs(*shape, out=out, bias=bias))


@pytest.mark.parametrize("shape", [(3,), (0, 3), (2, 0, 3), (MANY, 0), (0, 0)])
def test_shapes_without_rows_or_columns(shape):
    given = inputs(*shape)
    y = linear(*given)
    torch.testing.assert_close(y, F.linear(*given))
    expected = torch.autograd.grad(F.linear(*given).sum(), given)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), given), expected)


def test_whatever_lies_oddly_in_memory():
    x, weight, bias = inputs(MANY, 6)
    check([x.detach().T.contiguous().T.requires_grad_(), weight, bias])  # columns
    check([x, weight.detach().T.contiguous().T.requires_grad_(), bias])  # as generation keeps it: `lay_columns`
    check([torch.randn(MANY, 12)[:, ::2].requires_grad_(), torch.randn(10, 6)[::2].requires_grad_(), bias])
    check([torch.randn(4, MANY, 6).transpose(0, 1).requires_grad_(), weight, torch.randn(10)[::2].requires_grad_()])
    check([torch.randn(1, 6).expand(MANY, 6).requires_grad_(), weight, torch.randn(1).expand(5).requires_grad_()])
    check([torch.randn(MANY * 6 + 1)[1:].view(MANY, 6).requires_grad_(), weight, bias])  # no round address
    plain = torch.autograd.grad(F.linear(x, weight, bias).sum(), (x, weight, bias))  # an expanded gradient
    torch.testing.assert_close(torch.autograd.grad(linear(x, weight, bias).sum(), (x, weight, bias)), plain)


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (torch.ones(5, 4), None),
        (torch.ones(5, 3), torch.ones(2)),
        (torch.ones(5, 3), torch.ones(5).double()),
        (torch.ones(5, 3).double(), None),
    ],
)
def test_what_does_not_fit_is_refused_as_nn_linear_refuses_it(weight, bias):
    x = torch.ones(MANY, 3)
    with pytest.raises(RuntimeError) as theirs:
        F.linear(x, weight, bias)
    with pytest.raises(RuntimeError) as ours:
        linear(x, weight, bias)
    assert str(ours.value) == str(theirs.value)


def test_only_what_is_asked_for_has_a_gradient():
    x, weight, bias = inputs(MANY, 3)
    frozen = Linear(3, 5)
    frozen.requires_grad_(False)
    frozen(x).sum().backward()
    assert frozen.weight.grad is None and x.grad is not None
    linear(x.detach(), weight, bias).sum().backward()
    assert weight.grad is not None and bias.grad is not None
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))


def test_gradients_have_gradients():
    x, weight, bias = inputs(MANY, 3)

    def penalty(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        y = run(x, weight, bias)
        slope = torch.autograd.grad((y**3).sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum((part**2).mean() for part in slope), (x, weight, bias))

    torch.testing.assert_close(penalty(linear), penalty(F.linear), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func():
    x, weight, bias = (one.detach() for one in inputs(4, MANY, 3))
    for transform in (torch.func.grad, torch.func.jacrev):
        expected = transform(lambda w: F.linear(x, w, bias).square().sum())(weight)
        found = transform(lambda w: linear(x, w, bias).square().sum())(weight)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    each = torch.func.vmap(lambda row: linear(row, weight, bias))(x)
    torch.testing.assert_close(each, F.linear(x, weight, bias))
    per_sample = torch.func.vmap(torch.func.grad(lambda w, row: linear(row, w, bias).square().sum()), (None, 0))
    plain = torch.func.vmap(torch.func.grad(lambda w, row: F.linear(row, w, bias).square().sum()), (None, 0))
    torch.testing.assert_close(per_sample(weight, x), plain(weight, x), rtol=1e-4, atol=1e-3)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_forward_mode():
    """∂y along a direction of each argument, and what is made of it: Hessians, dual numbers."""
    given = x, weight, bias = tuple(one.detach() for one in inputs(2, MANY, 3))
    along = tuple(one.cos() for one in given)
    torch.testing.assert_close(torch.func.jvp(linear, given, along), torch.func.jvp(F.linear, given, along))
    found, expected = (
        torch.func.hessian(lambda w, run=run: run(x, w, bias).square().sum())(weight) for run in (linear, F.linear)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    with torch.autograd.forward_ad.dual_level():
        moving = torch.autograd.forward_ad.make_dual(x, x)
        slope = torch.autograd.forward_ad.unpack_dual(linear(moving, weight)).tangent
    torch.testing.assert_close(slope, F.linear(x, weight))


def test_the_same_numbers_every_time():
    given = inputs(2 * MANY, 96, out=160)
    first = linear(*given)
    outer = torch.randn_like(first)
    expected = torch.autograd.grad(first, given, outer)
    for _ in range(3):
        moved = [one.detach().clone().requires_grad_() for one in given]
        again = linear(*moved)
        assert torch.equal(again, first)
        assert all(map(torch.equal, torch.autograd.grad(again, moved, outer), expected))


def test_checkpointing_hooks_and_copies():
    torch.manual_seed(0)
    model = nn.Sequential(Linear(6, 24), nn.GELU(), Linear(24, 6))
    twin = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 6))
    twin.load_state_dict(model.state_dict())
    assert isinstance(copy.deepcopy(model)[0], Linear)
    seen: list[tuple[int, ...]] = []
    model[2].register_forward_hook(lambda layer, given, y: seen.append(tuple(y.shape)))
    model[0].register_full_backward_hook(lambda layer, inward, outward: seen.append(tuple(outward[0].shape)))
    x = torch.randn(2, MANY, 6, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    assert seen == [(2, MANY, 6), (2, MANY, 24)]
    gradient, x.grad = x.grad, None
    twin(x).square().sum().backward()
    torch.testing.assert_close(gradient, x.grad)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_compiler_sees_the_usual_operation():
    x, weight, bias = inputs(MANY, 3)
    layer = Linear(3, 5)
    with torch.no_grad():
        layer.weight.copy_(weight), layer.bias.copy_(bias)
    exported = torch.export.export(layer, (x.detach(),))
    assert "mkldnn" not in exported.graph_module.code
    torch.testing.assert_close(exported.module()(x), F.linear(x, weight, bias))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), F.linear(x, weight, bias))
