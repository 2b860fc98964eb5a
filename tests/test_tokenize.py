"""`regard tokenize`: tokens, ids and offsets of text, and back."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from regard.cli import main
from regard.data.korean import examples
from regard.text.tokenizer import Tokenizer

PAIRS = examples("train", 300, seed=1)
ENGLISH, KOREAN = [pair.source for pair in PAIRS], [pair.target for pair in PAIRS]
BPE, WORD, CHAR = Tokenizer.train(KOREAN, "bpe", 300), Tokenizer.train(ENGLISH, "word"), Tokenizer.train(KOREAN, "char")
TEXTS = [KOREAN[0], ENGLISH[1], unicodedata.normalize("NFD", KOREAN[2]), "naïve 😀", "<s> </s>", " "]


@pytest.fixture
def here(empty_folder) -> Path:
    for name, files in {"one": {"tokenizer": BPE}, "two": {"source": WORD, "target": CHAR}, "none": {}}.items():
        Path(name).mkdir()
        for file, tokenizer in files.items():
            tokenizer.save(f"{name}/{file}.json")
    return empty_folder


def call(capsys, *arguments: str, code: int = 0) -> list[str]:
    assert main(["tokenize", *arguments]) == code
    return capsys.readouterr().out.splitlines()


def test_tokens_ids_and_back(here, capsys):
    assert call(capsys, "one", *TEXTS) == [" ".join(BPE.tokens(text)) for text in TEXTS]
    ids = call(capsys, "one/tokenizer.json", *TEXTS, "--ids")
    assert ids == [" ".join(map(str, BPE.encode(text))) for text in TEXTS]
    assert call(capsys, "one", "--decode", *ids) == [unicodedata.normalize("NFC", text) for text in TEXTS]


def test_json_has_the_characters_of_every_token(here, capsys):
    for text, line in zip(TEXTS, call(capsys, "one", *TEXTS, "--json"), strict=True):
        value = json.loads(line)
        assert value["text"] == text and value["ids"] == BPE.encode(text) and value["tokens"] == BPE.tokens(text)
        covered = [text[start:end] for start, end in value["offsets"]]
        assert all(
            token == unicodedata.normalize("NFC", part).replace(" ", "▁") or "\\x" in token
            for token, part in zip(value["tokens"], covered, strict=True)
        )
        assert sorted({at for span in value["offsets"] for at in range(*span)}) == [*range(len(text))]
    (line,) = call(capsys, "one", "--decode", "261 262", "--json")
    assert json.loads(line) == {
        "ids": [261, 262],
        "tokens": [BPE.token(261), BPE.token(262)],
        "text": BPE.decode([261, 262]),
    }


def test_a_model_with_two_tokenizers(here, capsys):
    assert call(capsys, "two", ENGLISH[0]) == call(capsys, "two", ENGLISH[0], "--side", "source")
    assert call(capsys, "two", ENGLISH[0]) == [" ".join(WORD.tokens(ENGLISH[0]))]
    assert call(capsys, "two", KOREAN[0], "--side", "target") == [" ".join(CHAR.tokens(KOREAN[0]))]
    assert call(capsys, "one", KOREAN[0], "--side", "target") == [" ".join(BPE.tokens(KOREAN[0]))]


def test_files_and_standard_input(here, capsys, monkeypatch):
    Path("in.txt").write_text("\n".join([*KOREAN[:3], "", "\u2028"]) + "\n", encoding="utf-8")
    assert call(capsys, "one", "--files", "in.txt", "-o", "out.txt") == []
    expected = [" ".join(BPE.tokens(text)) for text in (*KOREAN[:3], "", "\u2028")]
    assert Path("out.txt").read_text(encoding="utf-8").split("\n") == [*expected, ""]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("in.txt").read_bytes())))
    assert call(capsys, "one") == expected


def test_sentencepiece_has_no_offsets(here, capsys):
    spm = pytest.importorskip("sentencepiece")
    Path("lines.txt").write_text("\n".join(ENGLISH), encoding="utf-8")
    spm.SentencePieceTrainer.train(input="lines.txt", model_prefix="spm", vocab_size=60, minloglevel=2)
    (line,) = call(capsys, "spm.model", ENGLISH[0], "--json")
    value = json.loads(line)
    assert value["ids"] == spm.SentencePieceProcessor(model_file="spm.model").encode(ENGLISH[0])
    assert len(value["tokens"]) == len(value["ids"]) and value["offsets"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "a"], "missing: no such file or folder"),
        (["none", "a"], "none: has no tokenizer.json"),
        (["one", "--decode", "a b"], "--decode reads ids, such as  12 7 31"),
        (["one", "--decode", "1 99999"], "token id 99999 is not in the vocabulary"),
        (["one", "a", "--ids", "--decode"], "pass one of them"),
        (["one", "a", "--side", "both"], "invalid choice: 'both'"),
        (["one", "--files", "nowhere.txt"], "nowhere.txt: no such file"),
        (["one", "one/tokenizer.json"], "is the name of a file: read its lines with  --files one/tokenizer.json"),
    ],
)
def test_mistakes(here, capsys, arguments, message):
    assert main(["tokenize", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_one_bad_line_does_not_stop_the_others(here, capsys):
    assert call(capsys, "one", "--decode", "97", "x", "98", code=3) == [BPE.decode([97]), "", BPE.decode([98])]


def test_nothing_slow_is_imported(here):
    code = (
        "import sys; from regard.cli import main; code = main(['tokenize', 'one', 'a b', '--json']); "
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'numpy', 'sentencepiece')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
