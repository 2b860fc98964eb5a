"""Text cut at random: always the same text, as often as the paper says, and the same again from the same seed."""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data.korean import examples
from regard.errors import UserError
from regard.text import regularise
from regard.text.config import TextConfig
from regard.text.lattice import LatticeSampling
from regard.text.regularise import MergeDropout
from regard.text.tokenizer import Tokenizer

WORDS = (
    "the lower newest widest banana bananas unrelated relation related 서울에서 부산까지 도쿄에서 東京都に住む 日本語"
)
LINES = [f"{a} {b}, {c}!" for a, b, c in product(WORDS.split(), repeat=3)]
SPACED = ["the lower newest", "서울에서 부산까지", "unrelated relation, related!"]
TEXTS = [
    *LINES[::37],
    "",
    " ",
    "  two  spaces ",
    "naïve 😀 👩‍👩‍👧",
    "</s><s>",
    "がが がが",
    "a" * 200,
    "東京都に住む日本語" * 12,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, "bpe", 360)


def draw(tokenizer: Tokenizer, dropout: float, texts: list[str], seed: int = 1) -> list[list[int]]:
    cutter = MergeDropout(tokenizer, dropout)
    return cutter.draw(cutter.cut(texts), np.random.PCG64(seed))


def outcomes(tokenizer: Tokenizer, word: str, dropout: float) -> dict[tuple[int, ...], float]:
    """Algorithm 1 of Provilkov et al. with every possible set of merges left out, each with its probability."""
    merges = MergeDropout(tokenizer, 0).merges

    def follow(ids: tuple[int, ...], chance: float) -> None:
        possible = [i for i in range(len(ids) - 1) if (ids[i], ids[i + 1]) in merges]
        for kept in product((True, False), repeat=len(possible)):
            share = chance * np.prod([1 - dropout if keep else dropout for keep in kept])
            left = [i for i, keep in zip(possible, kept, strict=True) if keep]
            if not left:
                found[ids] = found.get(ids, 0) + share
                continue
            at = min(left, key=lambda i: (merges[ids[i], ids[i + 1]][0], i))
            follow((*ids[:at], merges[ids[at], ids[at + 1]][1], *ids[at + 2 :]), share)

    found: dict[tuple[int, ...], float] = {}
    follow(tuple(MergeDropout(tokenizer, 0)._symbols(word)), 1.0)
    return found


@pytest.mark.parametrize("word", ["banana", "newest", "日"])
@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_each_segmentation_comes_as_often_as_the_algorithm_says(tokenizer, word, dropout) -> None:
    (symbols,) = tokenizer.words(word)
    expected, count = outcomes(tokenizer, symbols, dropout), 20_000
    drawn = Counter(map(tuple, draw(tokenizer, dropout, [word] * count)))
    assert set(drawn) <= set(expected) and sum(expected.values()) == pytest.approx(1)
    for ids, share in expected.items():  # within five standard deviations
        assert abs(drawn[ids] - count * share) <= 5 * (count * share * (1 - share)) ** 0.5 + 1, tokenizer.decode(ids)


@pytest.mark.parametrize("long", [0, 48])
@pytest.mark.parametrize("dropout", [0.1, 0.9])
def test_every_cut_spells_the_same_text(tokenizer, monkeypatch, dropout, long) -> None:
    monkeypatch.setattr(regularise, "LONG", long)
    for seed in range(3):
        drawn = draw(tokenizer, dropout, TEXTS, seed)
        assert [tokenizer.decode(ids) for ids in drawn] == TEXTS
        assert all(min(ids, default=4) >= 4 for ids in drawn)  # no special token


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=40), max_size=4), dropout=st.sampled_from([0.0, 0.3, 0.99]))
def test_any_text(tokenizer, texts, dropout) -> None:
    drawn = draw(tokenizer, dropout, texts)
    assert [tokenizer.decode(ids) for ids in drawn] == texts
    if dropout == 0:
        assert drawn == tokenizer.encode_batch(texts)


@pytest.mark.parametrize("long", [0, 48])
def test_without_dropout_it_is_the_plain_cut(tokenizer, monkeypatch, long) -> None:
    monkeypatch.setattr(regularise, "LONG", long)
    assert draw(tokenizer, 0.0, TEXTS) == tokenizer.encode_batch(TEXTS)


def test_text_without_spaces_is_cut_too(tokenizer) -> None:
    """One long word has so many merges that hardly any is lost in the end; its plain pieces have few."""
    text = "東京都に住む日本語" * 12
    assert len(tokenizer.words(text)) == 1
    drawn = draw(tokenizer, 0.1, [text] * 50)
    plain = tokenizer.encode(text)
    assert 1.1 * len(plain) < sum(map(len, drawn)) / 50 < 3 * len(plain)
    borders = {
        len(tokenizer.decode(plain[:i]).encode())
        for i in range(len(plain))
        if "\ufffd" not in tokenizer.decode(plain[:i])
    }
    for ids in drawn:
        assert borders <= {len(tokenizer.decode(ids[:i]).encode()) for i in range(len(ids))}


def test_more_dropout_gives_more_pieces(tokenizer) -> None:
    counts = [sum(map(len, draw(tokenizer, dropout, LINES[:500]))) for dropout in (0.0, 0.05, 0.1, 0.3, 0.9, 0.999)]
    assert counts == sorted(set(counts))
    assert counts[-1] <= sum(len(line.encode()) for line in LINES[:500])


def test_the_seed_decides_and_what_was_drawn_before_does_not(tokenizer, monkeypatch) -> None:
    first = draw(tokenizer, 0.2, TEXTS, seed=7)
    assert draw(tokenizer, 0.2, TEXTS, seed=7) == first != draw(tokenizer, 0.2, TEXTS, seed=8)
    cutter = MergeDropout(tokenizer, 0.2)
    words = cutter.cut(TEXTS)
    cutter.draw(cutter.cut(LINES), np.random.PCG64(3))
    assert cutter.draw(words, np.random.PCG64(7)) == first
    monkeypatch.setattr(regularise, "NODES", 10)  # the graph is forgotten before each draw
    assert cutter.draw(words, np.random.PCG64(7)) == first


def test_a_tokenizer_with_little_to_merge() -> None:
    none = Tokenizer.train(["ab"], "bpe", 260)  # bytes alone
    assert draw(none, 0.5, ["ab", "", "é"]) == none.encode_batch(["ab", "", "é"])


# --- unigram


@pytest.fixture(scope="module")
def unigram() -> Tokenizer:
    """Pieces of many lengths that overlap."""
    pairs = examples("train", 600, seed=1)
    return Tokenizer.train(
        [*LINES[::50], *(text for pair in pairs for text in (pair.source, pair.target))], "unigram", 240
    )


def sample(tokenizer: Tokenizer, alpha: float, texts: list[str], seed: int = 1) -> list[list[int]]:
    cutter = LatticeSampling(tokenizer, alpha)
    return cutter.draw(cutter.cut(texts), np.random.PCG64(seed))


@pytest.mark.parametrize("word", ["seventeenth", "thousand", "구십칠만"])
@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_each_cut_comes_as_often_as_its_probability_to_the_alpha(unigram, word, alpha) -> None:
    """Kudo 2018, section 3.2, over all cuts of a word."""
    scores = {piece: (id, score) for id, (piece, score) in enumerate(json.loads(unigram.json)["model"]["vocab"])}
    weights: dict[tuple[int, ...], float] = {}
    for borders in product((False, True), repeat=len(word) - 1):
        positions = [0, *(i + 1 for i, border in enumerate(borders) if border), len(word)]
        pieces = [word[a:b] for a, b in pairwise(positions)]
        if all(piece in scores for piece in pieces):
            weights[tuple(scores[piece][0] for piece in pieces)] = math.exp(alpha * sum(scores[p][1] for p in pieces))
    count, total = 20_000, sum(weights.values())
    drawn = Counter(map(tuple, sample(unigram, alpha, [word] * count)))
    assert set(drawn) <= set(weights) and len(weights) > 1
    for ids, weight in weights.items():  # within five standard deviations
        share = weight / total
        assert abs(drawn[ids] - count * share) <= 5 * (count * share * (1 - share)) ** 0.5 + 1, unigram.decode(ids)


def test_every_drawn_cut_spells_the_same_text(unigram) -> None:
    texts = [unicodedata.normalize("NFC", text) for text in TEXTS]
    plain = unigram.encode_batch(texts)
    for alpha in (0.05, 1.0):
        for ids, drawn in zip(plain, sample(unigram, alpha, texts), strict=True):
            assert unigram.decode(drawn) == unigram.decode(ids)
            assert drawn.count(unigram.unk) == ids.count(unigram.unk)
            assert not {unigram.pad, unigram.bos, unigram.eos} & {*drawn}
    counts = [sum(map(len, sample(unigram, alpha, LINES[:300]))) for alpha in (0.05, 0.5, 50.0)]
    assert counts == sorted(counts, reverse=True)
    assert sample(unigram, 50.0, SPACED) == unigram.encode_batch(SPACED)  # nothing but the likeliest
    assert sample(unigram, 0.2, texts, 7) == sample(unigram, 0.2, texts, 7) != sample(unigram, 0.2, texts, 8)


def test_what_cannot_be_sampled_is_refused(unigram, tokenizer) -> None:
    with pytest.raises(UserError, match="unigram tokenizers; this is BPE"):
        LatticeSampling(tokenizer, 0.2)
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="alpha"):
            LatticeSampling(unigram, wrong)
        with pytest.raises(UserError, match="alpha"):
            TextConfig(kind="unigram", alpha=wrong)
    for wrong in ({"kind": "bpe", "alpha": 0.2}, {"kind": "unigram", "alpha": 0.2, "segmentations": 1}):
        with pytest.raises(UserError, match=r"alpha"):
            TextConfig(**wrong)


def test_other_kinds_are_refused() -> None:
    for kind in ("word", "char", "unigram"):
        with pytest.raises(UserError, match="only kind = 'bpe'"):
            MergeDropout(Tokenizer.train(["some words"], kind), 0.1)
        with pytest.raises(UserError, match=r"dropout = 0\.1"):
            TextConfig(kind=kind, dropout=0.1)
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match="dropout"):
            TextConfig(dropout=wrong)
    with pytest.raises(UserError, match=r"segmentations = 1 with dropout or alpha"):
        TextConfig(dropout=0.1, segmentations=1)
    assert TextConfig(segmentations=1).segmentations == 1
