"""Scores: the figures are sacrebleu's own, and say what they are."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from regard.errors import UserError
from regard.metrics.bleu import natural_splitting, score


@pytest.fixture(scope="module")
def lines() -> tuple[list[str], list[str]]:
    """Outputs that are partly correct, some empty, some with capitals."""
    draw, words = random.Random(0), [*"abcdefgh", "Man", "Hund", "springt", ",", "."]
    references = [" ".join(draw.choices(words, k=draw.randint(4, 15))) for _ in range(60)]
    outputs = []
    for reference in references:
        kept = [word for word in reference.split() if draw.random() > 0.2]
        outputs.append(" ".join(kept if draw.random() > 0.1 else [word.lower() for word in kept]))
    outputs[7] = ""
    return outputs, references


def sacrebleu(tmp_path, outputs, references, *options) -> dict:
    (tmp_path / "ref").write_text("\n".join(references) + "\n")
    (tmp_path / "out").write_text("\n".join(outputs) + "\n")
    command = [
        sys.executable,
        "-m",
        "sacrebleu",
        str(tmp_path / "ref"),
        "-i",
        str(tmp_path / "out"),
        "-w",
        "10",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_bleu_is_the_command_line_s(tmp_path, lines):
    found, theirs = score(*lines), sacrebleu(tmp_path, *lines)
    assert found["bleu"] == pytest.approx(theirs["score"], abs=1e-9) and 10 < found["bleu"] < 90
    assert theirs["signature"] in found["signature"] or found["signature"] in theirs["signature"]
    assert "tok:13a" in found["signature"] and "version:" in found["signature"] and found["lines"] == 60


def test_tokenised_bleu_is_the_command_line_s_without_a_tokenizer(tmp_path, lines):
    found = score(*lines)
    theirs = sacrebleu(tmp_path, *lines, "--tokenize", "none", "--lowercase", "--force")
    assert found["tokenised_bleu"] == pytest.approx(theirs["score"], abs=1e-9)
    assert found["reference_tokens"] == sum(len(line.split()) for line in lines[1])
    assert found["tokenised_bleu"] != pytest.approx(found["bleu"], abs=1e-3)


def test_chrf_is_the_command_line_s(tmp_path, lines):
    theirs = sacrebleu(tmp_path, *lines, "-m", "chrf")
    assert score(*lines)["chrf"] == pytest.approx(theirs["score"], abs=1e-9)


JAPANESE = ["東京に住んでいる友達は、日本語を教えています。", "明日は雨が降るでしょう。", "コーヒーを飲みますか。"]
CHINESE = ["我们今天去北京看朋友。", "明天会下雨吗？", "他每天早上喝咖啡。"]
KOREAN = ["제 친구는 서울에서 한국어를 가르칩니다.", "내일 비가 올까요?", "커피 드시겠어요?"]


@pytest.mark.parametrize(("references", "name"), [(JAPANESE, "char"), (CHINESE, "zh"), (KOREAN, "13a")])
def test_words_are_what_fits_the_language(tmp_path, references, name):
    outputs = [references[0][:-4] + references[0][-1], *references[1:]]
    found, theirs = score(outputs, references), sacrebleu(tmp_path, outputs, references, "--tokenize", name)
    assert f"tok:{name}" in found["signature"] and natural_splitting(references) == name
    assert found["bleu"] == pytest.approx(theirs["score"], abs=1e-9) and 20 < found["bleu"] < 100
    other = score(outputs, references, "char" if name != "char" else "13a")
    assert other["signature"] != found["signature"] and other["chrf"] == found["chrf"]


def test_words_that_are_kept_apart_are_words():
    assert natural_splitting(["東京 に 住んで いる 友達 は 日本語 を 教えて います 。"]) == "13a"
    assert natural_splitting(["“東京” is the Japanese name of Tokyo.", "한자(漢字)를 함께 썼다."]) == "13a"
    assert natural_splitting(["", " "]) == "13a"


def test_a_splitting_that_cannot_be_had_is_an_error(monkeypatch):
    with pytest.raises(UserError, match=r"tokenize = '14a'; did you mean|tokenize = '14a'"):
        score(["a"], ["a"], "14a")
    monkeypatch.setitem(sys.modules, "MeCab", None)
    monkeypatch.setitem(sys.modules, "mecab_ko", None)
    for language in ("ja", "ko"):
        with pytest.raises(UserError, match=rf"pip install 'sacrebleu\[{language}\]'"):
            score(["a"], ["a"], f"{language}-mecab")


def test_perfect_answers():
    text = ["ein hund läuft über die wiese .", "zwei kinder spielen im sand ."]
    found = score(text, text)
    assert found["bleu"] == pytest.approx(100) and found["chrf"] == pytest.approx(100) and found["exact"] == 1.0
    assert score([text[0], "x"], text)["exact"] == 0.5


@pytest.mark.parametrize(("outputs", "references"), [(["a"], ["a", "b"]), ([], []), (["a"], [])])
def test_a_mismatch_is_an_error_with_both_numbers(outputs, references):
    with pytest.raises(UserError, match=rf"{len(outputs)} hypotheses and {len(references)} references"):
        score(outputs, references)
