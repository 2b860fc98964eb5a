"""Packing: nothing is lost, nothing is mixed, and the numbers are those of the sentences alone."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.data.batch import PairBatch, Pairs
from regard.data.pack import PackedBatch, Packs, assign
from regard.data.streams import Batches
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.training.objective import target_states, translation

POSITIONS = ["sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none"]
BOS, EOS = 2, 3


def some_pairs(count: int, seed: int = 0, shortest: int = 0, longest: int = 9) -> Pairs:
    """Pairs whose words say which pair they belong to: number i uses the ids from 10 i + 4 on."""
    draw = random.Random(seed)
    sources, targets = [], []
    for i in range(count):
        words = [[4 + 10 * i + draw.randrange(10) for _ in range(draw.randint(shortest, longest))] for _ in range(2)]
        sources.append([*words[0], EOS])
        targets.append([BOS, *words[1], EOS])
    return Pairs(sources, targets)


def row_of(data, i):
    return data.flat[data.starts[i] : data.starts[i] + data.lengths[i]].tolist()


def layout_of(packs: Packs, epoch: int) -> PackedBatch:
    """All rows of an epoch."""
    return packs.fill(epoch, packs.plan(epoch))


def unpack(batch: PackedBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(source, whole target) of every document, read back from the tensors alone."""
    found = []
    for row in range(len(batch.source)):
        documents = {*batch.source_document[row].tolist(), *batch.target_document[row].tolist()} - {0}
        assert documents == set(range(1, len(documents) + 1))
        for number in documents:
            on, at = batch.source_document[row] == number, batch.target_document[row] == number
            read, expected = batch.target[row][at].tolist(), batch.labels[row][at].tolist()
            assert read[1:] == expected[:-1]  # what should follow is what is read next
            found.append((tuple(batch.source[row][on].tolist()), (*read, expected[-1])))
    return found


# --- where a pair goes


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=80), st.integers(12, 30))
def test_no_row_overflows_and_every_pair_is_the_best_fit(sizes, length):
    """Against a search over all rows for the one with the least room that is enough."""
    rows = assign([a for a, _ in sizes], [b for _, b in sizes], length)
    room: list[list[int]] = []
    for (a, b), row in zip(sizes, rows, strict=True):
        fits = [min(sides) for sides in room if min(sides) >= max(a, b)]
        if fits:
            assert min(room[row]) == min(fits)
        else:
            assert row == len(room)
            room.append([length, length])
        room[row] = [room[row][0] - a, room[row][1] - b]
        assert min(room[row]) >= 0


# --- what an epoch holds


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_every_pair_is_there_exactly_once_an_epoch(rows):
    data = some_pairs(60)
    packs = Packs(data, rows, 24, seed=5)
    wanted = sorted((tuple(row_of(data.sources, i)), tuple(row_of(data.targets, i))) for i in range(60))
    for epoch in range(2):
        layout = layout_of(packs, epoch)
        assert len(layout.source) % rows == 0 and layout.source.shape == layout.labels.shape
        assert sorted(unpack(layout)) == wanted


def test_documents_stand_together_and_padding_comes_last():
    layout = layout_of(Packs(some_pairs(60), 4, 24, seed=5), 0)
    for documents in (*layout.source_document.tolist(), *layout.target_document.tolist()):
        real = [number for number in documents if number]
        assert documents == real + [0] * (24 - len(real)) and real == sorted(real)
    padding = layout.target_document == 0
    assert (layout.labels[padding] == PairBatch.IGNORE).all() and (layout.labels[~padding] > 0).all()


def test_rows_are_filled_to_nine_tenths_and_more():
    """Lengths like those of captions: 10 to 15 words, sides that go together."""
    draw = random.Random(1)
    lengths = [max(3, round(draw.gauss(14, 5))) for _ in range(3000)]
    other = [max(3, round(n * draw.uniform(0.8, 1.25))) for n in lengths]
    data = Pairs([[4] * n for n in lengths], [[4] * (n + 1) for n in other])
    layout = layout_of(Packs(data, 16, 128, seed=1), 0)
    assert (layout.source_document > 0).float().mean() > 0.9
    assert (layout.target_document > 0).float().mean() > 0.9
    assert int(layout.tokens) == sum(other)


def test_the_order_follows_from_seed_and_epoch():
    data = some_pairs(60)
    layouts = {
        (seed, epoch): unpack(layout_of(Packs(data, 2, 24, seed=seed), epoch)) for seed in (1, 2) for epoch in (0, 1)
    }
    assert layouts[1, 0] == unpack(layout_of(Packs(data, 2, 24, seed=1), 0))
    assert len({tuple(order) for order in layouts.values()}) == 4


def test_seek_goes_on_where_it_stood():
    packs = Packs(some_pairs(60), 3, 24, seed=2)
    stream, seen, positions = iter(packs), [], []
    for batch in islice(stream, 20):
        seen.append(batch)
        positions.append(packs.position)
    assert positions[-1]["epoch"] >= 1  # over the end of an epoch
    for at in (0, 4, 15):
        again = Packs(some_pairs(60), 3, 24, seed=2)
        again.seek(positions[at])
        torch.testing.assert_close(next(iter(again)).source, seen[at + 1].source)


def test_a_pair_may_fill_a_row_but_not_more():
    data = Pairs([[4] * 8, [4] * 3], [[4] * 9, [4] * 3])  # 8 tokens are read of a target of 9
    assert len(unpack(layout_of(Packs(data, 1, 8, seed=0), 0))) == 2
    with pytest.raises(UserError, match=r"train.pack = 7 is too short for a sequence of 8 tokens.*data.max_length = 7"):
        Packs(data, 1, 7, seed=0)


# --- the numbers


@pytest.fixture(scope="module")
def small() -> Pairs:
    draw = random.Random(3)
    words = [[draw.randrange(4, 20) for _ in range(draw.randint(0, 7))] for _ in range(24)]
    return Pairs([[*line, EOS] for line in words], [[BOS, *reversed(line), EOS] for line in words])


def model(position: str, **changes):
    fields = {"dim": 16, "layers": 2, "heads": 2, "ff_dim": 32, "vocab_size": 20, "position": position} | changes
    return build(ModelConfig(**fields)).double().eval()


@pytest.mark.parametrize("position", POSITIONS)
def test_a_packed_sentence_has_the_logits_it_has_alone(small, position):
    network = model(position)
    layout = layout_of(Packs(small, 4, 16, seed=1), 0)
    logits = network.output_head(target_states(network, layout))
    assert logits.isfinite().all()  # on padding, too
    for row in range(len(layout.source)):
        for number in range(1, int(layout.source_document[row].max()) + 1):
            source = layout.source[row][layout.source_document[row] == number]
            at = layout.target_document[row] == number
            alone = network(source[None], layout.target[row][at][None])
            torch.testing.assert_close(logits[row][at], alone[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("position", ["sinusoidal", "rope"])
def test_the_loss_of_an_epoch_is_that_of_padded_batches(small, position):
    network = model(position)
    packed, count = translation(network, layout_of(Packs(small, 4, 16, seed=1), 0), label_smoothing=0.1)
    batches = Batches(small, 40, seed=1)
    padded = [translation(network, small.batch(rows), label_smoothing=0.1) for rows in batches.plan(0)]
    assert int(count) == sum(int(part) for _, part in padded)
    torch.testing.assert_close(packed, torch.stack([loss for loss, _ in padded]).sum(), rtol=1e-5, atol=1e-4)


def test_rows_of_pure_padding_count_nothing_and_poison_nothing(small):
    """An epoch of 24 pairs in steps of 50 rows: most of the step is padding."""
    network = model("rope").train()
    step = next(iter(Packs(small, 50, 16, seed=1)))
    assert len(step.source) == 50 and int((step.source_document.amax(dim=1) == 0).sum()) > 25
    loss, count = translation(network, step)
    assert int(count) == int((small.targets.lengths - 1).sum())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
