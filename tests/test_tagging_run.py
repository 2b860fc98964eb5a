"""`regard train` with task = "token-classification": training, evaluation, predictions, views, transformers."""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import regard
from commanded import training
from regard.cli import main
from regard.data.batch import PairBatch
from regard.models.recipe import override, read_recipe
from regard.settings import read_toml
from regard.tasks.text_classification import class_logits, classification
from regard.tasks.token_classification import TokenClassification
from regard.training.history import read_metrics
from regard.training.run import Run
from smoke import ROOT, smoke_run
from stopping import assert_same_weights, interrupt_at

ENTITIES = ROOT / "recipes/entities.toml"
seqeval = pytest.importorskip("seqeval.metrics")
KINDS = {"Tom": "PER", "Ann": "PER", "민수가": "PER", "Oslo": "LOC", "Rome": "LOC", "서울에": "LOC"}
OTHER = ("sees", "in", "likes", "봤다", "the", "🙂")
RECIPE = """task = "token-classification"
[data]
train = ["train.conll"]
valid = ["valid.conll"]
test = { test = ["test.conll"] }
[train]
steps = 250
"""
BERT = ["position=learned", "max_length=256", "embed_norm=true", "embed_scale=false", "activation=gelu"]
SMALL = [
    f"--set={setting}"
    for setting in (
        "text.vocab_size=400", "data.max_length=40",
        "model.dim=32", "model.layers=1", "model.heads=2", "model.ff_dim=32",
        *(f"model.{field}" for field in BERT),
        "train.batch_tokens=256", "train.warmup=5", "train.lr=0.01", "train.log_every=20", "train.save_every=30",
        "train.evaluate_every=20", "train.metric=f1",
    )
]  # fmt: skip


def conll(count: int, seed: int) -> str:
    """Sentences whose names are known; every second name has two words. Punctuation is a word of its own."""
    draw, lines = random.Random(seed), []
    for _ in range(count):
        for _ in range(draw.randint(1, 4)):
            if draw.random() < 0.5:
                name = draw.choice(list(KINDS))
                lines.append(f"{name} x B-{KINDS[name]}")
                if draw.random() < 0.5:
                    lines.append(f"{name} x I-{KINDS[name]}")
            lines.append(f"{draw.choice(OTHER)} y O")
        lines += [". z O", ""]
    return "\n".join(lines)


def write_data(folder: Path) -> None:
    for seed, (name, count) in enumerate((("train", 150), ("valid", 30), ("test", 30))):
        (folder / f"{name}.conll").write_text(conll(count, seed), encoding="utf-8")
    (folder / "mine.toml").write_text(RECIPE)


@pytest.fixture
def here(empty_folder: Path) -> Path:
    write_data(empty_folder)
    return empty_folder


train = training(SMALL, "mine.toml")


@pytest.fixture
def run(once: Callable[..., Path], empty_folder: Path) -> Path:
    """A trained run, which several tests read, in a folder with its data."""

    def make(folder: Path) -> None:
        folder.mkdir()
        write_data(folder)
        assert main(["train", str(folder / "mine.toml"), *SMALL, "-o", str(folder / "run"), "--device", "cpu"]) == 0

    return once("tagging", make) / "run"


def test_a_few_lines_make_a_complete_run(run, capsys):
    recipe = read_toml(run / "recipe.toml")
    assert recipe["task"] == "token-classification" and recipe["model"]["classes"] == 5
    assert recipe["data"]["classes"] == ["O", "B-LOC", "B-PER", "I-LOC", "I-PER"]
    assert recipe["data"]["punctuation"] == "separate" and recipe["model"]["pooling"] == "none"
    scores = json.loads((run / "scores.json").read_text())
    assert scores["test"]["f1"] > 0.9 and scores["test"]["types"].keys() == {"LOC", "PER"}
    evaluated = [line for line in read_metrics(run) if "f1" in line]
    assert max(line["f1"] for line in evaluated) == pytest.approx(scores["valid"]["f1"])
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "F1 on test" in report and "Entities of test" in report and "Errors" in report
    assert main(["runs", str(run.parent), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["task"] == "token-classification" and listed["test"]["test"] == scores["test"]["f1"]


def test_scores_are_those_of_seqeval_over_the_files(run, capsys):
    test = run.parent / "test.conll"
    assert main(["evaluate", str(run), "--files", str(test), "--json", "--device", "cpu"]) == 0
    metrics = json.loads(capsys.readouterr().out)["files"]
    assert metrics == json.loads((run / "scores.json").read_text())["test"]
    rows = [block.splitlines() for block in test.read_text(encoding="utf-8").split("\n\n") if block.strip()]
    words = [[line.split()[0] for line in block] for block in rows]
    tags = [[line.split()[2] for line in block] for block in rows]
    predicted = [list(one.tags) for one in regard.load(run).predict(words)]
    report = seqeval.classification_report(tags, predicted, output_dict=True)
    assert metrics["f1"] == report["micro avg"]["f1-score"] == seqeval.f1_score(tags, predicted)
    assert metrics["types"]["PER"]["f1"] == report["PER"]["f1-score"]
    assert metrics["accuracy"] == pytest.approx(seqeval.accuracy_score(tags, predicted))


def test_resuming_gives_the_same_weights(here, monkeypatch):
    assert train("-o", "straight", "--set=train.steps=30") == 0
    interrupt_at(monkeypatch, 20)
    assert train("-o", "stopped", "--set=train.steps=30") == 130
    assert main(["resume", "stopped", "--device", "cpu"]) == 0
    assert_same_weights(here / "straight", here / "stopped")


def test_parts_of_speech(here):
    text = (
        "".join(f"the\tDET\n{noun}\tNOUN\n{verb}\tVERB\n\n" for noun in ("dog", "cat") for verb in ("sees", "runs")) * 9
    )
    for name in ("train", "valid", "test"):
        (here / f"{name}.conll").write_text(text)
    assert train("-o", "pos", "--set=train.steps=40") == 0
    scores = json.loads((here / "pos/scores.json").read_text())["test"]
    assert scores["f1"] == scores["macro_f1"] == 1.0 and "types" not in scores
    (prediction,) = regard.load("pos").predict(["the cat sees"])
    assert prediction.tags == ("DET", "NOUN", "VERB") and prediction.entities == ()


def test_characters_as_units(here):
    (here / "train.conll").write_text("서 B-LOC\n울 I-LOC\n에 O\n\n비 O\n가 O\n" * 20, encoding="utf-8")
    assert train("-o", "chars", "--set=data.valid=[]", "--set=data.test={}", "--set=train.metric=loss") == 0
    (prediction,) = regard.load("chars").predict([list("서울에")])
    assert prediction.tags == ("B-LOC", "I-LOC", "O") and prediction.entities[0].text == "서 울"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.max_length=300"], "learned positions end at model.max_length = 256"),
        (["model.pooling=mean"], "pooling = 'none'"),
        (["model.pooler=true"], "pooler = false"),
        (["train.metric=bleu"], "is not a metric of token-classification"),
        (["data.train=['missing.conll']"], "no such file"),
    ],
)
def test_mistakes_are_told_before_training(here, capsys, settings, message):
    assert train(*(f"--set={setting}" for setting in settings)) == 2
    assert message in capsys.readouterr().err and not (here / "runs").exists()


def test_a_missing_seqeval_is_told_before_training(here, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "seqeval.metrics", None)
    assert train() == 2
    assert "pip install 'regard[seqeval]'" in capsys.readouterr().err and not (here / "runs").exists()


def test_a_test_set_with_an_unknown_tag(here, capsys):
    (here / "test.conll").write_text("a x O\nb x B-ORG\n")
    assert train() == 2
    assert "tag 'B-ORG' does not occur in training" in capsys.readouterr().err


def test_groups_of_files_have_weights(here):
    (here / "more.conll").write_text("Tom x B-PER\n\n" * 3)
    task = made(here, 'data.train=[{files=["train.conll"]},{files=["more.conll"],weight=2}]')
    weights = task.train_sentences.weights
    assert weights is not None and weights.tolist() == [1.0] * 150 + [2.0] * 3


# --- the loss


def made(here: Path, *settings: str) -> TokenClassification:
    given = [setting.removeprefix("--set=") for setting in (*SMALL, *settings)]
    task = TokenClassification(override(read_recipe("mine.toml"), given), here / "run", torch.device("cpu"))
    Run(task).prepare()
    return task


def test_the_loss_is_cross_entropy_at_first_tokens(here):
    task = made(here)
    model = regard.build(task.model_config).eval()
    batch = next(iter(task.stream()))
    loss, count = classification(model, batch)
    logits = model(batch.text, batch.is_real)
    assert logits.shape == (*batch.text.shape, 5)
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert count == (batch.labels != PairBatch.IGNORE).sum()
    assert task.model_config.per_token and task.examples("train")[0].words


def test_packed_rows_have_the_loss_of_padded_ones(here):
    padded, packed = made(here), made(here / "packed", "train.pack=64")
    model = regard.build(padded.model_config).eval()
    sums = []
    for task in (padded, packed):
        count, make = task.stream().open(0)
        with torch.no_grad():
            losses = [classification(model, make(number)) for number in range(count)]
        sums.append((sum(float(loss) for loss, _ in losses), sum(int(number) for _, number in losses)))
    assert sums[0][1] == sums[1][1] and sums[0][0] == pytest.approx(sums[1][0], rel=1e-4)
    batch = packed.stream().open(0)[1](0)
    assert class_logits(model, batch).shape == (*batch.text.shape, 5)


# --- predictions


def test_predictions_have_spans_and_probabilities(run):
    bundle = regard.load(run)
    text = "  Tom Tom sees Oslo. "
    (prediction,) = bundle.predict([text])
    assert [one.word for one in prediction.words] == ["Tom", "Tom", "sees", "Oslo", "."]
    assert prediction.tags == ("B-PER", "I-PER", "O", "B-LOC", "O")
    assert all(text[one.start : one.end] == one.word for one in prediction.words)
    assert [(one.type, one.text) for one in prediction.entities] == [("PER", "Tom Tom"), ("LOC", "Oslo")]
    person = prediction.entities[0]
    assert text[person.start : person.end] == person.text
    assert person.probability == pytest.approx(sum(one.probability for one in prediction.words[:2]) / 2)
    assert bundle.predict([["Tom", "Tom", "sees", "Oslo", "."]])[0].tags == prediction.tags
    assert bundle.predict("")[0].words == () and bundle.predict([]) == []


def test_a_batch_gives_what_single_sentences_give(run):
    bundle = regard.load(run)
    sentences = [one.split(" ") for one in ("Tom", "Tom Tom sees Oslo .", "민수가 서울에 봤다 .", "the 🙂 in Rome")]
    together = bundle.predictor.probabilities(sentences)
    for words, rows in zip(sentences, together, strict=True):
        alone = bundle.predictor.probabilities([words])[0]
        assert rows.shape == (len(words), 5) and torch.allclose(rows, alone, atol=1e-5)


def test_decomposed_korean_is_tagged_alike(run):
    bundle, text = regard.load(run), "민수가 봤다 서울에."
    decomposed = unicodedata.normalize("NFD", text)
    assert bundle.predict([decomposed])[0].tags == bundle.predict([text])[0].tags == ("B-PER", "O", "B-LOC", "O")


def test_a_long_text_is_tagged_in_parts(run):
    (prediction,) = regard.load(run).predict(["Tom sees Oslo " * 400])
    assert len(prediction.words) == 1200 and "tagged in parts" in str(prediction.note)
    assert sum(one.tag.endswith("PER") for one in prediction.words) > 350


# --- the command


def test_tag_prints_columns_or_entities(run, empty_folder, capsys, monkeypatch):
    assert main(["tag", str(run), "Tom Tom sees Oslo.", "the", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "Tom\tB-PER\nTom\tI-PER\nsees\tO\nOslo\tB-LOC\n.\tO\n\nthe\tO\n\n"
    (empty_folder / "in.txt").write_text("Tom sees Oslo.\n\n민수가 봤다 서울에.\n", encoding="utf-8")
    assert main(["tag", str(run), "--files", "in.txt", "-o", "out.jsonl", "--json", "--device", "cpu"]) == 0
    first, empty, last = map(json.loads, Path("out.jsonl").read_text(encoding="utf-8").splitlines())
    assert first["text"] == "Tom sees Oslo." and first["row"] == 1
    assert first["words"][0].keys() == {"word", "tag", "probability", "start", "end"}
    for one in (*first["entities"], *last["entities"]):
        assert one.keys() == {"type", "text", "start", "end", "probability"}
    assert [(one["type"], one["text"], one["start"], one["end"]) for one in first["entities"]] == [
        ("PER", "Tom", 0, 3),
        ("LOC", "Oslo", 9, 13),
    ]
    assert empty["words"] == empty["entities"] == [] and [one["type"] for one in last["entities"]] == ["PER", "LOC"]
    assert main(["tag", str(run), "--files", "in.txt", "-o", "out.conll", "--device", "cpu"]) == 0
    assert main(["evaluate", str(run), "--files", "out.conll", "--json", "--device", "cpu", "-o", "saved"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["files"]["f1"] == 1.0  # its own tags
    assert json.loads(Path("saved/files.jsonl").read_text(encoding="utf-8").splitlines()[0])["tags"][0] == "B-PER"


def test_other_commands_point_to_tag(run, capsys):
    assert main(["classify", str(run), "a", "--device", "cpu"]) == 2
    assert f"use  regard tag {run}" in capsys.readouterr().err


# --- other runs and other libraries


def test_a_masked_language_model_is_the_start(here, capsys):
    (here / "text.txt").write_text(" ".join(KINDS) * 30, encoding="utf-8")
    (here / "masked.toml").write_text(
        'task = "masked-language-modeling"\n[data]\ntrain = ["text.txt"]\n[train]\nsteps = 2\npack = 32\n'
    )
    model = [one for one in SMALL if not any(name in one for name in ("metric", "evaluate", "data."))]
    assert main(["train", "masked.toml", *model, "-o", "masked", "--device", "cpu"]) == 0
    options = [one for one in SMALL if "=train." in one]
    capsys.readouterr()
    start = [*options, "--set=train.init_from=masked", "--set=train.steps=1", "--set=train.lr=1e-9", "-o", "tuned"]
    assert main(["train", "mine.toml", *start, "--device", "cpu"]) == 0
    assert "initialized randomly: classifier.weight and classifier.bias" in capsys.readouterr().err
    before, after = (regard.load(name).model.state_dict() for name in ("masked", "tuned"))
    assert torch.allclose(before["embedding.tokens.weight"], after["embedding.tokens.weight"], atol=1e-6)


def test_transformers_gives_the_same_tags(run, empty_folder, capsys):
    transformers = pytest.importorskip("transformers")
    assert main(["export", str(run), "--hf", "hf", "--check", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["family"] == "BERT" and result["identical"] == result["compared"] > 10
    hf = json.loads(Path("hf/config.json").read_text())
    assert hf["architectures"] == ["BertForTokenClassification"] and hf["id2label"]["1"] == "B-LOC"
    pipeline = transformers.pipeline("token-classification", "hf", aggregation_strategy="first")
    bundle = regard.load(run)
    for text in ("Tom Tom sees Oslo .", "민수가 서울에 봤다 .", "the Rome likes Ann"):
        ours, theirs = bundle.predict([text])[0].entities, pipeline(text)
        assert [(one["entity_group"], one["end"]) for one in theirs] == [(one.type, one.end) for one in ours]
        assert [one["score"] for one in theirs] == pytest.approx([one.probability for one in ours], abs=1e-4)
    assert main(["import", "hf", "-o", "again", "--check"]) == 0
    again = regard.load("again")
    assert again.predictor.COMMAND == "tag" and again.predict(["Tom sees Oslo ."])[0].tags == (
        "B-PER",
        "O",
        "B-LOC",
        "O",
    )


def test_an_imported_bert_is_the_start(run, here):
    transformers = pytest.importorskip("transformers")
    tokenizer = regard.load(run).tokenizer
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **size)
    transformers.BertModel(config).save_pretrained("bert")
    tokenizer.save("bert/tokenizer.json")
    assert main(["import", "bert", "-o", "imported"]) == 0
    options = [one for one in SMALL if "=train." in one]
    assert (
        main(["train", "mine.toml", *options, "--set=train.init_from=imported", "-o", "tuned", "--device", "cpu"]) == 0
    )
    recipe = read_toml("tuned/recipe.toml")["model"]
    assert recipe["pooler"] is False and recipe["pooling"] == "none" and recipe["token_types"] == 2
    assert json.loads(Path("tuned/scores.json").read_text())["test"]["f1"] > 0.5
    assert main(["export", "tuned", "--hf", "out", "--check"]) == 0


# --- views


def test_views_open_the_run(run, empty_folder, capsys):
    assert main(["attend", str(run), "Tom sees Oslo."]) == 0
    out = capsys.readouterr()
    assert "Oslo" in out.out and "B-PER" in out.out + out.err
    assert main(["figure", str(run), "Tom sees Oslo.", "-o", "a.svg"]) == 0
    assert main(["figure", str(run), "Tom sees Oslo.", "-o", "a.json", "--off", "encoder.0.0"]) == 0
    test = str(run.parent / "test.conll")
    assert main(["heads", str(run), "--data", test, "--limit", "10", "--json"]) == 0


def test_a_look_has_the_tags_of_the_predictor(run):
    from regard.explore.inside import Inside

    look = Inside.open(run).look("Tom sees Oslo.")
    output = look.output
    assert output.kind == "tags" and output.loss is None and look.input.text == "Tom sees Oslo."
    tokens = regard.load(run).predictor
    from regard.text.words import encode_words

    (part,) = encode_words(tokens.tokenizer, [["Tom", "sees", "Oslo", "."]], 100)
    assert look.input.source[0].tolist() == part.ids
    tops = [output.positions[at].top[0] for at in part.first]
    assert [one.label for one in tops] == ["B-PER", "O", "B-LOC", "O"]
    (prediction,) = tokens.predict(["Tom sees Oslo."])
    assert [one.probability for one in tops] == pytest.approx([one.probability for one in prediction.words], abs=1e-5)


def test_the_page_opens_the_run(run):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn", reason="install it with  pip install 'regard[explore]'")
    from explorer import ask_frame, served

    with served(run.parent) as listener:
        header, arrays = ask_frame(listener.address, "api/look", {"run": "run", "text": "Tom sees Oslo."})
    assert header["output"]["kind"] == "tags" and arrays["encoder.0"].shape[0] == 2
    assert header["output"]["positions"][1]["choices"][0]["label"] == "B-PER"


def test_the_cost_of_a_recipe(capsys):
    assert main(["cost", str(ENTITIES), "--set", "vocab_size=1200", "--set", "classes=7", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert counted["parameters"]["parts"]["head"] == 97 * 7
    assert counted["operations"]["parts"]["head"] == 2 * 256 * 96 * 7


def test_the_bundled_recipe_learns_unseen_names(empty_folder):
    scores = smoke_run("recipes/entities.toml", empty_folder / "run")["test"]
    assert scores["types"].keys() == {"PER", "LOC", "DATE"} and scores["f1"] > 0.5
