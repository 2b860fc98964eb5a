"""Checkpoints: whole or absent, and whatever is damaged is recognised, named and skipped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regard.errors import UserError
from regard.models.transformer import build
from regard.training import checkpoint
from regard.training.history import read_metrics
from reversal import MODEL, TRAIN, make_trainer, train

FILES = ["model.safetensors", "optimizer.safetensors", "state.json"]
CONFIG = replace(TRAIN, steps=14)  # checkpoints at 7 and 14


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    train(folder, CONFIG)
    return folder


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    """A run with checkpoints at steps 7 and 14, to be damaged."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def place(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- what is in one


def test_it_holds_weights_moments_generators_and_the_place_in_the_data(folder):
    assert sorted(path.name for path in place(folder, 14).iterdir()) == FILES
    trainer = make_trainer(folder, CONFIG)
    assert trainer.resume() and trainer.step == 14
    weights, moments = (load_file(place(folder, 14) / name) for name in FILES[:2])
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(weights[name], parameter)
        state = trainer.optimizer.state[parameter]
        assert state["step"].item() == 14
        assert all(torch.equal(moments[f"{name}/{key}"], state[key]) for key in ("exp_avg", "exp_avg_sq"))
    assert torch.equal(moments["rng.cpu"], torch.get_rng_state())
    assert trainer.batches.position == json.loads((place(folder, 14) / "state.json").read_text())["data"]


def test_the_newest_are_kept_and_nothing_else(tmp_path):
    trainer = train(tmp_path, replace(TRAIN, save_every=2, keep=3))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"step-{step:08d}" for step in (20, 22, 23)]
    trainer.save()  # the same step again replaces it
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"step-{step:08d}" for step in (20, 22, 23)]


def test_steps_are_ordered_as_numbers_and_other_folders_are_left_alone(tmp_path):
    trainer = make_trainer(tmp_path)
    for name in ("step-00000009-copy", "step-7", "step-best", "notes"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for step in (99_999_998, 99_999_999, 100_000_000):
        trainer.step = step
        trainer.save()
    found, passed = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None and found.step == 100_000_000 and not passed
    kept = ["notes", "step-00000009-copy", "step-100000000", "step-7", "step-99999999", "step-best"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == kept


@pytest.mark.parametrize("make", [False, True], ids=["no folder", "an empty folder"])
def test_no_checkpoints_is_no_error(tmp_path, capsys, make):
    if make:
        (tmp_path / "checkpoints").mkdir()
    trainer = make_trainer(tmp_path)
    assert not trainer.resume() and trainer.step == 0
    assert capsys.readouterr().err == ""


# --- damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def turn_into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {"truncated": truncate, "empty": empty, "one bit": flip, "missing": Path.unlink, "folder": turn_into_a_folder}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(finished, folder, capsys, name, damage):
    DAMAGES[damage](place(folder, 14) / name)
    trainer = make_trainer(folder, CONFIG)
    assert trainer.resume() and trainer.step == 7
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"warning: {place(folder, 14)}: skipped: ") and name in lines[0]
    assert trainer.run()
    for file in FILES[:2]:
        assert (place(folder, 14) / file).read_bytes() == (place(finished, 14) / file).read_bytes()
    assert [line["step"] for line in read_metrics(folder)] == [5, 10, 14]


@pytest.mark.parametrize(
    "text",
    [
        *("", "not JSON", "[]", "5", "null", '"step"', "{}", "\x00", "[" * 100_000, "1" * 10_000),
        *('{"sha256": 3}', '{"step": 14, "sha256": {}}', '{"step": 14, "files": {}, "sha256": "0"}'),
    ],
)
def test_garbage_for_a_state_is_passed_over(folder, capsys, text):
    (place(folder, 14) / "state.json").write_text(text)
    assert make_trainer(folder, CONFIG).resume()
    assert "state.json is" in capsys.readouterr().err
    (place(folder, 14) / "state.json").write_bytes(b"\xff\xfe{}")
    assert make_trainer(folder, CONFIG).resume()


def test_every_value_of_the_state_is_guarded(folder):
    """A wrong step or place in the data would go on quietly, and wrongly."""
    path = place(folder, 14) / "state.json"
    whole = json.loads(path.read_text())
    for key, value in {"step": 13, "seconds": 0.0, "data": {"epoch": 0, "index": 0}, "line": {}}.items():
        path.write_text(json.dumps({**whole, key: value}))
        found, passed = checkpoint.newest(folder / "checkpoints")
        assert found is not None and found.step == 7 and len(passed) == 1, key
    path.write_text(json.dumps(whole))  # written in another way, the same values
    found, passed = checkpoint.newest(folder / "checkpoints")
    assert found is not None and found.step == 14 and not passed


def test_an_empty_checkpoint_folder_is_passed_over(folder, capsys):
    place(folder, 21).mkdir()
    trainer = make_trainer(folder, CONFIG)
    assert trainer.resume() and trainer.step == 14
    assert f"{place(folder, 21)}: skipped: state.json" in capsys.readouterr().err


def test_all_damaged_starts_from_zero_and_says_so(finished, folder, capsys):
    for step in (7, 14):
        flip(place(folder, step) / "model.safetensors")
    trainer = make_trainer(folder, CONFIG)
    assert not trainer.resume() and trainer.step == 0 and read_metrics(folder) == []
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[-1] == "warning: no checkpoint is complete: starting from step 0"
    assert trainer.run()
    assert contents(folder).keys() == contents(finished).keys()
    for file in FILES[:2]:
        assert (place(folder, 14) / file).read_bytes() == (place(finished, 14) / file).read_bytes()


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_later_one_never_takes_the_place_of_a_good_one(folder, keep):
    """Else, resuming from step 7 with 14 damaged, the checkpoint just written would be the oldest and go."""
    flip(place(folder, 14) / "model.safetensors")
    trainer = make_trainer(folder, replace(CONFIG, keep=keep))
    trainer.resume()
    for step in (8, 9, 10):
        trainer.step = step
        trainer.save()
        found, passed = checkpoint.newest(folder / "checkpoints")
        assert found is not None and found.step == step and len(passed) == 1


def test_left_over_temporary_folders_are_not_taken_for_checkpoints_and_go(folder):
    for step in (14, 20):
        hidden = folder / "checkpoints" / f".step-{step:08d}"
        shutil.copytree(place(folder, 14), hidden)
    found, passed = checkpoint.newest(folder / "checkpoints")
    assert found is not None and found.step == 14 and not passed
    trainer = make_trainer(folder, CONFIG)
    trainer.resume()
    trainer.save()
    assert sorted(os.listdir(folder / "checkpoints")) == ["step-00000007", "step-00000014"]


def test_a_checkpoint_of_another_model_is_refused_with_its_name(folder):
    trainer = make_trainer(folder, CONFIG, replace(MODEL, ff_dim=64))
    with pytest.raises(UserError, match=rf"{place(folder, 14)}.*shape"):
        trainer.resume()


# --- a machine that does not let it write


def break_call(monkeypatch, name: str, at: int, number: int = errno.ENOSPC) -> None:
    """The `at`-th call of os.NAME from now on fails."""
    calls, real = 0, getattr(os, name)

    def fail(*arguments, **more):
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **more)

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize(("call", "at"), [("fsync", n) for n in (1, 2, 3, 4)] + [("replace", n) for n in (1, 2, 3, 4)])
def test_a_full_disk_leaves_the_last_checkpoint_and_no_half_one(folder, monkeypatch, call, at):
    before = contents(folder)
    trainer = make_trainer(folder, CONFIG)
    trainer.resume()
    trainer.step = 21
    break_call(monkeypatch, call, at)
    with pytest.raises(UserError, match=rf"{place(folder, 21)}: cannot be written \(.*No space left.*Free some space"):
        trainer.save()
    monkeypatch.undo()
    assert contents(folder) == before and not place(folder, 21).exists()
    trainer.save()
    assert checkpoint.newest(folder / "checkpoints")[0].step == 21


def test_an_interrupt_while_writing_leaves_no_half_one(folder, monkeypatch):
    trainer = make_trainer(folder, CONFIG)
    trainer.resume()
    trainer.step, before = 21, contents(folder)

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_atomically", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.save()
    assert contents(folder) == before


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=rf"{tmp_path / 'metrics.jsonl'}: cannot be written \(Is a directory\)"):
        make_trainer(tmp_path).run()


def test_checkpoints_being_a_file_is_said(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    trainer = make_trainer(tmp_path)
    assert not trainer.resume()
    with pytest.raises(UserError, match="checkpoints: is a file"):
        trainer.save()
    assert (tmp_path / "checkpoints").read_text() == "mine"


LIMITED = """
import resource, sys
from dataclasses import replace
from pathlib import Path
from regard.cli import report
from reversal import TRAIN, train
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    train(Path(sys.argv[1]), replace(TRAIN, steps=21))
except Exception as error:
    sys.exit(report(error, debug=False))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the size of files")
def test_writing_that_really_fails_half_way(folder):
    """The operating system cuts every file at 20 kB: the weights fit, the optimizer's moments do not."""
    size = (place(folder, 14) / "model.safetensors").stat().st_size
    before = contents(folder)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}  # writes too
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder), str(size + 100)],
        capture_output=True, text=True, cwd=Path(__file__).parent, timeout=60, env=environment,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"error: {place(folder, 21)}: cannot be written (") and "File too large" in error
    after = contents(folder)
    assert after.pop("metrics.jsonl").startswith(before.pop("metrics.jsonl"))
    assert after == before


def test_generators_of_a_gpu_are_not_needed_where_there_is_none(folder, monkeypatch):
    """A checkpoint written on a GPU goes on without one."""
    path = place(folder, 14)
    state = json.loads((path / "state.json").read_text())
    tensors = load_file(path / "optimizer.safetensors")
    real = checkpoint._optimizer_tensors
    monkeypatch.setattr(checkpoint, "_optimizer_tensors", lambda *a: {**real(*a), "rng.cuda": tensors["rng.cpu"]})
    trainer = make_trainer(folder, CONFIG)
    trainer.resume()
    trainer.save()
    assert "rng.cuda" in load_file(path / "optimizer.safetensors") and state["step"] == 14
    assert make_trainer(folder, CONFIG).resume()


@pytest.mark.cuda
def test_resume_on_a_gpu(tmp_path):
    model = build(MODEL).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(4, 12, (4, 6), device="cuda")

    def update() -> None:
        model(ids, ids).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    checkpoint.write(tmp_path, {"step": 1}, model, optimizer, keep=1)
    update()
    expected = [parameter.clone() for parameter in model.parameters()]
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None
    found.restore(model, optimizer)
    update()
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
