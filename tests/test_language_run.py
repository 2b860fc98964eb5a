"""`regard train` with task = "language-modeling": from a text to a run that is resumed, evaluated and generates."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import regard
from commanded import training
from regard.cli import main
from regard.data import documents, encode
from regard.data.columns import Store
from regard.data.streams import BlockBatch
from regard.metrics.perplexity import perplexity
from regard.models.config import ModelConfig
from regard.models.folder import load_tokenizers
from regard.models.recipe import preset, read_recipe
from regard.models.transformer import build
from regard.settings import read_toml
from regard.tasks.language_modeling import LanguageData, LanguageModeling, next_token
from regard.training.history import read_metrics
from regard.training.run import Run
from stopping import assert_same_weights, interrupt_at

ROOT = Path(__file__).parent.parent
TEXT = "".join(f"{n} green bottles hanging on the wall, 초록 병 {n}개.\n" for n in range(60, 0, -1))
RECIPE = """task = "language-modeling"
[data]
train = ["input.txt"]
valid_fraction = 0.1
[train]
steps = 6
"""
SMALL = [
    f"--set={setting}"
    for setting in (
        "text.kind=char", "model.dim=16", "model.layers=1", "model.heads=2", "model.ff_dim=32", "model.position=rope",
        "model.norm_order=pre", "model.max_length=24", "train.batch_tokens=96", "train.warmup=2", "train.lr=0.01",
        "train.log_every=2", "train.save_every=4",
    )
]  # fmt: skip


@pytest.fixture
def here(empty_folder: Path) -> Path:
    (empty_folder / "input.txt").write_bytes(TEXT.encode())
    (empty_folder / "mine.toml").write_text(RECIPE)
    return empty_folder


train = training(SMALL, "mine.toml")


def test_six_lines_make_a_complete_run(here, capsys):
    assert train("--json") == 0
    result = json.loads(capsys.readouterr().out)
    run = here / "runs" / "mine"
    assert {path.name for path in run.iterdir()} >= {
        "recipe.toml", "tokenizer.json", "model.safetensors", "metrics.jsonl", "scores.json", "summary.json",
        "report.html", "data",
    }  # fmt: skip
    recipe = read_toml(run / "recipe.toml")
    assert (
        recipe["task"] == "language-modeling"
        and recipe["train"]["pack"] == 24
        and recipe["train"]["label_smoothing"] == 0
    )
    cut = int(len(TEXT) * 0.9)
    tokenizer = load_tokenizers(run)["tokenizer"]
    for name, part in (("train", TEXT[:cut]), ("valid", TEXT[cut:])):
        stored = Store.open(run / "data" / name)
        assert stored.columns["ids"].tolist() == tokenizer.encode(part)
    assert set(tokenizer.tokens(TEXT[:cut])) >= {"0", "병"} and tokenizer.unk not in tokenizer.encode(TEXT[:cut])
    # the weights that are kept are those with the figures that are result
    model, valid = regard.load(run).model, Store.open(run / "data" / "valid")
    found = perplexity(model, valid, 24)
    assert result["scores"]["valid"]["loss"] == pytest.approx(found["loss"])
    size = len(TEXT[cut + 1 :].encode())
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2) * found["tokens"] / size)
    evaluations = [line["valid_loss"] for line in read_metrics(run) if "valid_loss" in line]
    assert len(evaluations) > 1 and min(evaluations) == pytest.approx(found["loss"])  # the best weights are kept
    report = (run / "report.html").read_text()
    assert "Samples" in report and "Loss by position" in report and "loss on valid" in report


def test_it_learns(here):
    """Far better than knowing how often each character occurs, on text that it has not seen."""
    settings = ["--set=train.steps=150", "--set=train.evaluate_every=50", "--set=model.dropout=0"]
    assert train(*settings, "--set=model.embed_dropout=0") == 0
    cut = int(len(TEXT) * 0.9)
    counts, held_out = Counter(TEXT[:cut]), TEXT[cut + 1 :]
    unigram = -sum(math.log(counts[char] / cut) for char in held_out) / len(held_out)
    assert json.loads(Path("runs/mine/scores.json").read_text())["valid"]["loss"] < 0.5 * unigram


@pytest.mark.parametrize(
    "settings",
    [["--set=train.gradient_accumulation=2"], ["--set=train.compile=false", "--set=train.ema=0.9"]],
    ids=["gradient_accumulation", "ema"],
)
def test_interrupted_and_resumed_is_the_uninterrupted_run(here, monkeypatch, capsys, settings):
    assert train(*settings, "-o", "whole") == 0
    interrupt_at(monkeypatch, 2)
    assert train(*settings, "-o", "parts") == 130
    read = []
    monkeypatch.setattr(documents, "split", lambda *_: read.append(_) or iter(()))  # the text is not read again
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    assert_same_weights("whole", "parts")
    assert not read


@torch.no_grad()
def test_the_loss_is_the_sum_over_all_tokens_of_a_batch(here):
    """So that the parts of a batch, as with `gradient_accumulation`, add up to the whole."""
    task = LanguageModeling(read_tables(), here / "run", torch.device("cpu"))
    Run(task).prepare()
    model = build(task.model_config).double().eval()
    batch = next(iter(task.stream()))
    loss, count = next_token(model, batch)
    halves = [next_token(model, type(batch)(half)) for half in batch.ids.chunk(2)]
    assert float(loss) == pytest.approx(sum(float(part) for part, _ in halves)) and int(count) == batch.read.numel()
    logits = model(batch.read).log_softmax(-1)
    expected = -logits.gather(2, batch.labels[..., None]).sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)


def read_tables() -> dict:
    from regard.models.recipe import override

    return override(read_recipe("mine.toml"), [setting.removeprefix("--set=") for setting in SMALL])


def test_preparation_that_was_stopped_goes_on(here, monkeypatch, capsys):
    """Ctrl-C while the text is tokenised; what was done is kept, and the run is the same as any."""
    monkeypatch.setattr(documents, "PIECE", 100)
    monkeypatch.setattr(encode, "CHARACTERS", 300)
    monkeypatch.setattr(encode, "CHECKPOINT", 500)
    assert train("-o", "whole") == 0
    real, calls = encode._joined, []

    def stopping(chunk, *rest):
        calls.append(chunk)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(chunk, *rest)

    monkeypatch.setattr(encode, "_joined", stopping)
    assert train("-o", "parts") == 130
    assert Path("parts/data/.train.part/progress.json").is_file()
    assert main(["resume", "parts", "--device", "cpu"]) == 0
    assert_same_weights("whole", "parts")


@pytest.mark.parametrize("form", ["folder", "jsonl", "gz"])
def test_other_forms_of_the_same_text_give_the_same_model(here, form):
    assert train("-o", "plain") == 0
    match form:
        case "folder":
            Path("books").mkdir()
            shutil.move("input.txt", "books/input.txt")
            name = "books"
        case "jsonl":
            Path("input.jsonl").write_text(json.dumps({"text": TEXT}))
            name = "input.jsonl"
        case _:
            Path("input.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
            Path("input.txt").unlink()
            name = "input.txt"
    assert train("-o", "other", f'--set=data.train=["{name}"]') == 0
    assert_same_weights("plain", "other")


@pytest.mark.parametrize("kind", ["byte", "bpe", "unigram", "word"])
def test_other_tokenizers(here, kind):
    size = ["--set=text.vocab_size=300"] if kind == "bpe" else ["--set=text.vocab_size=80"] if kind == "unigram" else []
    assert train(f"--set=text.kind={kind}", *size, "--set=train.steps=2") == 0
    assert regard.load("runs/mine").config.vocab_size == len(load_tokenizers("runs/mine")["tokenizer"])
    assert main(["generate", "runs/mine", "9 green", "--max-tokens", "5", "--device", "cpu"]) == 0


def test_a_data_folder_and_validation_text_of_its_own(here, capsys):
    Path("corpus").mkdir()
    for name, text in (("train.txt", TEXT), ("valid.txt", TEXT[:300]), ("test.txt", TEXT[300:400])):
        (Path("corpus") / name).write_text(text, encoding="utf-8")
    Path("mine.toml").write_text(
        'task = "language-modeling"\n[data]\ntrain = ["train.txt"]\nvalid = ["valid.txt"]\n'
        'test = { end = ["test.txt"] }\n'
        "[train]\nsteps = 4\n"
    )
    assert train("--data", "corpus") == 0
    result = capsys.readouterr().out
    assert "valid" in result and "end" in result and "bits per character" in result
    assert json.loads(Path("runs/mine/scores.json").read_text()).keys() == {"valid", "end"}


# --- evaluate and runs


def test_evaluate(here, capsys):
    assert train() == 0
    capsys.readouterr()
    assert main(["evaluate", "runs/mine", "--device", "cpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(Path("runs/mine/scores.json").read_text())
    assert len(result["valid"]["loss_per_position"]) == 24
    cut = int(len(TEXT) * 0.9)
    Path("held-out.txt").write_bytes(TEXT[cut:].encode())
    order = ["evaluate", "runs/mine", "--files", "held-out.txt", "--device", "cpu", "--json"]
    assert main(order) == 0
    assert json.loads(capsys.readouterr().out)["files"] == result["valid"]
    assert main([*order, "--context", str(8 * 24), "--stride", "16"]) == 0  # eight times the length of training
    longer = json.loads(capsys.readouterr().out)["files"]
    assert longer["context"] == 192 and longer["stride"] == 16 and math.isfinite(longer["loss"])
    assert longer["tokens"] == result["valid"]["tokens"]
    assert main(["evaluate", "runs/mine", "--files", "held-out.txt", "--device", "cpu"]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_what_evaluate_refuses(here, capsys):
    assert train() == 0
    Path("latin.txt").write_bytes(b"caf\xe9")
    for arguments, message in (
        (["--files", "nowhere.txt"], "no such file"),
        (["--files", "latin.txt"], "is not UTF-8: byte 0xe9 at position 4"),
        (["--files", "input.txt", "--stride", "25"], "stride = 25: must be from 1 to the context of 24"),
        (["--files", "input.txt", "--context", "0"], "--context 0"),
        (["--test", "wiki"], "is not a set of the recipe"),
        (["--beam", "4"], "--beam 4: has no effect for a model of task language-modeling"),
    ):
        assert main(["evaluate", "runs/mine", *arguments, "--device", "cpu"]) == 2
        assert message in capsys.readouterr().err


def test_runs_tell_the_task(here, capsys):
    assert train() == 0
    capsys.readouterr()
    assert main(["runs"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[1] == "task" and row.split()[1] == "language-modeling"
    assert "valid loss" in row and "loss valid" in row


def test_r_drop_is_the_formula_of_two_passes():
    """(CE(P) + CE(Q)) / 2 + α (KL(P‖Q) + KL(Q‖P)) / 4, and nothing more than CE where nothing is dropped."""
    sizes = {
        "dim": 16,
        "layers": 1,
        "heads": 2,
        "ff_dim": 32,
        "architecture": "decoder",
        "vocab_size": 11,
        "position": "rope",
    }
    ids = torch.randint(11, (3, 9))
    for chance in (0.3, 0.0):
        model = build(ModelConfig(**sizes, dropout=chance, embed_dropout=chance)).train()
        torch.manual_seed(5)
        found, tokens = next_token(model, BlockBatch(ids), r_drop=2.0)
        torch.manual_seed(5)
        p, q = model(torch.cat((ids, ids))[:, :-1]).log_softmax(dim=-1).chunk(2)
        right = ids[:, 1:, None]
        wrong = -(p.gather(2, right).sum() + q.gather(2, right).sum()) / 2
        apart = F.kl_div(q, p, log_target=True, reduction="sum") + F.kl_div(p, q, log_target=True, reduction="sum")
        torch.testing.assert_close(found, wrong + 2.0 * apart / 4)
        assert tokens == 24 and (apart > 0.1) == (chance > 0)


# --- mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.train=['none.txt']"], "no such file"),
        (["task.x=1"], "task = {'x': 1}: unknown task|task is not a table"),
        (["model.architecture=encoder-decoder"], "language-modeling needs architecture = 'decoder'"),
        (["model.vocab_size=20"], "model.vocab_size = 20, but the tokenizer has"),
        (["train.metric=bleu"], "train.metric = 'bleu': is not a metric of language-modeling"),
        (["train.pack=5000", "train.batch_tokens=5000"], "less than one row of train.pack = 5000"),
        (["model.position=learned", "train.pack=48"], "train.pack = 48: learned positions end at model.max"),
        (["text.kind=gpt2"], "kind = 'gpt2' with vocab_dir = None"),
        (["text.kind=gpt2", "text.vocab_dir=here"], "GPT-2's vocabulary needs vocab.json"),
        (
            ["data.valid_fraction=0.9999"],
            "data.train: has|less than one row|the text has no tokens|training text is empty",
        ),
        (["data.colum=text"], "data.colum: unknown setting; did you mean 'column'?"),
    ],
)
def test_a_mistake_is_told_and_leaves_nothing(here, capsys, settings, message):
    assert train(*[f"--set={setting}" for setting in settings]) == 2
    import re

    assert re.search(message, capsys.readouterr().err)
    assert not Path("runs/mine").exists()


def test_a_task_that_does_not_exist(here, capsys):
    Path("mine.toml").write_text(RECIPE.replace("language", "langauge"))
    assert train() == 2
    assert "task = 'langauge-modeling': unknown task; did you mean 'language-modeling'?" in capsys.readouterr().err


def test_a_padded_vocabulary(here):
    assert train("--set=text.kind=byte", "--set=model.vocab_size=384", "--set=train.steps=2") == 0
    assert regard.load("runs/mine").config.vocab_size == 384


# --- the recipes


@pytest.mark.parametrize(
    "name", ["shakespeare-char", "shakespeare-char-best", "shakespeare-char-fast", "shakespeare-bpe", "gpt2-124m"]
)
def test_the_recipes_can_be_read(name, tmp_path):
    tables = read_recipe(ROOT / "recipes" / f"{name}.toml")
    del tables["smoke"]
    task = LanguageModeling(tables, tmp_path, torch.device("cpu"))
    vocab_size = 65 + 4 if "char" in name else {"shakespeare-bpe": 1024}.get(name, 50257)
    config = task.make_model_config({} if "vocab_size" in tables["model"] else {"vocab_size": vocab_size})
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in build(config).named_parameters()}
    count = sum(size for name, size in sizes.items() if "position" not in name)
    if "char" in name:  # nanoGPT tells 10.65M: without positions, and with 65 characters
        assert count == pytest.approx(10.65e6, rel=2e-3)
        assert (task.config.pack, task.config.batch_tokens // task.config.pack) == (256, 64)
    if name == "gpt2-124m":
        assert config.vocab_size == 50304 and task.config.pack == preset("gpt2").max_length
        assert sum(sizes.values()) - 47 * 768 == 124_439_808  # Radford et al.: 124M, and 47 rows that fill up


def test_the_page_has_a_row_for_every_setting_of_the_data():
    page = (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")
    table = page.split("| `[data]` |")[1].split("\n\n")[0]
    shown = [line.split("|")[1].strip(" `") for line in table.splitlines()[2:]]
    assert sorted(shown) == sorted(field.name for field in dataclasses.fields(LanguageData))


def test_data_check_reads_text_too(here, capsys):
    assert main(["data", "check", "mine.toml"]) == 0
    size = f"{len(TEXT):,} characters, {len(TEXT.encode()):,} bytes"
    assert f"train: 1 documents, {size}" in capsys.readouterr().out
    assert main(["data", "check", "mine.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["characters"] == len(TEXT)
    Path("input.txt").write_bytes(b"\xff")
    assert main(["data", "check", "mine.toml"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err
