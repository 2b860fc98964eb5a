"""`regard demo`: what it writes, what it refuses to touch, and that stopping it loses nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import regard
from regard import cli
from regard.commands.demo import ARGUMENTS, SHOWN
from regard.data.korean import examples
from regard.errors import program
from regard.models.recipe import read_recipe
from regard.text.tokenizer import Tokenizer

SMALL = ["--set", "dim=16", "--set", "ff_dim=32", "--set", "layers=1", "--set", "heads=2"]
OWN = {
    "recipe.toml", "source.json", "target.json", "data", "model.safetensors", "metrics.jsonl", "scores.json",
    "summary.json", "examples.json", "predictions", "report.html", "checkpoints", "snapshots",
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_examples(monkeypatch):
    """The demo on 400 examples instead of 40,000, evaluated on 30."""

    def fewer(split: str, count: int, seed: int):
        return examples(split, {"train": 400, "test": 30}[split], seed)  # type: ignore[arg-type]

    monkeypatch.setattr("regard.data.pairs.examples", fewer)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, str]:
    """A finished demo of three steps, and what it printed."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("demo run") / "first demo"  # names with a space
        patch.setattr("regard.data.pairs.examples", lambda split, count, seed: examples(split, 60, seed))
        patch.setattr(sys, "stdout", open(folder.parent / "out", "w+", encoding="utf-8"))  # noqa: SIM115
        assert cli.main(["demo", "--out", str(folder), "--steps", "3", *SMALL]) == 0
        sys.stdout.seek(0)
        return folder, sys.stdout.read()


def demo(folder: Path, *options: str) -> int:
    return cli.main(["demo", "--out", str(folder), *SMALL, *options])


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- what it leaves behind


def test_it_writes_its_files_and_nothing_else(done):
    folder, _ = done
    assert set(os.listdir(folder)) == OWN
    tables = read_recipe(folder)
    assert tables["train"]["steps"] == 3 and tables["model"]["dim"] == 16
    assert tables["data"]["generator"]["train"] == 40_000
    assert len(regard.load(folder).predictor.translate(["March 3rd, 2021", "seven"])) == 2


def test_the_page_holds_curve_examples_alignment_and_the_heads(done):
    folder, _ = done
    page = (folder / "report.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", page)
    for start in ("Learning curve", "Metrics", "Translations of test", "Attention"):
        assert any(heading.startswith(start) for heading in headings), start
    for title in ("mean of its heads", "Encoder self-attention, every", "Decoder self-attention, every"):
        assert title in page
    assert page.count("<svg") >= 6  # the sign, the curve, the alignment, three grids
    assert "training loss" in page and " → " in page and "not why" in page


def test_each_thing_to_try_next_is_a_command_that_runs(done, capsys):
    _, text = done
    lines = text.partition("three things to try next:\n")[2].splitlines()
    commands = [re.split(r"\s{2,}", line.strip())[0] for line in lines]
    assert len(commands) == 3 and all(command.startswith(f"{program()} ") for command in commands)
    names = [shlex.split(command)[1] for command in commands]
    assert names == ["translate", "demo", "cost"]
    for command in (commands[0], commands[2]):
        assert cli.main(shlex.split(command)[1:]) == 0, command
    assert capsys.readouterr().err == ""
    parser = cli.Parser("regard demo", "", ARGUMENTS)
    assert parser.parse_all(shlex.split(commands[1])[2:]).set == ["heads=1"]


def test_json_is_all_that_standard_output_holds(tmp_path, capsys):
    assert demo(tmp_path / "run", "--steps", "1", "--json") == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert figures["steps"] == 1 and figures["tested"] == 30 and figures["run"] == str(tmp_path / "run")
    assert figures["correct"] / 30 == figures["exact_match"]
    first = re.search(r"<dt>(.*?)</dt><dd>(.*?)</dd>", Path(figures["report"]).read_text("utf-8"))
    assert first and first.groups() == ("exact match on test", f"{figures['exact_match']:.2%}")
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0  # leads with the same metric
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["headline"], listed["test"]) == ("exact match", {"test": figures["exact_match"]})
    assert figures["parameters"] == sum(p.numel() for p in regard.load(tmp_path / "run").predictor.model.parameters())
    assert list(figures["examples"]) == list(SHOWN)
    assert "step 1/1" in captured.err


def test_the_figure_is_the_share_of_exactly_right_answers(tmp_path, capsys):
    assert demo(tmp_path / "run", "--steps", "1", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    unseen = examples("test", 30, 1)
    outputs = regard.load(tmp_path / "run").predictor.translate([example.source for example in unseen])
    right = sum(example.target == output for example, output in zip(unseen, outputs, strict=True))
    assert figures["correct"] == right


@pytest.mark.parametrize(
    "change", ["heads=1", "position=learned", "norm_order=post", "architecture=recurrent", "window=2"]
)
def test_another_model_is_one_option(tmp_path, capsys, change):
    assert demo(tmp_path / "run", "--steps", "1", "--set", change) == 0
    name, value = change.split("=")
    assert str(read_recipe(tmp_path / "run")["model"][name]) == value
    assert ("recurrent model" in capsys.readouterr().out) == (value == "recurrent")


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], ["--steps: 0", "1 or more"]),
        (["--steps", "many"], ["--steps", "'many'"]),
        (["--seed", "-1"], ["seed = -1", "from 0 to"]),
        (["--set", "output_head=none"], ["model.output_head = 'none'", "output_head = 'tokens'"]),
        (["--set", "hedas=1"], ["'hedas'", "did you mean 'heads'?"]),
        (["--set", "heads"], ["--set heads", "name=value"]),
        (["--set", "heads=3"], ["model.heads = 3", "does not divide"]),
        (["--set", "position=rotary"], ["model.position = 'rotary'", "rope"]),
        (["--set", "dropout=nan"], ["model.dropout", "finite"]),
        (["--set", "vocab_size=5"], ["model.vocab_size = 5", "the data decides"]),
        (["--set", "architecture=decoder"], ["architecture = 'decoder'", "'encoder-decoder' or 'recurrent'"]),
        (["--set", "position=learned", "--set", "max_length=5"], ["model.max_length = 5", "learned positions"]),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path, capsys, options, words):
    assert demo(tmp_path / "run", "--json", *options) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err


@pytest.mark.parametrize("fresh", [[], ["--fresh"]], ids=["", "fresh"])
def test_a_file_in_place_of_the_folder_is_left_alone(tmp_path, capsys, fresh):
    (tmp_path / "run").write_text("mine")
    assert demo(tmp_path / "run", *fresh) == 2
    assert f"{tmp_path / 'run'}: is a file" in capsys.readouterr().err
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a place where nobody may write")
def test_a_folder_that_cannot_be_made(capsys):
    assert demo(Path("/proc/regard/run")) == 2
    assert "/proc/regard" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the administrator may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path, capsys):
    tmp_path.chmod(0o500)
    try:
        assert demo(tmp_path) == 2
    finally:
        tmp_path.chmod(0o700)
    assert "recipe.toml: cannot be written: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(OWN))
@pytest.mark.parametrize("fresh", [[], ["--fresh"]], ids=["", "fresh"])
def test_files_of_somebody_else_are_never_touched(tmp_path, capsys, name, fresh):
    """A project of one's own may well hold a model.safetensors or a checkpoints folder."""
    if name in ("checkpoints", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("mine")
    else:
        (tmp_path / name).write_text("task = 'translation'\n[data]\ntrain = ['a', 'b']\n")
    before = files(tmp_path)
    assert demo(tmp_path, *fresh) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}: holds " in error and ("not a run" in error or "holds a run with other" in error)
    assert files(tmp_path) == before


def test_a_recipe_that_cannot_be_read_is_named(tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text("[data")
    assert demo(tmp_path, "--fresh") == 2
    assert f"{tmp_path / 'recipe.toml'}: not readable as TOML" in capsys.readouterr().err


# --- again


def test_a_second_time_nothing_is_trained_and_the_report_is_there(tmp_path, capsys):
    assert demo(tmp_path, "--steps", "2", "--json") == 0
    first, before = json.loads(capsys.readouterr().out), files(tmp_path)
    (tmp_path / "report.html").unlink()
    assert demo(tmp_path, "--steps", "2", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == first
    again = f"{program()} demo --out {tmp_path} --steps 2 " + " ".join(SMALL)
    assert captured.err == f"{tmp_path} was already trained ({again} --fresh trains again).\n"
    after = files(tmp_path)
    assert before.pop("report.html") and after.pop("report.html") and after == before


@pytest.mark.parametrize(
    "options", [["--steps", "3"], ["--steps", "2", "--seed", "2"], ["--steps", "2", *SMALL, "--set", "heads=1"]]
)
def test_other_settings_need_another_folder_or_fresh(tmp_path, capsys, options):
    assert demo(tmp_path, "--steps", "2") == 0
    before = files(tmp_path)
    assert demo(tmp_path, *options) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path}: holds a run with other settings" in error and "-o" in error and "resume" in error
    assert files(tmp_path) == before


def test_fresh_deletes_the_demos_own_files_only(tmp_path, capsys):
    assert demo(tmp_path, "--steps", "2") == 0
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints-of-mine").mkdir()
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    (tmp_path / "checkpoints").rename(elsewhere)
    (tmp_path / "checkpoints").symlink_to(elsewhere)  # checkpoints on another disk
    assert demo(tmp_path, "--fresh", "--steps", "1") == 0
    assert set(os.listdir(tmp_path)) == OWN | {"notes.txt", "checkpoints-of-mine"}
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]
    assert os.listdir(elsewhere) == ["step-00000002"]  # what a link points to is not the demo's
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]


@pytest.mark.parametrize("fails", ["source.json", "checkpoints"])
def test_a_demo_killed_while_it_claims_or_clears_a_folder_still_knows_it(tmp_path, monkeypatch, fails):
    """Were the recipe not the first file to come and the last to go, the folder would be taken for another's."""
    if fails == "checkpoints":
        assert demo(tmp_path, "--steps", "1") == 0
        monkeypatch.setattr("regard.training.run.shutil.rmtree", stop)
        assert demo(tmp_path, "--steps", "1", "--fresh") == 130
    else:
        monkeypatch.setattr(Tokenizer, "save", stop)
        assert demo(tmp_path, "--steps", "1") == 130
    monkeypatch.undo()
    monkeypatch.setattr("regard.data.pairs.examples", lambda split, count, seed: examples(split, 60, seed))
    assert demo(tmp_path, "--steps", "1", "--fresh") == 0


def stop(*arguments: object, **more: object) -> None:
    raise KeyboardInterrupt


def test_a_damaged_checkpoint_and_a_lost_log_do_not_stop_it(tmp_path, capsys):
    assert demo(tmp_path, "--steps", "2") == 0
    (tmp_path / "metrics.jsonl").unlink()
    assert demo(tmp_path, "--steps", "2") == 0  # a report without a curve
    (tmp_path / "checkpoints" / "step-00000002" / "state.json").write_text("{}")
    capsys.readouterr()
    assert demo(tmp_path, "--steps", "2", "--json") == 0
    captured = capsys.readouterr()
    assert "starting from step 0" in captured.err and json.loads(captured.out)["steps"] == 2


def test_without_a_browser_the_report_is_named(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)))
    assert demo(tmp_path, "--steps", "1", "--open") == 0
    assert opened == [(tmp_path / "report.html").resolve().as_uri()]
    assert f"no browser found; the report is {tmp_path / 'report.html'}" in capsys.readouterr().err


# --- as a process of its own


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "regard", "demo", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, running: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert running() and time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_ctrl_c_saves_says_how_to_go_on_and_the_same_command_goes_on(tmp_path):
    folder = tmp_path / "a run"
    options = ["--out", str(folder), "--steps", "60", *SMALL]
    process = start(*options)
    wait_for(folder / "metrics.jsonl", lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "stopping after this step" in error and "Traceback" not in error and "Korean" in out
    last = error.splitlines()[-1]
    step = int(re.match(r"saved at step (\d+) of 60\. To continue:  \S*regard demo ", last)[1])
    assert 10 <= step < 60 and [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{step:08d}"]
    again = shlex.split(last.partition("To continue:  ")[2])
    assert again == [program(), "demo", *options]
    process = start(*again[2:], "--json")
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert f"resuming from step {step} of 60." in error and json.loads(out)["steps"] == 60
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(10, 61, 10))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("signals", "saved"), [([signal.SIGTERM], True), ([signal.SIGINT] * 2, None)], ids=str)
def test_sigterm_saves_too_and_a_second_ctrl_c_ends_it_in_any_case(tmp_path, signals, saved):
    child = multiprocessing.get_context("fork").Process(
        target=lambda: os._exit(demo(tmp_path / "run", "--steps", "100000"))
    )
    child.start()
    wait_for(tmp_path / "run" / "metrics.jsonl", child.is_alive)
    for number in signals:
        os.kill(child.pid, number)
    child.join(30)
    assert child.exitcode == 130
    if saved:
        assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    assert not [path for path in (tmp_path / "run").rglob(".*") if path.parent.name != "data"]


@pytest.mark.slow
def test_the_whole_demo_is_right_on_99_in_100_it_has_never_seen(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "regard", "demo", "--out", str(tmp_path), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["tested"] == 2000 and figures["exact_match"] >= 0.99
    assert figures["examples"]["Friday, August 15th, 1947"] == "1947년 8월 15일 금요일"


def test_explore_opens_the_page_at_the_end(done, monkeypatch, capsys):
    pytest.importorskip("fastapi")
    opened = []
    monkeypatch.setattr("regard.commands.demo.check_page", lambda: None)
    monkeypatch.setattr("regard.commands.demo.open_page", lambda run, *rest, **options: opened.append((run, options)))
    assert demo(done[0], "--steps", "3", "--explore") == 0
    assert opened == [(str(done[0]), {"fragment": "tour=1"})] and "report:" in capsys.readouterr().out


def test_without_a_page_explore_says_so_before_it_trains(tmp_path, monkeypatch, capsys):
    pytest.importorskip("fastapi")
    monkeypatch.setattr("regard.page.PAGE", tmp_path / "page")
    assert demo(tmp_path / "run", "--explore") == 2
    assert "the page is not built" in capsys.readouterr().err and not (tmp_path / "run").exists()
