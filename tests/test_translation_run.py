"""`regard train` on a person's own sentence pairs: from five lines of TOML to a folder that can go anywhere."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from corpus import FIVE_LINES, train, write_corpus
from regard.cli import main
from regard.data.pairs import PairData
from regard.errors import program
from regard.explore import Inside
from regard.models.folder import read_weights
from regard.settings import read_toml, write_toml
from regard.training.history import read_metrics
from regard.training.trainer import Trainer

COMPLETE = {"recipe.toml", "tokenizer.json", "model.safetensors", "metrics.jsonl", "checkpoints", "scores.json"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def here(corpus, tmp_path, monkeypatch) -> Path:
    """A folder of one's own with the corpus in it, where commands run."""
    shutil.copytree(corpus, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.fixture(scope="module")
def finished(corpus) -> Path:
    """A run that is over; tests copy it."""
    assert train(corpus / "mine.toml", "-o", str(corpus / "finished")) == 0
    return corpus / "finished"


def interrupt_at(monkeypatch, step: int) -> None:
    """Ctrl-C in the middle of a step, once."""
    real, sent = Trainer._update, []

    def update(self, batches):
        if self.step + 1 == step and not sent:
            sent.append(step)
            signal.raise_signal(signal.SIGINT)
        return real(self, batches)

    monkeypatch.setattr(Trainer, "_update", update)


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = read_weights(a / "model.safetensors"), read_weights(b / "model.safetensors")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# --- from five lines to a folder


def test_five_lines_make_a_complete_run(here, capsys):
    assert train() == 0
    run = here / "runs" / "mine"
    assert {path.name for path in run.iterdir()} >= COMPLETE | {"report.html"}
    assert "6 steps" in capsys.readouterr().out
    lines = read_metrics(run)
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6]
    assert [line["step"] for line in lines if "valid_loss" in line] == [1, 2, 3, 4, 5, 6]
    scores = json.loads((run / "scores.json").read_text())
    assert scores["valid"]["lines"] == 6 and scores["valid"]["signature"].startswith("nrefs:1")
    assert regard.load(run).config.vocab_size == 300
    assert Path(read_toml(run / "recipe.toml")["data"]["folder"]) == here
    assert isinstance(regard.load(run).predictor.translate(["July 4th, 1976"])[0], str)


@pytest.mark.parametrize(
    "data",
    ['train = ["train.tsv"]', 'train = ["train.jsonl"]', 'train = ["zipped-train.en", "zipped-train.ko"]'],
    ids=["tsv", "jsonl", "gz"],
)
def test_every_format_gives_the_same_model(here, finished, data):
    """The pairs are the same, so the weights are, to the bit."""
    Path("other.toml").write_text(f'[data]\n{data}\nvalid = ["valid.en", "valid.ko"]\n[train]\nsteps = 6\n')
    assert train("other.toml") == 0
    assert_same_weights(here / "runs" / "other", finished)


@pytest.mark.parametrize("kind", ["word", "char", "unigram"])
def test_other_tokenizers(here, kind):
    assert train("mine.toml", f"--set=text.kind={kind}", "--set=train.steps=2") == 0
    assert regard.load("runs/mine").config.target_vocab_size is None


def test_two_tokenizers(here):
    assert train("mine.toml", "--set=text.joint=false", "--set=train.steps=2") == 0
    run, names = here / "runs" / "mine", {path.name for path in (here / "runs" / "mine").iterdir()}
    assert {"source.json", "target.json"} <= names and "tokenizer.json" not in names
    translator = regard.load(run).predictor
    config = regard.load(run).config
    assert not config.share_embeddings
    assert (config.vocab_size, config.target_vocab_size) == (len(translator.source), len(translator.target))
    assert main(["resume", str(run)]) == 0


def test_without_a_validation_set_the_last_weights_are_the_model(here):
    Path("mine.toml").write_text('[data]\ntrain = ["train.en", "train.ko"]\n[train]\nsteps = 6\n')
    assert train() == 0
    assert json.loads(Path("runs/mine/scores.json").read_text()) == {}
    last = read_weights(Path("runs/mine/checkpoints/step-00000006/model.safetensors"))
    assert all(
        torch.equal(tensor, last[name]) for name, tensor in read_weights(Path("runs/mine/model.safetensors")).items()
    )
    assert "Learning curve" in Path("runs/mine/report.html").read_text()


def test_with_a_running_mean_that_is_the_model(here):
    Path("mine.toml").write_text('[data]\ntrain = ["train.en", "train.ko"]\n[train]\nsteps = 6\nema = 0.5\n')
    assert train() == 0
    last = Path("runs/mine/checkpoints/step-00000006")
    means = {
        name.removesuffix("/mean"): tensor
        for name, tensor in read_weights(last / "optimizer.safetensors").items()
        if name.endswith("/mean")
    }
    model = read_weights(Path("runs/mine/model.safetensors"))
    assert model.keys() == means.keys() and all(torch.equal(model[name], means[name]) for name in means)


def test_the_mean_of_the_last_checkpoints_is_the_model(here, capsys):
    settings = ["--set=train.save_every=2", "--set=train.keep=3", "--set=train.average=3"]
    assert train("mine.toml", *settings) == 0
    parts = [read_weights(Path(f"runs/mine/checkpoints/step-0000000{n}/model.safetensors")) for n in (2, 4, 6)]
    for name, tensor in read_weights(Path("runs/mine/model.safetensors")).items():
        torch.testing.assert_close(tensor, torch.stack([part[name] for part in parts]).mean(0))
    settings[1:] = ["--set=train.keep=9", "--set=train.average=9"]
    capsys.readouterr()
    assert train("mine.toml", *settings, "-o", "runs/few") == 0  # three are there: they are taken, and it says so
    assert "train.average = 9, but there are 3 checkpoints" in capsys.readouterr().err


def test_test_sets_and_a_recurrent_model(here, capsys):
    Path("rnn.toml").write_text(FIVE_LINES + '[data.test]\nnews = ["news.tsv"]\n[model]\narchitecture = "recurrent"\n')
    assert train("rnn.toml", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 6 and result["scores"].keys() == {"valid", "news"}
    report = Path("runs/rnn/report.html").read_text()
    assert "BLEU on news" in report and "Cross-attention" in report and "Encoder self-attention" not in report
    look = Inside.open("runs/rnn").look("July 4th", target="7월 4일")
    (weights,) = look.parts["cross"].weights
    assert look.parts.keys() == {"cross"}
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
    assert main(["evaluate", "runs/rnn", "--test", "news", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["news"] == result["scores"]["news"]


def test_the_report_of_a_transformer_has_its_heads(finished):
    report = (finished / "report.html").read_text()
    assert "BLEU on valid" in report and "validation loss" in report and "Encoder self-attention" in report
    assert "exact match, never seen" not in report and "wrong" not in report.split("<body>")[1]


def test_bleu_may_choose(here):
    assert train("mine.toml", "--set=train.metric=bleu", "--set=train.evaluate_every=3", "--set=train.pack=64") == 0
    evaluations = [line for line in read_metrics(Path("runs/mine")) if "bleu" in line]
    assert [line["step"] for line in evaluations] == [3, 6] and all("valid_loss" in line for line in evaluations)


# --- again, elsewhere, interrupted


def test_the_same_command_again_changes_nothing(here, finished, capsys):
    shutil.copytree(finished, "runs/mine")
    recipe = Path("runs/mine/recipe.toml")
    recipe.write_text(recipe.read_text().replace(str(finished.parent), str(here)))
    before = {path: path.read_bytes() for path in Path("runs/mine").rglob("*") if path.is_file()}
    assert train() == 0
    changed = [path for path, content in before.items() if path.read_bytes() != content and path.name != "report.html"]
    assert [path.name for path in changed if "data" not in path.parts] == []
    assert "6 steps" in capsys.readouterr().out


def test_a_run_made_before_a_setting_existed_goes_on(here, finished, capsys):
    """A field that the folder's recipe lacks has its default; another value than that is another setting."""
    shutil.copytree(finished, "runs/mine")
    recipe = Path("runs/mine/recipe.toml")
    text = recipe.read_text().replace(str(finished.parent), str(here))
    assert "activation_checkpointing = false\n" in text and "n_best = 1\n" in text
    recipe.write_text(text.replace("activation_checkpointing = false\n", "").replace("n_best = 1\n", ""))
    assert train() == 0
    assert train("mine.toml", "--set=train.activation_checkpointing=true") == 2
    assert "holds a run with other settings" in capsys.readouterr().err


def test_other_settings_are_refused_and_nothing_is_touched(here, finished, capsys):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert train(finished.parent / "mine.toml", "-o", str(finished), "--set=train.steps=7") == 2
    assert "holds a run with other settings" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_interrupted_and_resumed_is_the_uninterrupted_run(here, monkeypatch, capsys, stop):
    """With the mean of the last checkpoints, which must not include the one that the interruption left."""
    settings = ["--set=train.save_every=2", "--set=train.keep=3", "--set=train.average=3", "--set=train.pack=64"]
    assert train("mine.toml", *settings, "-o", "runs/whole") == 0
    interrupt_at(monkeypatch, stop)
    assert train("mine.toml", *settings, "-o", "runs/parts") == 130
    assert f"saved at step {stop} of 6. To continue:  {program()} resume runs/parts" in capsys.readouterr().err
    assert main(["resume", "runs/parts", "--device", "cpu"]) == 0
    assert f"resuming from step {stop} of 6" in capsys.readouterr().err
    assert_same_weights(Path("runs/parts"), Path("runs/whole"))
    whole, parts = (json.loads(Path(f"runs/{name}/scores.json").read_text()) for name in ("whole", "parts"))
    assert whole == parts


def test_a_run_can_be_moved(here, monkeypatch, capsys):
    assert train("mine.toml", "-o", "whole") == 0
    interrupt_at(monkeypatch, 3)
    assert train("mine.toml", "-o", "first/place") == 130
    shutil.move("first/place", "second")
    assert main(["resume", "second", "--device", "cpu"]) == 0
    assert_same_weights(Path("second"), Path("whole"))
    capsys.readouterr()
    assert main(["translate", "second", "July 4th, 1976"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert main(["evaluate", "second", "--device", "cpu"]) == 0
    assert "tokenised BLEU" in capsys.readouterr().out


def test_when_the_data_is_gone(here, monkeypatch, capsys, tmp_path):
    assert train("mine.toml", "-o", "whole") == 0
    interrupt_at(monkeypatch, 3)
    assert train("mine.toml", "-o", "run") == 130
    Path("moved").mkdir()
    for file in here.glob("*.en"), here.glob("*.ko"):
        for path in file:
            path.rename(Path("moved") / path.name)
    capsys.readouterr()
    assert main(["translate", "whole", "July 4th, 1976"]) == 0
    before = Path("run/recipe.toml").read_bytes()
    assert main(["resume", "run"]) == 2
    error = capsys.readouterr().err
    assert str(here / "train.en") in error and "no such file" in error and "--data DIR" in error
    assert main(["resume", "run", "--data", "nowhere"]) == 2
    assert Path("run/recipe.toml").read_bytes() == before
    assert main(["resume", "run", "--data", "moved", "--device", "cpu"]) == 0
    assert_same_weights(Path("run"), Path("whole"))


def test_a_finished_run_is_extended(here, capsys):
    """4 steps and 4 more are 8 steps, where the learning rate does not depend on their number."""
    steady = ("--set=train.schedule=constant", "--set=train.warmup=0")
    assert train("mine.toml", "-o", "whole", *steady, "--set=train.steps=8") == 0
    assert train("mine.toml", "-o", "parts", *steady, "--set=train.steps=4") == 0
    assert main(["resume", "parts", "--set", "train.steps=8", "--device", "cpu"]) == 0
    assert read_metrics(Path("parts"))[-1]["step"] == 8
    last = "checkpoints/step-00000008/model.safetensors"
    assert Path("parts", last).read_bytes() == Path("whole", last).read_bytes()
    for setting, message in (
        ("model.dim=8", "only settings of [train] can change"),
        ("steps=9", "name its table, such as --set train.steps=9"),
        ("train.stepz=9", "did you mean 'steps'?"),
    ):
        assert main(["resume", "parts", "--set", setting]) == 2
        assert message in capsys.readouterr().err
    assert "steps = 8" in Path("parts/recipe.toml").read_text()


def test_resume_wants_a_run(here, capsys):
    assert main(["resume", "nowhere"]) == 2
    Path("other").mkdir()
    assert main(["resume", "other"]) == 2
    Path("other/recipe.toml").write_text("[model]\nvocab = 8\n")
    assert main(["resume", "other"]) == 2
    assert "no tables [data] and [train]" in capsys.readouterr().err


# --- evaluate and runs


def test_evaluate_other_files(finished, corpus, capsys):
    files = [str(corpus / "news.en"), str(corpus / "news.ko")]
    assert main(["evaluate", str(finished), "--files", *files, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["lines"] == 8
    assert main(["evaluate", str(finished), "--files", *files, "--device", "cpu", "--json", "--tokenize", "char"]) == 0
    assert "tok:char" in json.loads(capsys.readouterr().out)["files"]["signature"]
    assert main(["evaluate", str(finished), "--files", *files, "--tokenize", "words"]) == 2
    assert "tokenize = 'words'" in capsys.readouterr().err
    assert main(["evaluate", str(finished), "--test", "vaild"]) == 2
    assert "did you mean 'valid'?" in capsys.readouterr().err


def test_runs_side_by_side(here, finished, capsys):
    shutil.copytree(finished, "runs/one")
    shutil.copytree(finished, "runs/stopped", ignore=shutil.ignore_patterns("scores.json"))
    lines = [line for line in Path("runs/stopped/metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    Path("runs/stopped/metrics.jsonl").write_text("\n".join(lines[:2]) + '\n{"step": 5, "se')  # cut short
    for odd, content in (("empty", ""), ("broken", "[train"), ("model", "[model]\nvocab = 8\n")):
        Path(f"runs/{odd}").mkdir()
        if content:
            Path(f"runs/{odd}/recipe.toml").write_text(content)
    Path("runs/note.txt").write_text("not a folder")
    assert main(["runs"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "task", "steps", "seconds", "loss", "best", "test"]
    assert [row.split()[0] for row in rows] == ["one", "stopped"]
    assert main(["runs", "runs", "--json"]) == 0
    one, stopped = json.loads(capsys.readouterr().out)
    scores = json.loads((finished / "scores.json").read_text())
    evaluations = [line["valid_loss"] for line in read_metrics(finished) if "valid_loss" in line]
    assert (one["step"], one["steps"], one["best"]) == (6, 6, min(evaluations))
    assert one["test"] == {"valid": scores["valid"]["bleu"]} and stopped["test"] == {} and stopped["best"] is None
    assert stopped["step"] == 4 and "4 of 6" in rows[1]
    Path("runs/one/summary.json").unlink()  # as an earlier version has left it
    assert main(["runs", "runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [one, stopped]
    Path("runs/one/summary.json").write_text('{"task": "translation"}')
    assert main(["runs", "runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [stopped]


def test_long_runs_are_listed_without_pytorch(tmp_path, monkeypatch):
    """The best value may be anywhere in metrics.jsonl; PyTorch and the task are not imported."""
    monkeypatch.chdir(tmp_path)
    about = {"task": "translation", "steps": 9000, "metric": "bleu", "higher": True, "headline": "exact", "test": "e"}
    log = [{"step": step, "loss": 1 / step, "seconds": step} for step in range(1, 5001)]
    log[2000:2000] = [{"step": 2000, "seconds": 2000, "valid_loss": 2.0, "bleu": 31.5}]
    log[700:700] = [{"step": 700, "seconds": 700, "valid_loss": 1.0, "bleu": 7.25}]
    for name in ("a", "b"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "summary.json").write_text(json.dumps(about))
        Path("runs", name, "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    code = (
        "import sys; from regard.cli import main; main(['runs', '--json']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'tokenizers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first == second | {"run": "a"}
    assert (first["step"], first["seconds"], first["loss"], first["best"]) == (5000, 5000, 1 / 5000, 31.5)


def test_runs_where_there_are_none(here, capsys):
    assert main(["runs"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    Path("runs").mkdir()
    assert main(["runs"]) == 0
    assert "no runs yet" in capsys.readouterr().err


def test_the_page_has_a_row_for_every_setting_of_the_data():
    page = (Path(__file__).parent.parent / "docs" / "translation.md").read_text(encoding="utf-8")
    table = page.split("| `[data]` |")[1].split("\n\n")[0]
    shown = [line.split("|")[1].strip(" `") for line in table.splitlines()[2:]]
    assert sorted(shown) == sorted(field.name for field in dataclasses.fields(PairData))


def test_evaluating_what_has_no_test_files(finished, tmp_path, capsys):
    folder = tmp_path / "imported"
    shutil.copytree(finished, folder)
    tables = read_toml(folder / "recipe.toml")
    del tables["data"]
    write_toml(folder / "recipe.toml", tables)
    assert main(["evaluate", str(folder)]) == 2
    assert f"{folder}: its recipe has no table [data]; name files with --files" in capsys.readouterr().err
