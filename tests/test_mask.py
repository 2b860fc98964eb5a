"""Masks: predicates mean what they say, combine like booleans, and render the same in all three ways."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard.nn.mask
from mask_strategies import combined
from regard.errors import UserError
from regard.nn.attention import attend
from regard.nn.mask import (
    AttentionMask,
    Mask,
    Positions,
    Token,
    causal,
    everything,
    from_tensor,
    padding,
    same_document,
    window,
)
from regard.nn.patterns import global_tokens, prefix, random_blocks

CPU = torch.device("cpu")
first = Mask("first", lambda q, k: k.pos == 0)
even = Mask("even", lambda q, k: (q.pos + k.pos) % 2 == 0)
nothing = ~everything


def dense(mask: Mask, queries: int = 5, keys: int = 5) -> Tensor:
    """[Nq, Nk], positions counted from 0 on both sides."""
    attention_mask = AttentionMask(mask, Positions.of(queries, CPU), Positions.of(keys, CPU))
    return attention_mask.dense().expand(1, 1, queries, keys)[0, 0]


def by_loop(mask: Mask, q: Positions, k: Positions, batch: int) -> Tensor:
    """The predicate asked pair by pair, [B, Nq, Nk]."""

    def place(of: Positions, b: int, i: int) -> Token:
        def at(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[min(b, x.shape[0] - 1), i]

        pos = at(of.pos)
        assert pos is not None
        return Token(torch.tensor(b), torch.tensor(i), pos, at(of.is_real), at(of.document))

    rows = range(batch)
    cells = [
        [[bool(mask.predicate(place(q, b, i), place(k, b, j))) for j in range(k.length)] for i in range(q.length)]
        for b in rows
    ]
    return torch.tensor(cells)


leaves = st.sampled_from([causal, window(1), window(2), window(3), first, even, everything, nothing])
masks = combined(leaves, 6)


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        (everything, lambda i, j: True),
        (causal, lambda i, j: j <= i),
        (window(1), lambda i, j: i == j),
        (window(3), lambda i, j: abs(i - j) <= 2),
        (causal & window(2), lambda i, j: i - 1 <= j <= i),
        (causal & (window(2) | first), lambda i, j: j <= i and (j >= i - 1 or j == 0)),
        (~causal, lambda i, j: j > i),
        (~(causal & window(2)), lambda i, j: not i - 1 <= j <= i),
    ],
    ids=lambda value: str(value) if isinstance(value, Mask) else "rule",
)
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 4), (4, 1), (3, 7)])
def test_truth_tables(mask: Mask, rule: object, queries: int, keys: int) -> None:
    expected = torch.tensor([[bool(rule(i, j)) for j in range(keys)] for i in range(queries)])
    assert torch.equal(dense(mask, queries, keys), expected)


@settings(max_examples=60, deadline=None)
@given(masks, masks)
def test_masks_combine_like_booleans(a: Mask, b: Mask) -> None:
    one, other = dense(a), dense(b)
    assert torch.equal(dense(a & b), one & other)
    assert torch.equal(dense(a | b), one | other)
    assert torch.equal(dense(~a), ~one)
    assert torch.equal(dense(~(a & b)), dense(~a | ~b))  # De Morgan
    assert torch.equal(dense(~(a | b)), dense(~a & ~b))
    assert torch.equal(dense(a | a & b), one) and torch.equal(dense(~~a), one)


@settings(max_examples=60, deadline=None)
@given(masks, leaves)
def test_without_lets_one_part_through(mask: Mask, part: Mask) -> None:
    """Taking a part out can only show more, and what is left does not hold it any longer."""
    rest = mask.without(part)
    assert part is everything or part not in rest
    if part not in mask:
        assert torch.equal(dense(rest), dense(mask))
    assert (dense(rest) | ~dense(mask)).all()


def test_without_and_in() -> None:
    assert (causal & padding).without(causal) is padding
    assert causal.without(causal) is everything and causal.without(padding) is causal
    nested = causal & (window(3) & padding)
    assert all(part in nested for part in (causal, window(3), padding)) and first not in nested
    assert torch.equal(dense((causal & (window(2) | first)).without(causal)), dense(window(2) | first))
    assert (causal | first).without(first) is everything
    assert causal & everything is causal and everything & causal is causal and causal & causal is causal


def test_names_say_what_was_combined() -> None:
    assert str(causal & ~(window(3) | first)) == "(causal & ~(window(3) | first))"


def test_draw() -> None:
    assert doctest.testmod(regard.nn.mask).failed == 0
    assert (causal & window(2)).draw(3, 4) == "■ · · ·\n■ ■ · ·\n· ■ ■ ·"
    assert first.draw(2) == "■ ·\n■ ·"
    assert everything.draw(1, 3) == "■ ■ ■"


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(UserError, match="window = 0"):
        window(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: prefix(-1), "prefix = -1: must be 0 or more"),
        (lambda: global_tokens(-1), "global_tokens = -1"),
        (lambda: random_blocks(-1, 4), "random_blocks = -1"),
        (lambda: random_blocks(1, 0), "block_size = 0: must be 1 or more"),
        (lambda: causal | torch.ones(2, 2), "the mask is a Tensor: pass a Mask"),
        (lambda: causal & None, "the mask is a NoneType"),
    ],
)
def test_parts_that_are_no_masks_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


# Padding, documents, tables


def test_positions_count_real_tokens() -> None:
    is_real = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()
    pos = Positions.of(5, CPU, is_real).pos
    assert [pos[b][is_real[b]].tolist() for b in range(4)] == [[0, 1, 2], [0, 1, 2], [0, 1, 2, 3, 4], []]
    assert Positions.of(3, CPU, start=4).pos.tolist() == [[4, 5, 6]]


def test_positions_restart_with_each_document() -> None:
    document = torch.tensor([[0, 0, 0, 1, 1, 2], [5, 5, 7, 7, 7, 7]])
    assert Positions.of(6, CPU, document=document).pos.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]
    is_real = torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1]]).bool()
    pos = Positions.of(6, CPU, is_real, document).pos
    assert pos[0][is_real[0]].tolist() == [0, 1, 0] and pos[1][is_real[1]].tolist() == [0, 1, 0, 1]


def test_padding_and_documents_hide_by_themselves() -> None:
    """Whatever the mask: padding and other documents are never attended to."""
    is_real = torch.tensor([[False, True, True], [True, True, False]])
    seen = AttentionMask(everything, Positions.of(3, CPU), Positions.of(3, CPU, is_real)).dense()
    assert torch.equal(seen.expand(2, 1, 3, 3)[:, 0], is_real[:, None].expand(2, 3, 3))
    packed = Positions.of(4, CPU, document=torch.tensor([[0, 0, 1, 1]]))
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(AttentionMask(causal, packed, packed).dense()[0, 0], torch.tensor(expected).bool())
    taken = AttentionMask(causal, packed, packed).with_mask(everything)
    assert same_document in taken.mask  # dropping a mask never joins documents


def test_documents_are_needed_on_both_sides() -> None:
    packed = Positions.of(2, CPU, document=torch.tensor([[0, 1]]))
    with pytest.raises(UserError, match="document"):
        AttentionMask(everything, Positions.of(2, CPU), packed).dense()


@pytest.mark.parametrize(
    ("is_real", "document", "word"),
    [
        (torch.ones(2, 3), None, "float32"),  # 1 and 0 would be added to the scores
        (torch.ones(2, 3).long(), None, "int64"),
        (torch.ones(2, 4).bool(), None, r"\(2, 4\)"),
        (torch.ones(3).bool(), None, r"\(3,\)"),
        (None, torch.zeros(2, 3), "float32"),
        (None, torch.zeros(2, 5).long(), r"\(2, 5\)"),
    ],
)
def test_marks_of_a_wrong_kind_are_refused(is_real: Tensor | None, document: Tensor | None, word: str) -> None:
    with pytest.raises(UserError, match=word):
        Positions.of(3, CPU, is_real, document)


def test_from_tensor_reads_by_index() -> None:
    table = torch.rand(2, 3, 4) < 0.5
    seen = AttentionMask(from_tensor(table), Positions.of(3, CPU), Positions.of(4, CPU)).dense()
    assert torch.equal(seen[:, 0], table)
    assert torch.equal(dense(from_tensor(table[1]), 3, 4), table[1])
    assert torch.equal(dense(from_tensor(table[1]) & causal, 3, 4), table[1] & dense(causal, 3, 4))


def test_from_tensor_refuses_what_does_not_fit() -> None:
    for wrong in (torch.ones(3, 3), torch.ones(3).bool(), torch.ones(1, 1, 3, 3).bool()):
        with pytest.raises(UserError, match="mask tensor"):
            from_tensor(wrong)
    with pytest.raises(UserError, match=r"\(3, 3\): too small for 4 queries and 3 keys"):
        dense(from_tensor(torch.ones(3, 3).bool()), 4, 3)
    positions, x = Positions.of(600, CPU), torch.randn(1, 1, 600, 8)
    with pytest.raises(UserError, match=r"\(500, 500\): too small"):  # also where blocks are skipped
        attend(x, x, x, AttentionMask(window(60) & from_tensor(torch.ones(500, 500).bool()), positions, positions))


# Renderings


@st.composite
def situations(draw: st.DrawFn) -> tuple[AttentionMask, int]:
    """A mask over positions with left or right padding, packed documents, or a cache in front."""
    batch, keys = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(["plain", "padded", "packed", "cached"]))
    bits = st.lists(st.booleans(), min_size=keys, max_size=keys)
    k = Positions.of(keys, CPU)
    if kind == "padded":
        k = Positions.of(keys, CPU, torch.tensor([draw(bits) for _ in range(batch)]))
    if kind == "packed":
        steps = torch.tensor([draw(bits) for _ in range(batch)]).long()
        k = Positions.of(keys, CPU, document=steps.cumsum(dim=1))
    q = k
    if kind == "cached":
        new = draw(st.integers(1, keys))
        q = Positions.of(new, CPU, start=keys - new)
    mask = draw(masks)
    if draw(st.booleans()):
        table = torch.tensor([[draw(bits) for _ in range(q.length)] for _ in range(batch)])
        mask = mask & from_tensor(table)
    return AttentionMask(mask, q, k), batch


@settings(max_examples=60, deadline=None)
@given(situations())
def test_dense_is_a_loop_over_all_pairs(situation: tuple[AttentionMask, int]) -> None:
    attention_mask, batch = situation
    expected = by_loop(attention_mask.mask, attention_mask.q, attention_mask.k, batch)
    assert torch.equal(attention_mask.dense().expand(batch, 1, *expected.shape[1:])[:, 0], expected)


@settings(max_examples=15, deadline=None)
@given(situations())
def test_blocks_are_the_dense_mask(situation: tuple[AttentionMask, int]) -> None:
    """FlexAttention's own evaluation of its mask, and no visible pair in a block that it would skip."""
    from torch.nn.attention.flex_attention import create_mask

    attention_mask, batch = situation
    expected = attention_mask.dense().expand(batch, 1, attention_mask.q.length, attention_mask.k.length)
    blocks = attention_mask.blocks(batch)
    if blocks is None:
        assert expected.all()
        return
    assert torch.equal(
        create_mask(blocks.mask_mod, batch, 1, attention_mask.q.length, attention_mask.k.length, "cpu"), expected
    )
    kept = blocks.to_dense().bool().expand(batch, 1, -1, -1)  # one block of 128 x 128 holds all of it
    assert bool((kept[:, 0, 0, 0] | ~expected.flatten(1).any(dim=1)).all())


@settings(max_examples=80, deadline=None)
@given(situations())
def test_fused_is_the_dense_mask(situation: tuple[AttentionMask, int]) -> None:
    """Whatever shortcut `fused` takes, SDPA computes what the dense mask says."""
    attention_mask, batch = situation
    q = torch.randn(batch, 1, attention_mask.q.length, 4, dtype=torch.float64)
    k = torch.randn(batch, 1, attention_mask.k.length, 4, dtype=torch.float64)
    mask, is_causal = attention_mask.fused()
    ours = F.scaled_dot_product_attention(q, k, k, mask, is_causal=is_causal)
    dense_mask = attention_mask.dense().expand(batch, 1, q.shape[2], k.shape[2])
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, k, dense_mask))


def span(start: int, count: int) -> Positions:
    return Positions.of(count, CPU, start=start)


@pytest.mark.parametrize(
    ("q", "k", "shortcut"),
    [
        (span(0, 6), span(0, 6), (None, True)),  # a whole sequence
        (span(3, 4), span(3, 4), (None, True)),
        (span(5, 1), span(0, 6), (None, False)),  # one token beside a cache: every key is in the past
        (span(0, 1), span(0, 1), (None, True)),
        (span(3, 3), span(0, 6), None),  # a chunk beside a cache: is_causal would count from the first key
        (span(0, 3), span(0, 6), None),
        (span(0, 6), span(0, 3), None),
        (span(7, 2), span(0, 6), (None, False)),
        (span(6, 2), span(0, 8), None),
    ],
)
def test_causal_needs_no_tensor_exactly_where_it_is_exact(q: Positions, k: Positions, shortcut: object) -> None:
    attention_mask = AttentionMask(causal, q, k)
    mask, is_causal = attention_mask.fused()
    if shortcut is None:
        assert mask is not None and not is_causal
    else:
        assert (mask, is_causal) == shortcut
    if shortcut == (None, False):
        assert attention_mask.dense().all()


def test_padding_and_windows_always_bring_a_tensor() -> None:
    padded = Positions.of(4, CPU, torch.tensor([[False, True, True, True]]))
    assert AttentionMask(causal, padded, padded).fused()[0] is not None
    assert AttentionMask(causal & window(2), span(0, 4), span(0, 4)).fused()[0] is not None
    assert AttentionMask(everything, padded, span(0, 4)).fused() == (None, False)  # padded queries hide no keys


def test_a_rendering_is_made_once() -> None:
    attention_mask = AttentionMask(causal & window(2), span(0, 4), span(0, 4))
    assert attention_mask.dense() is attention_mask.dense() and attention_mask.blocks(1) is attention_mask.blocks(1)
    assert attention_mask.with_mask(attention_mask.mask) is attention_mask
