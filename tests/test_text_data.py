"""Text for language models: every way to give it, every way in which it can be wrong, and how it is cut."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regard.data import documents
from regard.data.documents import Piece, TextData, part
from regard.errors import UserError
from regard.text.tokenizer import Tokenizer

DOCUMENTS = ["The first document.\nTwo lines.\n", "둘째 문서 😀", "  third, with spaces\r\n and an end  "]


def read(config: TextData) -> list[str]:
    """Whole documents."""
    found, held = [], ""
    for text, ends in config.read(config.train):
        held += text
        if ends:
            found.append(held)
            held = ""
    assert not held
    return found


def write(folder: Path, form: str) -> TextData:
    """The three documents in some form."""
    rows = "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(DOCUMENTS))
    settings: dict = {"train": ("*.txt",)}
    match form:
        case "files" | "folder":
            (folder / "in" / "deep").mkdir(parents=True)
            for i, text in enumerate(DOCUMENTS):
                (folder / "in" / ("deep" if i == 2 else ".") / f"{'z' * (i == 2)}{i}.txt").write_bytes(text.encode())
            (folder / "in" / ".hidden").write_bytes(b"\xff")
            names = ("in/0.txt", "in/1.txt", "in/deep/z2.txt")
            settings = {"train": ("in",) if form == "folder" else names}
        case "glob":
            for i, text in enumerate(DOCUMENTS):
                (folder / f"{i}.txt").write_bytes(text.encode())
        case "gz":
            for i, text in enumerate(DOCUMENTS):
                (folder / f"{i}.txt.gz").write_bytes(gzip.compress(text.encode()))
            settings = {"train": ("0.txt", "[12].txt.gz")}
        case "separator":
            (folder / "all.txt").write_bytes("<|end|>".join(DOCUMENTS).encode())
            settings |= {"separator": "<|end|>"}
        case "jsonl":
            (folder / "all.jsonl").write_text(rows, encoding="utf-8")
            settings = {"train": ("all.jsonl",), "column": "body"}
        case "jsonl.gz":
            (folder / "all.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
            settings = {"train": ("all.jsonl",), "column": "body"}
        case "parquet":
            arrow = pytest.importorskip("pyarrow")
            from pyarrow import parquet

            parquet.write_table(arrow.table({"body": DOCUMENTS}), folder / "all.parquet")
            settings = {"train": ("all.parquet",), "column": "body"}
    return TextData(**settings, folder=str(folder))


@pytest.mark.parametrize("form", ["files", "folder", "glob", "gz", "separator", "jsonl", "jsonl.gz", "parquet"])
def test_every_form_gives_the_same_documents(tmp_path, form):
    config = write(tmp_path, form)
    assert read(config) == DOCUMENTS
    found, whole = config.read(config.train).check(), "".join(DOCUMENTS)
    assert found.totals == {"documents": 3, "characters": len(whole), "bytes": len(whole.encode())}


@given(text=st.text(st.sampled_from("ab é\n\t\r 한̈👩‍"), max_size=200), size=st.integers(3, 30))
@settings(max_examples=200, deadline=None)
def test_pieces_make_the_text_again(tmp_path_factory, text, size):
    assume("\u0308" * (size - 1) not in text)  # a character with more marks than a piece is long has to be split
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_bytes(text.encode())
    (folder / "a.jsonl").write_text(json.dumps({"text": text}), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", size)
        patch.setattr(documents, "BLOCK", 7)  # blocks end inside characters
        for name in ("a.txt", "a.jsonl"):
            found = list(TextData(train=(name,), folder=str(folder)).read((name,)))
            assert "".join(piece.text for piece in found) == text
            assert all(len(piece.text) <= size for piece in found[:-1])
            assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True] * (len(found) > 0)
            composed = [unicodedata.normalize("NFC", piece.text) for piece in found]
            assert "".join(composed) == unicodedata.normalize("NFC", text)


@given(st.lists(st.text("abc1!'한é", min_size=1, max_size=6), max_size=30), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_no_token_lies_across_a_cut(words, random):
    text = "".join(word + random.choice([" ", "\n", "  ", "\n\n", " \n", "\t"]) for word in words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", 25)
        found = [piece.text for piece in documents.split([text], None, "", Counter())]
    for tokenizer in TOKENIZERS:
        assert [id for piece in found for id in tokenizer.encode(piece)] == tokenizer.encode(text)


TOKENIZERS = [
    Tokenizer.train(["a bc ab'c 1! 한 é\n\n a\tb  c", *DOCUMENTS], kind, vocab_size=size)
    for kind, size in (("bpe", 320), ("char", None), ("byte", None))
]


@given(st.lists(st.lists(st.text("ab\n", max_size=5), min_size=1, max_size=3), max_size=4), st.data())
def test_a_part_is_that_part_of_the_characters(stream, data):
    found = [Piece(text, at == len(texts) - 1) for texts in stream for at, text in enumerate(texts)]
    whole = "".join(piece.text for piece in found)
    border = data.draw(st.integers(0, len(whole)))
    head, tail = list(part(found, 0, border)), list(part(found, border, len(whole)))
    assert "".join(piece.text for piece in head) == whole[:border]
    assert "".join(piece.text for piece in tail) == whole[border:]


# --- what is wrong


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good line\nbad \xff here\n", r"a\.txt, line 2: is not UTF-8: byte 0xff at position 5"),
        ("a.txt", b"x" * 9 + b"\xed\x95", r"is not UTF-8: byte 0xed at position 10"),
        ("a.txt", "text".encode("utf-16"), "looks like UTF-16"),
        ("a.txt", b"a\0b", "NUL character; is this a text file"),
        ("a.txt", b"", "no text; a language model needs some"),
        ("a.txt.gz", gzip.compress(b"text" * 999, mtime=0)[:-9], "the gzip file is truncated"),
        ("a.jsonl", b'{"text": "ok"}\n{"body": "x"}\n', r"line 2: column 'text' is missing.*Set column in \[data\]"),
        ("a.jsonl", b'{"text": 3}\n', "is int, not text"),
        ("a.jsonl", b"not json\n", "is not JSON"),
        ("a.tsv", b"label\tbody\n1\tx\n", "column 'text' is missing"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
    ],
)
def test_bad_text_is_named(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(documents, "BLOCK", 11)
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    config = TextData(train=(name,), folder=str(tmp_path))
    with pytest.raises(UserError, match=message):
        config.read(config.train).check()


def test_bad_rows_may_be_left_out(tmp_path):
    rows = ['{"text": "good"}', "nonsense", '{"text": ""}', '{"text": "more"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    config = TextData(train=("a.jsonl",), folder=str(tmp_path), skip_bad=True)
    found = config.read(config.train).check()
    assert read(config) == ["good", "more"] and found.bad_count == 1
    assert any("an empty document" in line for line in found.notes) and "line 2" in str(found.bad[0])


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "input.txt").write_text("x")
    with pytest.raises(UserError, match=r"did you mean 'input\.txt'"):
        TextData(train=("imput.txt",), folder=str(tmp_path)).find(("imput.txt",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="the folder is empty"):
        TextData(train=("empty",), folder=str(tmp_path)).find(("empty",))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": ()}, "no files"),
        ({"train": "a.txt"}, "write a list"),
        ({"train": ("a",), "valid_fraction": 1.0}, "must be at least 0 and below 1"),
        ({"train": ("a",), "valid": ("b",), "valid_fraction": 0.1}, "choose one"),
        ({"train": ("a",), "separator": ""}, "separator = ''"),
        ({"train": ("a",), "test": ("b",)}, "give each set a name"),
        ({"train": ("a",), "folder": ""}, "not a folder name"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(UserError, match=message):
        TextData(**settings)


def test_a_byte_order_mark_is_left_out_and_said(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    config = TextData(train=("a.txt",), folder=str(tmp_path))
    assert read(config) == ["text"]
    assert "byte order mark" in config.read(config.train).check().notes[0]


def test_the_fingerprint_follows_the_files_and_the_settings(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    config = TextData(train=("a.txt",), folder=str(tmp_path))
    before = config.fingerprint(config.train)
    assert config.fingerprint(config.train) == before
    assert TextData(train=("a.txt",), folder=str(tmp_path), separator="x").fingerprint(config.train) != before
    (tmp_path / "a.txt").write_text("another text")
    assert config.fingerprint(config.train) != before
