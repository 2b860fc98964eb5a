"""Linear attention against its definition, other implementations and itself: parallel, chunked and step by step."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.nn import sums
from regard.nn.block import Stack
from regard.nn.cache import Cache
from regard.nn.config import StackConfig
from regard.nn.linear_attention import (
    GatedLinearAttention,
    LinearAttention,
    both_ways,
    elu_features,
    orthogonal_features,
    random_features,
)
from regard.nn.mask import AttentionMask, Positions, causal, everything
from regard.nn.multihead import Context
from regard.nn.sums import causal_sum

pytestmark = pytest.mark.grid

CPU = torch.device("cpu")
KINDS = ("linear", "performer", "gated-linear")
SMALL: dict[str, Any] = {"dim": 16, "heads": 4, "ff_dim": 16, "layers": 2, "dropout": 0.0, "embed_dropout": 0.0}


def stack_of(kind: str, *, is_causal: bool, **fields: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(StackConfig(**(SMALL | fields), mixer=kind), causal=is_causal).double().eval()


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def context_of(length: int, is_causal: bool = False) -> Context:
    positions = Positions.of(length, CPU)
    return Context(AttentionMask(causal if is_causal else everything, positions, positions))


def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, N, D] as `causal_sum` reads it: one query head per key."""
    return q[:, :, None], k[:, :, None], v[:, :, None]


# --- other implementations


def test_linear_attention_is_the_formula_of_katharopoulos() -> None:
    """Weights φ(q) · φ(k), normalised over the keys, written out as a matrix."""
    q, k, v = inputs(3, 2, 3, 70, 4)
    weights = elu_features(q) @ elu_features(k).transpose(-2, -1)
    for is_causal in (False, True):
        layer = LinearAttention(StackConfig(dim=12, heads=3), causal=is_causal)
        heads = layer.mix(q, *spread(q, k, v), context_of(70, is_causal))[:, :, 0]
        visible = weights.tril() if is_causal else weights
        torch.testing.assert_close(heads, visible / visible.sum(dim=-1, keepdim=True) @ v)


@pytest.mark.parametrize("is_causal", [False, True])
def test_performer_agrees_with_performer_pytorch(is_causal: bool) -> None:
    package = pytest.importorskip("performer_pytorch.performer_pytorch")
    q, k, v = (x.float().requires_grad_() for x in inputs(3, 2, 3, 130, 8))
    layer = LinearAttention(StackConfig(dim=24, heads=3, mixer="performer", features=20), causal=is_causal,
                            kind="performer")  # fmt: skip
    options = {"projection_matrix": layer.features, "eps": 0.0}  # theirs adds 1e-4 to every feature, in no formula
    features = (package.softmax_kernel(x, is_query=x is q, **options) for x in (q, k))
    if is_causal:
        expected = package.causal_linear_attention_noncuda(*features, v, eps=0.0)
    else:
        expected = package.linear_attention(*features, v)
    ours = layer.mix(q, *spread(q, k, v), context_of(130, is_causal))[:, :, 0]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (ours, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


def naive(path: str) -> Any:
    """A file of the package fla: importing the package itself needs Triton."""
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("fla is not installed")
    file = Path(found.submodule_search_locations[0]) / "ops" / path / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_naive_{path}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gated_linear_attention_agrees_with_fla() -> None:
    q, k, v = (x.float() for x in inputs(3, 2, 3, 130, 8))
    gate = torch.nn.functional.logsigmoid(inputs(2, 3, 130, 8).float()) / 16
    given = [x.detach().requires_grad_() for x in (q, k, v, gate)]
    theirs, state = naive("gla").naive_recurrent_gla(*(x.transpose(1, 2) for x in given), output_final_state=True)
    ours, (last, _) = causal_sum(*spread(given[0] * 8**-0.5, *given[1:3]), log_gate=given[3][:, :, None])
    torch.testing.assert_close(ours[:, :, 0], theirs.transpose(1, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last[:, :, 0], state, atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad(x.square().sum(), given) for x in (ours, theirs))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=5e-4, rtol=1e-4)


def test_linear_attention_agrees_with_fla() -> None:
    given = [x.requires_grad_() for x in inputs(3, 2, 3, 64, 8).float()]
    q, k, v = given
    features = [elu_features(x) for x in (q, k)]
    theirs, _ = naive("linear_attn").naive_recurrent_linear_attn(
        *(x.transpose(1, 2) for x in (*features, v)), normalize=True
    )
    layer = LinearAttention(StackConfig(dim=24, heads=3), causal=True)
    ours = layer.mix(q, *spread(q, k, v), context_of(64, True))[:, :, 0]
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=1e-5, rtol=1e-5)
    gradients = (torch.autograd.grad(x.square().sum(), given) for x in (ours, theirs))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


# --- random features


def test_random_features_estimate_the_exponential_of_the_product() -> None:
    """E[φ(q) · φ(k)] = exp(q · k), with independent and with orthogonal features (Choromanski et al. 2021, lemma 1)."""
    q, k = inputs(2, 8) / 4
    features = torch.cat([orthogonal_features(4096, 8, seed) for seed in range(8)]).double()
    own = random_features(features)
    assert own.added is not None
    products = (own.of_k(q) + own.added(q) + own.of_k(k) + own.added(k)).exp()
    error = float(products.std()) / len(features) ** 0.5
    assert abs(float(products.mean()) - math.exp(float(q @ k))) < 4 * error


def test_features_are_orthogonal_in_blocks_and_as_long_as_gaussian_vectors() -> None:
    features = orthogonal_features(40, 16, seed=0)
    for block in features.split(16):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag(), atol=1e-4, rtol=0)
    assert float(orthogonal_features(4000, 16, seed=0).square().sum(dim=1).mean()) == pytest.approx(16, rel=0.03)
    assert torch.equal(features, orthogonal_features(40, 16, seed=0))
    assert not torch.equal(features, orthogonal_features(40, 16, seed=1))


# --- in a stack


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fields", [{}, {"kv_heads": 2, "qk_norm": True, "position": "rope", "value_dim": 6}], ids=str)
def test_cached_equals_uncached(kind: str, fields: dict[str, Any]) -> None:
    stack, x = stack_of(kind, is_causal=True, **fields), inputs(2, 90, 16)
    whole = stack(x, Positions.of(90, CPU))
    cache, parts = Cache(), []
    for begin, end in ((0, 70), (70, 71), (71, 72), (72, 90)):
        positions = cache.next_positions(end - begin, CPU)
        parts.append(stack(x[:, begin:end], positions, cache=cache))
        if begin == 0:
            size = cache.nbytes
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    assert cache.nbytes == size and cache.length == 90  # whatever the length
    assert cache.positions is not None and cache.positions.length == 18  # no key needs a position


@pytest.mark.parametrize("kind", KINDS)
def test_padding_leaves_a_state_as_it_is(kind: str) -> None:
    q, k, v = spread(*inputs(3, 2, 3, 10, 4))
    gate = -inputs(2, 3, 1, 10, 4).abs() if kind == "gated-linear" else None
    layer = LinearAttention(StackConfig(dim=12, heads=3, mixer="performer", features=8), kind=kind).double()
    features = None if gate is not None else layer.map
    own = [*(x.split((7, 1, 2), dim=-2) for x in (q, k, v)), [None] * 3 if gate is None else gate.split((7, 1, 2), -2)]
    state, states = None, []
    for part, real in zip(zip(*own, strict=True), (True, False, False), strict=True):
        mask = torch.full((2, 1, 1, part[0].shape[-2], 1), real)
        _, state = causal_sum(*part[:3], features=features, log_gate=part[3], is_real=mask, state=state)
        states.append(state)
    for later in states[1:]:
        torch.testing.assert_close(later, states[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_segments_of_a_long_sequence_change_nothing(kind: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes a long sequence in segments, each from the state after the one before."""
    stack, x, results = stack_of(kind, is_causal=True), inputs(2, 200, 16).requires_grad_(), []
    is_real = torch.arange(200) >= torch.tensor([[0], [70]]) if padded else None
    for size in (2048, 64):
        monkeypatch.setattr(sums, "SEGMENT", size)
        out = stack(x, Positions.of(200, CPU, is_real))
        out = out if is_real is None else out[is_real]
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *stack.parameters()])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_cache_can_be_reordered(kind: str) -> None:
    stack, x = stack_of(kind, is_causal=True), inputs(3, 12, 16)
    rows, cache = torch.tensor([2, 0, 0, 1]), Cache()
    stack(x[:, :10], cache.next_positions(10, CPU), cache=cache)
    cache.reorder(rows)
    after = stack(x[rows, 10:], cache.next_positions(2, CPU), cache=cache)
    torch.testing.assert_close(after, stack(x[rows], Positions.of(12, CPU))[:, 10:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_loss_on_padding_without_keys_has_finite_gradients(kind: str, is_causal: bool) -> None:
    stack, x = stack_of(kind, is_causal=is_causal).float(), inputs(2, 20, 16).float().requires_grad_()
    is_real = torch.arange(20) >= torch.tensor([[8], [20]])
    stack(x, Positions.of(20, CPU, is_real)).sin().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_second_derivative_is_refused(kind: str, is_causal: bool) -> None:
    stack, x = stack_of(kind, is_causal=is_causal), inputs(1, 70, 16).requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(stack(x, Positions.of(70, CPU)).sin().sum(), x, create_graph=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_nothing(kind: str, is_causal: bool, left: bool) -> None:
    stack, x = stack_of(kind, is_causal=is_causal), inputs(2, 80, 16)
    is_real = torch.ones(2, 80, dtype=torch.bool)
    is_real[1, : 70 if left else 0] = False
    is_real[1, 80 if left else 10 :] = False
    out = stack(x, Positions.of(80, CPU, is_real))
    alone = stack(x[1:, is_real[1]], Positions.of(10, CPU))
    torch.testing.assert_close(out[1, is_real[1]], alone[0])
    torch.testing.assert_close(out[:1], stack(x[:1], Positions.of(80, CPU)))
    assert out.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_padding_gives_finite_values_and_gradients(kind: str) -> None:
    for is_causal in (False, True):
        stack, x = stack_of(kind, is_causal=is_causal), inputs(2, 20, 16).requires_grad_()
        is_real = torch.tensor([[True] * 20, [False] * 20])
        stack(x, Positions.of(20, CPU, is_real))[0].sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in stack.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_documents_are_separate(kind: str, is_causal: bool) -> None:
    stack, x = stack_of(kind, is_causal=is_causal), inputs(1, 150, 16)
    lengths = (3, 61, 1, 64, 13)
    document = torch.cat([torch.full((n,), number + 1) for number, n in enumerate(lengths)] + [torch.zeros(8)])[None]
    is_real = document > 0
    out = stack(x, Positions.of(150, CPU, is_real, document.long()))
    begin = 0
    for n in lengths:
        alone = stack(x[:, begin : begin + n], Positions.of(n, CPU))
        torch.testing.assert_close(out[:, begin : begin + n], alone)
        begin += n


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("factors", [(1, 60, 1), (60, 1, 60), (50, 60, 1)])
@pytest.mark.parametrize("lengths", [(20, 20, 20), (70, 5, 120), (1, 64, 64)])
def test_features_of_packed_documents_do_not_underflow(
    is_causal: bool, factors: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    """Exponents of one document may be hundreds below those of another."""
    stack = stack_of("performer", is_causal=is_causal, layers=1, position="none", kv_heads=2).float()
    layer, x = stack.blocks[0].attention, inputs(1, 16) + inputs(1, sum(lengths), 16) / 400  # alike in each document
    x = x.float() * torch.tensor(factors).repeat_interleave(torch.tensor(lengths))[:, None]
    document = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None]
    positions, mask = Positions.of(sum(lengths), CPU, document=document), causal if is_causal else everything
    out = layer(x, Context(AttentionMask(mask, positions, positions)))
    for own, found in zip(x.split(lengths, dim=1), out.split(lengths, dim=1), strict=True):
        torch.testing.assert_close(found, layer(own, context_of(own.shape[1], is_causal)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_changing_the_future_never_changes_the_past(kind: str) -> None:
    stack, x = stack_of(kind, is_causal=True), inputs(1, 100, 16)
    other = x.clone()
    other[:, 50:] += 1
    before, after = (stack(one, Positions.of(100, CPU)) for one in (x, other))
    torch.testing.assert_close(before[:, :50], after[:, :50])
    assert not torch.allclose(before[:, 50:], after[:, 50:])


@pytest.mark.parametrize("kind", ["linear", "performer"])
def test_the_encoder_form_is_symmetric_in_time(kind: str) -> None:
    stack, x = stack_of(kind, is_causal=False, position="none"), inputs(1, 100, 16)
    reversed_out = stack(x.flip(1), Positions.of(100, CPU)).flip(1)
    torch.testing.assert_close(stack(x, Positions.of(100, CPU)), reversed_out)


@pytest.mark.parametrize("count", range(4))
def test_gated_heads_of_an_encoder_read_one_way_each(count: int) -> None:
    q, k, v = spread(*inputs(3, 2, 3, 90, 4))
    gate = -inputs(2, 3, 1, 90, 4).abs()
    out = both_ways(q, k, v, log_gate=gate, forward=count)
    ahead, _ = causal_sum(q, k, v, log_gate=gate)
    back, _ = causal_sum(q.flip(-2), k.flip(-2), v.flip(-2), log_gate=gate.flip(-2))
    torch.testing.assert_close(out, torch.cat((ahead[:, :count], back.flip(-2)[:, count:]), dim=1))


@pytest.mark.parametrize(
    ("heads", "layer", "count"), [(4, 0, 2), (4, 1, 2), (3, 0, 2), (3, 1, 1), (1, 0, 1), (1, 1, 0)]
)
def test_half_of_the_gated_heads_read_from_left_to_right(heads: int, layer: int, count: int) -> None:
    """The others do not depend on earlier tokens."""
    config = StackConfig(dim=12, heads=heads)
    mixer = GatedLinearAttention(config, layer=layer).double()
    x, other = inputs(2, 1, 40, 12)
    q, k, v = spread(*inputs(3, 1, heads, 40, 12 // heads))
    for changed, still in ((slice(0, 20), slice(20, 40)), (slice(20, 40), slice(0, 20))):
        texts, values = x.clone(), v.clone()
        texts[:, changed], values[..., changed, :] = other[:, changed], 1.0
        before, after = (mixer.mix(*one, context_of(40, False)) for one in ((x, q, k, v), (texts, q, k, values)))
        same = before[..., still, :].isclose(after[..., still, :]).flatten(2).all(dim=-1)[0].tolist()
        early = changed.start == 0
        assert same == [(number >= count) == early for number in range(heads)]


def test_shared_keys_equal_repeated_keys() -> None:
    few, many = (LinearAttention(StackConfig(dim=16, heads=4, kv_heads=n), causal=True) for n in (2, 4))
    q, k, v = (part.transpose(0, 1) for part in few.qkv.weight.detach().T.split(few.sizes, dim=1))
    repeated = [part.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1) for part in (k, v)]
    with torch.no_grad():
        many.qkv.weight.copy_(torch.cat((q, *repeated)))
        many.qkv.bias.zero_(), few.qkv.bias.zero_()
    many.out.load_state_dict(few.out.state_dict())
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(few(x, context_of(9, True)), many(x, context_of(9, True)))


def test_gated_attention_normalises_heads_and_gates_the_output() -> None:
    layer = GatedLinearAttention(StackConfig(dim=8, heads=2), causal=True)
    x, heads = torch.randn(1, 3, 8), torch.randn(1, 3, 2, 4)
    normal = heads / (heads.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    gate = torch.nn.functional.silu(x @ layer.output_gate.weight.T)
    torch.testing.assert_close(layer.project(x, heads), layer.out(normal.flatten(2) * gate))
