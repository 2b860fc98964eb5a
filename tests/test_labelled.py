"""Labelled texts in batches: each once, with its class, and packed or padded the same to the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from regard.data import pack
from regard.data.batch import PairBatch, Ragged
from regard.data.columns import Store
from regard.data.encode import store_labelled
from regard.data.labels import LabelData, balanced_weights
from regard.data.pack import ClassBatch, ClassPacks, Labelled
from regard.data.streams import Batches, sample_rows
from regard.models.config import ModelConfig
from regard.models.transformer import Encoder, build
from regard.tasks.text_classification import class_logits, classification
from regard.text import Tokenizer
from regard.training.objective import make_word_dropout

TINY = {
    "architecture": "encoder",
    "output_head": "classes",
    "classes": 3,
    "dim": 16,
    "layers": 2,
    "heads": 2,
    "ff_dim": 32,
}


def some(count: int = 40) -> Labelled:
    """Texts <s> … </s> in which no two ids besides the ends are the same."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    numbers = iter(range(4, 10_000))
    texts = [[2, *(next(numbers) for _ in range(n)), 3] for n in lengths]
    return Labelled(Ragged.of(texts), torch.randint(3, (count,), generator=generator))


def read_back(batch: ClassBatch) -> list[tuple[tuple[int, ...], int]]:
    """(ids, class) of every text in a batch."""
    found = []
    for row in range(len(batch.text)):
        if batch.document is None:
            real = slice(None) if batch.is_real is None else batch.is_real[row]
            found.append((tuple(batch.text[row][real].tolist()), int(batch.labels[row, 0])))
            continue
        for number in range(1, int(batch.document[row].max()) + 1):
            ids = batch.text[row][batch.document[row] == number]
            found.append((tuple(ids.tolist()), int(batch.labels[row, number - 1])))
    return found


@pytest.mark.parametrize("stream", ["padded", "packed"])
def test_an_epoch_has_every_text_once_with_its_class(stream, monkeypatch):
    monkeypatch.setattr(pack, "CHUNK", 100)  # several slabs
    data = some()
    batches = Batches(data, 40, seed=3) if stream == "padded" else ClassPacks(data, 2, 20, seed=3)
    texts = data.texts
    wanted = Counter(
        (tuple(ids.tolist()), int(label))
        for ids, label in zip(texts.joined().split(texts.lengths.tolist()), data.labels, strict=True)
    )
    for epoch in (0, 5):
        count, make = batches.open(epoch)
        seen = [make(number) for number in range(count)]
        assert Counter(one for batch in seen for one in read_back(batch)) == wanted
        assert sum(int(batch.tokens) for batch in seen) == len(data)
        if stream == "packed":
            assert {(batch.text.shape, batch.labels.shape) for batch in seen} == {(seen[0].text.shape, (2, 20 // 3))}


def test_a_packed_stream_goes_on_from_any_point(monkeypatch):
    monkeypatch.setattr(pack, "CHUNK", 100)
    first = ClassPacks(some(), 2, 20, seed=3)
    stream = iter(first)
    seen = [next(stream) for _ in range(25)]
    for start in (0, 1, 9, 17):
        walked, second = (ClassPacks(some(), 2, 20, seed=3) for _ in range(2))
        for _ in zip(range(start), walked, strict=False):
            pass
        second.seek(walked.position)
        again = iter(second)
        assert all(torch.equal(next(again).text, batch.text) for batch in seen[start : start + 6])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
def test_packed_padded_and_alone_give_the_same_classes(pooling, position):
    torch.manual_seed(0)
    model = build(
        ModelConfig(**TINY, vocab_size=600, pooling=pooling, position=position, max_length=20, pooler=pooling == "cls")
    )
    assert isinstance(model, Encoder)
    model = model.double().eval()
    data = some()
    alone = {}
    for ids, label in zip(data.texts.joined().split(data.texts.lengths.tolist()), data.labels, strict=True):
        alone[tuple(ids.tolist())] = (model(ids[None].long())[0], int(label))
    for batches in (Batches(data, 60, seed=3), ClassPacks(data, 2, 24, seed=3)):
        count, make = batches.open(0)
        for number in range(count):
            batch = make(number)
            logits = class_logits(model, batch)[batch.labels != PairBatch.IGNORE]
            for row, (ids, label) in zip(logits, read_back(batch), strict=True):
                torch.testing.assert_close(row, alone[ids][0])
                assert label == alone[ids][1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_weighted_formula(smoothing):
    torch.manual_seed(0)
    model = build(ModelConfig(**TINY, vocab_size=600)).double().eval()
    batch = some().batch(torch.arange(20))
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    logits, right = model(batch.text, batch.is_real), batch.labels[:, 0]
    loss, count = classification(model, batch, smoothing, weight=weight)
    log = logits.log_softmax(dim=1)
    each = -(1 - smoothing) * log[torch.arange(20), right] - smoothing * log.mean(dim=1)
    torch.testing.assert_close(loss, (weight[right] * each).sum())
    assert int(count) == 20
    if not smoothing:
        torch.testing.assert_close(loss, F.cross_entropy(logits, right, weight=weight, reduction="sum"))
        torch.testing.assert_close(classification(model, batch)[0], F.cross_entropy(logits, right, reduction="sum"))


def test_r_drop_is_the_formula_of_two_passes():
    torch.manual_seed(0)
    model = build(ModelConfig(**TINY, vocab_size=600, dropout=0.0, embed_dropout=0.0)).double().train()
    batch = some().batch(torch.arange(10))
    plain, _ = classification(model, batch)
    doubled, count = classification(model, batch, r_drop=3.0)
    torch.testing.assert_close(doubled, plain)  # without dropout both passes agree
    assert int(count) == 10


def test_a_share_of_the_words_is_hidden_in_training_alone():
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["a b"], "word")
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eos) == (1, 2, 3)
    hide = make_word_dropout(0.3, tokenizer)
    text = torch.randint(4, 600, (500, 20))
    text[:, 0], text[:, -1] = 2, 3
    hidden = hide(text)
    changed = hidden != text
    assert not bool(changed[:, [0, -1]].any()) and bool((hidden[changed] == 1).all())
    assert abs(changed[:, 1:-1].float().mean() - 0.3) < 4 * (0.21 / 9000) ** 0.5
    model = build(ModelConfig(**TINY, vocab_size=600, dropout=0.0, embed_dropout=0.0))
    batch = some().batch(torch.arange(10))
    plain = classification(model.eval(), batch)[0]
    assert torch.equal(classification(model, batch, word_dropout=hide)[0], plain)
    assert not torch.equal(classification(model.train(), batch, word_dropout=hide)[0], plain)


def test_balanced_weights_give_every_class_the_same_part_and_a_mean_of_one():
    counts = [900, 90, 10]
    weights = balanced_weights(counts)
    assert len({round(count * weight, 9) for count, weight in zip(counts, weights, strict=True)}) == 1
    assert sum(count * weight for count, weight in zip(counts, weights, strict=True)) == pytest.approx(1000)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.37, 1.0])
def test_a_share_is_drawn_of_every_class(share):
    labels = torch.arange(3).repeat_interleave(torch.tensor([1000, 300, 7]))[torch.randperm(1307)]
    drawn = sample_rows(labels, share, seed=4, keep=False)
    for label, count in ((0, 1000), (1, 300), (2, 7)):
        assert int(drawn[labels == label].sum()) == max(1, round(share * count))
    assert torch.equal(drawn, sample_rows(labels, share, seed=4, keep=False))
    if share < 1:
        assert not torch.equal(drawn, sample_rows(labels, share, seed=5, keep=False))
        assert bool((sample_rows(labels, min(1.0, share * 2), seed=4, keep=False) | ~drawn).all())  # a subset
        held = sample_rows(labels, share, seed=4, keep=True)
        assert all(int((~held)[labels == label].sum()) > 0 for label in range(3))


def test_a_store_holds_framed_texts_cut_to_length(tmp_path):
    rows = [(f"가나 다라 {'마' * n}", "yx"[n % 2]) for n in range(30)]
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    data = LabelData(train=("a.tsv",), folder=str(tmp_path), max_length=12, classes=("x", "y"))
    tokenizer = Tokenizer.train([text for text, _ in rows], "char")

    def stored(data: LabelData) -> Store:
        state = lambda: data.fingerprint(data.train)  # noqa: E731
        return store_labelled([data.read(data.train)], data, tmp_path / "store", tokenizer, state)

    store = stored(data)
    texts = Labelled.of(store)
    for (text, label), ids, number in zip(
        rows, texts.texts.joined().split(texts.sizes.tolist()), texts.labels.tolist(), strict=True
    ):
        whole = [tokenizer.bos, *tokenizer.encode(text), tokenizer.eos]
        assert ids.tolist() == (whole if len(whole) <= 12 else [*whole[:11], tokenizer.eos])
        assert ("x", "y")[number] == label
    assert store.index["truncated"] == sum(len(tokenizer.encode(text)) + 2 > 12 for text, _ in rows) > 0
    made = (tmp_path / "store" / "index.json").stat().st_mtime_ns
    stored(data)
    assert (tmp_path / "store" / "index.json").stat().st_mtime_ns == made  # used again
    stored(replace(data, classes=("y", "x")))
    assert (tmp_path / "store" / "index.json").stat().st_mtime_ns != made  # other classes, other numbers
    assert Labelled.of(Store.open(tmp_path / "store")).labels.tolist() == [1 - n for n in texts.labels.tolist()]
