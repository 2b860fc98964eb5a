"""Batches: every row once an epoch, within the budget, in an order that a seed and a place decide."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.batch import PairBatch, Pairs, Ragged
from regard.data.streams import Batches
from regard.errors import UserError


def make_pairs(count: int = 57, longest: int = 9) -> Pairs:
    """Source i is i, i, …, 3 and target i is 2, i, …, 3: a batch shows which rows it holds."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest - 1, (count, 2), generator=generator).tolist()
    return Pairs(
        [[i] * a + [3] for i, (a, _) in enumerate(lengths)], [[2] + [i] * b + [3] for i, (_, b) in enumerate(lengths)]
    )


def same(a: PairBatch, b: PairBatch) -> bool:
    is_real = (a.source_is_real is None) == (b.source_is_real is None)
    if is_real and a.source_is_real is not None and b.source_is_real is not None:
        is_real = torch.equal(a.source_is_real, b.source_is_real)
    return is_real and all(torch.equal(getattr(a, x), getattr(b, x)) for x in ("source", "target", "labels"))


# --- Ragged


@given(st.lists(st.lists(st.integers(1, 2**31 - 1), max_size=6), max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_padding_gives_each_sequence_back(sequences, data):
    table = Ragged.of(sequences)
    assert len(table) == len(sequences)
    rows = data.draw(st.lists(st.sampled_from(range(len(sequences))), max_size=6)) if sequences else []
    ids, is_real = table.pad(torch.tensor(rows, dtype=torch.long))
    assert ids.dtype == torch.long and is_real.dtype == torch.bool
    assert ids.shape == is_real.shape == (len(rows), max((len(sequences[row]) for row in rows), default=0))
    for row, line, real in zip(rows, ids, is_real, strict=True):
        assert line[real].tolist() == sequences[row]
        assert real.tolist() == sorted(real.tolist(), reverse=True)  # real tokens first
        assert not line[~real].any()


# --- Pairs


def test_target_is_shifted_by_one_and_padding_is_never_expected():
    batch = Pairs([[5, 6, 3], [7, 3]], [[2, 8, 3], [2, 9, 10, 11, 3]]).batch(torch.tensor([0, 1]))
    ignore = PairBatch.IGNORE
    assert batch.source.tolist() == [[5, 6, 3], [7, 3, 0]]
    assert batch.source_is_real is not None
    assert batch.source_is_real.tolist() == [[True, True, True], [True, True, False]]
    assert batch.target[:, :2].tolist() == [[2, 8], [2, 9]]
    assert batch.labels.tolist() == [[8, 3, ignore, ignore], [9, 10, 11, 3]]
    assert batch.target.shape == batch.labels.shape


def test_no_mask_where_there_is_no_padding():
    pairs = Pairs([[5, 3], [6, 3], [5, 6, 3]], [[2, 3]] * 3)
    assert pairs.batch(torch.tensor([1, 0])).source_is_real is None
    assert pairs.batch(torch.tensor([0, 2])).source_is_real is not None


def test_a_batch_moves_whole():
    batch = make_pairs().batch(torch.tensor([0, 1, 2]))
    moved = batch.to(torch.device("meta"))
    assert {moved.source.device.type, moved.target.device.type, moved.labels.device.type} == {"meta"}
    assert (moved.source_is_real is None) == (batch.source_is_real is None)


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [
        ([], [], "the data is empty"),
        ([[3]], [[2, 3], [2, 3]], "1 sources but 2 targets"),
        ([[4, 3], []], [[2, 3], [2, 3]], "source 1 has 0 ids"),
        ([[3], [3]], [[2, 3], [2]], "target 1 has 1 ids"),  # nothing to predict: its loss would be 0 / 0
        ([[3]], [[]], "target 0 has 0 ids"),
    ],
)
def test_data_that_nothing_can_be_learned_from_is_refused(sources, targets, words):
    with pytest.raises(UserError, match=words):
        Pairs(sources, targets)


# --- Batches


@pytest.mark.parametrize("budget", [9, 10, 31, 64, 10_000])
def test_every_row_once_an_epoch_and_never_over_budget(budget):
    pairs = make_pairs()
    batches = Batches(pairs, budget, seed=3)
    for epoch in range(3):
        plan = batches.plan(epoch)
        assert sorted(torch.cat(plan).tolist()) == list(range(len(pairs)))
        for rows in plan:
            assert len(rows) * int(pairs.sizes[rows].max()) <= budget
    if budget == 10_000:
        assert len(batches.plan(0)) == 1


def test_padding_stays_small_because_lengths_are_grouped():
    pairs = make_pairs(2000, longest=40)
    plan = Batches(pairs, 1024, seed=1).plan(0)
    real = int(pairs.sizes.sum())
    area = sum(len(rows) * int(pairs.sizes[rows].max()) for rows in plan)
    assert area < 1.1 * real
    assert len(plan) < 1.1 * real / 1024 + 1  # and the budget is used


@pytest.mark.parametrize("longest, multiple", [(60, 8), (900, 64)])
def test_batches_for_a_gpu_have_few_shapes(longest, multiple):
    pairs = make_pairs(800, longest)
    budget, cuda = 10 * longest, torch.device("cuda")
    exact, rounded = (list(islice(Batches(pairs, budget, 1, device), 40)) for device in (None, cuda))
    stream = Batches(pairs, budget, 1, cuda)
    assert sorted(torch.cat(stream.plan(0)).tolist()) == list(range(800))
    for batch in rounded:
        assert batch.source.shape[1] % multiple == 0 or batch.source.shape[1] == pairs.longest_row
        assert batch.source.numel() <= budget and (batch.target.shape[1] + 1) * len(batch.target) <= budget
    shapes = [len({batch.source.shape for batch in batches}) for batches in (exact, rounded)]
    assert shapes[1] < 0.7 * shapes[0]


def test_the_stream_is_the_plan_epoch_after_epoch():
    pairs = make_pairs()
    batches = Batches(pairs, 40, seed=7)
    expected = [rows for epoch in range(3) for rows in Batches(pairs, 40, seed=7).plan(epoch)]
    for rows, batch in zip(expected, batches, strict=False):
        assert same(batch, pairs.batch(rows))


def test_same_seed_same_order_and_another_order_each_epoch_and_seed():
    pairs = make_pairs()

    def order(seed: int, epoch: int) -> list[int]:
        return torch.cat(Batches(pairs, 40, seed).plan(epoch)).tolist()

    assert order(1, 0) == order(1, 0)
    seen = [order(seed, epoch) for seed in (0, 1, 2) for epoch in range(4)]
    assert len({tuple(line) for line in seen}) == len(seen)


def test_neither_the_global_generator_nor_its_state_matters():
    pairs = make_pairs()
    torch.manual_seed(1)
    first = Batches(pairs, 40, 5).plan(0)
    state = torch.get_rng_state()
    Batches(pairs, 40, 5).plan(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, Batches(pairs, 40, 5).plan(0), strict=True))


def test_seeking_goes_on_as_if_it_had_never_stopped():
    pairs = make_pairs(23)
    length = len(Batches(pairs, 30, seed=4).plan(0))
    total = 2 * length + 2  # over two ends of an epoch
    whole = list(islice(Batches(pairs, 30, seed=4), total))
    for taken in range(total):
        stopped = Batches(pairs, 30, seed=4)
        list(islice(stopped, taken))
        again = Batches(pairs, 30, seed=4)
        again.seek(dict(stopped.position))
        rest = list(islice(again, total - taken))
        assert all(same(a, b) for a, b in zip(rest, whole[taken:], strict=True)), taken


def test_one_row_is_an_epoch():
    batches = Batches(Pairs([[5, 3]], [[2, 6, 3]]), 3, seed=0)
    for batch in islice(batches, 3):
        assert batch.source.tolist() == [[5, 3]] and batch.labels.tolist() == [[6, 3]]
    assert batches.position == {"epoch": 2, "index": 1}


def test_a_row_beyond_the_budget_is_named_before_training_starts():
    pairs = Pairs([[5, 3], [4] * 80 + [3]], [[2, 3], [2, 3]])
    with pytest.raises(UserError, match=r"batch_tokens = 64 .* 81 tokens"):
        Batches(pairs, 64, seed=0)
    assert len(Batches(pairs, 81, seed=0).plan(0)) == 2


# --- several processes


@pytest.mark.parametrize("world", [2, 3, 5])
def test_processes_take_turns_and_stand_at_the_same_place(world):
    """Together they read what one would, over the end of an epoch too; where each stands says nothing of its rank."""
    pairs = make_pairs()
    one = Batches(pairs, 40, seed=1)
    several = [Batches(pairs, 40, seed=1) for _ in range(world)]
    for rank, stream in enumerate(several):
        stream.shard(rank, world)
    turns = 2 * len(one.plan(0)) // world + 1
    expected = iter(one)
    for parts in islice(zip(*several, strict=True), turns):
        for part in parts:
            assert same(part, next(expected))
        assert all(stream.position == one.position for stream in several)


def test_another_number_of_processes_goes_on_where_they_stopped():
    pairs = make_pairs()
    two, three = Batches(pairs, 40, seed=1), Batches(pairs, 40, seed=1)
    two.shard(1, 2)
    three.shard(2, 3)
    for _ in islice(two, 2):
        pass
    three.seek(two.position)
    assert same(next(iter(three)), list(islice(Batches(pairs, 40, seed=1), 7))[6])
