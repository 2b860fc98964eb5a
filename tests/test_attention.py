"""Attention: three paths and one formula written out by hand give the same values and the same gradients."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UserError
from regard.nn.attention import attend, attention_stages, softmax
from regard.nn.mask import AttentionMask, Positions, causal, everything, from_tensor
from regard.nn.position import Bias

pytestmark = pytest.mark.grid

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3}


@dataclass
class Case:
    """One random attention problem; `visible` [B, Nq, Nk] may hide whole rows, `table` [1, H, Nq, Nk] is a bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor | None
    table: Tensor | None
    scale: float | None

    @property
    def inputs(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.table) if x is not None]

    @property
    def attention_mask(self) -> AttentionMask:
        mask = everything if self.visible is None else from_tensor(self.visible)
        return AttentionMask(mask, positions(self.q.shape[2], self.q.device), positions(self.k.shape[2], self.q.device))

    @property
    def bias(self) -> Bias | None:
        if self.table is None:
            return None
        table, pos = self.table, self.attention_mask
        return Bias(lambda q: lambda b, h, i, j: table[0, h, i, j], table.shape[1], pos.q.pos, pos.k.pos, content=False)

    def detached(self) -> Case:
        q, k, v = self.q.detach(), self.k.detach(), self.v.detach()
        return Case(q, k, v, self.visible, None if self.table is None else self.table.detach(), self.scale)

    def run(self, path: str) -> Tensor:
        return attend(self.q, self.k, self.v, self.attention_mask, bias=self.bias, scale=self.scale, path=path)


def positions(length: int, device: torch.device = CPU) -> Positions:
    return Positions.of(length, device)


def make_case(seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu", head_dim: int | None = None) -> Case:
    """Odd sizes, single tokens, fewer or more queries than keys, other value sizes, shared key heads."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, kv_heads, group = draw.randint(1, 3), draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 3))
    queries, keys = draw.choice((1, 2, 5, 7)), draw.choice((1, 3, 5, 8))
    size, value_size = head_dim or draw.choice((1, 3, 4, 8)), head_dim or draw.choice((1, 4, 5))

    def normal(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)
        return x.requires_grad_()

    visible = table = None
    if seed % 3:
        visible = (torch.rand(batch, queries, keys, generator=generator) < draw.choice((0.3, 0.8))).to(device)
        visible[:, draw.randrange(queries)] &= queries == 1  # a blind row beside others
    if seed % 2:
        table = normal(1, kv_heads * group, queries, keys)
    return Case(
        normal(batch, kv_heads * group, queries, size),
        normal(batch, kv_heads, keys, size),
        normal(batch, kv_heads, keys, value_size),
        visible,
        table,
        draw.choice((None, 0.7)),
    )


def by_hand(case: Case) -> Tensor:
    """softmax(q · k · scale + bias) v, one query at a time, from nothing but sums and exponentials."""
    group, scale = case.q.shape[1] // case.k.shape[1], case.scale or 1 / math.sqrt(case.q.shape[-1])
    rows = []
    for b in range(case.q.shape[0]):
        for h in range(case.q.shape[1]):
            for i in range(case.q.shape[2]):
                out = case.v[b, h // group, 0] * 0
                seen = [j for j in range(case.k.shape[2]) if case.visible is None or case.visible[b, i, j]]
                if seen:
                    score = [(case.q[b, h, i] * case.k[b, h // group, j]).sum() * scale for j in seen]
                    if case.table is not None:
                        score = [s + case.table[0, h, i, j] for s, j in zip(score, seen, strict=True)]
                    raised = [s.exp() for s in score]
                    for e, j in zip(raised, seen, strict=True):
                        out = out + e / sum(raised) * case.v[b, h // group, j]
                rows.append(out)
    return torch.stack(rows).view(*case.q.shape[:3], -1)


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Of a sum with unequal weights, so that no error cancels."""
    weight = torch.arange(output.numel(), device=output.device, dtype=output.dtype).view_as(output).sin()
    found = torch.autograd.grad((output * weight).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor]) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    for own, other in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(own, other, atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("seed", range(18))
def test_reference_is_the_formula(seed: int) -> None:
    case = make_case(seed)
    assert_same(case.run("reference"), by_hand(case), case.inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(60))
def test_fused_is_the_reference(seed: int, dtype: torch.dtype) -> None:
    case = make_case(seed, dtype)
    assert_same(case.run("fused"), case.run("reference"), case.inputs)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", range(14))
def test_flex_is_the_reference(seed: int) -> None:
    dtype = torch.float32 if seed > 9 else torch.float64
    case, tolerance = make_case(seed, dtype).detached(), TOLERANCE[dtype]
    torch.testing.assert_close(case.run("flex"), case.run("reference"), atol=tolerance, rtol=tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["fused", "flex"])
@pytest.mark.parametrize("seed", range(12))
def test_gradients_on_a_gpu(seed: int, path: str) -> None:
    torch._dynamo.reset()  # past 8 kinds of graph in one process, flex would no longer be compiled
    case = make_case(seed, torch.float32, "cuda", head_dim=16)
    ours, theirs = case.run(path), case.run("reference")
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)  # flex multiplies in TF32
    for own, other in zip(gradients(ours, case.inputs), gradients(theirs, case.inputs), strict=True):
        torch.testing.assert_close(own, other, atol=5e-2, rtol=2e-2)


def test_flex_refuses_what_it_cannot_do() -> None:
    case = make_case(0, torch.float32)
    with pytest.raises(UserError, match=r"no gradients on a CPU.*fused"):
        case.run("flex")
    with pytest.raises(UserError, match=r"dropout = 0\.1"):
        attend(case.q, case.k, case.v, case.attention_mask, dropout=0.1, path="flex")


@pytest.mark.parametrize("seed", [1, 2, 4, 5, 7, 8])
def test_an_additive_mask_is_a_boolean_mask(seed: int) -> None:
    """0 and -inf added to the scores hide as True and False do, blind rows included."""
    case = make_case(seed)
    assert case.visible is not None
    visible = case.visible[:, None]
    added = torch.zeros_like(visible, dtype=case.q.dtype).masked_fill(~visible, float("-inf"))
    boolean = attention_stages(case.q, case.k, case.v, visible).output
    assert_same(attention_stages(case.q, case.k, case.v, bias=added).output, boolean, [case.q, case.k, case.v])


def test_gradcheck() -> None:
    """Automatic gradients against finite differences, torch's own check."""
    visible = torch.tensor([[True, False, True], [False, False, False]])  # the second query is blind

    def compute(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return attention_stages(q, k, v, visible, bias=table).output

    shapes = ((1, 2, 2, 3), (1, 1, 3, 3), (1, 1, 3, 2), (1, 2, 2, 3))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(compute, inputs)


@pytest.mark.parametrize("seed", range(12))
def test_stages_follow_from_each_other(seed: int) -> None:
    case = make_case(seed)
    visible = None if case.visible is None else case.visible[:, None]
    stages = attention_stages(case.q, case.k, case.v, visible, bias=case.table)
    group = case.q.shape[1] // case.k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (case.k, case.v))
    torch.testing.assert_close(stages.scores, torch.einsum("bhid,bhjd->bhij", case.q, k))
    scaled = stages.scores / math.sqrt(case.q.shape[-1])
    torch.testing.assert_close(stages.scaled, scaled if case.table is None else scaled + case.table)
    if visible is not None:
        hidden = ~visible.expand_as(stages.masked)
        assert (stages.masked[hidden] == float("-inf")).all() and (stages.weights[hidden] == 0).all()
        torch.testing.assert_close(stages.masked[~hidden], stages.scaled[~hidden])
    sums, blind = stages.weights.sum(dim=-1), (stages.masked == float("-inf")).all(dim=-1)
    torch.testing.assert_close(sums, (~blind).to(sums))
    torch.testing.assert_close(stages.output, torch.einsum("bhij,bhjd->bhid", stages.weights, v))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("path", ["reference", "fused"])
def test_a_blind_query_gets_zeros_and_finite_gradients(path: str, biased: bool, dtype: torch.dtype) -> None:
    case = make_case(5 if biased else 4, dtype)
    assert case.visible is not None and (case.table is not None) == biased
    case.visible[:] = True
    case.visible[:, 0] = False
    case.visible[0] = False
    out = case.run(path)
    assert (out[:, :, 0] == 0).all() and (out[0] == 0).all() and out.isfinite().all()
    assert all(g.isfinite().all() for g in gradients(out, case.inputs))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [4, 5])
def test_a_blind_query_gets_zeros_from_flex(seed: int, dtype: torch.dtype) -> None:
    case = make_case(seed, dtype).detached()
    assert case.visible is not None
    case.visible[:, 0] = False
    out = case.run("flex")
    assert (out[:, :, 0] == 0).all() and out.isfinite().all()


def test_softmax_of_large_scores() -> None:
    """Shifted by the row's maximum, so nothing overflows; torch's softmax agrees where a row sees something."""
    x = torch.tensor([[1e4, 1e4 - 1, -float("inf")], [-1e4, -1e4, -1e4], [-float("inf")] * 3])
    torch.testing.assert_close(softmax(x)[:2], x[:2].softmax(dim=-1))
    assert (softmax(x)[2] == 0).all()


def test_every_key_alike_gives_the_mean_of_the_values() -> None:
    q, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 5)
    out = attention_stages(q, torch.zeros(2, 3, 6, 8), v).output
    torch.testing.assert_close(out, v.mean(dim=2, keepdim=True).expand_as(out))


def test_the_order_of_keys_does_not_matter() -> None:
    case, order = make_case(0), torch.randperm(make_case(0).k.shape[2])
    shuffled = Case(case.q, case.k[:, :, order], case.v[:, :, order], None, None, case.scale)
    torch.testing.assert_close(shuffled.run("fused"), case.run("fused"))


@pytest.mark.parametrize("path", ["reference", "fused"])
def test_dropout_drops_weights_and_scales_up_the_rest(path: str) -> None:
    """With the identity as values the output is the weights: each is 0 or w / (1 - p)."""
    n, p = 48, 0.25
    q, k, v = torch.randn(1, 8, n, 4), torch.randn(1, 8, n, 4), torch.eye(n).expand(1, 8, n, n)
    seen = AttentionMask(everything, positions(n), positions(n))
    weights = attend(q, k, v, seen, path=path)
    dropped = attend(q, k, v, seen, dropout=p, path=path)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / (1 - p), atol=1e-5, rtol=1e-4)
    assert abs(kept.float().mean().item() - (1 - p)) < 0.02


@pytest.mark.parametrize("path", ["reference", "fused"])
def test_inputs_need_not_be_contiguous(path: str) -> None:
    q, k, v = (torch.randn(2, 7, 3, 8, dtype=torch.float64).transpose(1, 2) for _ in range(3))
    seen = AttentionMask(causal, positions(7), positions(7))
    whole = attend(q.contiguous(), k.contiguous(), v.contiguous(), seen, path=path)
    torch.testing.assert_close(attend(q, k, v, seen, path=path), whole)
    strided = torch.randn(2, 3, 7, 16, dtype=torch.float64)[..., ::2]
    torch.testing.assert_close(
        attend(strided, k, v, seen, path=path), attend(strided.contiguous(), k, v, seen, path=path)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_exact_result(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 4, 33, 16, dtype=torch.float64) for _ in range(3))
    seen = AttentionMask(causal, positions(33), positions(33))
    exact = attend(q, k, v, seen, path="reference")
    for path in ("reference", "fused"):
        half = attend(q.to(dtype), k.to(dtype), v.to(dtype), seen, path=path)
        assert half.dtype == dtype
        torch.testing.assert_close(half.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_long_sequence() -> None:
    """4096 tokens: a few rows of the fused causal result against the formula."""
    n = 4096
    q, k, v = (torch.randn(1, 1, n, 8) for _ in range(3))
    out = attend(q, k, v, AttentionMask(causal, positions(n), positions(n)))
    for i in (0, 1, 63, 64, 2047, n - 1):
        expected = F.softmax(q[0, 0, i] @ k[0, 0, : i + 1].T / math.sqrt(8), dim=-1) @ v[0, 0, : i + 1]
        torch.testing.assert_close(out[0, 0, i], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("path", ["reference", "fused"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_nothing_in_gives_nothing_or_zeros_out(path: str, batch: int, queries: int, keys: int) -> None:
    """Without keys every query is blind."""
    q, k, v = torch.randn(batch, 2, queries, 4), torch.randn(batch, 2, keys, 4), torch.randn(batch, 2, keys, 5)
    for mask in (everything, causal):
        out = attend(q, k, v, AttentionMask(mask, positions(queries), positions(keys)), path=path)
        assert out.shape == (batch, 2, queries, 5) and (out == 0).all() == (keys == 0 or out.numel() == 0)
