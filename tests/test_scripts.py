"""Scripts without spaces between words: Japanese, Korean, Chinese, Thai, emoji."""

from __future__ import annotations

import time
import unicodedata
from pathlib import Path

import pytest

from corpus import train
from regard.errors import UserError
from regard.text.tokenizer import Tokenizer
from regard.text.train import LONGEST_WORD
from regard.training.history import read_metrics

JAPANESE = [
    "東京に住んでいる友達は、日本語を教えています。", "明日は雨が降るでしょう。",
    "コーヒーを飲みますか、それともお茶ですか。",
    "彼女は毎朝六時に起きて、犬と散歩します。", "この本はとても面白かったので、二回読みました。",
    "電車が遅れて、会議に間に合いませんでした。", "日本語の勉強は楽しいですが、漢字は難しいです。",
]  # fmt: skip
KOREAN = [
    "제 친구는 서울에서 한국어를 가르칩니다.", "내일은 비가 올 것 같아요.", "커피 드시겠어요, 아니면 차를 드시겠어요?",
    "그녀는 매일 아침 여섯 시에 일어나 개와 산책한다.", "이 책은 정말 재미있어서 두 번 읽었어요.",
    "기차가 늦어서 회의에 늦고 말았습니다.", "띄어쓰기를안해도읽을수는있지만불편합니다.",
]  # fmt: skip
ODD = [
    unicodedata.normalize("NFD", KOREAN[0]),  # the letters of each syllable one by one
    unicodedata.normalize("NFD", "ガギグ、ぱぴぷ。"),  # voiced marks as characters of their own
    "ｶﾀｶﾅ ｶﾞｷﾞ 半角と全角：ＡＢＣ１２３", "ㅋㅋㅋㅋ ㅠㅠ ㅇㅇ",
    "👩‍👩‍👧‍👦👍🏽🇰🇷 e\u0301", "東京\u3000大阪", "𠮷野家で𩸽を食べた", "ﷺ ﬁ ①",
]  # fmt: skip
ALL = [*JAPANESE, *KOREAN, *ODD]


@pytest.mark.parametrize(("kind", "size"), [("bpe", 600), ("unigram", 500), ("char", None), ("byte", None)])
def test_decoding_inverts_encoding(kind, size) -> None:
    tokenizer = Tokenizer.train(ALL * 3, kind, size)
    for text in ALL:
        assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_tokens_are_words_although_a_sentence_has_no_spaces(kind) -> None:
    """Frequent words become tokens in sentences without spaces."""
    words = ["東京", "大阪", "友達", "学校", "コーヒー", "電車", "日本語", "先生"]
    lines = [f"{a}の{b}は{c}です" for a in words for b in words for c in words if len({a, b, c}) == 3]
    tokenizer = Tokenizer.train(lines, kind, 256 + 80 if kind == "bpe" else 60)
    tokens = {piece for line in lines for piece in tokenizer.tokens(line)}
    assert sum(any(word in piece for piece in tokens) for word in words) == len(words)
    letters = sum(map(len, lines))
    assert sum(len(tokenizer.encode(line)) for line in lines) < 0.6 * letters


def test_training_on_very_long_words_is_fast() -> None:
    """The time of a merge is proportional to the length of words, so bpe splits long ones."""
    line = "".join(JAPANESE).replace("。", "").replace("、", "") * 150  # 22,000 characters, no space
    start = time.process_time()
    tokenizer = Tokenizer.train([line], "bpe", 600)
    assert time.process_time() - start < 5  # 0.1 s; in one piece, half a minute
    assert tokenizer.decode(tokenizer.encode(line)) == line
    short = [line[at : at + LONGEST_WORD] for at in range(0, len(line), LONGEST_WORD)]
    assert Tokenizer.train(short, "bpe", 600).json == tokenizer.json


def test_kind_word_needs_spaces() -> None:
    for lines in (JAPANESE, ["我们今天去北京看朋友吃饭", "他每天早上喝咖啡看报纸"], ["ฉันรักเธอมากที่สุดในโลก"]):
        with pytest.raises(UserError, match=r"kind is 'word', but .* without spaces.*'unigram', 'bpe' or 'char'"):
            Tokenizer.train(lines, "word")
    Tokenizer.train(KOREAN, "word")  # has them
    Tokenizer.train(["東京 に 住ん で いる 友達 は 日本語 を 教え て い ます 。"], "word")  # parted beforehand
    Tokenizer.train(["東京", "大阪", "日本語"], "word")  # a list of words
    Tokenizer.train(["Tokyo is written 東京都渋谷区神宮前一丁目 in " + "a very long English text " * 20], "word")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
def test_a_run_from_korean_to_japanese(tmp_path: Path, kind) -> None:
    """Train and evaluate, with chrF as the metric."""
    for name, lines in (("ko", KOREAN), ("ja", JAPANESE)):
        (tmp_path / f"train.{name}").write_text("\n".join(lines * 4) + "\n", encoding="utf-8")
    (tmp_path / "r.toml").write_text(
        '[data]\ntrain = ["train.ko", "train.ja"]\nvalid = ["train.ko", "train.ja"]\n'
        '[train]\nsteps = 4\nmetric = "chrf"\nevaluate_every = 2\n'
    )
    size = {"bpe": 400, "unigram": 250, "char": "none"}[kind]
    options = [f"--set=text.kind={kind}", f"--set=text.vocab_size={size}", "--set=data.max_length=90"]
    assert train(tmp_path / "r.toml", "-o", str(tmp_path / "run"), *options) == 0
    assert all("chrf" in line and "bleu" in line for line in read_metrics(tmp_path / "run") if "valid_loss" in line)
    assert "tok:char" in (tmp_path / "run" / "scores.json").read_text()
