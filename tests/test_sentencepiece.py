"""SentencePiece models converted to `tokenizers`, compared with the sentencepiece package on any text."""

from __future__ import annotations

import io
import json
import random
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus import train as train_run
from corpus import write_corpus
from regard.cli import main
from regard.data.korean import examples
from regard.errors import MissingExtra, UserError
from regard.interop import export_folder, read_folder
from regard.models.recipe import preset
from regard.models.transformer import build
from regard.text import Tokenizer, from_sentencepiece, load_tokenizer
from regard.text.config import TextConfig

pytestmark = pytest.mark.grid

spm = pytest.importorskip("sentencepiece")

SENTENCES = [
    "The cat sat on the mat, and the dog did not!",
    "Die Katze saß auf der Matte; größere Hunde bellen.",
    "고양이가 매트 위에 앉아 있었고, 개는 그렇지 않았다.",
    "東京都に住んでいる友達は、日本語を教えています。",
    "Où est la bibliothèque ? Elle est là-bas — tout près…",
    "<b>bold</b> </s> ㅋㅋㅋㅋ --- !!! x = 0x41 <0 ABCDEF 123456789>",
]
LINES = [
    *SENTENCES * 4,
    *(text for example in examples("train", 150, seed=1) for text in (example.source, example.target)),
]
# What trips tokenizers up: letters in parts, widths, joiners, controls, spaces of every kind, names of tokens.
ODD = [
    "", " ", "\t\n", "  two  spaces  ", "▁", "▁▁a▁ ▁", "a\u00a0b\u3000c\u2009d", "\x00\x01", "\ufeff\u200b", "\ufffd",
    "<s>", "</s>a", "x<unk>", "<0x41><0xE3>", "<sep>", "a <sep>b<sep>", "[MASK] [mask]", "＜ｓｅｐ＞",
    "ｶﾞｷﾞｸﾞ", "か\u3099", unicodedata.normalize("NFD", "한국어 갔다 é ñ ǖ"), "①②㌔㍿ﬁﬀ", "👩‍👩‍👧 👍🏽 🇰🇷", "نَصٌّ", "ก็ไม่",
    "ȧ̈́ȧ̈", "İstanbul ẞ ſ", "𝔘𝔫𝔦 𠮷野家",
]  # fmt: skip
TEXTS = [*SENTENCES, *ODD, *(f"{a}{b}" for a, b in zip(ODD, SENTENCES * 5, strict=False))]
MODELS = {
    "unigram": {},
    "unigram-bytes": {"byte_fallback": True, "character_coverage": 0.98},
    "unigram-symbols": {"user_defined_symbols": ["<sep>", "[MASK]"], "normalization_rule_name": "nmt_nfkc_cf"},
    "unigram-spaces": {"remove_extra_whitespaces": False, "add_dummy_prefix": False, "split_by_whitespace": False},
    "unigram-identity": {"normalization_rule_name": "identity", "control_symbols": ["<2de>"], "pad_id": 3},
    "bpe": {"model_type": "bpe"},
    "bpe-bytes": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe-symbols": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "[MASK]"]},
    "bpe-spaces": {"model_type": "bpe", "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True},
    "char": {"model_type": "char", "character_coverage": 0.99},
}


def make(path: Path, lines: list[str] = LINES, **options) -> Path:
    written = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, vocab_size=500, hard_vocab_limit=False, num_threads=1,
        minloglevel=2, **options,
    )  # fmt: skip
    path.write_bytes(written.getvalue())
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make(folder / f"{name}.model", **options) for name, options in MODELS.items()}


@pytest.fixture(scope="module")
def both(files) -> dict[str, tuple[Tokenizer, object]]:
    """Ours and theirs."""
    return {
        name: (from_sentencepiece(path), spm.SentencePieceProcessor(model_file=str(path)))
        for name, path in files.items()
    }


def same(ours: Tokenizer, theirs, text: str) -> bool:
    """Equal ids; or, for a unigram model, another segmentation with the same score except for rounding."""
    got, expected = ours.encode(text), theirs.encode(text)
    if got == expected:
        return True
    scores = [sum(theirs.get_score(id) for id in ids) for ids in (got, expected)]
    return sorted(got) == sorted(expected) and abs(scores[0] - scores[1]) < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_ids_equal_those_of_the_package(both, name) -> None:
    ours, theirs = both[name]
    assert len(ours) == theirs.get_piece_size()
    assert [ours.unk, ours.bos, ours.eos] == [theirs.unk_id(), theirs.bos_id(), theirs.eos_id()]
    for text in TEXTS:
        expected = theirs.encode(text)
        assert ours.encode(text) == expected, text
        if theirs.unk_id() not in expected:  # the library writes " ⁇ " for it
            assert ours.decode(expected) == theirs.decode(expected), text


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_ids_of_any_text_equal_those_of_the_package(both, name, data) -> None:
    parts = st.one_of(st.text(max_size=6), st.sampled_from(ODD), st.sampled_from([*"".join(SENTENCES)]))
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    assert same(*both[name], text)


def test_only_ties_may_differ(both) -> None:
    """Runs of one character have many segmentations with the same score."""
    random.seed(5)
    ours, theirs = both["unigram"]
    different = 0
    for _ in range(300):
        text = "".join(random.choice("ㅋ-!a") * random.randint(1, 12) for _ in range(3))
        assert same(ours, theirs, text)
        different += ours.encode(text) != theirs.encode(text)
    assert different < 100


@pytest.mark.parametrize("name", ["unigram-symbols", "bpe-symbols", "bpe-bytes"])
def test_saving_and_loading_changes_nothing(both, tmp_path, name) -> None:
    ours, _ = both[name]
    ours.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.encode_batch(TEXTS) == ours.encode_batch(TEXTS)
    assert again.json == ours.json


def test_text_never_becomes_a_control_token(both) -> None:
    for ours, _ in both.values():
        for text in ("<s>", "</s>", "a</s>b", "<unk>", "<pad>", "<2de>"):
            assert not {ours.bos, ours.eos, ours.pad} & {*ours.encode(text)}


def test_a_model_without_the_characters_of_control_tokens(tmp_path) -> None:
    """ "<" has no piece here, so the name of a control token is full of unknown characters."""
    korean = [example.target for example in examples("train", 300, seed=2)]
    for kind in ("unigram", "bpe"):
        path = make(tmp_path / "k.model", korean, model_type=kind)
        ours, theirs = from_sentencepiece(path), spm.SentencePieceProcessor(model_file=str(path))
        for text in (*korean[:20], "<s>천", "a 2021년", "", "<0x41>", "</s> <s> </s>"):
            assert not {ours.bos, ours.eos} & {*ours.encode(text)}
            if "<" not in text:
                assert ours.encode(text) == theirs.encode(text)


# --- invalid files


def test_damaged_and_other_files_are_refused(files, tmp_path) -> None:
    path = tmp_path / "x.model"
    whole = files["unigram"].read_bytes()
    foreign = [b"", b"{}", b"\x80\x04pickle", b"PK\x03\x04", "한국어 텍스트".encode(), bytes(1000), b"\x0a\xff" * 40]
    for content in [*foreign, whole[:-100], whole[: len(whole) // 2], whole[1:], whole[:40]]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"x\.model: .*(damaged|not supported)"):
            from_sentencepiece(path)
    for missing in (tmp_path / "none.model", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            from_sentencepiece(missing)


@pytest.mark.parametrize("name", ["unigram", "bpe-bytes"])
def test_flipped_bytes_never_crash(files, tmp_path, name) -> None:
    random.seed(7)
    whole = files[name].read_bytes()
    for end in [20_000] * 30 + [len(whole)] * 5:  # most of the file is the table of its normaliser
        content = bytearray(whole)
        for _ in range(random.randint(1, 3)):
            content[random.randrange(min(end, len(whole)))] = random.randrange(256)
        (tmp_path / "x.model").write_bytes(content)
        try:
            from_sentencepiece(tmp_path / "x.model").encode_batch(TEXTS)
        except UserError as error:
            assert "x.model" in str(error) or "rules" in str(error)


def test_the_error_names_the_extra_that_is_missing(files, both, tmp_path, monkeypatch) -> None:
    both["bpe"][0].save(tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    for path in (files["bpe"], tmp_path / "tokenizer.json"):
        with pytest.raises(MissingExtra, match=r"pip install 'regard\[sentencepiece\]'"):
            load_tokenizer(path)


def test_unsupported_settings_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match="model_type = word is not supported"):
        from_sentencepiece(make(tmp_path / "w.model", model_type="word"))
    with pytest.raises(UserError, match="treat_whitespace_as_suffix is not supported"):
        from_sentencepiece(make(tmp_path / "s.model", treat_whitespace_as_suffix=True))


# --- in a recipe and in a Marian folder


def test_tokenizer_file_in_a_recipe(tmp_path, monkeypatch, capfd) -> None:
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    english, korean = ((tmp_path / f"train.{side}").read_text().splitlines() for side in ("en", "ko"))
    make(tmp_path / "joint.model", english + korean, model_type="bpe")
    make(tmp_path / "en.model", english)
    make(tmp_path / "ko.model", korean)
    keep = ["--set=text.vocab_size=none"]
    assert train_run("mine.toml", "-o", "joint", *keep, "--set=text.tokenizer_file=joint.model") == 0
    theirs = spm.SentencePieceProcessor(model_file="joint.model")
    assert Tokenizer.load("joint/tokenizer.json").encode(english[0]) == theirs.encode(english[0])
    two = ["--set=text.joint=false", '--set=text.tokenizer_file=["en.model", "ko.model"]']
    assert train_run("mine.toml", "-o", "two", *keep, *two) == 0
    (tmp_path / "en.model").unlink()  # the run has what it needs
    assert main(["translate", "two", "May 3rd", "--device", "cpu"]) == 0
    capfd.readouterr()
    assert train_run("mine.toml", "-o", "none", *keep, *two) == 2
    assert "en.model: cannot be read" in capfd.readouterr().err
    assert not (tmp_path / "none").exists()


def test_the_recipe_is_checked() -> None:
    with pytest.raises(UserError, match="remove vocab_size, vocab_dir and normalize"):
        TextConfig(tokenizer_file="a.model", vocab_size=100)
    for file, joint in ((("a", "b"), True), ("a", False), ((), True), ("", True)):
        with pytest.raises(UserError, match=r"tokenizer_file = .* with joint"):
            TextConfig(tokenizer_file=file, joint=joint)
    assert TextConfig(tokenizer_file=("a", "b"), joint=False).tokenizer_files == ("a", "b")


def marian_folder(folder: Path, codes: tuple[str, ...] = ()) -> Path:
    """A Marian model with two SentencePiece files and one list of ids, as on the Hugging Face hub."""
    english, german = [*SENTENCES[:1] * 9, *LINES[30::2]], [*SENTENCES[1:3] * 9, *LINES[31::2]]
    paths = [make(folder.with_name(f"{side}.spm"), lines) for side, lines in (("source", english), ("target", german))]
    models = [spm.SentencePieceProcessor(model_file=str(path)) for path in paths]
    texts = {
        model.id_to_piece(id): None
        for model in models
        for id in range(len(model))
        if not (model.is_unknown(id) or model.is_control(id))
    }
    ids = {text: id for id, text in enumerate(["</s>", "<unk>", *codes, *texts, "<pad>"])}
    model = build(preset("tiny", dim=12, heads=3, layers=1, ff_dim=10, max_length=40, vocab_size=len(ids)))
    pad = ids["<pad>"]
    export_folder(model, folder, metadata={"eos_token_id": 0, "pad_token_id": pad, "decoder_start_token_id": pad})
    for path in paths:
        path.rename(folder / path.name)
    (folder / "vocab.json").write_text(json.dumps(ids), encoding="utf-8")
    return folder


@pytest.mark.filterwarnings("ignore:Recommended")
def test_tokenizers_of_a_marian_folder(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = marian_folder(tmp_path / "hf", codes=(">>deu<<", ">>kor<<"))
    tokenizers = read_folder(folder).tokenizers
    theirs = transformers.MarianTokenizer.from_pretrained(str(folder))
    assert {side: len(tokenizer) for side, tokenizer in tokenizers.items()} == dict.fromkeys(
        ("source", "target"), len(theirs.encoder)
    )
    sources, targets = (
        [getattr(example, side) for example in examples("test", 20, seed=3)] for side in ("source", "target")
    )
    for text in [SENTENCES[0], *sources, ">>kor<< the cat", ">>deu<<", "saß é"]:  # ß comes from the other file
        assert [*tokenizers["source"].encode(text), 0] == theirs(text)["input_ids"], text
    for text in [*SENTENCES[1:3], *targets, "Matte Katze é"]:
        ids = theirs(text_target=text)["input_ids"]
        assert [*tokenizers["target"].encode(text), 0] == ids, text
        if theirs.unk_token_id not in ids:
            assert tokenizers["target"].decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_an_imported_marian_model_translates(tmp_path, monkeypatch, capfd) -> None:
    folder = marian_folder(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    assert main(["import", str(folder), "-o", "run"]) == 0
    assert main(["translate", "run", "the cat", "--device", "cpu"]) == 0
    (folder / "vocab.json").write_text('{"a": 5}')
    assert main(["import", str(folder), "-o", "other"]) == 2
    assert "vocab.json: not a vocabulary" in capfd.readouterr().err
