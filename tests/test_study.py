"""`regard ablate`: rows over a base, several seeds, and the same models as single runs would give."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from commanded import training
from corpus import SMALL, write_corpus
from regard.cli import main
from regard.errors import UserError
from regard.models.recipe import read_recipe, smoke_form
from regard.study.definition import Planned, Row, Study, extended, fitting, merged, read_rows, resolved, row_of
from regard.study.results import Progress, collect, done_file, progress
from regard.study.worker import is_prepared, prepare_one
from stopping import assert_same_weights, interrupt_at

ROOT = Path(__file__).parent.parent
BASE = {"data": {"train": ["a.en", "a.de"]}, "model": {"preset": "tiny"}, "train": {"steps": 10}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(write_corpus(tmp_path))
    return tmp_path


def ablate(*arguments: str) -> int:
    """A study of a model small enough for a test."""
    return main(["ablate", *arguments, "--device", "cpu"])


# --- rows


def test_rows_of_a_file_and_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "rows.toml").write_text(
        '[one]\nmodel.heads = 1\npaper = 24.9\n[half]\nmodel.dim = "x0.5"\nmodel.head_dim = "x1"\ntrain.lr = "x2"\n'
    )
    one, half = read_rows(tmp_path / "rows.toml")
    assert one == Row("one", {"model": {"heads": 1}}, paper=24.9)
    rows, notes = fitting(BASE, [one, half, row_of("rope", ["model.position=rope", "train.r_drop=5"])], lenient=False)
    assert not notes and rows[1].changes == {"model": {"dim": 64, "head_dim": 32}, "train": {"lr": 0.002}}
    assert rows[2].changes == {"model": {"position": "rope"}, "train": {"r_drop": 5}}
    assert merged(BASE, rows[0].changes)["model"] == {"preset": "tiny", "heads": 1}


def test_a_row_that_changes_nothing_is_left_out() -> None:
    rows = [
        row_of("same", ["model.heads=4"]),
        row_of("derived", ["model.head_dim=32"]),
        row_of("two", ["model.heads=2"]),
    ]
    kept, notes = fitting(BASE, [*rows, row_of("again", ["model.heads=2"])], lenient=False)
    assert [row.name for row in kept] == ["two"]
    assert notes == [
        "row same is left out: the same as the base", "row derived is left out: the same as the base",
        "row again is left out: the same as row two",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("base", ["model.heads=1"], "no name for a row"),
        ("a/b", ["model.heads=1"], "no name for a row"),
        ("a", ["model.heads=3"], r"row a: model.heads = 3 does not divide dim"),
        ("a", ["model.haeds=3"], "haeds: unknown setting"),
        ("a", ["model.kv_heads=none"], "cannot remove a setting"),
        ("a", ["heads=1"], "^--set-row a heads=1: name its table, such as model.heads=1"),
        ("a", [], "it changes nothing"),
        ("a", ["model.layers=x0.3"], "not a whole number"),
        ("a", ["model.position=x2"], "the base has no number"),
    ],
)
def test_rows_that_cannot_be(name: str, changes: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        fitting(BASE, [row_of(name, changes)], lenient=False)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "--rows rows.toml: has no rows; add a table"),
        ("[a]\nheads = 1", r"\[a\] heads = 1: name its table, such as model.heads"),
        ('[a]\nmodel.heads = 1\npaper = "about 25"', r"\[a\] paper = 'about 25': must be a number"),
        ("[a]\nmodel.heads = 1\nseeds = 3", r"\[a\] seeds = 3: must be a list of whole numbers, such as \[4, 5\]"),
        ('[a]\nmodel.heads = 1\nseeds = ["4"]', r"\[a\] seeds = \['4'\]: must be a list"),
    ],
)
def test_files_of_rows_that_cannot_be(
    content: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.toml").write_text(content)
    with pytest.raises(UserError, match=words):
        read_rows("rows.toml")


def test_table3_has_the_rows_of_the_paper() -> None:
    """Vaswani et al. 2017, Table 3: BLEU on the development set."""
    published = {
        "heads-1": 24.9, "heads-4": 25.5, "heads-16": 25.8, "heads-32": 25.4, "key-size-quarter": 25.1,
        "key-size-half": 25.4, "layers-2": 23.7, "layers-4": 25.3, "layers-8": 25.5, "d_model-half": 24.5,
        "d_model-double": 26.0, "d_ff-half": 25.4, "d_ff-double": 26.2, "dropout-0": 24.6, "dropout-0.2": 25.5,
        "label-smoothing-0": 25.3, "label-smoothing-0.2": 25.7, "position-learned": 25.7,
    }  # fmt: skip
    base = {"data": {"train": ["a.en", "a.de"]}, "model": {"preset": "base"}}
    rows, notes = fitting(base, read_rows("table3"), lenient=True)
    assert {row.name: row.paper for row in rows if row.paper is not None} == published
    assert sorted(note.split()[1] for note in notes) == [
        "dropout-0.1", "heads-8", "layers-6", "position-sinusoidal", "post-norm"
    ]  # fmt: skip
    sizes = {row.name: resolved(merged(base, row.changes))["model"] for row in rows}
    fields = "layers", "dim", "ff_dim", "heads", "key_dim", "val_dim"
    columns = {name: tuple(model[field] for field in fields) for name, model in sizes.items()}
    assert columns["heads-1"] == (6, 512, 2048, 1, 512, 512) and columns["heads-32"] == (6, 512, 2048, 32, 16, 16)
    assert columns["key-size-quarter"] == (6, 512, 2048, 8, 16, 64)
    assert columns["d_model-half"] == (6, 256, 2048, 8, 32, 32)
    assert columns["d_model-double"] == (6, 1024, 2048, 8, 128, 128)
    assert columns["single-head"] == (6, 512, 2048, 1, 64, 64)


@pytest.mark.parametrize("rows", ["listops", "nsmc-long", "long-text"])
def test_rows_of_mixers_are_small_in_the_small_form_of_a_recipe(rows: str) -> None:
    recipe = ROOT / "recipes" / f"{'shakespeare-16k' if rows == 'long-text' else rows}.toml"
    base = smoke_form(read_recipe(recipe), recipe)
    kept, _ = fitting(base, read_rows(ROOT / "recipes" / "rows" / f"{rows}.toml"), lenient=False)
    for row in kept:
        own, known = (resolved(tables) for tables in (merged(base, row.changes), base))
        assert own["train"]["steps"] <= 4 * known["train"]["steps"], row.name
        assert own["model"]["dim"] * own["model"]["layers"] <= 4 * known["model"]["dim"] * known["model"]["layers"]


@pytest.mark.parametrize("recipe", ["multi30k-en-de", "multi30k-en-de-fast", "multi30k-en-de-best", "tatoeba-en-ko"])
def test_table3_fits_the_translation_recipes(recipe: str) -> None:
    base = {name: table for name, table in read_recipe(ROOT / "recipes" / f"{recipe}.toml").items() if name != "smoke"}
    rows, notes = fitting(base, read_rows("table3"), lenient=True)
    assert len(rows) >= 30 and all("the same as" in note for note in notes), notes


# --- training


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two rows, one that diverges, and two seeds; and the runs of one row by `regard train`."""
    folder = write_corpus(tmp_path_factory.mktemp("study"))
    here = os.getcwd()
    os.chdir(folder)
    try:
        rows = ["--set-row", "one", "model.heads=1", "--set-row", "wild", "train.lr=1e30", "train.warmup=0"]
        assert ablate("mine.toml", *SMALL, *rows, "--seeds", "2", "-o", "study") == 3
        for seed in ("1", "2"):
            alone = ["--set", "model.heads=1", "--set", f"train.seed={seed}", "-o", f"alone-{seed}"]
            assert training(SMALL)("mine.toml", *alone) == 0
    finally:
        os.chdir(here)
    return folder


def test_runs_of_a_study_are_the_runs_of_train(trained: Path) -> None:
    for seed in (1, 2):
        own = trained / "study" / "runs" / "one" / str(seed)
        assert_same_weights(own, trained / f"alone-{seed}")
        assert (own / "scores.json").read_text() == (trained / f"alone-{seed}" / "scores.json").read_text()
        assert (own / "report.html").exists() and not (own / "checkpoints").exists()


def test_a_diverged_run_is_in_the_table_with_its_reason(trained: Path) -> None:
    table = collect(Study.read(trained / "study"))
    base, one, wild = table.rows
    assert [base.name, one.name, wild.name] == ["base", "one", "wild"]
    assert base.scores.keys() == one.scores.keys() == {1, 2} and not wild.scores
    assert wild.failed.keys() == {1, 2} and "training has diverged" in wild.failed[1]
    assert one.changes == {"model.heads": 1} and one.difference is not None and one.difference.n == 2
    assert one.parameters == base.parameters and (one.flops or 0) > 0
    for name in ("table.md", "table.csv", "table.json", "report.html"):
        assert (trained / "study" / name).stat().st_size > 0


def test_data_and_tokenizers_are_made_once(trained: Path) -> None:
    log = (trained / "study" / "logs" / "one@2.log").read_text()
    first, second = (trained / "study" / "runs" / "one" / seed for seed in "12")
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()
    assert (first / "data" / "train" / "index.json").read_bytes() == (
        second / "data" / "train" / "index.json"
    ).read_bytes()
    assert "parameters; training data" in log


def test_rows_and_seeds_are_added_and_nothing_is_trained_twice(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    before = {path: path.stat().st_mtime_ns for path in (trained / "study" / "runs").glob("*/*/model.safetensors")}
    assert ablate("study", "--set-row", "two", "model.layers=2", "--seeds", "3", "--only", "two") == 0
    runs = [
        line.split("training ")[1].partition(";")[0]
        for line in capsys.readouterr().err.splitlines()
        if "] training" in line
    ]
    assert runs == ["two, seed 1", "two, seed 2", "base, seed 3", "two, seed 3"]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert Study.read("study").seeds_of("one") == [1, 2] and Study.read("study").seeds_of("base") == [1, 2, 3]
    assert ablate("study", "--json") == 3
    assert {row["row"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"base", "one", "two", "wild"}


def test_another_base_in_the_folder_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    assert ablate("mine.toml", *SMALL, "--set", "model.dim=32", "-o", "study") == 2
    assert "another base (model.dim = 16 there, 32 here)" in capsys.readouterr().err
    assert ablate("study", "--set-row", "one", "model.heads=2", "model.layers=2") == 2
    assert "row one: the study has it with other changes" in capsys.readouterr().err
    assert ablate("study", "--set", "model.dim=32") == 2
    assert ablate("mine.toml", "-o", "alone-1") == 2
    assert "is not empty and not a study" in capsys.readouterr().err
    assert ablate("nothing") == 2 and ablate() == 2


def test_an_unknown_metric_or_test_set_is_not_saved(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    before = (trained / "study" / "study.toml").read_bytes()
    assert ablate("study", "--metric", "blue") == 2 and ablate("study", "--test", "tset") == 2
    assert "metric = 'blue'" in capsys.readouterr().err
    assert (trained / "study" / "study.toml").read_bytes() == before


def test_names_without_a_font_are_found_before_training(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.explore.svg.characters_without_font", lambda text, fonts: [*text][-1:])
    row = ["--set-row", "머리", "model.heads=1", "--seeds", "1", "-o", "study"]
    assert ablate("mine.toml", *SMALL, *row, "--png") == 2
    error = capsys.readouterr().err
    assert "no installed font has 리 (U+B9AC)" in error and "or remove --png" in error and "--font" not in error
    assert not (here / "study").exists()


def test_a_folder_that_is_no_study(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate("studies/typo") == 2
    assert "studies/typo: no such file or folder; name a recipe, or the folder of a study" in capsys.readouterr().err
    Path("file").touch()
    assert ablate("mine.toml", *SMALL, "-o", "file") == 2
    assert "file: is not empty and not a study; name another folder" in capsys.readouterr().err


def test_rows_and_seeds_that_two_processes_add_at_once_are_both_kept(tmp_path: Path) -> None:
    study = Study(tmp_path, "two", BASE, (row_of("one", ["model.heads=1"]),), (1,))
    study.save()
    first = extended(study, [row_of("two", ["model.heads=2"])], [2, 3], ["one"])
    second = extended(study, [row_of("rope", ["model.position=rope"])], [4])
    first.save()
    second.save()
    found = Study.read(tmp_path)
    assert [(row.name, row.seeds) for row in found.rows] == [("one", (2, 3)), ("two", ()), ("rope", ())]
    assert found.seeds == (1, 4)


def test_interrupted_between_two_runs_it_says_so(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.commands.ablate.train", stop)
    assert ablate("mine.toml", *SMALL, "--set-row", "one", "model.heads=1", "-o", "study") == 130
    assert "\ninterrupted. To continue:" in capsys.readouterr().err


def test_interrupted_and_resumed_it_is_the_same(
    here: Path, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3)
        assert ablate("mine.toml", *SMALL, "--set-row", "one", "model.heads=1", "--seeds", "1", "-o", "study") == 130
    assert "To continue:" in capsys.readouterr().err
    assert (here / "study" / "runs" / "base" / "1" / "checkpoints").exists()
    assert len(progress(Study.read("study")).pending) == 2
    assert ablate("study") == 0
    assert "resuming from step" in (here / "study" / "logs" / "base@1.log").read_text()
    assert_same_weights(here / "study" / "runs" / "one" / "1", trained / "alone-1")


def test_one_run_is_prepared_before_several_processes_start(here: Path) -> None:
    row = ["--set-row", "one", "model.heads=1", "--slurm", "job.sh"]
    assert ablate("mine.toml", *SMALL, *row, "--seeds", "2", "-o", "study") == 0
    prepare_one(here / "study", ())
    study = Study.read(here / "study")
    prepared = [run for run in study.runs() if is_prepared(study, run)]
    assert len(prepared) == 1 and not progress(study).running
    (own,) = prepared
    data = study.run_folder(own) / "data" / "train" / "index.json"
    made = data.stat().st_mtime_ns
    prepare_one(here / "study", ())
    assert ablate("study", "--seeds", "2") == 0
    copies = [study.run_folder(run) / "data" / "train" / "index.json" for run in study.runs()]
    assert [copy.stat().st_mtime_ns for copy in copies] == [made] * len(copies)  # copies keep the time


def test_the_time_of_a_run_includes_what_was_before_an_interruption(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.study.finished.FinishedRun.seconds", 1000.0)  # of metrics.jsonl, over all its sessions
    assert ablate("mine.toml", *SMALL, "--set-row", "one", "model.heads=1", "--seeds", "1", "-o", "study") == 0
    assert {*progress(Study.read("study")).seconds.values()} == {1000.0}


@pytest.mark.slow
def test_two_jobs_give_the_same_models(here: Path, trained: Path) -> None:
    row = ["--set-row", "one", "model.heads=1"]
    assert ablate("mine.toml", *SMALL, *row, "--seeds", "2", "--jobs", "2", "-o", "study") == 0
    for seed in ("1", "2"):
        own = here / "study" / "runs" / "one" / seed
        assert (own / "scores.json").read_text() == (trained / f"alone-{seed}" / "scores.json").read_text()


def test_a_dry_run_leaves_nothing_and_a_job_script_can_be_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.training.progress.MEASURED", (0.0, 2))
    rows = ["--set-row", "one", "model.heads=1", "--set-row", "wide", "model.ff_dim=64", "--seeds", "2"]
    assert ablate("mine.toml", *SMALL, *rows, "--dry-run", "--json", "-o", "study") == 0
    content = json.loads(capsys.readouterr().out)
    base, one, wide = content["rows"]
    assert content["runs"] == 6 and base["parameters"] == one["parameters"] < wide["parameters"]
    assert base["flops"] == one["flops"] < wide["flops"] and content["seconds"] > 0
    assert not (here / "study").exists()
    assert main(["ablate", "mine.toml", *SMALL, *rows, "--slurm", "job.sh", "--jobs", "4", "-o", "study"]) == 0
    script = (here / "job.sh").read_text()
    assert "#SBATCH --array=0-3\n" in script and script.startswith("#!/bin/bash\n")
    assert subprocess.run(["bash", "-n", "job.sh"]).returncode == 0
    command = script.rstrip().splitlines()[-1].removeprefix("exec srun ").split()
    assert command[-3:] == ["ablate", str(here / "study"), "--no-wait"]
    assert len([*Study.read("study").runs()]) == 6 and "--gres=gpu:1\n" in script
    assert ablate("study", "--only", "wide", "--keep-checkpoints", "--slurm", "cpu.sh") == 0  # with --device cpu
    script = (here / "cpu.sh").read_text()
    assert f"#SBATCH --output={here}/study/logs/slurm-%A_%a.log\n" in script
    assert script.endswith("--only wide --keep-checkpoints --device cpu --no-wait\n") and "gpu" not in script


def test_a_full_disk_is_no_failure_of_a_row(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study ends, and continues when there is space, without --retry."""

    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    row = ["--set-row", "one", "model.heads=1", "--seeds", "1", "-o", "study"]
    with monkeypatch.context() as patch:
        patch.setattr("regard.models.folder.save_file", full)
        assert ablate("mine.toml", *SMALL, *row) == 2
    assert "No space left on device" in capsys.readouterr().err
    state = progress(Study.read("study"))
    assert not state.failed and len(state.pending) == 2
    assert ablate("study") == 0


def test_a_job_script_quotes_names_with_spaces(here: Path) -> None:
    Path("my recipe.toml").write_bytes(Path("mine.toml").read_bytes())
    row = ["--set-row", "one", "model.heads=1", "--seeds", "1"]
    assert ablate("my recipe.toml", *SMALL, *row, "--slurm", "job.sh", "-o", "my study") == 0
    script = (here / "job.sh").read_text()
    assert "#SBATCH --job-name='regard-my recipe'\n" in script
    assert f"#SBATCH --output='{here}/my study/logs/slurm-%A_%a.log'\n" in script


def test_the_time_left_counts_what_is_done(here: Path) -> None:
    """Of two runs side by side that take 10 s each as the others of their row did, one is half done: 7.5 s."""
    done = {Planned("base", 1): 10.0, Planned("one", 1): 10.0, Planned("two", 1): 100.0}
    running = {Planned("base", 2): (50, 100), Planned("one", 2): (0, 100)}
    state = Progress(tuple(done), (), tuple(running), running, done)
    assert state.left == pytest.approx(7.5) and state.total == 5
    assert Progress((), (), tuple(running), running, {}).left is None


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(here: Path) -> None:
    command = [sys.executable, "-m", "regard", "ablate", "mine.toml", *SMALL, "--set", "train.steps=100000", "-o", "s"]
    command += ["--set-row", "one", "model.heads=1", "--seeds", "1", "--jobs", "2", "--device", "cpu"]
    parent = subprocess.Popen(command)
    while not (here / "s" / "study.toml").exists() or len(claims_of(Study.read("s"))) < 2:
        time.sleep(0.1)
    workers = [json.loads(path.read_text())["process"] for path in claims_of(Study.read("s"))]
    while len([*(here / "s" / "runs").glob("*/1/metrics.jsonl")]) < 2:  # until both train
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{number}").exists() for number in workers) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{number}").exists() for number in workers)
    assert all((here / "s" / "runs" / row / "1" / "checkpoints").exists() for row in ("base", "one"))
    assert not progress(Study.read("s")).running


@pytest.mark.slow
def test_three_processes_one_killed(here: Path) -> None:
    """The killed one's run is taken over from its checkpoint; every run is done once."""
    rows = ["--set-row", "one", "model.heads=1", "--set-row", "two", "model.layers=2"]
    settings = [*SMALL, "--set", "train.steps=200"]
    assert ablate("mine.toml", *settings, *rows, "--seeds", "2", "--slurm", "job.sh", "-o", "study") == 0
    command = [sys.executable, "-m", "regard", "ablate", "study", "--device", "cpu"]
    workers = [subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}) for _ in range(3)]
    study = Study.read("study")
    while not any(json.loads(path.read_text())["process"] == workers[0].pid for path in claims_of(study)):
        time.sleep(0.05)
    time.sleep(1)
    workers[0].send_signal(signal.SIGKILL)
    workers[0].wait()
    assert [worker.wait(300) for worker in workers[1:]] == [0, 0]
    assert not progress(study).pending and all(done_file(study, run).exists() for run in study.runs())
    ends = [(study.folder / "logs" / f"{run.name}.log").read_text().count("writing report") for run in study.runs()]
    assert max(ends) <= 1
    assert sum(path.suffix == ".1" for path in claims_of(study)) == 1


def claims_of(study: Study) -> list[Path]:
    folder = study.folder / "claims"
    return [path for path in folder.glob("*@*") if path.suffix in (".0", ".1")] if folder.exists() else []


def test_the_smoke_study_with_few_steps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--set", "train.steps=12", "--set", "data.generator.train=300", "--set", "data.generator.test=20"]
    assert ablate("--smoke", *few, "--seeds", "1", "-o", "smoke") == 0
    assert "[4 of 4]" in capsys.readouterr().err
    assert [*Study.read("smoke").runs()][:2] == [Planned("base", 1), Planned("heads-1", 1)]


@pytest.mark.slow
def test_the_smoke_study(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert ablate("--smoke", "--jobs", "2", "-o", "smoke") == 0
    assert time.monotonic() - began < 180
    rows = {row.name: row for row in collect(Study.read("smoke")).rows}
    assert all(len(row.scores) == 3 for row in rows.values())
    assert (rows["no-positions"].mean or 0) < (rows["base"].mean or 0)
