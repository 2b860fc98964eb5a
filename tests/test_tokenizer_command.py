"""`regard tokenizer train`: the tokenizer that `regard train` would learn, from the same files."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import get_args

import pytest

import regard
from regard.cli import main
from regard.commands.tokenizer import KINDS
from regard.data.korean import examples
from regard.text.tokenizer import Tokenizer
from regard.text.train import Kind

PAIRS = examples("train", 300, seed=1)
LINES = [text for pair in PAIRS for text in (pair.source, pair.target)]


@pytest.fixture
def here(empty_folder) -> Path:
    Path("lines.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    table = "".join(f"{pair.source}\t{pair.target}\n" for pair in PAIRS)
    Path("pairs.tsv").write_text(f"English\tKorean\n{table}", encoding="utf-8")
    return empty_folder


def statistics(tokenizer: Tokenizer, lines: list[str]) -> dict[str, float]:
    ids = [tokenizer.encode(line) for line in lines]
    tokens, words = sum(map(len, ids)), sum(len(line.split()) for line in lines)
    unknown = sum(id == tokenizer.unk for row in ids for id in row)
    characters = sum(map(len, lines))
    return {
        "lines": len(lines), "words": words, "characters": characters, "tokens": tokens, "unknown": unknown,
        "tokens_per_word": tokens / words, "characters_per_token": characters / tokens,
        "unknown_rate": unknown / tokens,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size"), [("bpe", 400), ("unigram", 200), ("word", 40), ("word", None), ("char", None), ("byte", None)]
)
def test_the_same_tokenizer_as_in_python_and_its_statistics(here, capsys, kind, size):
    options = ["--vocab-size", str(size)] if size else []
    assert main(["tokenizer", "train", "lines.txt", "-o", "new/tok", "--kind", kind, *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    tokenizer = Tokenizer.train(LINES, kind, size)
    assert Path("new/tok/tokenizer.json").read_text(encoding="utf-8") == tokenizer.json
    about = {"tokenizer": "new/tok/tokenizer.json", "kind": kind, "normalize": "NFC", "vocab_size": len(tokenizer)}
    assert result == {**about, **statistics(tokenizer, LINES)}
    assert (result["unknown_rate"] > 0) == (kind == "word" and size == 40)


def test_columns_of_tables_and_compressed_files(here, capsys):
    """Normalisation makes decomposed Korean the same tokens as composed Korean."""
    content = unicodedata.normalize("NFD", Path("pairs.tsv").read_text(encoding="utf-8"))
    Path("pairs.tsv.gz").write_bytes(gzip.compress(content.encode()))
    options = ["--kind", "char", "--column", "English", "--column", "Korean"]
    assert main(["tokenizer", "train", "pairs.tsv.gz", "-o", "tok", *options]) == 0
    assert "tokens per word" in capsys.readouterr().out
    assert Path("tok/tokenizer.json").read_text(encoding="utf-8") == Tokenizer.train(LINES, "char").json


def test_a_recipe_uses_the_folder(here, capsys):
    assert main(["tokenizer", "train", "lines.txt", "-o", "tok", "--kind", "unigram", "--vocab-size", "150"]) == 0
    assert f'tokenizer_file = "{here / "tok"}"' in capsys.readouterr().out
    bundle = regard.train(
        {"task": "language-modeling", "data": {"train": ["lines.txt"]}, "text": {"tokenizer_file": "tok"}},
        out="run", device="cpu",
        model={"architecture": "decoder", "dim": 8, "heads": 1, "layers": 1, "ff_dim": 8},
        train={"steps": 1, "pack": 16, "batch_tokens": 32},
    )  # fmt: skip
    assert bundle.tokenizer.json == Path("tok/tokenizer.json").read_text(encoding="utf-8")
    assert bundle.config.vocab_size == 150


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("lines.txt -o runs", "-o runs: already exists; choose another folder"),
        ("lines.txt -o lines.txt", "-o lines.txt: already exists"),
        ("liens.txt -o tok", "liens.txt: no such file"),
        ("pairs.tsv -o tok", "column 'text' is missing"),
        ("pairs.tsv -o tok --column Koraen", "did you mean 'Korean'?"),
        ("empty.txt -o tok", "the training text is empty"),
        ("bad.txt -o tok", "bad.txt, line 1: is not UTF-8"),
        ("lines.txt -o tok --vocab-size 3", "vocab_size = 3: must be 5 or more"),
        ("lines.txt -o tok --vocab-size 100", "vocab_size = 100: too small"),
        ("lines.txt -o tok --kind byte --vocab-size 300", "has a fixed vocabulary"),
        ("lines.txt -o tok --kind gpt2", "invalid choice: 'gpt2'"),
    ],
)
def test_mistakes_leave_nothing_behind(here, capsys, arguments, message):
    Path("runs").mkdir()
    Path("runs/file").touch()
    Path("empty.txt").touch()
    Path("bad.txt").write_bytes("영화".encode("cp949") + b"\n")
    before = sorted(here.iterdir())
    assert main(["tokenizer", "train", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
    assert sorted(here.iterdir()) == before
    assert main(["tokenizer", "trian", "lines.txt", "-o", "tok"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_nothing_slow_is_imported(here):
    code = (
        "import sys; from regard.cli import main; main(['tokenizer', 'train', 'lines.txt', '-o', 'tok']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'sentencepiece')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_kinds_are_those_of_the_library():
    assert get_args(Kind) == KINDS
