"""Generation: the same text as transformers and as the model read anew at every step; what a user may ask for."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from regard.cli import main
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.folder import load_tokenizers, save
from regard.models.transformer import Decoder
from regard.nn.embedding import Tokens
from regard.predict import SearchConfig
from regard.predict.bundle import Bundle
from regard.predict.generator import Generator
from regard.text.tokenizer import Tokenizer
from regard.text.train import bytes_to_unicode

LINES = ["To be, or not to be, that is the question.\n", "한국어 텍스트와 😀 이모지\n"]
BYTES = Tokenizer.train(LINES, "byte")
SHAPE = {
    "architecture": "decoder",
    "dim": 16,
    "layers": 2,
    "heads": 2,
    "ff_dim": 32,
    "norm_order": "pre",
    "max_length": 32,
}
LIKELIEST = SearchConfig(sample=True, top_k=1, max_length=12)


def make(tokenizer: Tokenizer = BYTES, **changes) -> Generator:
    torch.manual_seed(3)
    settings = {**SHAPE, "vocab_size": len(tokenizer), "position": "rope", **changes}
    model = Decoder(ModelConfig(**settings)).double()
    return Generator(Bundle(model, {"tokenizer": tokenizer}))


@torch.no_grad()
def uncached(generator: Generator, ids: list[int], count: int) -> list[int]:
    """The likeliest token after all others, read from the start every time."""
    written = list(ids)
    for _ in range(count):
        logits = generator.model(torch.tensor([written]))[0, -1, : len(generator.tokenizer)]
        written.append(int(logits.argmax()))
    return written[len(ids) :]


@pytest.mark.parametrize("position", ["rope", "learned", "alibi", "sinusoidal", "t5", "none"])
def test_with_a_cache_as_without(position):
    generator = make(position=position)
    found = generator.generate("To be", config=LIKELIEST)[0]
    assert found.ids == uncached(generator, BYTES.encode("To be"), 12) and found.ended == "limit"
    written = [*BYTES.encode("To be"), *found.ids]
    known = generator.model(torch.tensor([written]))[0].log_softmax(-1)
    for at, value in enumerate(found.log_probabilities):
        assert value == pytest.approx(known[4 + at, found.ids[at]].item(), rel=1e-5)
    assert found.text == BYTES.decode(found.ids)


def test_the_likeliest_tokens_are_those_of_transformers(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = transformers.GPT2Config(
        vocab_size=len(BYTES), n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=3
    )
    theirs = transformers.GPT2LMHeadModel(settings).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(4)  # away from answers that are all alike
    theirs.save_pretrained(tmp_path / "hf")
    BYTES.save(tmp_path / "hf" / "tokenizer.json")
    assert main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "run")]) == 0
    (tmp_path / "text.txt").write_text("What is the question?")
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--files", str(tmp_path / "text.txt"), "--json"]) == 0
    text = torch.tensor([BYTES.encode("What is the question?")])
    with torch.no_grad():
        assert json.loads(capsys.readouterr().out)["files"]["loss"] == pytest.approx(
            theirs(text, labels=text).loss.item(), rel=1e-5
        )
    ids = BYTES.encode("The question")
    expected = theirs.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=40, do_sample=False, pad_token_id=0
    )[0, len(ids) :].tolist()
    order = ["generate", str(tmp_path / "run"), "The question", "--max-tokens", "40", "--top-k", "1", "--json"]
    assert main([*order, "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [token["id"] for token in result["tokens"]] == expected
    assert result["ended"] == ("end" if expected[-1] == BYTES.eos else "limit")


def test_an_old_folder_with_two_vocabulary_files(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    letters = {letter: id for id, letter in enumerate((*bytes_to_unicode(), "he", "<|endoftext|>"))}
    settings = transformers.GPT2Config(vocab_size=len(letters), n_positions=32, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(settings).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "vocab.json").write_text(json.dumps(letters))
    (tmp_path / "hf" / "merges.txt").write_text("#version: 0.2\nh e\n")
    assert main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert generate(tmp_path / "run", "the", "--max-tokens", "3", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 3
    assert load_tokenizers(tmp_path / "run")["tokenizer"].encode("he") == [256]


def test_every_token_costs_one_step(monkeypatch):
    generator, read = make(), []
    real = Tokens.forward
    monkeypatch.setattr(Tokens, "forward", lambda self, tokens: read.append(tokens.shape) or real(self, tokens))
    generator.generate("To be", config=SearchConfig(sample=True, n_best=3, max_length=20, min_length=20))
    assert read == [(1, 5)] + [(3, 1)] * 19


def test_samples_depend_on_their_number_and_the_seed_alone():
    generator = make()
    config = SearchConfig(sample=True, n_best=4, max_length=15, seed=5)
    together = generator.generate("To be", config=config)
    again = generator.generate("To be", config=config)
    assert [sample.ids for sample in together] == [sample.ids for sample in again]
    assert len({tuple(sample.ids) for sample in together}) == 4
    alone = generator.generate("To be", config=SearchConfig(sample=True, n_best=1, max_length=15, seed=5))
    assert alone[0].ids == together[0].ids
    other = generator.generate("To be", config=SearchConfig(sample=True, n_best=1, max_length=15, seed=6))
    assert other[0].ids != together[0].ids


def test_streamed_parts_are_the_text():
    generator = make()
    config = SearchConfig(sample=True, n_best=3, max_length=30, min_length=30)
    parts: dict[int, str] = {}
    for token in generator.stream(["한"], config=config, overflow="slide"):
        parts[token.sample] = parts.get(token.sample, "") + token.text
    for number, sample in enumerate(generator.generate("한", config=config, overflow="slide")):
        assert parts[number] == sample.text == BYTES.decode(sample.ids)


# --- where it ends


def certain(token: int, generator: Generator) -> Generator:
    """A model that always writes the same token."""
    head = generator.model.output_head
    head.bias = torch.nn.Parameter(torch.zeros(generator.model.config.vocab_size, dtype=torch.float64))
    head.bias.data[token] = 1e4
    return generator


def test_it_ends_at_the_end_of_a_document():
    found = certain(BYTES.eos, make()).generate("a")
    assert [(sample.ids, sample.text, sample.ended) for sample in found] == [([BYTES.eos], "", "end")]


def test_it_ends_before_a_stop_string():
    generator = certain(BYTES.encode("x")[0], make())
    found = generator.generate("a", stops=["xxx", "never"])[0]
    assert (found.text, found.ended, len(found.ids)) == ("", "stop", 3)
    assert generator.generate("a", stops=["xy"], config=LIKELIEST)[0].text == "x" * 12


def test_rows_that_the_tokenizer_lacks_are_never_drawn():
    generator = make(vocab_size=384)  # 260 tokens, rounded up to a multiple of 128
    certain(300, generator)
    found = generator.generate("a", config=SearchConfig(sample=True, max_length=20))[0]
    assert max(found.ids) < len(BYTES) and found.ended in ("limit", "end")


@pytest.mark.parametrize("vocab_size", [259, 385, 4])
def test_a_vocabulary_that_does_not_match_is_an_error(vocab_size):
    with pytest.raises(UserError, match=f"model.vocab_size = {vocab_size}, but the tokenizer has 260 tokens"):
        make(vocab_size=vocab_size)


def test_the_context_ends_or_slides():
    generator = make(position="learned", max_length=8)
    config = SearchConfig(sample=True, top_k=1, max_length=30, min_length=30)
    stopped = generator.generate("To be", config=config)[0]
    assert stopped.ended == "context" and len(stopped.ids) == 4  # 8 tokens can be read, and one more written
    assert stopped.ids == uncached(generator, BYTES.encode("To be"), 4)
    slid = generator.generate("To be", config=config, overflow="slide")[0]
    assert slid.ended == "limit" and len(slid.ids) == 30 and slid.ids[:4] == stopped.ids
    written = [*BYTES.encode("To be"), *slid.ids]
    # The context is full at 8 tokens; the newer half, 4 of the 9, is read again: the next one follows from those.
    assert slid.ids[4] == uncached(generator, written[5:9], 1)[0]


def test_a_long_prompt_is_an_error_or_loses_its_beginning():
    generator = make(position="learned", max_length=8)
    with pytest.raises(UserError, match=r"the prompt has 9 tokens, but the context has 8.*--overflow slide"):
        generator.generate("123456789")
    slid = generator.generate("123456789", config=LIKELIEST, overflow="slide")[0]
    assert slid.ids == generator.generate("23456789", config=LIKELIEST, overflow="slide")[0].ids


def test_other_mistakes():
    generator = make(position="learned", max_length=8)
    for settings, message in (
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "a", "context": 9}, "end at max_length = 8"),
        ({"prompt": "a", "context": 0}, "must be 1 or more tokens"),
        ({"prompt": "a", "overflow": "jump"}, "overflow = 'jump'"),
        ({"prompt": "\udcff"}, "half a surrogate pair"),
    ):
        with pytest.raises(UserError, match=message):
            generator.generate(settings.pop("prompt"), **settings)
    assert generator.generate("", begin=True, config=LIKELIEST)[0].ids == uncached(generator, [BYTES.eos], 8)
    with torch.no_grad():
        generator.model.output_head.project.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="not numbers"):
        generator.generate("a")


def test_eight_times_the_length_of_training():
    for changes in ({"position": "rope"}, {"position": "none", "window": 4}):
        generator = make(max_length=8, **changes)
        config = SearchConfig(sample=True, top_k=1, max_length=60, min_length=60)
        found = generator.generate("To b", config=config, context=64)[0]
        assert len(found.ids) == 60 and found.ids == uncached(generator, BYTES.encode("To b"), 60)


# --- the command


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    generator = make()
    save(generator.model.float(), folder, tokenizers={"tokenizer": BYTES}, recipe={"decode": {"temperature": 0.5}})
    return folder


def generate(*arguments: str | Path) -> int:
    return main(["generate", *map(str, arguments), "--device", "cpu"])


def test_samples_one_after_the_other(run, capsys):
    assert generate(run, "To be", "--samples", "3", "--max-tokens", "9", "--json") == 0
    result = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["sample"] for one in result] == [1, 2, 3] and all(one["prompt"] == "To be" for one in result)
    for one in result:
        assert one["log_probability"] == pytest.approx(sum(token["log_probability"] for token in one["tokens"]))
    assert generate(run, "To be", "--samples", "3", "--max-tokens", "9") == 0
    shown = capsys.readouterr().out
    assert shown == "".join(f"--- sample {one['sample']} of 3\nTo be{one['text']}\n" for one in result)


def test_a_full_context_is_told(run, capsys):
    assert generate(run, "To be", "--max-tokens", "3") == 0
    assert "context" not in capsys.readouterr().err
    assert generate(run, "To be", "--context", "7", "--max-tokens", "30", "--top-k", "1") == 0
    assert "note: the context is full; --overflow slide" in capsys.readouterr().err


def test_a_prompt_is_a_whole_file_or_a_line(run, tmp_path, monkeypatch, capsys):
    content = "첫째\n둘째 줄\n"
    (tmp_path / "start.txt").write_bytes(content.encode())
    assert generate(run, "--prompt-file", tmp_path / "start.txt", "--json", "--max-tokens", "3") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == content
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert generate(run, "--json", "--max-tokens", "3") == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["첫째", "둘째 줄"]


def test_several_prompts_give_a_line_for_each_sample(run, capsys):
    order = [run, "To be", "or", "--samples", "2", "--max-tokens", "9"]
    assert generate(*order, "--json") == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert generate(*order) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [row[0] for row in rows] == ["1", "1", "2", "2"]
    for row, one in zip(rows, objects, strict=True):
        text = " ".join((one["prompt"] + one["text"]).splitlines()).replace("\t", " ")
        assert row[1:] == [f"{one['log_probability']:.4f}", text]


def test_mistakes_of_the_command(run, tmp_path, capsys):
    (tmp_path / "bad.txt").write_bytes(b"ok\xff")
    for arguments, message in (
        ((run, ""), "the prompt is empty"),
        ((run, "a", "--samples", "0"), "--samples: 0: must be 1 or more"),
        ((run, "a", "--max-tokens", "0"), "--max-tokens: 0: must be 1 or more"),
        ((run, "--prompt-file", tmp_path / "bad.txt"), "byte 3 is not UTF-8"),
        ((run, "--prompt-file", tmp_path / "none.txt"), "cannot be read"),
        ((run, "a", "--prompt-file", tmp_path / "bad.txt"), "pass one of them"),
        ((run, "ab\udcff"), "PROMPT 1: is not UTF-8: byte 0xff at position 3"),
        ((run, "x" * 40), "the prompt has 40 tokens, but the context has 32"),
        ((run, "a", "--stop", ""), "--stop ''"),
        ((run, "a", "--temperature", "0"), "temperature = 0.0: must be greater than 0; top_k = 1"),
        ((run, "a", "--top-p", "2"), "top_p = 2.0"),
        ((run, "a", "--overflow", "fall"), "overflow = 'fall'"),
        ((tmp_path, "a"), "not a saved model"),
    ):
        assert generate(*arguments) == 2
        result = capsys.readouterr()
        assert message in result.err and result.out == ""


def test_other_models_and_missing_tokenizers(tmp_path, capsys):
    small = {name: value for name, value in SHAPE.items() if name != "architecture"}
    from regard.models.transformer import build

    save(build(ModelConfig(**small, vocab_size=260)), tmp_path / "pairs", tokenizers={"tokenizer": BYTES})
    save(make().model, tmp_path / "bare")
    save(make().model, tmp_path / "wrong", tokenizers={"tokenizer": Tokenizer.train(LINES, "char")})
    for folder, message in (
        ("pairs", "a decoder (a language model) with its tokenizer is needed here; use  regard translate"),
        ("bare", "has no tokenizer.json"),
        ("wrong", "they do not match"),
    ):
        assert generate(tmp_path / folder, "a") == 2
        assert message in capsys.readouterr().err


def test_unknown_letters_are_told(tmp_path, capsys):
    letters = Tokenizer.train(LINES, "char")
    save(make(letters).model, tmp_path / "run", tokenizers={"tokenizer": letters})
    assert generate(tmp_path / "run", "To Ω", "--max-tokens", "2") == 0
    assert "1 token of the prompt is not in the model's vocabulary" in capsys.readouterr().err
