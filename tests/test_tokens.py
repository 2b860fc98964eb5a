"""A text as one sequence of tokens: complete, whatever happens while it is written; and the blocks cut from it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.data import encode, streams
from regard.data.columns import Store
from regard.data.documents import Piece
from regard.data.encode import store_tokens
from regard.data.streams import Blocks, windows
from regard.errors import Unfinished, UserError
from regard.text.tokenizer import Tokenizer

BYTES = Tokenizer.train(["x"], "byte")
STREAM = [Piece(f"document {i}, 둘째 😀\n" * (i % 5), True) for i in range(1, 60)]
STREAM = [piece for piece in STREAM if piece.text]
WHOLE = [id for i, (text, _) in enumerate(STREAM) for id in [BYTES.eos] * (i > 0) + BYTES.encode(text)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(encode, "CHARACTERS", 100)
    monkeypatch.setattr(encode, "CHECKPOINT", 300)


def make(folder: Path, stream=STREAM, tokenizer=BYTES, print="") -> Store:
    return store_tokens([stream], folder, tokenizer, state=print)


def ids_of(text: Store) -> list[int]:
    return text.columns["ids"].tolist()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_documents_with_separators_between_them(tmp_path):
    text = make(tmp_path / "train")
    assert len(text) == len(WHOLE) and ids_of(text) == WHOLE
    whole = "".join(piece.text for piece in STREAM)
    expected = {"documents": len(STREAM), "characters": len(whole), "bytes": len(whole.encode()), "unknown": 0}
    assert {name: text.index[name] for name in expected} == expected and text.index["first"] == [1, 1]
    assert text.columns["ids"].dtype == torch.uint16


def test_larger_vocabularies_take_four_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(Tokenizer, "__len__", lambda self: 2**16 + 1)
    text = make(tmp_path / "train")
    assert text.columns["ids"].dtype == torch.uint32 and ids_of(text) == WHOLE


def test_a_finished_store_is_used_again_and_another_text_makes_another(tmp_path):
    make(tmp_path / "train")
    make(tmp_path / "train", stream=["never read"])
    other = make(tmp_path / "train", stream=[Piece("other", True)], print="other")
    assert ids_of(other) == BYTES.encode("other")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".train.lock", "train"]


class Stopped(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 7, 20, 40])
def test_after_an_interruption_it_goes_on_and_gives_the_same_bytes(tmp_path, stop):
    whole = files(make(tmp_path / "whole").folder)

    def broken():
        yield from islice(STREAM, stop)
        raise Stopped

    with pytest.raises(Stopped):
        store_tokens([broken()], tmp_path / "parts", BYTES, state="")
    kept = (tmp_path / ".parts.part").exists()
    assert kept == (stop > 1)
    encoded = []
    real = Tokenizer.encode_batch

    def counting(self, texts):
        encoded.extend(texts)
        return real(self, texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "encode_batch", counting)
        make(tmp_path / "parts")
    assert files(tmp_path / "parts") == whole
    assert not kept or len(encoded) < len(STREAM)  # nothing before the checkpoint is tokenised again


def _killed(folder: str) -> None:
    encode.CHARACTERS, encode.CHECKPOINT = 100, 300

    def broken():
        yield from islice(STREAM, 30)
        os.kill(os.getpid(), signal.SIGKILL)

    store_tokens([broken()], folder, BYTES, state="")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_after_a_kill_too(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_killed, args=(str(tmp_path / "parts"),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and (tmp_path / ".parts.part" / "progress.json").exists()
    make(tmp_path / "parts")
    assert files(tmp_path / "parts") == files(make(tmp_path / "whole").folder)


def test_a_full_disk_keeps_what_is_done(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(Unfinished, match=r"No space left.*run the same command again"):
            make(tmp_path / "train")
    assert ids_of(make(tmp_path / "train")) == WHOLE


@pytest.mark.parametrize("damage", ["cut", "missing", "index"])
def test_damage_is_detected_and_repaired(tmp_path, damage):
    folder = make(tmp_path / "train").folder
    path = folder / ("index.json" if damage == "index" else "ids.values")
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="not a complete store"):
        Store.open(folder)
    assert ids_of(make(folder)) == WHOLE


def test_unknown_characters_are_counted(tmp_path):
    letters = Tokenizer.train(["abc"], "char")
    text = make(tmp_path / "train", [Piece("abxc", True), Piece("ya", True)], letters)
    assert text.index["unknown"] == 2
    assert ids_of(text) == [*letters.encode("abxc"), letters.eos, *letters.encode("ya")]


def test_documents_need_a_separator(tmp_path):
    bare = Tokenizer(json.dumps({**json.loads(BYTES.json), "added_tokens": []}).replace("</s>", "<end>"))
    assert bare.eos is None
    assert len(make(tmp_path / "one", STREAM[:1], bare)) > 0
    with pytest.raises(UserError, match="no eos token"):
        make(tmp_path / "two", STREAM[:2], bare)


# --- blocks


@given(st.integers(9, 300), st.integers(1, 8), st.integers(1, 6), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_reads_every_token_once_but_for_the_ends(size, length, rows, epoch):
    text = torch.arange(size)
    stream = Blocks(text, rows, length, seed=3)
    starts = stream.starts(epoch).flatten()
    count = Counter((starts[:, None] + 1 + torch.arange(length)).flatten().tolist())
    assert len(starts) % rows == 0 and len(starts) >= rows and max(count) < len(text)
    blocks_there = (len(text) - 1) // length
    if blocks_there > rows:
        assert max(count.values()) == 1
        assert len(count) > len(text) - 1 - length * (rows + 1)  # an offset before, less than a batch after
    number, batch = stream.open(epoch)
    found = torch.cat([batch(i).ids for i in range(number)])
    assert torch.equal(found, torch.stack([text[s : s + length + 1] for s in starts.tolist()]))


def test_repeated_rows_have_one_passage_again_and_again():
    """Half of the rows: a passage of 8 tokens to half a row, then itself; the others are the text as it is."""
    text = torch.arange(4000)
    plain, stream = (Blocks(text, 6, 64, seed=3, repeat=repeat) for repeat in (0.0, 0.5))
    periods = set()
    for a, b in islice(zip(plain, stream, strict=False), 12):
        assert torch.equal(a.ids[3:], b.ids[3:]) and torch.equal(a.ids[:, 0], b.ids[:, 0])
        for row in b.ids[:3]:
            period = int((row[1:] == row[0]).nonzero()[0]) + 1
            assert 8 <= period <= 32 and torch.equal(row, row[0] + torch.arange(65) % period)
            periods.add(period)
    assert len(periods) > 8
    with pytest.raises(UserError, match=r"data\.repeat = 0.5: needs rows of train\.pack >= 16 tokens, not 15"):
        Blocks(text, 6, 15, seed=3, repeat=0.5)


def test_blocks_are_the_same_from_memory_and_from_disk(tmp_path, monkeypatch):
    text = make(tmp_path / "train").columns["ids"]
    stream = Blocks(text, 4, 16, seed=1)
    monkeypatch.setattr(streams, "RESIDENT", {"cpu": 10})
    mapped = Blocks(text, 4, 16, seed=1)
    assert stream.ids is not text and mapped.ids is text
    for a, b in islice(zip(stream, mapped, strict=False), 40):
        assert torch.equal(a.ids, b.ids) and a.ids.dtype == b.ids.dtype == torch.long and a.ids.shape == (4, 17)
        assert int(a.tokens) == 64 and torch.equal(a.read[:, 1:], a.labels[:, :-1])


def test_a_stream_goes_on_from_any_point(tmp_path):
    text = make(tmp_path / "train").columns["ids"]
    first = Blocks(text, 4, 16, seed=1)
    stream = iter(first)
    for _ in range(80):
        next(stream)
    later = Blocks(text, 4, 16, seed=1)
    later.seek(first.position)
    assert first.epoch > 0
    for a, b in islice(zip(stream, later, strict=False), 20):
        assert torch.equal(a.ids, b.ids)
    other = next(iter(Blocks(text, 4, 16, seed=2)))
    assert not torch.equal(other.ids, next(iter(Blocks(text, 4, 16, seed=1))).ids)


def test_a_text_shorter_than_a_row_is_an_error():
    text = torch.arange(16)
    assert next(iter(Blocks(text, 3, 15, seed=1))).ids.tolist() == [[*range(16)]] * 3
    with pytest.raises(UserError, match=r"16 tokens, less than one row of train\.pack = 16"):
        Blocks(text, 3, 16, seed=1)


# --- windows


@given(st.integers(2, 60), st.integers(1, 12), st.data())
@settings(max_examples=100, deadline=None)
def test_windows_count_every_token_once_with_enough_before_it(size, context, data):
    stride, rows = data.draw(st.integers(1, context)), data.draw(st.integers(1, 4))
    text = torch.arange(size)
    ids = text.tolist()
    seen = []
    for batch, counted in windows(text, context, stride, rows):
        assert batch.read.shape == counted.shape and len(batch.read) <= rows and batch.read.shape[1] == context
        for read, expected, count in zip(batch.read.tolist(), batch.labels.tolist(), counted.tolist(), strict=True):
            for at in (at for at in range(context) if count[at]):
                place = ids.index(expected[at])
                seen.append(place)
                assert read[: at + 1] == ids[place - at - 1 : place]  # the tokens right before it
                assert at + 1 >= min(place, context - stride + 1)
    assert sorted(seen) == [*range(1, size)]


def test_a_stride_fits_into_the_context():
    text = torch.arange(9)
    for stride in (0, 5):
        with pytest.raises(UserError, match=f"stride = {stride}: must be from 1 to the context of 4"):
            next(windows(text, 4, stride, 1))
