"""`regard tune`: the values of --search, trials that end in every way, searches that are stopped, killed and shared."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna", reason="install it with  pip install 'regard[tune]'")

from corpus import SMALL, write_corpus
from regard.api import open_recipe
from regard.cli import main
from regard.errors import UserError
from regard.study.search import ATTEMPTS, Search, open_search
from regard.study.space import Choice, Range, make_space, read_search
from regard.tasks.translation import Translation
from regard.training.history import read_metrics
from regard.training.lock import hold
from regard.training.trainer import Trainer
from stopping import interrupt_at

TABLES = {"data": {"train": ["a", "b"], "valid": ["c", "d"]}}
SPACE = ("train.lr=1e-3:1e-2:log", "model.layers=1:2", "model.position=rope,learned")


def command(folder: Path, *more: str, trials: int = 4, space: tuple[str, ...] = SPACE, steps: int = 6) -> list[str]:
    small = [f"--set=train.steps={steps}", "--set=train.evaluate_every=2", "--device", "cpu"]
    search = [f"--search={one}" for one in space]
    return ["tune", "mine.toml", *SMALL, *small, *search, "--trials", str(trials), "-o", str(folder), *more]


def trials(folder: Path) -> list[dict[str, Any]]:
    """All trials, without what depends on the time."""
    content = json.loads((folder / "trials.json").read_bytes())
    return [{name: value for name, value in one.items() if name != "seconds"} for one in content["trials"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A search of four trials that was never interrupted, beside its data."""
    folder = write_corpus(tmp_path_factory.mktemp("tune"))
    make_tokenizers, made = Translation.make_tokenizers, []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(Translation, "make_tokenizers", lambda task: made.append(task) or make_tokenizers(task))
        assert main(command(Path("search"))) == 0
    assert len(made) == 1  # the other trials copy them
    return folder / "search"


@pytest.fixture
def here(whole, monkeypatch) -> Path:
    """The working directory with the data."""
    monkeypatch.chdir(whole.parent)
    return whole.parent


def test_the_prepared_data_of_one_trial_is_kept_for_the_others(whole):
    folders = [whole / "trials" / str(number) for number in (1, 2, 3, 4)]
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1
    assert [(folder / "data").is_dir() for folder in folders] == [True, False, False, False]


# --- what is searched


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("train.lr=1e-4:1e-2:log", Range(1e-4, 1e-2, log=True)),
        ("model.dropout=0:1e-1", Range(0.0, 0.1)),
        ("model.layers=1:4", Range(1, 4)),
        ("model.dim=64:500:64", Range(64, 448, 64)),
        ("train.weight_decay=0:1:0.25", Range(0.0, 1.0, 0.25)),
        ("model.position=rope, learned,none", Choice(("rope", "learned", "none"))),
        ("model.kv_heads=none,4", Choice(("none", "4"))),
        ("model.bias=true,false", Choice(("true", "false"))),
        ("train.betas=[0.9,0.98],[0.9,0.999]", Choice(("[0.9, 0.98]", "[0.9, 0.999]"))),
    ],
)
def test_values(text, values):
    (space,) = make_space(read_search([text]), TABLES).values()
    assert space == values and type(getattr(space, "low", 0)) is type(getattr(values, "low", 0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train.lr", "write NAME=VALUES, such as train.lr=1e-4:1e-2:log"),
        ("lr=1:2", "name the table of the setting, such as train.lr"),
        ("train.lr=0.1", "is one value"),
        ("train.lr=1,1", "has a value twice"),
        ("train.lr=2:1", "the first number must be lower"),
        ("train.lr=0:1:log", "a logarithmic scale starts above 0"),
        ("train.lr=low:high", "write LOW:HIGH"),
        ("train.lr=nan:1", "write LOW:HIGH"),
        ("train.lr=1:2:3:4", "has more than LOW:HIGH:STEP"),
        ("model.layers=1:4:5", "the step must be above 0 and at most 3"),
        ("model.layers=1:2.5", "model.layers = 1.0: expected an integer"),
        ("model.layers=0:4", "model.layers = 0: must be 1 or more"),
        ("model.position=rope,ropes", "did you mean 'rope'"),
        ("model.laiers=1:4", "model.laiers: unknown setting"),
        ("missing.toml", "missing.toml: cannot be read"),
    ],
)
def test_mistakes_are_found_before_the_first_trial(text, words):
    with pytest.raises(UserError) as error:
        make_space(read_search([text]), TABLES)
    assert words in str(error.value) and text.partition("=")[0] in str(error.value)


def test_a_file_has_the_same_values(tmp_path):
    path = tmp_path / "space.toml"
    path.write_text('[search]\ntrain.lr = "1e-4:1e-2:log"\nmodel.position = ["rope", "none"]\nmodel.layers = [1, 2]\n')
    assert read_search([str(path)]) == {
        "train.lr": "1e-4:1e-2:log", "model.position": "rope,none", "model.layers": "1,2",
    }  # fmt: skip
    with pytest.raises(UserError, match="is there twice"):
        read_search([str(path), "train.lr=1:2"])
    path.write_text("[other]\n")
    with pytest.raises(UserError, match="has no table"):
        read_search([str(path)])
    with pytest.raises(UserError, match="no settings to search"):
        read_search([])


# --- the search


def test_the_best_recipe_repeats_the_best_trial(whole, here, capsys):
    found = trials(whole)
    assert [one["number"] for one in found] == [1, 2, 3, 4] and {one["status"] for one in found} == {"done"}
    best = min(found, key=lambda one: one["value"])
    assert main(["train", str(whole / "best.toml"), "-o", "runs/best", "--device", "cpu"]) == 0
    losses = [line["valid_loss"] for line in read_metrics(Path("runs/best")) if "valid_loss" in line]
    assert min(losses) == best["value"]
    assert f"# valid loss {best['value']:.6g}: trial {best['number']} of a" in (whole / "best.toml").read_text()
    assert [*(whole / "trials" / "1").glob("checkpoints/*")] == [], "finished trials need no checkpoints"
    capsys.readouterr()
    assert main(["evaluate", str(whole / "trials" / str(best["number"])), "--device", "cpu"]) == 0


def test_the_same_command_trains_nothing_again_and_another_is_refused(whole, here, capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "run", lambda self: pytest.fail("a trial is trained again"))
    assert main(command(whole, "--json")) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["metric"] == "valid_loss" and len(content["trials"]) == 4
    assert main(["tune", str(whole), "--trials", "3", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "4 trials: 4 done" in shown and "best.toml" in shown and "model.position" in shown
    assert main(command(whole, "--set=train.seed=5")) == 2
    assert "holds another search" in capsys.readouterr().err
    assert main(["tune", str(whole), "--set=train.seed=5"]) == 2
    assert "which has its recipe; remove --set" in capsys.readouterr().err


def test_the_first_trial_is_the_recipe_itself(here, tmp_path):
    assert main(command(tmp_path / "own", "--set=model.position=rope", trials=1)) == 0
    assert trials(tmp_path / "own")[0]["settings"] == {
        "train.lr": "0.01",
        "model.layers": "1",
        "model.position": "rope",
    }


def test_trials_that_diverge_or_do_poorly(here, tmp_path, capsys):
    """Learning rates that learn, learn nothing, and destroy the weights; a failed trial does not end the search."""
    folder = tmp_path / "search"
    assert main(command(folder, trials=14, space=("train.lr=0.01,0.02,0.005,1e-9,2e-9,3e-9,1e30",))) == 0
    found = trials(folder)
    rates = {one["settings"]["train.lr"]: one for one in found}
    assert rates["1e+30"]["status"] == "failed" and "diverged" in rates["1e+30"]["reason"]
    assert len(found) == len(rates) == 7, "equal settings are trained once"
    assert [one["number"] for one in found] == [*range(1, 8)]
    assert all(2 <= one["step"] < 6 and one["value"] is None for one in found if one["status"] == "stopped")
    assert found[0]["status"] == "done" and found[0]["settings"] == {"train.lr": "0.01"}
    shown = capsys.readouterr()
    assert "failed: loss = " in shown.out and "all combinations were tried" in shown.out and "left, about" in shown.err
    stopped = next(one["number"] for one in found if one["status"] == "stopped")
    assert not (folder / "trials" / str(stopped) / "model.safetensors").exists()


def test_a_search_in_which_everything_fails_ends(here, tmp_path, capsys):
    assert main(command(tmp_path / "search", trials=9, space=("train.lr=1e30,1e31,1e32",))) == 2
    assert "all of the first 3 trials failed; the last one: loss = " in capsys.readouterr().err


def test_what_a_search_needs(here, tmp_path, capsys):
    Path("blind.toml").write_text('[data]\ntrain = ["train.en", "train.ko"]\n')
    assert main(["tune", "blind.toml", "--search", "train.lr=1:2", "-o", str(tmp_path / "new")]) == 2
    assert "the recipe has no validation data" in capsys.readouterr().err
    assert main(["tune", "mine.toml"]) == 2 and "no settings to search" in capsys.readouterr().err
    assert main(["tune", "mine.toml", "--search", "train.lr=1:2", "-o", str(here)]) == 2
    assert "holds other files but no search.toml" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main(["tune", "studies/typo", "--trials", "9"]) == 2
    assert "studies/typo: holds no search (search.toml); name a recipe and settings" in capsys.readouterr().err


def test_a_search_finds_the_minimum_and_what_it_depends_on(here, tmp_path):
    """Without training: a function of the learning rate alone, lowest at 3e-3."""
    search = open_search(tmp_path / "search", open_recipe("mine.toml")[0], read_search(SPACE), 1)
    for _ in range(30):
        trial = search._choose()
        search.study.tell(trial, abs(math.log(trial.params["train.lr"] / 3e-3)))
    assert float(search.ranked()[0].settings["train.lr"]) == pytest.approx(3e-3, rel=0.1)
    assert [one.number for one in search.results] == [*range(1, 31)]
    importance = search.importance()
    assert importance["train.lr"] == max(importance.values()) > 0.5 and sum(importance.values()) == pytest.approx(1)


# --- interrupted, killed, shared


def test_an_interrupted_search_continues_as_if_nothing_had_happened(whole, here, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "search"
    interrupt_at(monkeypatch, 3)
    assert main(command(folder)) == 130
    assert f"tune {folder} --trials 4" in capfd.readouterr().err
    assert main(command(folder)) == 0
    assert trials(folder) == trials(whole)


KILLED = """
import os, signal, sys
from regard.api import open_recipe
from regard.cli import main
from regard.training.lock import hold
from regard.training.trainer import Trainer
real, trials = Trainer._update, []

def update(self, batches):
    trials.extend({self.folder.name} - {*trials})
    if len(trials) == 2 and self.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, batches)

Trainer._update = update
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_the_trial_of_a_killed_process_is_continued(whole, here, tmp_path):
    folder = tmp_path / "search"
    done = subprocess.run([sys.executable, "-c", KILLED, *command(folder)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [one.status for one in Search(folder).results] == ["done", "running"]
    with (folder / "journal.log").open("ab") as file:
        file.write(b'{"op_code": 7, "trial')  # it was killed while writing, too
    assert main(command(folder)) == 0
    assert trials(folder) == trials(whole)


def test_a_trial_that_ends_its_process_again_and_again_has_failed(here, tmp_path, monkeypatch):
    folder = tmp_path / "search"

    class Killed(BaseException):
        """The end of a process, as far as the trial is concerned."""

    def end(self):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", end)
        for _ in range(ATTEMPTS):
            with pytest.raises(Killed):
                main(command(folder))
    assert main(command(folder, trials=2)) == 0
    assert [one["status"] for one in trials(folder)] == ["failed", "done"]
    assert "its process ended 3 times" in trials(folder)[0]["reason"]


@pytest.mark.slow
def test_two_processes_share_a_search(here, tmp_path, capsys):
    folder = tmp_path / "search"
    assert main(command(folder, "--jobs", "2", trials=5)) == 0
    found = trials(folder)
    assert [one["number"] for one in found] == [1, 2, 3, 4, 5] and all(one["status"] == "done" for one in found)
    assert len({json.dumps(one["settings"]) for one in found}) == 5
    logs = [path.read_text() for path in (folder / "logs").iterdir()]
    assert len(logs) == 2 and all("training: step" in text for text in logs)
    assert capsys.readouterr().err.count("valid loss") == 5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_the_processes_of_a_search_end_with_it(here, tmp_path, number):
    """They save a checkpoint, and the same command completes their trials."""
    folder, arguments = tmp_path / "search", {"trials": 2, "steps": 400}
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", *command(folder, "--jobs", "2", **arguments)],
        stderr=subprocess.PIPE,
        text=True,
    )
    while not all((folder / "trials" / str(one) / "metrics.jsonl").exists() for one in (1, 2)):
        assert process.poll() is None, process.stderr
        time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert "To continue:" in errors or number == signal.SIGKILL
    for one in (1, 2):
        with hold(folder / "trials" / str(one), wait=True):  # its process has ended
            assert [*(folder / "trials" / str(one) / "checkpoints").iterdir()]
    assert {one.status for one in Search(folder).results} == {"running"}
    assert main(command(folder, **arguments)) == 0
    assert {one.status for one in Search(folder).results} == {"done"}
