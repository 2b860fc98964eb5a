"""`regard translate`: a line for a line, options, streaming, and what is said when something is wrong."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli import main
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import EncoderDecoder
from regard.predict import SearchConfig
from regard.predict.config import read_config
from regard.text.tokenizer import Tokenizer

LINES = ["one two three", "two", "", "four five one two", "three three three three three", "five"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_run(folder: Path, decode: dict[str, object] | None = None, **changes: object) -> Path:
    """An untrained model: what it says has no meaning, but it says it reliably."""
    torch.manual_seed(1)
    tokenizer = Tokenizer.train(LINES, "word")
    sizes = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 32, "dropout": 0.0, "embed_dropout": 0.0}
    config = ModelConfig(**{**sizes, "vocab_size": len(tokenizer), **changes})  # type: ignore[arg-type]
    model = EncoderDecoder(config)
    save(model, folder, tokenizers={"tokenizer": tokenizer}, recipe={} if decode is None else {"decode": decode})
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def feed(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_every_batch_size_gives_the_same_lines_in_order(run: Path) -> None:
    translator = regard.load(run).predictor
    for config in (SearchConfig(), SearchConfig(beam=3, max_length=6), SearchConfig(sample=True, max_length=6)):
        single = [translator.predict([line], config=config, first=at)[0] for at, line in enumerate(LINES)]
        for batch in (1, 2, 128):
            found = translator.predict(LINES, batch=batch, config=config)
            assert [one.text for one in found] == [one.text for one in single]
        assert found[2].text == "" and len(found) == len(LINES)
        assert translator.translate(LINES, config=config) == [one.text for one in found]


def test_long_lines_come_in_small_batches(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translator, seen = regard.load(run).predictor, []
    search = translator.search

    def spy(config: SearchConfig, first: int, batch: Any, constraints: Any = None) -> Any:
        seen.append(batch[1].shape)
        return search(config, first, batch, constraints)

    monkeypatch.setattr(translator, "search", spy)
    translator.translate(["one " * 5000, *["two"] * 9, "two " * 4000], config=SearchConfig(beam=4, max_length=2))
    assert sorted(seen) == [(1, 4001), (1, 5001), (9, 2)]


def test_learned_positions_end_and_so_do_answers(tmp_path: Path) -> None:
    translator = regard.load(make_run(tmp_path / "run", position="learned", max_length=7)).predictor
    config = SearchConfig(beam=2, n_best=2)
    found = translator.predict(LINES, config=config)
    assert len(found) == len(LINES)


def test_recipe_gives_the_defaults_and_options_change_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", {"beam": 4, "n_best": 2, "max_length": 5})
    assert regard.load(run).predictor.config == SearchConfig(beam=4, n_best=2, max_length=5)
    assert main(["translate", str(run), "one two"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["1", "1"] and float(rows[0][1]) >= float(rows[1][1])
    assert main(["translate", str(run), "one two", "--n-best", "1"]) == 0
    assert capsys.readouterr().out == rows[0][2] + "\n"
    assert main(["translate", str(run), "one two", "--sample", "--seed", "3", "--n-best", "1"]) == 0


def test_json_lines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", str(run), "one two", "", "--json", "--beam", "3", "--n-best", "2"]) == 0
    first, empty = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["source"] == "one two" and len(first["n_best"]) == 2
    assert first["n_best"][0] == {name: first[name] for name in ("translation", "score", "log_probability")}
    assert first["n_best"][0]["score"] >= first["n_best"][1]["score"]
    assert empty["source"] == "" == empty["translation"]


@pytest.mark.parametrize("content", [b"", b"one\n", b"one", b"one\n\ntwo", b"one\n\n", b"one\ntwo\n" * 300])
def test_a_line_for_a_line(
    content: bytes, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.commands.inputs.PIECE", 100)
    feed(monkeypatch, content)
    assert main(["translate", str(run), "--max-length", "3"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == len(content.decode().splitlines()) and err == ""


def test_a_sample_does_not_depend_on_how_the_input_arrives(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for piece in (5, 2**18):
        monkeypatch.setattr("regard.commands.inputs.PIECE", piece)
        feed(monkeypatch, "\n".join(LINES).encode())
        assert main(["translate", str(run), "--sample", "--seed", "5", "--batch", "2"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_a_pipe_that_stays_open_is_answered(run: Path) -> None:
    command = [sys.executable, "-m", "regard", "translate", str(run), "--max-length", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in (b"one two\n", b"three\n"):
            process.stdin.write(line)
            process.stdin.flush()
            assert process.stdout.readline().endswith(b"\n")  # before the pipe is closed
        process.stdin.close()
        assert process.stdout.read() == b"" and process.wait() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--beam", "0"], "beam = 0: must be 1 or more"),
        (["--beam", "100000"], "beam = 100000: must be 1,000 or less"),
        (["--n-best", "2"], "n_best = 2: a search with beam = 1"),
        (["--top-k", "2"], "top_k = 2: has no effect on beam search; remove it, or set sample = true"),
        (["--sample", "--beam", "2"], "beam = 2: has no effect on sampling"),
        (["--batch", "0"], "--batch: 0: must be 1 or more"),
        (["--device", "abacus"], "device = 'abacus' is not available"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["translate", str(run), "one", *options]) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def test_a_beam_may_be_wide_but_not_endless() -> None:
    assert SearchConfig(beam=1000, n_best=1000).n_best == 1000
    assert SearchConfig(sample=True, n_best=5000).n_best == 5000  # draws, of which any number may be wanted
    for wrong in ({"beam": 1001}, {"beam": 10**9, "n_best": 2}, {"beam": 1000, "n_best": 1001}):
        with pytest.raises(UserError, match=r"= 10[0-9]+: must be 1,000 or less"):
            SearchConfig(**wrong)
    with pytest.raises(UserError, match=r"decode\.beam = 1001: must be"):
        read_config({"beam": 1001})


def test_wrong_recipe_and_input_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "wrong", {"beam": "five"})
    assert main(["translate", str(run), "one"]) == 2
    assert "recipe.toml: decode.beam = 'five': expected an integer" in capsys.readouterr().err
    run = make_run(tmp_path / "right")
    feed(monkeypatch, b"one\ntw\xff\n")
    assert main(["translate", str(run)]) == 3
    assert "standard input, line 2: is not UTF-8: byte 0xff at position 3" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["txt", "txt.gz", "tsv", "jsonl"])
def test_files_give_what_standard_input_gives(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    lines = ["a b c", "", "c d", " ", "e f g a"]
    assert main(["translate", str(run), *lines, "--device", "cpu"]) == 0
    expected = capsys.readouterr().out
    contents = {
        "txt": "".join(line + "\n" for line in lines),
        "tsv": "n\tsource\n" + "".join(f"1\t{line}\n" for line in lines),
        "jsonl": "".join(json.dumps({"source": line}) + "\n" for line in lines),
    }
    source, out = tmp_path / f"in.{form}", tmp_path / "out.txt"
    data = contents[form.removesuffix(".gz")].encode()
    source.write_bytes(gzip.compress(data) if form.endswith("gz") else data)
    assert main(["translate", str(run), "--files", str(source), "-o", str(out), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "" and out.read_text(encoding="utf-8") == expected
    assert expected.splitlines()[1] == expected.splitlines()[3] == ""
    assert main(["translate", str(run), "--files", str(source), "--column", "nothing", "-o", "x.txt"]) == 2
    assert not Path("x.txt").exists()
