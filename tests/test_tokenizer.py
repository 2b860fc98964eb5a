"""Properties of tokenizers: decoding inverts encoding, and text is never encoded as a special token."""

import copy
import json
import os
import pickle
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from regard.errors import UserError
from regard.text import Tokenizer
from regard.text.tokenizer import Kind

LINES = [
    "March 3rd, 2021 was a Wednesday.",
    "three hundred forty-two thousand seven hundred five",
    "2021년 3월 3일 수요일, 삼십사만 이천칠백오",
    "그래서 나는 학교에 갔다. 학교는 조용했다.",
    "a tag <s> and its end </s> <pad> <unk> <s> </s> <s>x</s>",
    "שלום עולם مرحبا 👩‍👩‍👧 naïve café",
]
KINDS: tuple[Kind, ...] = ("word", "char", "bpe", "unigram")
SPECIAL_WORDS = ("<pad>", "<unk>", "<s>", "</s>")
# Unassigned code points are left out: their normal form depends on the Unicode version of the library.
ANY_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn")), max_size=40) | st.sampled_from(
    ["각 각", "👨‍👩‍👧‍👦🇰🇷", "a\u200bb\u200f\u202e", "\r\n\t \u3000", "\x00", " a  b ", "▁", "<s>a</s>", "مرحبا \u0301"]
)
SLOW_MACHINE = settings(deadline=None)
SEEN_TEXT = st.text(st.sampled_from(sorted(set("".join(LINES)))), max_size=60)


def trained(kind: Kind, lines: list[str] = LINES) -> Tokenizer:
    return Tokenizer.train(lines, kind, {"bpe": 400, "unigram": 250}.get(kind))


TOKENIZERS = {kind: trained(kind) for kind in KINDS}
BYTES = {
    (kind, normalize): Tokenizer.train(LINES, kind, size, normalize=normalize)
    for kind, size in (("bpe", 400), ("byte", None))
    for normalize in ("NFC", "NFKC", "none")
}


def normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)


@SLOW_MACHINE
@given(ANY_TEXT)
def test_bytes_decode_any_unicode_text(text: str) -> None:
    for kind in ("bpe", "byte"):
        for normalize, wanted in (("NFC", normal(text)), ("NFKC", unicodedata.normalize("NFKC", text)), ("none", text)):
            tokenizer = BYTES[kind, normalize]
            assert tokenizer.decode(tokenizer.encode(text)) == wanted


@pytest.mark.parametrize("kind", [*KINDS, "byte"])
def test_decomposed_text_gives_the_ids_of_composed_text(kind: Kind) -> None:
    tokenizer = TOKENIZERS.get(kind) or BYTES["byte", "NFC"]
    for text in ("2021년 3월 3일", "학교에 간다", "café"):
        decomposed = unicodedata.normalize("NFD", text)
        assert decomposed != text and tokenizer.encode(decomposed) == tokenizer.encode(text)


@pytest.mark.parametrize("kind", [*KINDS, "byte"])
def test_a_vocabulary_does_not_depend_on_the_unicode_form_of_its_text(kind: Kind) -> None:
    decomposed = [unicodedata.normalize("NFD", line) for line in LINES]
    assert trained(kind, decomposed).json == trained(kind).json


@pytest.mark.parametrize("kind", KINDS)
def test_full_width_letters_are_replaced_only_by_nfkc(kind: Kind) -> None:
    ordinary = {name: Tokenizer.train([*LINES, "ABC"], kind, normalize=name) for name in ("NFC", "NFKC")}
    for name, equal in (("NFC", False), ("NFKC", True)):
        again = Tokenizer(ordinary[name].json)  # the choice is stored in the file
        assert (again.encode("ＡＢＣ") == again.encode("ABC")) is equal


@SLOW_MACHINE
@given(SEEN_TEXT)
def test_char_and_unigram_decode_known_characters_unchanged(text: str) -> None:
    for kind in ("char", "unigram"):
        tokenizer = TOKENIZERS[kind]
        assert tokenizer.unk not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == normal(text)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50, deadline=None)
@given(ANY_TEXT.filter(str.strip))
def test_char_and_unigram_decode_their_training_text_unchanged(text: str) -> None:
    char = Tokenizer.train([text], "char")
    assert char.decode(char.encode(text)) == normal(text)
    assert len(char.encode(text)) == len(normal(text))
    unigram = Tokenizer.train([text], "unigram")
    assert unigram.decode(unigram.encode(text)) == normal(text).replace("▁", " ")


def test_char_keeps_syllables_spaces_and_line_feeds() -> None:
    tokenizer = Tokenizer.train(["학교 가\n"], "char")
    assert tokenizer.tokens("학교\n 가") == ["학", "교", "\\n", "▁", "가"]
    letters = unicodedata.normalize("NFD", "학교")  # 학교 as five separate letters
    assert len(letters) == 5 and tokenizer.encode(letters) == tokenizer.encode("학교")


def test_word_splits_at_spaces_punctuation_and_digits() -> None:
    tokenizer = TOKENIZERS["word"]
    assert tokenizer.tokens("March 3rd, 2021") == ["March", "3", "rd", ",", "2", "0", "2", "1"]
    assert tokenizer.tokens("forty-two") == ["forty", "-", "two"]
    assert tokenizer.tokens("2021년 3월 3일") == ["2", "0", "2", "1", "년", "3", "월", "3", "일"]
    assert tokenizer.decode(tokenizer.encode("seven  hundred five")) == "seven hundred five"
    assert tokenizer.encode("zebra") == [tokenizer.unk]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_come_first(kind: Kind) -> None:
    tokenizer = TOKENIZERS[kind]
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos) == (0, 1, 2, 3)
    assert [tokenizer.token(id) for id in range(4)] == list(SPECIAL_WORDS)


@pytest.mark.parametrize("kind", KINDS)
@SLOW_MACHINE
@given(text=st.lists(st.sampled_from([*SPECIAL_WORDS, "<", "s", "/", ">", " ", "x", "학교"])).map("".join) | ANY_TEXT)
def test_text_never_becomes_a_special_token(kind: Kind, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert not {tokenizer.pad, tokenizer.bos, tokenizer.eos} & set(tokenizer.encode(text))
    if kind == "bpe":
        assert tokenizer.decode(tokenizer.encode(text)) == normal(text)


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_names_of_special_tokens_does_not_encode_them(kind: Kind) -> None:
    tokenizer = trained(kind, ["<s></s><pad><unk><s>"] * 1000 + LINES)
    for name in SPECIAL_WORDS:
        assert not {0, 2, 3} & set(tokenizer.encode(f"{name} a{name}b {name}{name}"))
        assert len(tokenizer.encode(name)) > 1 or tokenizer.encode(name) == [1]
    pieces = [tokenizer.token(id) for id in range(len(tokenizer))]
    assert len(set(pieces)) == len(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_skips_special_tokens_and_continues_after_them(kind: Kind) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("학교")
    assert tokenizer.decode([2, *ids, 3, 0, *ids, 0]) == tokenizer.decode(ids + ids)
    assert tokenizer.decode([0, 2, 3]) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_batches_equal_single_texts(kind: Kind) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.encode_batch([*LINES, ""]) == [tokenizer.encode(line) for line in [*LINES, ""]]
    assert tokenizer.encode_batch([]) == []


@pytest.mark.parametrize("kind", KINDS)
@SLOW_MACHINE
@given(text=ANY_TEXT)
def test_one_readable_token_per_id(kind: Kind, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    pieces = tokenizer.tokens(text)
    assert len(pieces) == len(tokenizer.encode(text))
    assert all(piece and piece.isprintable() and " " not in piece for piece in pieces)


def test_korean_tokens_of_bpe_are_readable() -> None:
    tokenizer = Tokenizer.train(["학교에 학교는 학교"] * 10, "bpe", 300)
    assert tokenizer.tokens("학교 학교") == ["학교", "▁학교"]
    assert tokenizer.tokens("갂") == [f"\\x{byte:02x}" for byte in "갂".encode()]  # a syllable never seen


@pytest.mark.parametrize("kind", KINDS)
def test_a_reloaded_tokenizer_is_the_same(kind: Kind, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    texts = [*LINES, "x <s> y", "", "전혀 새로운 글", "  two  spaces "]
    copies = [Tokenizer.load(path), copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))]
    for other in copies:
        assert other.encode_batch(texts) == tokenizer.encode_batch(texts)
        assert [other.token(id) for id in range(len(other))] == [tokenizer.token(id) for id in range(len(tokenizer))]
        assert (other.pad, other.unk, other.bos, other.eos) == (0, 1, 2, 3)
    before = path.read_bytes()
    copies[0].save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_reads_the_file_the_same_way(kind: Kind, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert raw.get_vocab_size() == len(tokenizer)
    for text in [line for line in LINES if "<" not in line] + ["새 글 new text 42"]:
        assert tokenizer.encode(text) == raw.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == raw.decode(raw.encode(text).ids)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_file_the_same_way(kind: Kind, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = TOKENIZERS[kind]
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    assert len(fast) == len(tokenizer)
    assert (fast.pad_token_id, fast.unk_token_id, fast.bos_token_id, fast.eos_token_id) == (0, 1, 2, 3)
    for text in [line for line in LINES if "<" not in line]:
        ids = tokenizer.encode(text)
        assert fast(text, add_special_tokens=False)["input_ids"] == ids
        assert fast.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == tokenizer.decode(ids)


def test_training_gives_the_same_file_in_every_process(tmp_path: Path) -> None:
    code = (
        "import sys, json; from regard.text import Tokenizer; lines = json.load(sys.stdin)\n"
        "for kind in ('word', 'char', 'bpe', 'unigram'):\n"
        "    size = {'bpe': 400, 'unigram': 250}.get(kind)\n"
        "    Tokenizer.train(iter(lines), kind, size).save(sys.argv[1] + kind)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for run in ("1", "2", "3"):
        command = [sys.executable, "-c", code, str(tmp_path / run)]
        subprocess.run(command, input=json.dumps(LINES), env=env, text=True, check=True)
    for kind in KINDS:
        TOKENIZERS[kind].save(tmp_path / f"0{kind}")
        assert len({(tmp_path / f"{run}{kind}").read_bytes() for run in range(4)}) == 1


def test_sizes_and_counts() -> None:
    lines = ["one two two three three three"]
    assert len(Tokenizer.train(lines, "word")) == 4 + 3
    assert Tokenizer.train(lines, "word", 6).tokens("one two three") == ["<unk>", "two", "three"]
    assert Tokenizer.train(lines, "word", min_count=2).tokens("one two three") == ["<unk>", "two", "three"]
    assert Tokenizer.train(["aab"], "char", min_count=2).tokens("ab") == ["a", "<unk>"]
    assert len(Tokenizer.train(LINES * 20, "bpe", 300)) == 300
    for size in range(4 + 3, 20):
        assert len(Tokenizer.train(["abcabcabcabc cab bac"] * 5, "unigram", size + 1)) <= size + 1


def test_merges_of_bpe_are_those_of_the_paper() -> None:
    """Sennrich et al.: the most frequent pair first; here "lo" (7 times), then "low" (7 times)."""
    tokenizer = Tokenizer.train(["low"] * 5 + ["lot", "low"] + ["new"] * 2, "bpe", 4 + 256 + 2)
    assert [tokenizer.token(id) for id in (260, 261)] == ["lo", "low"]


def test_files_of_other_programs(tmp_path: Path) -> None:
    """A byte-level file with one special token, with padding and truncation enabled: both are ignored."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = tokenizers.Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>"])
    raw.enable_padding(length=50)
    raw.enable_truncation(3)
    raw.save(str(tmp_path / "foreign.json"))
    tokenizer = Tokenizer.load(tmp_path / "foreign.json")
    assert len(tokenizer) == 257
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos) == (None, None, 256, 256)
    assert tokenizer.decode([*tokenizer.encode("학교 <|endoftext|>"), 256]) == "학교 <|endoftext|>"
    assert tokenizer.token(256) == "<|endoftext|>"
    tokenizer.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "foreign.json").read_bytes()


def test_text_is_no_special_token_for_a_unigram_file_of_another_program(tmp_path: Path) -> None:
    vocab_size = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((char, -2.0) for char in "▁<>/sab")]
    raw = tokenizers.Tokenizer(models.Unigram(vocab_size, unk_id=2, byte_fallback=False))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.add_special_tokens(["<pad>", "</s>", "<unk>"])
    raw.save(str(tmp_path / "t5.json"))
    tokenizer = Tokenizer.load(tmp_path / "t5.json")
    assert (tokenizer.pad, tokenizer.unk, tokenizer.bos, tokenizer.eos) == (0, 2, None, 1)
    assert tokenizer.eos not in tokenizer.encode("a </s> b</s>")
    assert tokenizer.encode("a bab") == raw.encode("a bab").ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [[], [""], ["", "  \n"]])
def test_empty_training_text_is_refused(kind: Kind, lines: list[str]) -> None:
    with pytest.raises(UserError, match="empty"):
        Tokenizer.train(lines, kind)


def test_wrong_training_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'word'"):
        Tokenizer.train(LINES, "words")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="single string"):
        Tokenizer.train("one long text", "char")
    for kind, needed in (("bpe", 260), ("char", 4 + 3), ("unigram", 4 + 3), ("word", 5)):
        for size in (needed - 1, 0, -5):
            with pytest.raises(UserError, match=f"vocab_size = {size}"):
                Tokenizer.train(["ab ba"], kind, size)  # type: ignore[arg-type]
        Tokenizer.train(["ab ba"], kind, needed)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="min_count = 0"):
        Tokenizer.train(LINES, "word", min_count=0)
    with pytest.raises(UserError, match="likelihood"):
        Tokenizer.train(LINES, "unigram", min_count=2)
    with pytest.raises(UserError, match="no word occurs"):
        Tokenizer.train(["a b c"], "word", min_count=9)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_text_are_refused(kind: Kind) -> None:
    with pytest.raises(UserError, match="surrogate"):
        Tokenizer.train(["good", "bad \ud800"], kind)
    with pytest.raises(UserError, match="NoneType"):
        Tokenizer.train(["good", None], kind)  # type: ignore[list-item]
    with pytest.raises(UserError, match="position 4"):
        TOKENIZERS[kind].encode("bad \ud800")


@pytest.mark.parametrize("id", [-1, -100, 10**6, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(id: int) -> None:
    with pytest.raises(UserError, match=str(id)):
        TOKENIZERS["char"].decode([4, id])
    with pytest.raises(UserError, match=str(id)):
        TOKENIZERS["char"].token(id)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"null", b'{"model": 3}', b"\xff\xfe", b"\x00" * 50])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="the tokenizer file"):
        Tokenizer.load(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZERS[kind].save(path)
    whole = path.read_bytes()
    for part in (0.2, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(part * len(whole))])
        with pytest.raises(UserError, match="the tokenizer file"):
            Tokenizer.load(path)


def test_paths_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            Tokenizer.load(path)
    for path in (tmp_path / "no folder" / "t.json", tmp_path, Path("/"), Path()):
        with pytest.raises(UserError, match="cannot be written"):
            TOKENIZERS["char"].save(path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    TOKENIZERS["char"].save(path)
    before = path.read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left"):
        TOKENIZERS["word"].save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
