"""Positions: each scheme against its paper's formula, or against transformers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.block import Stack
from regard.nn.config import StackConfig
from regard.nn.mask import Positions
from regard.nn.position import KINDS as SCHEMES
from regard.nn.position import T5, ALiBi, Learned, Relative, Rotary, Sinusoidal, alibi_slopes, rotate

CPU = torch.device("cpu")
KINDS = ("sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none")


def config(**changes: object) -> StackConfig:
    values = {"dim": 16, "layers": 2, "heads": 4, "ff_dim": 24, "dropout": 0.0, "embed_dropout": 0.0, "max_length": 16}
    return StackConfig(**{**values, **changes})


def positions(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


# Sinusoidal


@pytest.mark.parametrize("dim", [2, 6, 16])
def test_sinusoidal_is_the_paper_formula(dim: int) -> None:
    """Section 3.5: PE(pos, 2i) = sin(pos / 10000^(2i/dim)), PE(pos, 2i+1) = cos(pos / 10000^(2i/dim))."""
    table = Sinusoidal(config(dim=dim, heads=1)).embed(positions(list(range(40)), [9999] * 40))
    for pos, row in ((0, 0), (1, 0), (39, 0), (9999, 1)):
        for i in range(dim // 2):
            angle = pos / 10000 ** (2 * i / dim)
            assert table[row, min(pos, 39), 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-9)
            assert table[row, min(pos, 39), 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-9)


def test_sinusoidal_halves_are_the_same_numbers_reordered() -> None:
    pos = positions(list(range(9)))
    apart, mixed = (Sinusoidal(config(pairs=pairs)).embed(pos) for pairs in ("halves", "interleaved"))
    torch.testing.assert_close(apart, torch.cat((mixed[..., 0::2], mixed[..., 1::2]), dim=-1))


def test_sinusoidal_has_no_end_and_shifts_linearly() -> None:
    """PE(pos + k) is a rotation of PE(pos) that depends on k alone: the reason the paper gives for it."""
    scheme = Sinusoidal(config(dim=8, heads=1))
    table = scheme.embed(torch.arange(3000)[None])[0].view(-1, 4, 2)
    assert table.abs().max() <= 1
    for step in (1, 17, 1000):
        angle = step * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        sin, cos = table[:-step, :, 0], table[:-step, :, 1]
        moved = torch.stack((sin * angle.cos() + cos * angle.sin(), cos * angle.cos() - sin * angle.sin()), dim=-1)
        torch.testing.assert_close(table[step:], moved, atol=1e-9, rtol=0)


# Learned


def test_learned_is_a_row_per_position() -> None:
    scheme = Learned(config())
    pos = positions([3, 0, 15], [1, 1, 2])
    torch.testing.assert_close(scheme.embed(pos), scheme.embedding.weight[pos])


@pytest.mark.parametrize("kind", KINDS)
def test_only_learned_positions_end(kind: str) -> None:
    stack = Stack(config(position=kind), causal=True)
    assert stack(torch.randn(1, 16, 16), Positions.of(16, CPU)).shape == (1, 16, 16)
    if kind == "learned":
        with pytest.raises(UserError, match=r"17 tokens .* max_length = 16"):
            stack(torch.randn(1, 17, 16), Positions.of(17, CPU))
    else:
        assert stack(torch.randn(1, 17, 16), Positions.of(17, CPU)).isfinite().all()


# Rotary


def rope(pairs: str = "interleaved", head_dim: int = 8, base: float = 10000.0) -> Rotary:
    return Rotary(config(dim=4 * head_dim, position="rope", pairs=pairs, rope_base=base))


@pytest.mark.parametrize("pairs", ["interleaved", "halves"])
def test_rope_scores_depend_on_the_distance_alone(pairs: str) -> None:
    scheme, q, k = rope(pairs), torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        turned = [
            rotate(x.view(1, 1, 1, -1), scheme.rotation(positions([p])), pairs).flatten() for x, p in ((q, i), (k, j))
        ]
        return (turned[0] @ turned[1]).item()

    for distance in (-5, 0, 1, 300):
        scores = [score(i, i + distance) for i in (5, 6, 100, 4000)]
        assert scores == pytest.approx([scores[0]] * 4, abs=1e-9)
    assert score(0, 1) != pytest.approx(score(1, 0), abs=1e-6)


def test_rope_is_multiplication_by_a_complex_number() -> None:
    """Su et al. 2021: the pair (a, b) as a + bi, times e^(i pos θ) with θ = base^(-2i/d)."""
    x, pos = torch.randn(2, 3, 5, 8, dtype=torch.float64), positions([0, 1, 2, 3, 4], [7, 0, 50, 1, 9])
    theta = 500.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turn = torch.polar(torch.ones(2, 1, 5, 4, dtype=torch.float64), pos[:, None, :, None] * theta)
    expected = torch.view_as_real(torch.view_as_complex(x.view(2, 3, 5, 4, 2)) * turn).flatten(-2)
    torch.testing.assert_close(rotate(x, rope(base=500.0).rotation(pos), "interleaved"), expected)


def test_rope_layouts_are_permutations_of_each_other() -> None:
    x, pos = torch.randn(2, 3, 5, 8, dtype=torch.float64), positions(list(range(5)))
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # interleaved -> halves
    mixed = rotate(x, rope("interleaved").rotation(pos), "interleaved")
    apart = rotate(x[..., order], rope("halves").rotation(pos), "halves")
    torch.testing.assert_close(apart, mixed[..., order])


def test_rope_halves_are_those_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    settings_of = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=64
    )
    q, k = torch.randn(2, 4, 7, 8, dtype=torch.float64), torch.randn(2, 4, 7, 8, dtype=torch.float64)
    pos = positions(list(range(7)), [9, 3, 0, 60, 61, 2, 2])
    cos, sin = llama.LlamaRotaryEmbedding(settings_of)(q, pos)
    expected = llama.apply_rotary_pos_emb(q, k, cos, sin)
    rotation = rope("halves").rotation(pos)
    for ours, theirs in zip((rotate(x, rotation, "halves") for x in (q, k)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # transformers rounds angles to float32


# ALiBi


def test_alibi_slopes_are_those_of_the_paper() -> None:
    """Section 3: for 8 heads 1/2, 1/4, … 1/256; for 12, as in the authors' code, those and every other of 16."""
    assert alibi_slopes(8).tolist() == pytest.approx([2.0**-i for i in range(1, 9)])
    sixteen = [2 ** (-0.5 * i) for i in range(1, 17)]
    assert alibi_slopes(16).tolist() == pytest.approx(sixteen)
    assert alibi_slopes(12).tolist() == pytest.approx([2.0**-i for i in range(1, 9)] + sixteen[0:8:2])
    assert alibi_slopes(1).tolist() == pytest.approx([2.0**-8]) and len(alibi_slopes(25)) == 25


@pytest.mark.parametrize("heads", [3, 8, 12, 25])
def test_alibi_slopes_are_those_of_transformers(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    table = bloom.build_alibi_tensor(torch.ones(1, 3), heads, torch.float32).view(heads, 3)
    assert alibi_slopes(heads).tolist() == pytest.approx((table[:, 1] - table[:, 0]).tolist(), rel=1e-5)


def test_alibi_falls_with_the_distance() -> None:
    table = ALiBi(config(heads=8, dim=16)).bias(positions([0, 1, 2]), positions([0, 1, 2])).dense(torch.zeros(1))
    for h in range(8):
        expected = [[-(2.0 ** -(h + 1)) * abs(i - j) for j in range(3)] for i in range(3)]
        torch.testing.assert_close(table[0, h], torch.tensor(expected))


# T5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (16, 64)])
def test_t5_buckets_are_those_of_transformers(causal: bool, buckets: int, distance: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    scheme = T5(config(position="t5", position_buckets=buckets, position_distance=distance), causal)
    distances = torch.arange(-300, 301)
    theirs = t5.T5Attention._relative_position_bucket(distances, not causal, buckets, distance)
    assert torch.equal(scheme.bucket(distances), theirs)


def test_t5_bias_is_a_table_lookup_by_distance_and_head() -> None:
    scheme = T5(config(position="t5"), causal=False)
    q_pos, k_pos = positions([4, 5], [0, 90]), positions([0, 4, 6], [1, 1, 200])
    table = scheme.bias(q_pos, k_pos).dense(torch.zeros(1))
    assert table.shape == (2, 4, 2, 3)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in table.shape)).tolist():
        bucket = scheme.bucket(k_pos[b, j] - q_pos[b, i])
        assert table[b, h, i, j] == scheme.embedding.weight[bucket, h]


# Relative (Shaw)


def test_relative_is_the_paper_formula() -> None:
    """Shaw et al. 2018, eq. 4: (x_i W_Q)(a_ij)ᵀ / sqrt(d) is added, a_ij = w[clip(j - i, ±k)]."""
    scheme = Relative(config(position="relative", position_distance=2)).double()
    nn.init.normal_(scheme.embedding.weight)
    q = torch.randn(2, 4, 3, 4, dtype=torch.float64)
    q_pos, k_pos = positions([0, 1, 7], [2, 3, 4]), positions([0, 1, 2, 3, 7], [0, 1, 2, 3, 4])
    table = scheme.bias(q_pos, k_pos).dense(q)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (2, 4, 3, 5))).tolist():
        distance = max(-2, min(2, (k_pos[b, j] - q_pos[b, i]).item()))
        expected = q[b, h, i] @ scheme.embedding.weight[distance + 2] / math.sqrt(4)
        torch.testing.assert_close(table[b, h, i, j], expected)


# All schemes


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "relative", "t5", "rope", "alibi"])
@pytest.mark.parametrize("causal", [False, True])
def test_order_is_seen_with_positions_and_only_then(kind: str, causal: bool) -> None:
    """Without positions a two-way stack only follows a permutation of its input; with them it notices."""
    x, order = torch.randn(1, 5, 16, dtype=torch.float64), torch.tensor([3, 0, 4, 1, 2])
    plain, result = (Stack(config(position=p), causal=causal).double().eval() for p in ("none", kind))
    nn.init.normal_(next(iter(result.position.parameters()), torch.empty(0)))

    def moved(stack: Stack) -> float:
        positions = Positions.of(5, CPU)
        return (stack(x[:, order], positions) - stack(x, positions)[:, order]).abs().max().item()

    assert moved(result) > 1e-3
    assert causal or moved(plain) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [1, 9])
def test_relative_schemes_see_only_distances(kind: str, shift: int) -> None:
    """Moving the whole sequence along changes nothing for relative schemes."""
    stack = Stack(config(position=kind, max_length=32), causal=True).double().eval()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    here, there = stack(x, Positions.of(6, CPU)), stack(x, Positions.of(6, CPU, start=shift))
    same = (here - there).abs().max().item() < 1e-10
    assert same == (kind in ("relative", "t5", "rope", "alibi", "none"))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_computes_every_scheme(kind: str) -> None:
    """Values by all three paths, gradients by two; one row is padded on the left."""
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    is_real = torch.ones(2, 7, dtype=torch.bool)
    is_real[1, :3] = False
    outputs, slopes = {}, {}
    for path in ("reference", "fused", "flex"):
        torch.manual_seed(1)
        stack = Stack(config(position=kind, attention=path, layers=1, kv_heads=2), causal=True).double().eval()
        with torch.set_grad_enabled(path != "flex"):
            outputs[path] = stack(x, Positions.of(7, CPU, is_real))[is_real]
        if path != "flex":
            parameters = [x, *stack.parameters()]
            slopes[path] = torch.autograd.grad(outputs[path].sin().sum(), parameters)
    for path in ("fused", "flex"):
        torch.testing.assert_close(outputs[path].detach(), outputs["reference"].detach(), atol=1e-10, rtol=1e-10)
    for own, other in zip(slopes["fused"], slopes["reference"], strict=True):
        torch.testing.assert_close(own, other, atol=1e-9, rtol=1e-9)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["fused", "flex"])
def test_every_scheme_trains_on_a_gpu(kind: str, path: str) -> None:
    """Values and gradients by the fast paths, near those of the formula; flex multiplies in TF32."""
    torch._dynamo.reset()  # past 8 kinds of graph in one process, flex would no longer be compiled
    is_real = torch.ones(2, 130, dtype=torch.bool, device="cuda")
    is_real[1, :3] = False
    x, found = torch.randn(2, 130, 64, device="cuda", requires_grad=True), {}
    for way in (path, "reference"):
        torch.manual_seed(1)
        stack = Stack(config(position=kind, attention=way, dim=64, max_length=130), causal=True).cuda().eval()
        out = stack(x, Positions.of(130, x.device, is_real))[is_real]
        found[way] = [out, *torch.autograd.grad(out.sin().sum(), [x, *stack.parameters()])]
    for ours, theirs in zip(found[path], found["reference"], strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm() + 1e-4


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(("relative", "t5", "alibi")), st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_a_bias_does_not_care_where_a_token_stands_in_the_row(kind: str, pos: list[int]) -> None:
    """Its entry for two tokens depends on their positions, not on their indices."""
    scheme, q = SCHEMES[kind](config(position=kind), causal=True), torch.randn(1, 4, 1, 4).expand(1, 4, len(pos), 4)
    table = scheme.bias(torch.tensor([pos]), torch.tensor([pos]))
    back = scheme.bias(torch.tensor([pos[::-1]]), torch.tensor([pos[::-1]]))
    assert table is not None and back is not None
    torch.testing.assert_close(table.dense(q), back.dense(q).flip(-1, -2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_far_positions_stay_exact_in_half_precision(dtype: torch.dtype) -> None:
    """Angles are made in float64: at position 5000, only the last rounding is to half precision."""
    pos = positions([5000])
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    exact = rotate(x, rope().rotation(pos), "interleaved")
    half = rotate(x.to(dtype), rope().rotation(pos), "interleaved")
    assert half.dtype == dtype
    torch.testing.assert_close(half.double(), exact, atol=4e-2, rtol=0)
