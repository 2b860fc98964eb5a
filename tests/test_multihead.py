"""Multi-head attention: fused projections, a list of single heads and torch.nn.MultiheadAttention agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.nn.config import StackConfig
from regard.nn.mask import Mask, Places, Visibility, causal, everything, from_tensor, window
from regard.nn.multihead import Context, HeadList, MultiHead

CPU = torch.device("cpu")
SHAPES = [  # dim, heads, and what differs from the plain form
    (12, 3, {}),
    (8, 1, {}),
    (16, 4, {"kv_heads": 2}),
    (16, 4, {"kv_heads": 1}),
    (10, 3, {"head_dim": 5, "value_dim": 2}),
    (7, 7, {"value_dim": 3, "bias": False}),
    (12, 4, {"kv_heads": 2, "value_dim": 5, "score_scale": 0.3}),
]


def config(dim: int, heads: int, **changes: object) -> StackConfig:
    return StackConfig(dim=dim, heads=heads, position="none", **changes)


def randomised(module: nn.Module) -> nn.Module:
    """float64, with biases that are not zero."""
    module.double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def within(length: int, mask: Mask = everything, valid: Tensor | None = None) -> Context:
    places = Places.of(length, CPU, valid)
    return Context(Visibility(mask, places, places))


def across(memory: Tensor, length: int, valid: Tensor | None = None) -> Context:
    q, k = Places.of(length, CPU), Places.of(memory.shape[1], CPU, valid)
    return Context(Visibility(everything, q, q), memory=memory, memory_visibility=Visibility(everything, q, k))


def slopes(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.arange(output.numel(), dtype=output.dtype).view_as(output).cos()
    return list(torch.autograd.grad((output * weight).sum(), inputs))


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("dim", "heads", "changes"), SHAPES)
@pytest.mark.parametrize("mask", [everything, causal, causal & window(2)], ids=str)
def test_fused_projections_are_a_list_of_heads(dim: int, heads: int, changes: dict, mask: Mask) -> None:
    fused = MultiHead(config(dim, heads, **changes))
    randomised(fused)
    spelled = HeadList.of(fused)
    x = torch.randn(2, 5, dim, dtype=torch.float64, requires_grad=True)
    context = within(5, mask)
    one, other = fused(x, context), spelled(x, context.visibility.dense()[:, 0][:, None])
    torch.testing.assert_close(one, other)
    assert_close(slopes(one, [x, fused.out.weight]), slopes(other, [x, spelled.out.weight]))


def test_gradients_of_shared_key_heads_add_up() -> None:
    """A key head that serves two query heads gets the sum of what its copies would get."""
    fused = MultiHead(config(16, 4, kv_heads=2))
    randomised(fused)
    spelled, x = HeadList.of(fused), torch.randn(2, 5, 16, dtype=torch.float64)
    (own,) = slopes(fused(x, within(5)), [fused.qkv.weight])
    copies = slopes(spelled(x), [head.weight for head in spelled.heads])
    q, k, v = own.split(fused.sizes)
    assert_close([q], [torch.cat([copy[:4] for copy in copies])])
    for pair in (0, 1):
        shared = copies[2 * pair] + copies[2 * pair + 1]
        assert_close([k.chunk(2)[pair], v.chunk(2)[pair]], [shared[4:8], shared[8:12]])


def torch_form(ours: MultiHead) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(ours.config.dim, ours.config.heads, bias=ours.config.bias, batch_first=True)
    theirs.double().eval()
    linear = [ours.q, ours.kv] if ours.cross else [ours.qkv]
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([part.weight for part in linear]))
        if ours.config.bias:
            theirs.in_proj_bias.copy_(torch.cat([part.bias for part in linear]))
    theirs.out_proj.load_state_dict(ours.out.state_dict())
    return theirs


@pytest.mark.parametrize("path", ["fused", "reference"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", ["no", "causal", "padding", "both", "random"])
def test_self_attention_is_torch(masked: str, bias: bool, path: str) -> None:
    ours = MultiHead(config(12, 3, bias=bias, attention=path))
    randomised(ours)
    theirs = torch_form(ours)
    x = torch.randn(2, 6, 12, dtype=torch.float64, requires_grad=True)
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, 4:] = False
    table = torch.rand(6, 6) < 0.6
    table.fill_diagonal_(True)
    hidden = {"causal": ~torch.ones(6, 6).tril().bool(), "random": ~table}
    hidden["both"] = hidden["causal"]
    mask = {"causal": causal, "both": causal, "random": from_tensor(table)}.get(masked, everything)
    padded = masked in ("padding", "both")
    other, _ = theirs(
        x, x, x, attn_mask=hidden.get(masked), key_padding_mask=~valid if padded else None, need_weights=False
    )
    one = ours(x, within(6, mask, valid if padded else None))
    torch.testing.assert_close(one[valid], other[valid])
    weights = [ours.qkv.weight, ours.out.weight]
    assert_close(
        slopes(one * valid[..., None], [x, *weights]),
        slopes(other * valid[..., None], [x, theirs.in_proj_weight, theirs.out_proj.weight]),
    )


@pytest.mark.parametrize("lengths", [(1, 7), (5, 5), (7, 1), (3, 4)])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_is_torch(lengths: tuple[int, int], padded: bool) -> None:
    ours = MultiHead(config(12, 3), cross=True)
    randomised(ours)
    theirs = torch_form(ours)
    x = torch.randn(2, lengths[0], 12, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(2, lengths[1], 12, dtype=torch.float64, requires_grad=True)
    valid = torch.ones(2, lengths[1], dtype=torch.bool)
    valid[0, 1:] = not padded
    one = ours(x, across(memory, lengths[0], valid if padded else None))
    other, _ = theirs(x, memory, memory, key_padding_mask=~valid, need_weights=False)
    torch.testing.assert_close(one, other)
    *given, q, kv = slopes(one, [x, memory, ours.q.weight, ours.kv.weight])
    assert_close([*given, torch.cat((q, kv))], slopes(other, [x, memory, theirs.in_proj_weight]))


def test_weights_are_those_of_torch() -> None:
    ours = MultiHead(config(12, 3))
    randomised(ours)
    seen = {}
    ours.tap = lambda stage, value: seen.setdefault(stage, value)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    ours(x, within(6))
    _, weights = torch_form(ours)(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(seen["weights"], weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_padding_gives_the_output_bias(dtype: torch.dtype) -> None:
    """All keys hidden: the heads say nothing, and only the output projection's bias is left."""
    for path in ("fused", "reference"):
        layer = MultiHead(config(12, 3, attention=path))
        randomised(layer)
        layer.to(dtype)
        x = torch.randn(2, 4, 12, dtype=dtype, requires_grad=True)
        valid = torch.tensor([[True] * 4, [False] * 4])
        out = layer(x, within(4, causal, valid))
        torch.testing.assert_close(out[1], layer.out.bias.expand(4, 12))
        out.float().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all() and (x.grad[1] == 0).all()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_dropout_acts_in_training_only() -> None:
    layer = MultiHead(config(12, 3, attention_dropout=0.5))
    x = torch.randn(2, 6, 12)
    layer.train()
    assert not torch.equal(layer(x, within(6)), layer(x, within(6)))
    layer.eval()
    assert torch.equal(layer(x, within(6)), layer(x, within(6)))
