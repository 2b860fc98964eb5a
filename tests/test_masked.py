"""Masked text: how much is hidden and how, that only hidden tokens are learned, and words kept whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from regard.data import pack
from regard.data.batch import PairBatch, Ragged
from regard.data.documents import Piece
from regard.data.encode import store_documents
from regard.data.pack import MaskConfig, MaskedBatch, MaskedPacks, choose
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import Encoder, build
from regard.predict.bundle import Bundle
from regard.predict.mask_predictor import MaskPredictor
from regard.tasks.masked_language_modeling import masked_tokens
from regard.text import Tokenizer
from regard.text.words import WordBoundaries

LINES = ["이 영화 정말 재밌다.", "배우들의 연기가 최고였어요!", "시간이 아깝다...", "well, lower lowest 12 slower"] * 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, "bpe", 340).with_special_tokens(["<mask>"])


def texts(tokenizer: Tokenizer, count: int) -> Ragged:
    """Long texts of ordinary tokens, framed."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    ordinary = [id for id in range(len(tokenizer)) if id not in tokenizer.specials]
    rows = [
        [2, *(ordinary[i] for i in torch.randint(len(ordinary), (n,), generator=generator).tolist()), 3]
        for n in lengths
    ]
    return Ragged.of(rows)


def batches(packs: MaskedPacks, epoch: int = 0) -> list[MaskedBatch]:
    count, make = packs.open(epoch)
    found = [make(number) for number in range(count)]
    assert all(isinstance(one, MaskedBatch) for one in found)
    return found  # type: ignore[return-value]


def plain_rows(packs: MaskedPacks, epoch: int = 0) -> torch.Tensor:
    """The rows of an epoch before anything is hidden."""
    return packs.fill(epoch, packs.plan(epoch)).ids


def test_fifteen_per_cent_of_a_row_are_chosen_and_become_80_10_10(tokenizer):
    packs = MaskedPacks(texts(tokenizer, 3000), tokenizer, MaskConfig(), rows=8, length=64, seed=5)
    plain = plain_rows(packs)
    found = batches(packs)
    ids, document = (torch.cat([getattr(one, name) for one in found]) for name in ("ids", "document"))
    positions, expected = (torch.cat([getattr(one, name) for one in found]) for name in ("positions", "labels"))
    chosen = torch.zeros_like(ids, dtype=torch.bool)
    for row in range(len(ids)):
        chosen[row, positions[row][expected[row] != PairBatch.IGNORE]] = True
    special = torch.tensor([id in tokenizer.specials for id in range(len(tokenizer))])
    eligible = (document > 0) & ~special[plain]
    assert not bool((chosen & ~eligible).any())
    quota = (eligible.sum(dim=1) * 0.15).round().clamp_min(1)
    assert torch.equal(chosen.sum(dim=1), torch.where(eligible.any(dim=1), quota, 0).long())
    assert torch.equal(expected[expected != PairBatch.IGNORE], plain.gather(1, positions)[expected != PairBatch.IGNORE])
    assert torch.equal(ids[~chosen], plain[~chosen])  # nothing else is touched
    total = int(chosen.sum())
    masked, same = (ids == tokenizer.mask)[chosen], (ids == plain)[chosen]
    spread = 4 * (0.16 / total) ** 0.5  # four standard deviations of a share of 0.8
    assert abs(masked.float().mean() - 0.8) < spread
    assert abs(same.float().mean() - 0.1) < spread and abs((~masked & ~same).float().mean() - 0.1) < spread
    assert not bool(special[ids[chosen & (ids != tokenizer.mask)]].any())  # a random token is an ordinary one


def test_every_place_of_a_row_is_as_likely_as_the_others():
    generator = torch.Generator().manual_seed(0)
    words = torch.arange(1, 21).repeat(20_000, 1)
    share = choose(words, 0.15, generator).float().mean(dim=0)
    assert bool(((share - 0.15).abs() < 4 * (0.15 * 0.85 / 20_000) ** 0.5).all())


def test_words_are_chosen_whole_or_not_at_all():
    generator = torch.Generator().manual_seed(0)
    words = torch.tensor([1, 1, 1, 0, 2, 3, 3, 4, 0, 5, 5, 5, 5, 6, 7, 7, 8, 9, 10, 10]).repeat(2000, 1)
    chosen = choose(words, 0.3, generator)
    for word in range(1, 11):
        own = chosen[words == word].view(2000, -1)
        assert torch.equal(own.all(dim=1), own.any(dim=1)) and bool(own.any())
    assert not bool(chosen[words == 0].any())
    assert int(chosen.sum(dim=1).max()) <= round(18 * 0.3)


def test_the_words_of_a_text(tokenizer):
    line = "well, lower lowest 12"
    ids = torch.tensor([[tokenizer.bos, *tokenizer.encode(line), tokenizer.eos]])
    numbers = WordBoundaries(tokenizer).word_ids(ids)[0].tolist()
    assert numbers[0] == numbers[-1] == 0
    words: dict[int, str] = {}
    for id, number in zip(ids[0].tolist(), numbers, strict=True):
        if number:
            words[number] = words.get(number, "") + tokenizer.token(id)
    assert list(words.values()) == ["well", ",", "▁lower", "▁lowest", "▁12"]
    korean = torch.tensor([tokenizer.encode("재밌다... 최고")])  # characters of several byte pieces stay whole
    assert len(set(WordBoundaries(tokenizer).word_ids(korean)[0].tolist())) == 3
    for kind in ("char", "word"):
        plain = Tokenizer.train(["ab cd", "ab."], kind)
        found = WordBoundaries(plain).word_ids(torch.tensor([plain.encode("ab cd.")]))[0]
        assert len(set(found.tolist())) == (4 if kind == "char" else 3)  # a space is a word where it is a token


def test_what_is_hidden_follows_from_seed_epoch_and_place(tokenizer, monkeypatch):
    monkeypatch.setattr(pack, "CHUNK", 500)  # several slabs
    make = lambda seed: MaskedPacks(texts(tokenizer, 60), tokenizer, MaskConfig(), 2, 64, seed)  # noqa: E731
    first = make(5)
    stream = iter(first)
    seen = [next(stream) for _ in range(20)]
    second = make(5)
    second.seek({"epoch": 0, "index": 7})
    again = iter(second)
    for batch in seen[7:]:
        other = next(again)
        assert torch.equal(batch.ids, other.ids) and torch.equal(batch.labels, other.labels)
    count = make(5).open(0)[0]
    assert not torch.equal(batches(make(5), 0)[0].ids, batches(make(5), 1)[0].ids)
    assert not torch.equal(batches(make(5), 0)[0].ids, batches(make(6), 0)[0].ids)
    assert second.position == {"epoch": 20 // count, "index": 20 % count}


def test_the_loss_is_that_of_the_hidden_tokens_and_of_no_other(tokenizer):
    torch.manual_seed(0)
    shape = {
        "architecture": "encoder",
        "output_head": "tokens",
        "head_layer": True,
        "logit_bias": True,
        "position": "rope",
    }
    model = build(ModelConfig(**shape, vocab_size=len(tokenizer), dim=16, layers=2, heads=2, ff_dim=32))
    assert isinstance(model, Encoder)
    model = model.double().eval()
    batch = batches(MaskedPacks(texts(tokenizer, 20), tokenizer, MaskConfig(fraction=0.3), 4, 48, 1))[0]
    loss, count = masked_tokens(model, batch)
    states = model.encode(batch.ids, batch.document > 0, document=batch.document)
    full = torch.full_like(batch.ids, PairBatch.IGNORE).scatter(1, batch.positions, batch.labels)
    assert model.output_head is not None
    logits = model.output_head(states)
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.flatten(0, 1), full.flatten(), ignore_index=PairBatch.IGNORE, reduction="sum")
    )
    assert int(count) == int((full != PairBatch.IGNORE).sum())
    # texts that share a row do not see each other
    for row in range(len(batch.ids)):
        for number in range(1, int(batch.document[row].max()) + 1):
            inside = batch.document[row] == number
            torch.testing.assert_close(model.encode(batch.ids[row][inside][None])[0], states[row][inside])


def test_documents_are_cut_and_framed(tokenizer, tmp_path):
    long = " ".join(LINES)
    stream = [Piece(long[:50], False), Piece(long[50:], True), Piece("재밌다", True), Piece("끝", False)]
    store = store_documents([stream], tmp_path / "s", tokenizer, 16, state="a")
    rows = [row.tolist() for row in store.columns["text"].joined().split(store.columns["text"].lengths.tolist())]
    assert all(len(row) <= 16 and (row[0], row[-1]) == (tokenizer.bos, tokenizer.eos) for row in rows)
    inner = [id for row in rows for id in row[1:-1]]
    assert inner == [id for piece in stream for id in tokenizer.encode(piece.text)]
    assert [*tokenizer.encode("재밌다")] == rows[-2][1:-1] and rows[-1][1:-1] == tokenizer.encode("끝")
    with pytest.raises(UserError, match="no tokens"):
        store_documents([[Piece("", True)]], tmp_path / "t", tokenizer, 16, state="b")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "word", "byte"])
def test_special_tokens_are_added_once_and_text_stays_text(kind):
    plain = Tokenizer.train(LINES, kind, {"bpe": 300, "unigram": 120}.get(kind))
    more = plain.with_special_tokens(["<mask>", "<extra_id_0>"])
    assert len(more) == len(plain) + 2 and more.mask == len(plain) and plain.mask is None
    assert more.with_special_tokens(["<mask>"]).json == more.json
    for line in (*LINES, "좋다"):
        assert more.encode(line) == plain.encode(line)
    assert not set(more.encode("<mask> <extra_id_0>")) & {more.mask, len(plain) + 1}
    assert more.decode([*more.encode(LINES[0]), more.mask]) == more.decode(more.encode(LINES[0]))


def test_gaps_are_filled_with_what_the_model_holds_likely(tokenizer):
    torch.manual_seed(0)
    model = build(ModelConfig(architecture="encoder", vocab_size=len(tokenizer), dim=16, layers=1, heads=2, ff_dim=32))
    assert isinstance(model, Encoder)
    predictor = MaskPredictor(Bundle(model, {"tokenizer": tokenizer}, {"train": {"pack": 64}}))
    ids = predictor.encode("이 영화 <mask> 재밌다 [MASK]")
    assert ids.count(tokenizer.mask) == 2
    assert tokenizer.decode([id for id in ids if id != tokenizer.mask]) == "이 영화 재밌다"
    gaps = predictor.predict(["이 영화 <mask> 재밌다 [MASK]"], top=len(tokenizer))[0].masks
    chance = model(torch.tensor([ids])).softmax(dim=-1)[0, ids.index(tokenizer.mask)]
    assert len(gaps) == 2 and len(gaps[0]) == len(tokenizer) - len(tokenizer.specials)
    assert [one.probability for one in gaps[0]] == sorted((one.probability for one in gaps[0]), reverse=True)
    best = max((p.item(), id) for id, p in enumerate(chance) if id not in tokenizer.specials)
    assert gaps[0][0].token == tokenizer.token(best[1]) and gaps[0][0].probability == pytest.approx(best[0])
    for text, said in (("없다", "has no mask"), ("<mask>" * 70, "shorten it")):
        with pytest.raises(UserError, match=said):
            predictor.predict([text])


@pytest.mark.parametrize(
    ("settings", "said"), [({"fraction": 0.0}, "fraction = 0.0"), ({"mask": 0.9, "random": 0.2}, "together at most 1")]
)
def test_mistakes_in_the_table_are_told(settings, said):
    with pytest.raises(UserError, match=said):
        MaskConfig(**settings)
