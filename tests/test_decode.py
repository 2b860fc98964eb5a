"""Decoding: the cache, the batch and its order change nothing, and no line of text can break it."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from regard import cli
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.predict import SearchConfig, Translator, greedy
from regard.predict.bundle import Bundle
from regard.text.tokenizer import Tokenizer

pytestmark = pytest.mark.grid

BOS, EOS = 2, 3
TINY = {"dim": 16, "layers": 2, "heads": 2, "ff_dim": 32, "vocab_size": 14, "max_length": 30}
TINY |= {"norm_order": "pre", "tie_embeddings": False}
VARIANTS = {
    **{name: {"position": name} for name in ("sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none")},
    "window": {"position": "rope", "window": 3},
    "grouped": {"position": "rope", "kv_heads": 1, "norm_order": "pre", "norm": "rms", "activation": "swiglu"},
    "additive": {"attention_score": "additive", "attention": "reference"},
    "recurrent": {"architecture": "recurrent"},
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_model(**changes: object):
    """Large random weights, so that what was read matters, in double precision, so that rounding never decides."""
    model = build(ModelConfig(**{**TINY, **changes})).double().eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3 if "table" in name else 0.5)
    return model


def make_sources(count: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 8, (count,), generator=generator)
    is_real = torch.arange(7) < lengths[:, None]
    return torch.randint(4, 14, (count, 7), generator=generator) * is_real, is_real


@torch.no_grad()
def slow_greedy(model, source: Tensor, is_real: Tensor, limit: int) -> list[int]:
    """One row, everything computed again for every token."""
    written: list[int] = []
    source = source[is_real][None]
    while len(written) < limit:
        token = int(model(source, torch.tensor([[BOS, *written]]))[0, -1].argmax())
        if token == EOS:
            break
        written.append(token)
    return written


# --- greedy search


@pytest.mark.parametrize("name", VARIANTS)
def test_the_cache_and_the_batch_change_nothing(name):
    source, is_real = make_sources()
    different = set()
    for _ in range(3):
        model = make_model(**VARIANTS[name])
        expected = [slow_greedy(model, row, real, 12) for row, real in zip(source, is_real, strict=True)]
        assert greedy(model, source, is_real, bos=BOS, eos=EOS, limit=12) == expected
        alone = source[4:5, : int(is_real[4].sum())]
        assert greedy(model, alone, None, bos=BOS, eos=EOS, limit=12) == expected[4:5]
        different.update(map(tuple, expected))
    assert len(different) > 5  # the source matters to the output


def test_a_limit_ends_every_row_and_the_end_is_not_part_of_it():
    model, (source, is_real) = make_model(), make_sources()
    long = greedy(model, source, is_real, bos=BOS, eos=EOS, limit=25)
    assert all(EOS not in line for line in long)
    for limit in (1, 5):
        short = greedy(model, source, is_real, bos=BOS, eos=EOS, limit=limit)
        assert short == [line[:limit] for line in long]


def test_a_row_that_has_ended_stays_as_it_was():
    """Some rows end, the others go on: what the ended ones would say next must not show."""
    model, (source, is_real) = make_model(), make_sources()
    for eos in range(4, 14):  # any token may play the end
        together = greedy(model, source, is_real, bos=BOS, eos=eos, limit=15)
        free = greedy(model, source, is_real, bos=BOS, eos=EOS, limit=15)
        for cut, line in zip(together, free, strict=True):
            assert cut == (line[: line.index(eos)] if eos in line else cut)


def test_nothing_is_recorded_for_gradients():
    model, (source, is_real) = make_model(), make_sources()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    step = model.step
    model.step = lambda *arguments: calls.append(torch.is_inference_mode_enabled()) or step(*arguments)
    greedy(model, source, is_real, bos=BOS, eos=EOS, limit=3)
    assert calls == [True] * 3


# --- text


LINES = ["one two three", "two", "four five one two", "three three three three three", "five one", "one", "four"]
ODD = {
    "emoji": "🙂 one 👩‍👩‍👧‍👦",
    "unknown script": "ᚠᛇᚻ ᛒᛦᚦ 日本語 עברית",
    "tabs": "one\ttwo\tthree",
    "carriage return": "one two\r",
    "line end": "one\ntwo",
    "null": "one\x00two",
    "only blanks": " \t \u3000 ",
    "combining": "o\u0301ne e\u0301\u0327",
    "specials typed": "<s> one </s> <pad> <unk>",
    "byte order mark": "\ufeffone",
    "very long word": "x" * 20_000,
    "private": "\ue000\U0010ffff",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(21)  # one that neither stops at once nor says the same to everything
    source, target = Tokenizer.train(LINES, "word"), Tokenizer.train(["일 이", "삼사오"], "char")
    sizes = {"vocab_size": len(source), "target_vocab_size": len(target), "share_embeddings": False}
    model = make_model(**sizes, position="rope")
    folder = tmp_path_factory.mktemp("run")
    save(model, folder, tokenizers={"source": source, "target": target})
    return folder


@pytest.fixture
def translator(folder) -> Translator:
    return regard.load(folder).predictor


def test_neither_batch_size_nor_order_nor_neighbours_change_a_translation(translator):
    alone = {line: translator.translate([line])[0] for line in LINES}
    chance = random.Random(1)
    for batch in (1, 2, 3, 128):
        lines = chance.sample(LINES * 3, 15)
        assert translator.translate(lines, batch=batch) == [alone[line] for line in lines]
    assert translator.translate([]) == []


@pytest.mark.parametrize("name", ODD)
def test_an_odd_line_is_one_line_and_leaves_its_neighbours_alone(translator, name):
    config = SearchConfig(max_length=12)
    lines = ["one two", ODD[name], "five"]
    outputs = translator.translate(lines, config=config)
    assert outputs == [translator.translate([line], config=config)[0] for line in lines]
    assert (outputs[1] == "") == (name == "only blanks") and all(len(output) <= 12 for output in outputs)


def test_blank_lines_stay_blank(translator):
    assert translator.translate(["", " ", "\t", "\r"]) == [""] * 4


def test_blanks_between_words_do_not_matter_to_words(translator):
    assert len(set(translator.translate(["one two", " one  two ", "one\ttwo", "one two\r"]))) == 1


@pytest.mark.slow
def test_five_thousand_words_among_short_lines(translator):
    lines = ["one", " ".join(LINES * 400), "two"]
    assert len(lines[1].split()) > 5000
    outputs = translator.translate(lines, config=SearchConfig(max_length=8))
    assert [outputs[0], outputs[2]] == translator.translate(["one", "two"], config=SearchConfig(max_length=8))
    assert 0 < len(outputs[1]) <= 8


def test_half_a_character_is_an_error_with_words(translator):
    with pytest.raises(UserError, match="half a surrogate pair"):
        translator.translate(["one \ud83d two"])


def test_learned_positions_reach_to_their_last_row_and_no_further():
    tokenizer = Tokenizer.train(LINES, "word")
    model = make_model(vocab_size=len(tokenizer), position="learned", max_length=6)
    translator = Translator(Bundle(model, {"tokenizer": tokenizer}))
    output = translator.translate(["one " * 5])[0]  # and </s> makes six
    assert len(output.split()) <= 6
    with pytest.raises(UserError, match=r"line 2 has 7 tokens.*max_length = 6"):
        translator.translate(["one", "one " * 6])


def test_frames():
    tokenizer = Tokenizer.train(LINES, "word")
    plain = tokenizer.encode_batch(["one two", ""])
    bos, eos = tokenizer.special_id("bos"), tokenizer.special_id("eos")
    assert tokenizer.encode_batch(["one two", ""], add_eos=True) == [[*plain[0], eos], [eos]]
    assert tokenizer.encode_batch(["one two", ""], add_bos=True, add_eos=True) == [[bos, *plain[0], eos], [bos, eos]]


def test_a_tokenizer_without_an_end_is_refused():
    text = json.loads(Tokenizer.train(LINES, "word").json)
    text["added_tokens"] = [token for token in text["added_tokens"] if token["content"] != "</s>"]
    del text["model"]["vocab"]["</s>"]
    with pytest.raises(UserError, match="no eos token"):
        Tokenizer(json.dumps(text)).encode_batch(["one"], add_eos=True)


# --- the command


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"one two", ["one two"]),
        (b"one two\n", ["one two"]),
        (b"one\r\n\r\ntwo\r\n", ["one", "", "two"]),
        (b"\xef\xbb\xbfone\n", ["one"]),
        (b"one\n\n\n", ["one", "", ""]),
        ("🙂\tone\u2028two\x0b\n".encode(), ["🙂\tone\u2028two\x0b"]),
    ],
)
def test_standard_input_is_a_line_for_a_line(folder, translator, monkeypatch, capsys, content, lines):
    def run(*options: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert cli.main(["translate", str(folder), "--max-length", "9", *options]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out.split("\n")

    expected = translator.translate(lines, config=SearchConfig(max_length=9))
    assert run() == [*expected, ""]
    *objects, end = run("--json")
    outputs = [json.loads(line) for line in objects]
    assert end == "" and [(one["source"], one["translation"]) for one in outputs] == list(
        zip(lines, expected, strict=True)
    )


def test_input_that_is_not_utf_8_is_one_line_with_its_place(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo \xff\n")))
    assert cli.main(["translate", str(folder)]) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("error: standard input, line 2: is not UTF-8: byte 0xff at position 5")
    assert captured.out.endswith("\n\n") and captured.out.count("\n") == 2


@pytest.mark.parametrize("missing", ["model.safetensors", "recipe.toml", "source.json"])
def test_a_folder_without_one_of_its_files_says_which(folder, tmp_path, capsys, missing):
    for path in folder.iterdir():
        if path.name != missing:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert cli.main(["translate", str(tmp_path), "one"]) == 2
    assert missing in capsys.readouterr().err
