"""Multi-head attention: fused projections, a list of single heads and torch.nn.MultiheadAttention agree."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from odd_shapes import (
    DTYPES,
    GRADIENTS,
    HIDDEN,
    VALUES,
    Shape,
    assert_close,
    assert_same,
    attention_pairs,
    copy_pairs,
    hide,
    keep_real,
    key_padding_mask,
    random_is_real,
    shapes,
    slopes,
)
from regard.errors import UserError
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Mask, Positions, causal, everything, from_tensor, window
from regard.nn.multihead import Context, HeadList, MultiHead
from regard.nn.position import Rotary
from regard.nn.trace import trace

pytestmark = pytest.mark.grid

CPU = torch.device("cpu")
SHAPES = shapes(24)


def config(dim: int, heads: int, **changes: object) -> StackConfig:
    return StackConfig(dim=dim, heads=heads, position="none", **changes)


def randomised(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Sums of size 1, and biases that are not zero."""
    module.to(dtype).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5)
    return module


def within(length: int, mask: Mask = everything, is_real: Tensor | None = None) -> Context:
    positions = Positions.of(length, CPU, is_real)
    return Context(AttentionMask(mask, positions, positions))


def across(memory: Tensor, length: int, is_real: Tensor | None = None) -> Context:
    q, k = Positions.of(length, CPU), Positions.of(memory.shape[1], CPU, is_real)
    return Context(AttentionMask(everything, q, q), memory=memory, memory_mask=AttentionMask(everything, q, k))


# A list of heads


def fused_again(fused: MultiHead, copies: list[Tensor]) -> Tensor:
    """Gradients of single heads [q; k; v] as one of the fused projection: those of a shared key head add up."""
    c = fused.config
    q, k, v = zip(*(copy.split((c.key_dim, c.key_dim, c.val_dim)) for copy in copies), strict=True)
    group = c.heads // c.key_heads
    shared = [torch.stack(part).unflatten(0, (c.key_heads, group)).sum(dim=1).flatten(0, 1) for part in (k, v)]
    return torch.cat((*q, *shared))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fused_projections_are_a_list_of_heads(shape: Shape, dtype: torch.dtype) -> None:
    """Also with fewer key heads, values of their own size and another scale."""
    changes = {"kv_heads": shape.kv_heads, "value_dim": shape.value_dim, "head_dim": shape.head_dim}
    fused = MultiHead(config(shape.dim, shape.heads, bias=shape.bias, attention_scale=0.3, **changes))
    randomised(fused, dtype)
    spelled = HeadList.of(fused)
    x = torch.randn(shape.batch, shape.length, shape.dim, dtype=dtype, requires_grad=True)
    for kind in HIDDEN:
        mask, is_real, _ = hide(kind, shape.batch, shape.length)
        context = within(shape.length, mask & window(5) if kind == "causal" else mask, is_real)
        one, other = fused(x, context), spelled(x, context.attention_mask.dense())
        assert_close([one], [other], VALUES)
        own = slopes(one, [x, *fused.out.parameters(), *fused.qkv.parameters()])
        rest, heads = [x, *spelled.out.parameters()], [list(head.parameters()) for head in spelled.heads]
        given = slopes(other, rest + [parameter for head in heads for parameter in head])
        cut = given[len(rest) :]  # weight, bias of the first head, then of the second, …
        kinds = len(heads[0])
        assert_close(own, given[: len(rest)] + [fused_again(fused, cut[n::kinds]) for n in range(kinds)], GRADIENTS)


def test_a_list_of_heads_is_dot_product_self_attention() -> None:
    """Cross attention and learned scores are not what it spells out."""
    with pytest.raises(UserError, match="cross"):
        HeadList.of(MultiHead(config(12, 3), cross=True))
    for score in ("multiplicative", "additive", "concat"):
        with pytest.raises(UserError, match="score"):
            HeadList.of(MultiHead(config(12, 3, attention_score=score, attention="reference")))


# torch.nn.MultiheadAttention


def torch_form(ours: MultiHead) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(ours.config.dim, ours.config.heads, bias=ours.config.bias, batch_first=True)
    theirs.to(ours.out.weight.dtype).eval()
    copy_pairs(attention_pairs(ours, theirs))
    return theirs


@pytest.mark.parametrize("path", ["fused", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_self_attention_is_torch(shape: Shape, dtype: torch.dtype, path: str) -> None:
    ours = MultiHead(config(shape.dim, shape.heads, bias=shape.bias, attention=path))
    randomised(ours, dtype)
    theirs = torch_form(ours)
    x = torch.randn(shape.batch, shape.length, shape.dim, dtype=dtype, requires_grad=True)
    for kind in HIDDEN:
        mask, is_real, hidden = hide(kind, shape.batch, shape.length)
        other, _ = theirs(x, x, x, attn_mask=hidden, key_padding_mask=key_padding_mask(is_real), need_weights=False)
        one = ours(x, within(shape.length, mask, is_real))
        assert_same(keep_real(one, is_real), keep_real(other, is_real), [x], attention_pairs(ours, theirs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_attention_is_torch(shape: Shape, dtype: torch.dtype) -> None:
    ours = MultiHead(config(shape.dim, shape.heads, bias=shape.bias), cross=True)
    randomised(ours, dtype)
    theirs = torch_form(ours)
    x = torch.randn(shape.batch, shape.length, shape.dim, dtype=dtype, requires_grad=True)
    memory = torch.randn(shape.batch, shape.memory, shape.dim, dtype=dtype, requires_grad=True)
    for is_real in (None, random_is_real(shape.batch, shape.memory)):
        other, _ = theirs(x, memory, memory, key_padding_mask=key_padding_mask(is_real), need_weights=False)
        one = ours(x, across(memory, shape.length, is_real))
        assert_same(one, other, [x, memory], attention_pairs(ours, theirs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", ["fused", "reference"])
def test_any_table_of_who_sees_whom_is_torch(path: str, dtype: torch.dtype) -> None:
    ours = MultiHead(config(12, 3, attention=path))
    randomised(ours, dtype)
    theirs, x = torch_form(ours), torch.randn(2, 6, 12, dtype=dtype, requires_grad=True)
    table = torch.rand(6, 6) < 0.6
    table.fill_diagonal_(True)
    other, _ = theirs(x, x, x, attn_mask=~table, need_weights=False)
    assert_same(ours(x, within(6, from_tensor(table))), other, [x], attention_pairs(ours, theirs))


def test_weights_are_those_of_torch() -> None:
    ours = MultiHead(config(12, 3))
    randomised(ours)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    with trace(ours) as seen:
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
        is_real = torch.tensor([[True] * 4, [False] * 4])
        out = layer(x, within(4, causal, is_real))
        torch.testing.assert_close(out[1], layer.out.bias.expand(4, 12))
        out.float().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all() and (x.grad[1] == 0).all()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


# Norms of queries and keys


def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * gain


def turned(x: Tensor) -> Tensor:
    """RoPE as its paper writes it: pairs of numbers are complex ones, times e^(i · pos · θ)."""
    size = x.shape[-1]
    angles = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@pytest.mark.parametrize("path", ["fused", "reference"])
def test_queries_and_keys_are_normed_before_they_are_turned(path: str) -> None:
    c = StackConfig(dim=12, heads=3, head_dim=6, position="rope", qk_norm=True, attention=path, norm_eps=1e-3)
    layer = randomised(MultiHead(c))
    x, positions = torch.randn(2, 5, 12, dtype=torch.float64), Positions.of(5, CPU)
    rotation = Rotary(c, causal=True).rotation(positions.pos)
    out = layer(
        x, Context(AttentionMask(causal, positions, positions), rotation=tuple(part.double() for part in rotation))
    )
    q, k, v = (part.unflatten(-1, (3, 6)).transpose(1, 2) for part in layer.qkv(x).split(18, dim=-1))
    q, k = turned(normed(q, layer.q_norm.weight, 1e-3)), turned(normed(k, layer.k_norm.weight, 1e-3))
    scores = (q @ k.mT / 6**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    wanted = layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)  # the rotation is made in float32


def test_normed_scores_do_not_grow_with_the_weights() -> None:
    """Self and cross attention, with fewer key heads: queries and keys a thousand times as long change nothing."""
    for cross in (False, True):
        layer = randomised(MultiHead(config(12, 4, kv_heads=2, qk_norm=True, norm_eps=1e-12, bias=False), cross=cross))
        x, memory = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
        context = across(memory, 5) if cross else within(5)
        before = layer(x, context)
        with torch.no_grad():
            if cross:
                layer.q.weight.mul_(1000)
                layer.kv.weight[: layer.sizes[1]] *= 1000
            else:
                layer.qkv.weight[: sum(layer.sizes[:2])] *= 1000
        torch.testing.assert_close(layer(x, context), before)


def test_a_list_of_heads_has_no_norms() -> None:
    with pytest.raises(UserError, match="qk_norm"):
        HeadList.of(MultiHead(config(12, 3, qk_norm=True)))


def test_dropout_acts_in_training_only() -> None:
    layer = MultiHead(config(12, 3, attention_dropout=0.5))
    x = torch.randn(2, 6, 12)
    layer.train()
    assert not torch.equal(layer(x, within(6)), layer(x, within(6)))
    layer.eval()
    assert torch.equal(layer(x, within(6)), layer(x, within(6)))
