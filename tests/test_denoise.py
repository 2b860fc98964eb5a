"""Span corruption: nothing is lost, holes are as many and as long as asked, every cut is as likely as the others."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.batch import Pairs, Ragged
from regard.data.mixture import SENTINELS, Denoised, Mixture, Noise, corrupt, counts, segments, surround
from regard.data.pack import Packs
from regard.data.streams import Batches
from regard.errors import UserError
from regard.text import Tokenizer

MARKS = torch.arange(5000, 5100)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def apart(texts: Ragged) -> list[list[int]]:
    return [row.tolist() for row in texts.joined().split(texts.lengths.tolist())]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=20),
    st.floats(0.05, 0.9),
    st.floats(1.0, 6.0),
    st.integers(0, 1000),
)
def test_what_was_taken_out_fits_into_the_holes(lengths, density, span, seed):
    texts = Ragged.of([[100 * number + i for i in range(n)] for number, n in enumerate(lengths)])
    noise = Noise(density, span)
    sources, targets = corrupt(texts, MARKS, noise, seeded(seed))
    hidden, spans = counts(texts.lengths, noise)
    for number, (source, target) in enumerate(zip(apart(sources), apart(targets), strict=True)):
        holes: dict[int, list[int]] = {}
        for id in target:
            if id >= 5000:
                holes[id] = []
            else:
                holes[max(holes)].append(id)
        assert list(holes) == list(range(5000, 5000 + int(spans[number])))  # in order, from the first sentinel on
        assert [id for id in source if id >= 5000] == list(holes) and all(holes.values())
        assert not any(a >= 5000 and b >= 5000 for a, b in pairwise(source))  # something between
        assert sum(map(len, holes.values())) == int(hidden[number])
        filled = [id for place in source for id in (holes[place] if place >= 5000 else [place])]
        assert filled == [100 * number + i for i in range(lengths[number])]


def test_as_much_is_taken_out_as_the_paper_says():
    hidden, spans = counts(torch.tensor([100, 512, 2, 3, 40]), Noise(0.15, 3.0))
    assert hidden.tolist() == [15, 77, 1, 1, 6] and spans.tolist() == [5, 26, 1, 1, 2]


def test_every_way_of_cutting_is_as_likely():
    """Five items in three parts: (5-1 over 3-1) = 6 ways."""
    lengths = segments(torch.full((12_000,), 5), torch.full((12_000,), 3), seeded()).view(-1, 3)
    ways = Counter(map(tuple, lengths.tolist()))
    assert set(ways) == {(a, b, 5 - a - b) for a in range(1, 4) for b in range(1, 5 - a)}
    assert all(abs(count - 2000) < 4 * (12_000 * 5 / 36) ** 0.5 for count in ways.values())


def test_every_place_of_a_short_text_may_be_a_hole():
    texts = Ragged.of([list(range(10))] * 9000)
    sources, targets = corrupt(texts, MARKS, Noise(0.2, 2.0), seeded())  # one hole of two tokens, at 9 positions
    first = Counter(row[1] for row in apart(targets))
    assert set(first) == set(range(9)) and all(abs(n - 1000) < 4 * (9000 * 8 / 81) ** 0.5 for n in first.values())
    assert {len(row) for row in apart(sources)} == {9}


def test_surrounded_texts_keep_their_inside():
    texts = Ragged.of([[7], [8, 9, 10]])
    assert apart(surround(texts, [1, 2], [3])) == [[1, 2, 7, 3], [1, 2, 8, 9, 10, 3]]
    assert apart(surround(texts.choose(torch.tensor([1])), [], [3])) == [[8, 9, 10, 3]]


def test_an_epoch_of_noise_follows_from_the_seed():
    tokenizer = Tokenizer.train(["a b c d e f g h"], "word").with_special_tokens(SENTINELS)
    texts = Ragged.of([[2, *range(4, 4 + n), 3] for n in (1, 2, 5, 8)])
    make = lambda seed: Denoised(texts, tokenizer, Noise(0.3, 1.5), [9, 9], seed)  # noqa: E731
    data = make(1)
    assert len(data.texts) == 3  # one token has nothing to take out
    pairs = data.at(0)
    assert all(row[:2] == [9, 9] and row[-1] == tokenizer.eos for row in apart(pairs.sources))
    assert all((row[0], row[-1]) == (tokenizer.bos, tokenizer.eos) for row in apart(pairs.targets))
    noisy, spans = counts(data.texts.lengths, data.noise)
    assert torch.equal(pairs.sources.lengths, data.texts.lengths - noisy + spans + 3)  # the prefix and </s>
    assert torch.equal(pairs.targets.lengths, noisy + spans + 2)
    assert apart(make(1).at(3).sources) == apart(data.at(3).sources)
    epochs = {str(apart(data.at(epoch).sources)) for epoch in range(5)}
    assert len(epochs) > 1 and str(apart(make(2).at(0).sources)) not in {str(apart(data.at(0).sources))}
    with pytest.raises(UserError, match="no <extra_id_0>"):
        Denoised(texts, Tokenizer.train(["a"], "word"), Noise(), [], 1)


def test_too_many_holes_are_told():
    with pytest.raises(UserError, match="lower max_length or density"):
        corrupt(Ragged.of([list(range(800))]), MARKS, Noise(0.4, 1.0), seeded())


@pytest.mark.parametrize("pack", [0, 24])
def test_a_mixture_has_all_pairs_of_all_tasks_in_every_epoch(pack):
    tokenizer = Tokenizer.train([" ".join(f"w{i}" for i in range(30))], "word").with_special_tokens(SENTINELS)
    fixed = Pairs([[4, 5, 3], [6, 3]], [[2, 7, 3], [2, 8, 9, 3]])
    texts = Ragged.of([[2, *range(4, 4 + n), 3] for n in (4, 6, 10)])
    mixture = Mixture(fixed, [Denoised(texts, tokenizer, Noise(), [], 1)])
    assert len(mixture) == 5 and mixture.longest_row == max(int(mixture.at(e).sizes.max()) for e in range(4))
    stream = Packs(mixture, 1, pack, seed=1) if pack else Batches(mixture, 30, seed=1)
    for epoch in (0, 2):
        pairs = mixture.at(epoch)
        wanted = Counter(map(tuple, apart(pairs.targets)))
        assert wanted >= Counter([(2, 7, 3), (2, 8, 9, 3)]) and wanted.total() == 5
        count, make = stream.open(epoch)
        tokens = sum(int(make(number).tokens) for number in range(count))
        assert tokens == int((pairs.targets.lengths - 1).sum())
