"""GPT-2's vocabulary from its files, bytes, and text that comes out token by token.

The oracles: transformers' GPT-2 tokenizer, and the algorithm as published, written out below. The real vocabulary is
tried too where REGARD_GPT2_BPE names the folder of encoder.json and vocab.bpe.
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import UserError
from regard.text.gpt2 import read_gpt2
from regard.text.stream import StopStrings, StreamDecoder
from regard.text.tokenizer import Tokenizer
from regard.text.train import bytes_to_unicode

REAL = os.environ.get("REGARD_GPT2_BPE")
END = "<|endoftext|>"
LINES = [
    "The king's men weren't there: they'd gone, we've seen it, I'll say.",
    "To be, or not to be -- that is the question; 1599, 2024 and 3.14!",
    "동해 물과 백두산이 마르고 닳도록 하느님이 보우하사 우리나라 만세",
    "über naïve façades, 東京 and 😀👩‍👩‍👧 emoji\n\n\tindented   text  \r\n",
] * 3

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(LINES).flatmap(
    lambda line: st.integers(0, len(line)).map(lambda at: line[at:] + line[:at])
)


def write_files(folder: Path, names: tuple[str, str]) -> None:
    """A small vocabulary in GPT-2's format, trained here."""
    from tokenizers import ByteLevelBPETokenizer

    raw = ByteLevelBPETokenizer()
    raw.train_from_iterator(LINES, vocab_size=500, show_progress=False)
    content = json.loads(raw.to_str())["model"]
    vocabulary = {**content["vocab"], END: len(content["vocab"])}
    (folder / names[0]).write_text(json.dumps(vocabulary), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (folder / names[1]).write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


@pytest.fixture(scope="module", params=["small", "real"])
def folder(request, tmp_path_factory) -> Path:
    if request.param == "real":
        if not REAL:
            pytest.skip("REGARD_GPT2_BPE is not set")
        return Path(REAL)
    path = tmp_path_factory.mktemp("vocabulary")
    write_files(path, ("vocab.json", "merges.txt"))
    return path


class Published:
    """The algorithm of openai/gpt-2's encoder.py: split by a pattern, then merge the best pair until none is left."""

    def __init__(self, folder: Path) -> None:
        import regex

        from regard.text.gpt2 import find_files

        vocabulary, merges = find_files(folder)
        self.ids = json.loads(vocabulary.read_text(encoding="utf-8"))
        lines = merges.read_text(encoding="utf-8").split("\n")[1:-1]
        self.ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}
        self.pattern = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def encode(self, text: str) -> list[int]:
        ids = []
        for word in self.pattern.findall(text):
            parts = [bytes_to_unicode()[byte] for byte in word.encode()]
            while len(parts) > 1:
                pairs = [*pairwise(parts)]
                best = min(pairs, key=lambda pair: self.ranks.get(pair, float("inf")))
                if best not in self.ranks:
                    break
                merged, at = [], 0
                while at < len(parts):
                    take = 2 if at < len(parts) - 1 and (parts[at], parts[at + 1]) == best else 1
                    merged.append("".join(parts[at : at + take]))
                    at += take
                parts = merged
            ids += [self.ids[part] for part in parts]
        return ids


def test_bytes_have_gpt2s_characters():
    transformers = pytest.importorskip("transformers.convert_slow_tokenizer")
    assert dict(enumerate(bytes_to_unicode())) == transformers.bytes_to_unicode()


def test_the_same_ids_as_the_published_algorithm(folder):
    pytest.importorskip("regex")
    ours, theirs = read_gpt2(folder), Published(folder)

    @given(texts)
    @settings(max_examples=150, deadline=None)
    def check(text):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text

    check()


def test_the_same_ids_as_transformers(folder):
    transformers = pytest.importorskip("transformers")
    from regard.text.gpt2 import find_files

    vocabulary, merges = map(str, find_files(folder))
    theirs, ours = transformers.GPT2Tokenizer(vocabulary, merges), read_gpt2(folder)
    assert len(ours) == len(theirs) and ours.eos == ours.bos == theirs.eos_token_id == len(ours) - 1

    @given(texts)
    @settings(max_examples=150, deadline=None)
    def check(text):
        assert ours.encode(text) == theirs.encode(text, split_special_tokens=True)

    check()


def test_special_tokens_in_text_are_encoded_as_text(folder):
    tokenizer = read_gpt2(folder)
    ids = tokenizer.encode(f"a{END}b")
    assert tokenizer.eos not in ids and tokenizer.decode(ids) == f"a{END}b"


def test_openais_names_and_a_saved_copy(tmp_path):
    write_files(tmp_path, ("encoder.json", "vocab.bpe"))
    tokenizer = read_gpt2(tmp_path)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json").encode(LINES[0]) == tokenizer.encode(LINES[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", None, "needs vocab.json or encoder.json"),
        ("vocab.json", "[1, 2]", "not a vocabulary"),
        ("vocab.json", '{"a": 0, "b": 7}', "not a vocabulary"),
        ("vocab.json", '{"a": 0', "not JSON"),
        ("vocab.json", '{"a": 0}', "byte 0x00 is missing"),
        ("merges.txt", "#version: 0.2\nqq zz\n", r"line 2: 'qq zz' does not merge"),
        ("merges.txt", b"\xff\xfe", "cannot be read"),
    ],
)
def test_wrong_files_are_named(tmp_path, name, content, message):
    write_files(tmp_path, ("vocab.json", "merges.txt"))
    path = tmp_path / name
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_gpt2(tmp_path)


# --- bytes


def test_bytes_are_utf8():
    tokenizer = Tokenizer.train(["anything"], "byte", normalize="none")
    assert len(tokenizer) == 260 and (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos) == (0, 1, 2, 3)

    @given(texts)
    @settings(max_examples=100, deadline=None)
    def check(text):
        assert tokenizer.encode(text) == [4 + byte for byte in text.encode()]
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()
    with pytest.raises(UserError, match="256 bytes and 4 special tokens"):
        Tokenizer.train(["x"], "byte", vocab_size=300)


# --- streaming


KINDS = {
    kind: Tokenizer.train(LINES, kind, vocab_size=size)
    for kind, size in (("word", None), ("char", None), ("byte", None), ("bpe", 300), ("unigram", 150))
}


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_text_is_the_decoded_text(kind):
    """For any token ids, including incomplete characters and special tokens."""
    tokenizer = KINDS[kind]

    @given(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    @settings(max_examples=150, deadline=None)
    def check(ids):
        letters = StreamDecoder(tokenizer)
        parts = [letters.add(id) for id in ids]
        assert "".join(parts) + letters.end() == tokenizer.decode(ids)

    check()


def test_a_character_is_emitted_when_complete():
    letters = StreamDecoder(KINDS["byte"])
    parts = [letters.add(id) for id in KINDS["byte"].encode("é한😀")]
    assert [part for part in parts if part] == ["é", "한", "😀"] and letters.end() == ""


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.randoms())
def test_text_ends_before_the_stop_string_that_is_complete_first(text, stops, random):
    until, given_out, at = StopStrings(stops), "", 0
    while at < len(text) and not until.stopped:
        size = random.randint(1, 4)
        given_out += until.add(text[at : at + size])
        at += size
        assert not any(stop in given_out for stop in stops)
    given_out += until.end()
    positions = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert until.stopped == bool(positions)
    assert given_out == (text[: min(positions)[1]] if positions else text)
