"""`regard score` and `predictor.score`: log-probabilities of given outputs, against plain torch and transformers."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regard.cli import main
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.folder import save
from regard.models.transformer import build
from regard.predict import Bundle, SearchConfig, Translator
from regard.predict.captioner import Captioner
from regard.predict.generator import Generator
from regard.predict.mask_predictor import MaskPredictor
from regard.predict.scoring import windows
from regard.text.tokenizer import Tokenizer

SMALL: dict[str, Any] = {"dim": 16, "layers": 2, "heads": 2, "ff_dim": 32, "dropout": 0.0, "embed_dropout": 0.0}
LINES = ["one two three", "two", "four five one two", "하나 둘 셋 😀", "three three three three five"]
PAIRS = [*zip(LINES, reversed(LINES), strict=True), ("", "one"), ("one", ""), ("", "")]


def bundle(kind: str, *specials: str, **changes: Any) -> Bundle:
    torch.manual_seed(1)
    tokenizer = Tokenizer.train(LINES, kind).with_special_tokens(specials)  # type: ignore[arg-type]
    model = build(ModelConfig(**{**SMALL, "vocab_size": len(tokenizer), **changes}))
    return Bundle(model, {"tokenizer": tokenizer})


def run_of(folder: Path, of: Bundle, recipe: dict[str, Any] | None = None) -> str:
    save(of.model, folder, tokenizers=of.tokenizers, recipe=recipe or {})
    return str(folder)


@pytest.mark.parametrize("kind", ["word", "bpe", "byte"])
@pytest.mark.parametrize("changes", [{}, {"architecture": "recurrent"}, {"position": "rope", "decoder_layers": 1}])
@torch.no_grad()
def test_a_pair_as_by_teacher_forcing_alone(kind: str, changes: dict[str, Any], monkeypatch) -> None:
    monkeypatch.setattr("regard.predict.scoring.TOKENS", 40)  # several batches, with padding
    monkeypatch.setattr("regard.predict.scoring.LOGITS", 3 * 270)  # the output head in parts
    translator = Translator(bundle(kind, **changes))
    tokenizer = translator.source
    for (source, target), score in zip(PAIRS, translator.score(PAIRS), strict=True):
        read = [2, *tokenizer.encode(target)]
        logits = translator.model(torch.tensor([[*tokenizer.encode(source), 3]]), torch.tensor([read]))[0]
        expected = [row.log_softmax(-1)[id].item() for row, id in zip(logits, [*read[1:], 3], strict=True)]
        assert [one.id for one in score.tokens] == [*read[1:], 3] and score.tokens[-1].token == "</s>"
        assert [one.log_probability for one in score.tokens] == pytest.approx(expected, abs=1e-5)
        assert score.log_probability == pytest.approx(sum(expected), abs=1e-4)
        assert score.perplexity == pytest.approx(math.exp(-sum(expected) / len(expected)), rel=1e-4)
    assert translator.score([]) == []


@pytest.mark.parametrize("config", [SearchConfig(), SearchConfig(beam=4, n_best=4, length_penalty=1.0)])
def test_a_hypothesis_has_the_score_of_the_search(config: SearchConfig) -> None:
    of = bundle("word", logit_bias=True)
    with torch.no_grad():
        of.model.output_head.bias[:4] = torch.tensor([-30.0, -30.0, -30.0, 1.0])  # outputs end, and contain words alone
    translator = Translator(of)
    for line, prediction in zip(LINES, translator.predict(LINES, config=config), strict=True):
        scores = translator.score([(line, one.text) for one in prediction.n_best])
        assert len(scores) == config.n_best
        for one, score in zip(prediction.n_best, scores, strict=True):
            assert score.log_probability == pytest.approx(one.log_probability, abs=1e-4)
            assert one.score == pytest.approx(score.log_probability / config.penalty(len(score.tokens)), abs=1e-4)


@pytest.mark.parametrize("begin", [False, True])
@torch.no_grad()
def test_a_text_as_the_decoder_predicts_it(begin: bool) -> None:
    generator = Generator(bundle("byte", architecture="decoder", max_length=64, norm_order="pre", position="rope"))
    for text, score in zip(LINES, generator.score(LINES, begin=begin), strict=True):
        ids = torch.tensor([*[3] * begin, *generator.tokenizer.encode(text)])
        known = generator.model(ids[None, :-1])[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert [one.log_probability for one in score.tokens] == pytest.approx(known.tolist(), abs=1e-5)
        assert [one.id for one in score.tokens] == ids[1:].tolist()
    assert len(generator.score(["a"], begin=begin)[0].tokens) == begin
    empty = generator.score([""])[0]
    assert (empty.log_probability, empty.per_token, empty.perplexity) == (0.0, None, None)


@pytest.mark.parametrize("context", [1, 2, 3, 4, 7, 8])
def test_windows_count_every_token_once(context: int) -> None:
    for size in range(2, 30):
        counted = []
        for piece, skipped in windows(range(size), context):
            assert 2 <= len(piece) <= context + 1 and (not counted or skipped + 1 > context // 2)
            counted += piece[1 + skipped :]
        assert counted == list(range(1, size))


@torch.no_grad()
def test_a_text_longer_than_the_context() -> None:
    generator = Generator(bundle("byte", architecture="decoder", max_length=8, norm_order="pre", position="learned"))
    text = "one two three four five"
    ids = torch.tensor(generator.tokenizer.encode(text))
    expected = generator.model(ids[None, :8])[0].log_softmax(-1).gather(1, ids[1:9, None])[:, 0].tolist()
    while len(expected) < len(ids) - 1:
        start = len(expected) - 4  # four tokens of context at least
        part = generator.model(ids[None, start : min(start + 8, len(ids) - 1)])[0].log_softmax(-1)
        expected += part.gather(1, ids[start + 1 : start + 9, None])[4:, 0].tolist()
    assert [one.log_probability for one in generator.score([text])[0].tokens] == pytest.approx(expected, abs=1e-5)


@torch.no_grad()
def test_pseudo_log_likelihood_masks_one_token_after_the_other(monkeypatch) -> None:
    monkeypatch.setattr("regard.predict.scoring.TOKENS", 20)
    predictor = MaskPredictor(bundle("char", "<mask>", architecture="encoder", output_head="tokens", max_length=40))
    for text, score in zip([*LINES, ""], predictor.score([*LINES, ""]), strict=True):
        ids = [2, *predictor.tokenizer.encode(text), 3]
        for at, one in enumerate(score.tokens, 1):
            row = torch.tensor([[predictor.mask if i == at else id for i, id in enumerate(ids)]])
            assert one.log_probability == pytest.approx(
                predictor.model(row)[0, at].log_softmax(-1)[ids[at]].item(), abs=1e-5
            )
        assert [one.id for one in score.tokens] == ids[1:-1]
    with pytest.raises(UserError, match="62 tokens, but the model reads 40"):
        predictor.score(["a" * 60])


@torch.no_grad()
def test_a_caption_given_an_image(tmp_path: Path, capsys) -> None:
    changes = {"input": "patches", "image_size": 8, "patch_size": 4, "channels": 1}
    captioner = Captioner(bundle("word", **changes))
    pairs = []
    for number, caption in enumerate(("one two", "하나 둘 셋", "")):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        pairs.append((str(tmp_path / f"{number}.png"), caption))
        read = torch.tensor([[2, *captioner.target.encode(caption)]])
        logits = captioner.model(torch.tensor(pixels)[None, None].float() / 255, read)[0].log_softmax(-1)
        expected = logits.gather(1, torch.tensor([*read[0, 1:], 3])[:, None]).sum().item()
        assert captioner.score(pairs)[-1].log_probability == pytest.approx(expected, abs=1e-4)
    run, table = run_of(tmp_path / "run", captioner.bundle), tmp_path / "captions.tsv"
    table.write_text("image\tcaption\n" + "".join(f"{Path(file).name}\t{text}\n" for file, text in pairs))
    assert main(["score", run, "--files", str(table), "--device", "cpu", "--json"]) == 0
    found = [json.loads(line)["log_probability"] for line in capsys.readouterr().out.splitlines()]
    assert found == pytest.approx([one.log_probability for one in captioner.score(pairs)])


def test_the_loss_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    of = bundle(
        "byte", architecture="decoder", max_length=32, norm_order="pre", position="learned", activation="gelu-tanh",
        tie_embeddings=True, embed_scale=False,
    )  # fmt: skip
    run = run_of(tmp_path / "run", of)
    assert main(["export", run, "--hf", str(tmp_path / "hf")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    texts = ("To be, or not", "하나")
    for text, score in zip(texts, Generator(of).score(texts), strict=True):
        ids = torch.tensor([of.tokenizer.encode(text)])
        with torch.no_grad():
            loss = theirs(ids, labels=ids).loss.item()
        assert len(score.tokens) == ids.shape[1] - 1 and score.per_token == pytest.approx(-loss, abs=1e-5)
        assert score.perplexity == pytest.approx(math.exp(loss), rel=1e-4)


# --- the command


@pytest.fixture(scope="module")
def translator(tmp_path_factory) -> str:
    return run_of(tmp_path_factory.mktemp("run") / "run", bundle("word"))


def score(*arguments: str | Path) -> int:
    return main(["score", *map(str, arguments), "--device", "cpu"])


def numbers(output: str) -> list[float]:
    return [float(cell) for cell in output.split()]


def test_pairs_from_everywhere_give_the_same_lines(translator: str, tmp_path: Path, monkeypatch, capsys) -> None:
    pairs = PAIRS[:-1]
    assert score(translator, *[side for pair in pairs for side in pair]) == 0
    expected = capsys.readouterr().out
    assert len(expected.splitlines()) == len(pairs)
    for name, side in (("a.en", 0), ("a.de", 1)):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in pairs))
    table = "".join("\t".join(pair) + "\n" for pair in pairs)
    (tmp_path / "plain.tsv").write_text(table)
    (tmp_path / "named.tsv").write_text("en\tde\n" + table)
    rows = (json.dumps({"source": a, "target": b}, ensure_ascii=False) + "\n" for a, b in pairs)
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    monkeypatch.setattr("regard.commands.inputs.ROWS", 3)
    monkeypatch.chdir(tmp_path)
    ways = (["a.en", "a.de"], ["plain.tsv"], ["pairs.jsonl"], ["named.tsv", "--column", "en", "de"])
    for files in ways:
        assert score(translator, "--files", *files) == 0
        assert numbers(capsys.readouterr().out) == pytest.approx(numbers(expected), abs=2e-4)  # other batches
    korean = [pair for pair in pairs if "😀" not in "".join(pair)] + [("하나", "둘 셋")]
    for name, side in (("k.en", 0), ("k.ko", 1)):
        (tmp_path / name).write_text("".join(pair[side] + "\n" for pair in korean), encoding="cp949")
    (tmp_path / "k.tsv").write_text("".join("\t".join(pair) + "\n" for pair in korean), encoding="cp949")
    for files in (["k.en", "k.ko"], ["k.tsv"]):
        assert score(translator, "--files", *files, "--encoding", "cp949", "--json") == 0
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (last["source"], last["target"]) == korean[-1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(table.encode())))
    assert score(translator, "-o", "scores.tsv") == 0
    assert (
        numbers(Path("scores.tsv").read_text()) == pytest.approx(numbers(expected), abs=2e-4)
        and capsys.readouterr().out == ""
    )
    assert score(translator, "--files", "pairs.jsonl", "--json") == 0
    values = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(value["source"], value["target"]) for value in values] == pairs
    for value, line in zip(values, expected.splitlines(), strict=True):
        assert value["log_probability"] == pytest.approx(float(line.split("\t")[0]), abs=2e-4)
        assert sum(one["log_probability"] for one in value["tokens"]) == pytest.approx(value["log_probability"])


def test_texts_and_their_lines(tmp_path: Path, monkeypatch, capsys) -> None:
    run = run_of(tmp_path / "run", bundle("byte", architecture="decoder", max_length=32, norm_order="pre"))
    assert score(run, *LINES, "") == 0
    expected = capsys.readouterr().out
    assert expected.splitlines()[-1] == "0.0000\t0\t\t"
    (tmp_path / "a.txt").write_text("\n".join([*LINES, "", ""]))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"say": line}) + "\n" for line in [*LINES, ""]))
    assert score(run, "--files", tmp_path / "a.txt") == 0
    assert capsys.readouterr().out == expected
    assert score(run, "--files", tmp_path / "a.jsonl", "--column", "say") == 0
    assert capsys.readouterr().out == expected
    assert score(run, LINES[0], "--begin", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == len(LINES[0])


def test_mistakes(translator: str, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    (tmp_path / "c.tsv").write_text("one\ttwo\n")
    monkeypatch.chdir(tmp_path)
    classifier = bundle("word", architecture="encoder", output_head="classes", classes=2)
    other = run_of(tmp_path / "classifier", classifier)
    for arguments, message in (
        ((translator, "one"), "pass  SOURCE TARGET"),
        ((translator, "a.txt", "b.txt"), "--files a.txt b.txt"),
        ((translator, "--files", "a.txt", "b.txt"), "ends here"),
        ((translator, "--files", "a.txt"), "two files"),
        ((translator, "--files", "c.tsv", "--column", "x"), "needs 2, for source and target"),
        ((translator, "one", "two", "--column", "x", "y"), "there are none"),
        ((translator, "one", "two", "--begin"), "not a language model"),
        ((translator, "--files", "nowhere.txt", "b.txt"), "no such file"),
        ((other, "one"), "regard classify"),
    ):
        assert score(*arguments, "-o", "out.tsv") == 2
        out, err = capsys.readouterr()
        assert message in err and out == "" and err.startswith("error: ")
    assert not (tmp_path / "out.tsv").exists()


def test_what_cannot_be_scored_is_reported_and_the_rest_is_scored(tmp_path: Path, monkeypatch, capsys) -> None:
    run = run_of(tmp_path / "short", bundle("word", position="learned", max_length=4))
    content = "one\ttwo\none two\n{0}\tone\none\t{0}\ntwo\tone\tthree\ntwo\tone\n".format("one " * 9)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    assert score(run) == 3
    out, err = capsys.readouterr()
    assert [bool(line) for line in out.splitlines()] == [True, False, False, False, False, True]
    assert err.count("has 10 tokens") == 2 and err.count("SOURCE<tab>TARGET") == 2 and "4 of 6 inputs failed" in err
    (tmp_path / "pairs.tsv").write_text(content)
    assert score(run, "--files", tmp_path / "pairs.tsv", "--json") == 3
    values = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["error" in value for value in values] == [False, True, True, True, True, False]
    assert (values[-1]["source"], values[-1]["target"], values[-1]["row"]) == ("two", "one", 6)


def test_an_ensemble_has_the_mean_of_the_probabilities(tmp_path: Path, capsys) -> None:
    one = bundle("word")
    other = Bundle(build(one.config), one.tokenizers)
    runs = [run_of(tmp_path / name, of) for name, of in (("a", one), ("b", other))]
    assert score(*runs, "one two", "three", "--json") == 0
    found = json.loads(capsys.readouterr().out)["tokens"]
    single = [Translator(of).score([("one two", "three")])[0].tokens for of in (one, other)]
    for value, *parts in zip(found, *single, strict=True):
        mean = sum(math.exp(part.log_probability) for part in parts) / 2
        assert math.exp(value["log_probability"]) == pytest.approx(mean, rel=1e-4)
