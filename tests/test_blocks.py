"""Blocks: bounds of a mask are safe for any combination, and skipping masked blocks changes no value or gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from mask_strategies import combined
from regard.nn import flash
from regard.nn.attention import attend
from regard.nn.banded import attend_banded, prepare
from regard.nn.block import Stack
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Mask, Positions, causal, everything, from_tensor, padding, window
from regard.nn.patterns import global_tokens, prefix, random_blocks, tiles
from regard.nn.plan import Piece, Plan, cheapest, make_plan, plan_texts
from regard.nn.position import KINDS

pytestmark = pytest.mark.grid

CPU = torch.device("cpu")
even = Mask("even", lambda q, k: (q.pos + k.pos) % 2 == 0)  # one that knows nothing of blocks
table = from_tensor(torch.rand(60, 60, generator=torch.Generator().manual_seed(0)) < 0.3)
leaves = st.one_of(
    st.sampled_from([causal, everything, padding, even, table, tiles(3, (6, 1)), tiles(2, (5, 0), 1)]),
    st.builds(window, st.integers(1, 20), st.integers(1, 4)),
    st.builds(prefix, st.integers(0, 9)),
    st.builds(global_tokens, st.integers(0, 9)),
    st.builds(random_blocks, st.integers(0, 2), st.integers(1, 9), st.integers(0, 3)),
)
masks = combined(leaves, 5)


@st.composite
def tokens(draw: st.DrawFn, longest: int = 60) -> Positions:
    """A sequence, perhaps with padding anywhere, perhaps several documents in a row."""
    length, rows = draw(st.integers(1, longest)), draw(st.integers(1, 2))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    is_real = torch.rand(rows, length, generator=random) < 0.8 if draw(st.booleans()) else None
    document = None
    if draw(st.booleans()):
        document = (torch.rand(rows, length, generator=random) < 0.1).long().cumsum(dim=1)
    return Positions.of(length, CPU, is_real, document)


def in_blocks(dense: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Whether any and all pairs of each block are visible, from all pairs: [B, Nq, Nk] -> [B, Nq / size, Nk / size]."""
    parts = [[part for part in row.split(size, 2)] for row in dense.split(size, 1)]
    some = [torch.stack([part.flatten(1).any(1) for part in row], 1) for row in parts]
    every = [torch.stack([part.flatten(1).all(1) for part in row], 1) for row in parts]
    return torch.stack(some, 1), torch.stack(every, 1)


@settings(max_examples=120, deadline=None)
@given(masks, tokens(), st.sampled_from([3, 8, 16]))
def test_bounds_are_safe(mask: Mask, positions: Positions, size: int) -> None:
    attention_mask, length = AttentionMask(mask, positions, positions), positions.length
    dense = attention_mask.dense()[:, 0].expand(-1, length, length)
    some, every = in_blocks(dense, size)
    low, high = attention_mask.bounds(size)
    assert bool((low.expand_as(some) | ~some).all()), "a visible block would be skipped"
    assert bool((every | ~high.expand_as(every)).all()), "a masked pair would be attended to"


@pytest.mark.parametrize(
    "mask",
    [causal, window(5), causal & window(17), window(3) | prefix(6), global_tokens(4), causal & random_blocks(2, 8)],
    ids=str,
)
def test_bounds_of_a_plain_sequence_are_exact(mask: Mask) -> None:
    positions = Positions.of(64, CPU)
    attention_mask = AttentionMask(mask, positions, positions)
    some, every = in_blocks(attention_mask.dense()[:, 0].expand(-1, 64, 64), 8)
    low, high = attention_mask.bounds(8)
    assert torch.equal(low.expand_as(some), some) and torch.equal(high.expand_as(every), every)


def test_random_blocks_may_be_much_smaller_than_those_that_are_computed() -> None:
    """Their bounds take a sum over pairs of blocks once, not once for each pair inside a block."""
    length = 1100
    positions = Positions.of(length, CPU)
    for mask in (random_blocks(3, 1), random_blocks(2, 5) & causal):
        attention_mask = AttentionMask(mask, positions, positions)
        some, every = in_blocks(attention_mask.dense()[:, 0].expand(-1, length, length), 512)
        low, high = attention_mask.bounds(512)
        assert torch.equal(low.expand_as(some), some) and not bool((high & ~every).any())
    assert bool(AttentionMask(random_blocks(3, 1), *[Positions.of(5000, CPU)] * 2).bounds(512)[0].all())  # too many


@settings(max_examples=120, deadline=None)
@given(
    masks,
    tokens(),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([None, "alibi", "t5", "relative"]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_banded_attention_is_the_reference(
    mask: Mask, positions: Positions, size: int, kind: str | None, key_heads: int, pieces: bool
) -> None:
    config = StackConfig(dim=8, heads=2, position_distance=9, position_buckets=8)
    assume(positions.length > 1)
    batch = max(2, positions.rows) if positions.rows > 1 else 2
    q, k, v = (torch.randn(batch, heads, positions.length, 4).double() for heads in (2, key_heads, key_heads))
    bias, attention_mask = None, AttentionMask(mask, positions, positions)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    if kind is not None:
        position = KINDS[kind](config).double()
        bias = position.bias(positions.pos, positions.pos)
        inputs += [*position.parameters()]
    ours = attend_banded(q, k, v, make_plan(attention_mask, size, pieces), bias=bias, scale=None, dropout=0.0)
    theirs = attend(q, k, v, attention_mask, bias=bias, path="reference")
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    for own, other in zip(*(torch.autograd.grad(out, inputs, weight) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, other)


LONG_MASKS = [
    causal & window(60), window(60), window(20, 3), causal & window(20, 3), window(30) | global_tokens(3),
    causal & (window(30) | global_tokens(70)), window(20) | global_tokens(2) | random_blocks(2, 32),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", LONG_MASKS, ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_long_sequences_skip_blocks(mask: Mask, padded: bool) -> None:
    length = 600
    is_real = torch.arange(length) < torch.tensor([[600], [555]]) if padded else None
    positions = Positions.of(length, CPU, is_real)
    attention_mask = AttentionMask(mask, positions, positions)
    inputs = [torch.randn(2, 1, length, 16, requires_grad=True) for _ in range(3)]
    ours, theirs = (attend(*inputs, attention_mask, path=path) for path in ("fused", "reference"))
    assert isinstance(attention_mask.plan, Plan)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(ours)
    for own, other in zip(*(torch.autograd.grad(out, inputs, weight) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        flex = attend(*(x.detach() for x in inputs), attention_mask, path="flex")
    torch.testing.assert_close(flex, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", LONG_MASKS, ids=str)
def test_block_masks_contain_every_visible_pair_and_few_others(mask: Mask) -> None:
    length = 700
    positions = Positions.of(length, CPU)
    attention_mask = AttentionMask(mask, positions, positions)
    block_mask = attention_mask.blocks(1)
    assert block_mask is not None and block_mask.seq_lengths == (length, length)
    dense = create_mask(block_mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0]
    assert torch.equal(dense, attention_mask.dense()[0, 0])
    some, _ = in_blocks(dense[None], 128)
    listed = block_mask.to_dense()[0, 0].bool()  # partial and full blocks
    assert bool((listed | ~some[0]).all()) and int(listed.sum()) <= int(some.sum()) + 2


PACKED_MASKS = [everything, causal, window(30), causal & window(50), causal | window(9)]


@pytest.mark.parametrize("mask", PACKED_MASKS, ids=str)
@pytest.mark.parametrize("kind", [None, "alibi", "t5", "relative"])
def test_a_packed_batch_reads_only_its_texts(mask: Mask, kind: str | None) -> None:
    """Other texts in every row, two long ones in one of them, and padding at the ends."""
    document = torch.randint(1, 9, (3, 600)).sort(dim=1).values
    document[0, 570:], document[1], document[2, 590:] = 0, 1 + torch.arange(600) // 350, 0
    positions = Positions.of(600, CPU, document > 0, document)
    attention_mask = AttentionMask(mask, positions, positions)
    inputs = [torch.randn(3, heads, 600, 16, dtype=torch.double, requires_grad=True) for heads in (2, 1, 1)]
    bias = None
    if kind is not None:
        config = StackConfig(dim=32, heads=2, position_distance=9, position_buckets=8)
        bias = KINDS[kind](config).double().bias(positions.pos, positions.pos)
    ours = attend(*inputs, attention_mask, bias=bias)
    theirs = attend(*inputs, AttentionMask(mask, positions, positions), bias=bias, path="reference")
    plan = attention_mask.plan
    assert isinstance(plan, Plan) and plan.rows == 3 and plan.cost < 0.8 * 3 * Piece((0, 600), [(0, 600)]).cost
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    for own, other in zip(*(torch.autograd.grad(out, inputs, weight) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(own, other)


def test_packed_texts_stay_dense_where_blocks_are_no_help() -> None:
    whole = torch.tensor([[1] * 600, [1] * 300 + [2] * 300])
    other = from_tensor(torch.rand(600, 600) < 0.5)  # read by index, which a row of its own would change
    for mask, document in ((everything, whole.clamp_max(1)), (other, whole)):
        positions = Positions.of(600, CPU, document=document)
        attention_mask = AttentionMask(mask, positions, positions)
        assert prepare(attention_mask, CPU, 0.0, set()) == "dense" and attention_mask.plan is None


def test_texts_are_planned_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the plan is no faster than dense attention, and is not used."""
    stack = Stack(StackConfig(dim=8, heads=2, layers=3, ff_dim=8, position="none"), causal=False).eval()
    plans = list[Plan | None]()

    def planned(attention_mask: AttentionMask) -> Plan | None:
        plans.append(plan_texts(attention_mask))
        return plans[-1]

    monkeypatch.setattr("regard.nn.banded.plan_texts", planned)
    for size in (100, 600):
        stack(torch.randn(1, 600, 8), Positions.of(600, CPU, document=(torch.arange(600) // size)[None]))
    assert len(plans) == 2 and plans[0] is not None and plans[1] is None


def test_a_window_takes_no_memory_for_all_pairs() -> None:
    positions = Positions.of(1 << 17, CPU)
    attention_mask = AttentionMask(causal & window(256), positions, positions)
    assert prepare(attention_mask, CPU, 0.0, {"flex"}) == "banded"
    plan = attention_mask.plan
    assert isinstance(plan, Plan)
    masks = {id(piece.pairs): piece.pairs.visible.numel() for piece in plan.pieces if piece.pairs is not None}
    assert len(plan.pieces) > 1000 and sum(masks.values()) < 1 << 18
    block_mask = attention_mask.blocks(1)
    assert block_mask is not None and block_mask.kv_num_blocks.max() <= 3


def test_attention_dropout_of_a_window_keeps_the_mean() -> None:
    positions = Positions.of(640, CPU)
    attention_mask = AttentionMask(window(40), positions, positions)
    q, k = torch.randn(2, 2, 4, 640, 16)
    v = torch.ones(2, 4, 640, 1)
    out = attend(q, k, v, attention_mask, dropout=0.25)
    assert attention_mask.plan is not None and out.std() > 0.01
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)


def test_what_has_no_use_for_blocks_stays_dense() -> None:
    long, short = Positions.of(600, CPU), Positions.of(100, CPU)
    for mask, positions in ((everything, long), (causal, long), (window(20), short), (even, long)):
        assert prepare(AttentionMask(mask, positions, positions), CPU, 0.0, {"flex"}) == "dense"
    one = AttentionMask(causal & window(20), Positions.of(1, CPU, start=599), long)
    assert prepare(one, CPU, 0.0, {"flex"}) == "dense"


def cost(mask: Mask, length: int) -> tuple[float, Plan]:
    """The cost of a mask relative to that of all pairs of the sequence, and its plan."""
    positions = Positions.of(length, CPU)
    plan = cheapest(AttentionMask(mask, positions, positions))
    return plan.cost / Piece((0, length), [(0, length)]).cost, plan


@pytest.mark.parametrize("length", [4096, 5000, 8192])
def test_a_window_never_costs_more_than_none(length: int) -> None:
    """Of any width: by the number of blocks, of which the plan is made without looking at all pairs."""
    full = Piece((0, length), [(0, length)], is_causal=True).cost / Piece((0, length), [(0, length)]).cost
    for size in (64, 256, 1024, length // 2, 3 * length // 4, length - 96, length - 1):
        both, _ = cost(window(size), length)
        past, plan = cost(causal & window(size), length)
        assert both < 1.03 and past < 1.03 * full
        if size <= length // 2:
            assert both < 0.93 and past < 0.9 * full
        head = plan.pieces[0]
        assert head.is_causal and size - 1024 < head.queries[1] <= size + 1  # where the window does not cut yet


def test_blocks_are_as_large_as_they_are_worth() -> None:
    sizes = [cost(causal & window(size), 4096)[1].size for size in (32, 256, 1024, 3072)]
    assert sizes == sorted(sizes) and sizes[0] == 64 and sizes[-1] > 128
    sparse, plan = cost(window(64) | global_tokens(16) | random_blocks(2, 64), 4096)
    assert plan.size == 64 and sparse < 0.3  # larger ones contain a random block nearly everywhere
    assert max(len(piece.keys) for piece in plan.pieces) > 2 and len(plan.pieces[0].keys) == 1
    assert len(cost(window(400), 600)[1].pieces) == 1  # one call for all tokens: dense attention
    wide, plan = cost(window(3000), 4096)
    assert wide < 1.02 and [piece.masked for piece in plan.pieces].count(False) == 1  # the middle sees all tokens


@pytest.mark.parametrize("kind", ["sinusoidal", "t5", "alibi", "relative", "rope"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_stack_with_windows_is_the_reference(kind: Any, checkpoint: bool) -> None:
    shape: dict[str, Any] = {"dim": 16, "heads": 2, "ff_dim": 16, "layers": 3, "dropout": 0.0, "embed_dropout": 0.0}
    x, grads = torch.randn(1, 600, 16, dtype=torch.double), []
    for path in ("fused", "reference"):
        torch.manual_seed(1)
        config = StackConfig(**shape, position=kind, attention=path, mixer="window(40), full, window(9)")  # type: ignore[arg-type]
        stack = Stack(config, causal=True).double()
        stack.checkpoint = checkpoint
        out = stack(x, Positions.of(600, CPU))
        grads.append([out, *torch.autograd.grad(out.square().sum(), [*stack.parameters()])])
    for own, other in zip(*grads, strict=True):
        torch.testing.assert_close(own, other)


def test_a_band_says_which_keys_are_visible() -> None:
    assert window(5).band == (4, 4) and causal.band == (math.inf, 0)
    assert (causal & window(5) & window(9)).band == (4, 0)
    for mask in (window(5, dilation=2), causal | window(3), ~causal, padding, window(4) & padding):
        assert mask.band is None
    assert everything.band == (math.inf, math.inf)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, *given: Any, **options: Any) -> list[Tensor]:
    """In place of the operator for a GPU: its definition, for rows or for texts one after another."""
    before, after = options["window_size_left"], options["window_size_right"]
    assert given[4] is ((before, after) == (-1, 0))  # is_causal
    length = q.shape[-3]
    row, index = torch.zeros(length), torch.arange(length)
    if starts is not None:
        row = torch.bucketize(index, starts, right=True)
    visible, distance = row == row[:, None], index - index[:, None]
    visible &= (distance >= -before) | (before < 0)
    visible &= (distance <= after) | (after < 0)
    parts = (x.transpose(-3, -2) for x in (q, k, v))
    return [F.scaled_dot_product_attention(*parts, visible, scale=options["scale"]).transpose(-3, -2)]


PADDED = {"right": [1] * 20 + [0] * 10, "left": [0] * 10 + [1] * 20, "both": [0] * 3 + [1] * 20 + [0] * 7}


@pytest.mark.parametrize("tokens", ["plain", *PADDED, "packed", "packed and padded"])
@pytest.mark.parametrize("mask", [everything, causal, window(7), causal & window(7)], ids=str)
def test_flash_attention_gets_the_bands_of_the_mask(tokens: str, mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "forward", flash_forward)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    q, k, v = torch.randn(3, 2, 4, 30, 8, dtype=torch.double)
    is_real, document = None, None
    if tokens in PADDED:
        is_real = torch.tensor([PADDED[tokens], [1] * 30]).bool()
    elif tokens != "plain":
        document = torch.tensor([[1] * 4 + [2] * 20 + [3] * 6, [1] * 30])
        is_real = document < 3 if "padded" in tokens else None
    positions = Positions.of(30, CPU, is_real, document)
    own = AttentionMask(mask, positions, positions)
    bands = flash.find_bands(own)
    assert bands is not None and bands is own.bands
    out = flash.attend_flash(q, k, v, bands, 0.3)
    expected = attend(q, k, v, AttentionMask(mask, positions, positions), path="reference", scale=0.3)
    real = torch.ones(2, 1, 30, 1) if is_real is None else is_real[:, None, :, None]
    torch.testing.assert_close(out * real, expected * real)


def test_texts_whose_tokens_are_no_neighbours_have_no_bands() -> None:
    def texts(document: list[int], is_real: list[int] | None = None, pos: list[int] | None = None) -> list[int] | None:
        real = None if is_real is None else torch.tensor([is_real]).bool()
        positions = Positions.of(len(document), CPU, real, torch.tensor([document]))
        if pos is not None:
            positions = replace(positions, pos=torch.tensor([pos]))
        starts = flash.find_texts(positions)
        return None if starts is None else starts.tolist()

    assert texts([1, 1, 2, 2]) == [0, 2, 4] and texts([0, 0, 7, 9, 9]) == [0, 2, 3, 5]
    assert texts([1, 2, 2, 1]) is None and texts([2, 2, 1, 1]) is None  # the second could come again
    assert texts([1, 1, 1, 1], [1, 0, 1, 1]) is None
    assert texts([1, 1, 0, 0], [1, 1, 0, 0]) == [0, 2, 4] and texts([1, 1, 1, 2], [0, 1, 0, 1]) == [0, 1, 2, 3, 4]
    assert texts([1, 1, 1], pos=[0, 2, 3]) is None and texts([1, 1, 1], pos=[5, 6, 7]) == [0, 3]
    assert texts([1, 1, 1], [1, 1, 0], pos=[0, 1, 9]) == [0, 2, 3]  # that of padding does not matter
    both = torch.tensor([[1, 1, 1], [1, 2, 2]])
    assert flash.find_texts(Positions.of(3, CPU, None, both)).tolist() == [0, 3, 4, 6]


def test_what_has_no_bands() -> None:
    """Other patterns, queries that are not the keys, and a recorded step, in which tensors may not be read."""
    plain, padded = Positions.of(30, CPU), Positions.of(30, CPU, torch.arange(30)[None] < 20)
    for mask in (causal | window(3), window(5, dilation=2), ~causal):
        assert flash.find_bands(AttentionMask(mask, plain, plain)) is None
    assert flash.find_bands(AttentionMask(window(3), plain, Positions.of(30, CPU))) is None
    recorded = AttentionMask(window(3), padded, padded)
    recorded.is_recorded = True
    assert flash.find_bands(recorded) is None and flash.find_bands(AttentionMask(window(3), plain, plain)) is not None
