"""Several processes: the same curve as one, checkpoints that fit any number, and an end that all share.

Two processes on this machine, joined by gloo; see workers.py for what they do.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from corpus import SMALL, write_corpus
from regard.cli import main
from regard.errors import UserError
from regard.models.folder import WEIGHTS, read_weights
from regard.models.transformer import build
from regard.nn.mask import Positions, causal
from regard.nn.parts import Part
from regard.training import checkpoint, distributed
from regard.training.checkpoint import average
from regard.training.history import read_metrics
from regard.training.objective import translation
from regard.training.parallel import Engine, split
from reversal import reversal_pairs
from workers import BASE, CASES, ENGINES, LANGUAGE, SPLIT, STACKS, STILL, go_on, make, make_text, stack_outputs

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


def torchrun(*arguments: object, restarts: int = 0, cwd: Path = HERE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), *map(str, arguments)]
    paths = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


def play(folder: Path, *scenes: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    return torchrun("workers.py", ",".join(scenes), folder, restarts=restarts)


def alone(config):
    """The same batch for one process."""
    return replace(config, gradient_accumulation=2 * config.gradient_accumulation)


@pytest.fixture(scope="module")
def folder(once) -> Path:
    """All scenes that end well; what one process does, it does here."""

    def fill(folder: Path) -> None:
        for name, config in CASES.items():
            make(folder / f"{name}-one", alone(config)).run()
        for name in SPLIT:
            make_text(folder / f"text-{name}-one", name, "ddp").run()
        done = play(folder, "curves", "resumed", "stopped", "diverged", "full_disk", "contexts")
        assert done.returncode == 0, done.stderr

    return once("distributed", fill)


def curve(folder: Path) -> torch.Tensor:
    """step, loss, validation loss: of each line the one it has."""
    return torch.tensor([[line["step"], line.get("loss", line.get("valid_loss"))] for line in read_metrics(folder)])


def assert_same_run(one: Path, other: Path) -> None:
    """Equal but for the order in which numbers were added."""
    torch.testing.assert_close(curve(other), curve(one), rtol=1e-4, atol=1e-5)
    assert_close(read_weights(one / WEIGHTS), read_weights(other / WEIGHTS))


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4, msg=name)


# --- the gradient of the whole batch


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_learn_as_one_does_from_the_same_batch(folder, name, engine):
    assert len(curve(folder / f"{name}-one")) == 14  # twelve lines and two evaluations
    assert_same_run(folder / f"{name}-one", folder / f"{name}-{engine}")
    one, two = (checkpoint.newest(folder / f"{name}-{kind}" / "checkpoints")[0] for kind in ("one", engine))
    assert one.state["data"] == two.state["data"] and one.state["batches"] == two.state["batches"]


def test_dropout_differs_between_ranks_and_both_generators_are_kept(folder):
    tensors = load_file(folder / "dropout-ddp" / "checkpoints" / "step-00000012" / "optimizer.safetensors")
    assert not torch.equal(tensors["rng.cpu"], tensors["rng.cpu.1"])
    torch.testing.assert_close(curve(folder / "dropout-ddp"), curve(folder / "dropout-fsdp"), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(curve(folder / "dropout-ddp"), curve(folder / "plain-ddp"), rtol=1e-3)


# --- sequences that are divided


@pytest.mark.parametrize("name", SPLIT)
def test_two_processes_with_a_part_of_every_sequence_learn_as_one(folder, name):
    one, two = folder / f"text-{name}-one", folder / f"text-{name}-context"
    assert len(curve(one)) == 14
    torch.testing.assert_close(curve(two), curve(one), rtol=1e-5, atol=1e-5)
    assert_same_run(one, two)
    states = [checkpoint.newest(place / "checkpoints")[0].state for place in (one, two)]
    assert states[0]["data"] == states[1]["data"] and states[0]["batches"] == states[1]["batches"]


def test_a_checkpoint_of_divided_sequences_is_an_ordinary_one(folder, tmp_path):
    place = half_way(folder / "text-window-context", tmp_path / "run")
    trainer = make_text(place, "window", "ddp")
    assert trainer.resume() and trainer.step == 6 and trainer.run()
    assert_same_run(folder / "text-window-one", place)


@pytest.mark.parametrize("name", STACKS)
def test_a_divided_sequence_has_the_outputs_and_gradients_of_a_whole_one(folder, name):
    whole, divided = stack_outputs(name, None), load_file(folder / f"{name}.safetensors")
    assert whole.keys() == divided.keys() and len(whole) > 10
    for key, expected in whole.items():
        torch.testing.assert_close(divided[key], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item(), msg=key)


def test_each_process_has_a_piece_from_either_end():
    tokens = torch.arange(24).view(1, 2, 12)
    parts = [Part(rank, 3).take(tokens, 2)[0, 0].tolist() for rank in range(3)]
    assert parts == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    with pytest.raises(UserError, match=r"train.pack = 12: 4 processes .* a multiple of 8, such as 16"):
        Part(0, 4).take(tokens, 2)
    with pytest.raises(UserError, match="mask = causal: is for whole sequences"):
        Part(0, 3).keys(Positions.of(4, torch.device("cpu")), causal)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixer": "full, linear"}, "mixer = 'linear' has no keys"),
        ({"mixer": "gated-linear"}, "mixer = 'gated-linear'.*parallel = 'ddp'"),
        ({"experts": 2}, "experts = 2 are balanced over all tokens"),
        ({"architecture": "encoder-decoder"}, "cross-attention is not divided"),
        ({"architecture": "encoder", "window": 4, "global_tokens": 1, "global_projections": True}, "global tokens on"),
    ],
    ids=str,
)
def test_what_needs_whole_sequences_is_refused_by_name(fields, words):
    model = build(replace(LANGUAGE, **fields))
    with pytest.raises(UserError, match=f"train.parallel = 'context': .*{words}"):
        split(model, Part(0, 2))
    with pytest.raises(UserError, match="only rows of text are split"):
        engine = Engine(model, translation)
        engine.part = Part(0, 2)
        engine.take(reversal_pairs().batch(torch.arange(2)))


def test_a_recipe_that_cannot_be_divided_is_refused_before_its_data_is_read(tmp_path, monkeypatch, capsys):
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "mine.toml", *SMALL, "--set", "train.parallel=context", "-o", "run"]) == 2
    assert "train.parallel = 'context': translation does not divide sequences" in capsys.readouterr().err
    Path("text.toml").write_text(
        'task = "language-modeling"\n[data]\ntrain = ["none.txt"]\n[model]\nmixer = "performer"\n'
        '[train]\nparallel = "context"\n'
    )
    assert main(["train", "text.toml", "-o", "run"]) == 2
    assert "mixer = 'performer' has no keys" in capsys.readouterr().err and not Path("run").exists()


# --- checkpoints


def test_each_process_writes_its_part_and_no_pickle(folder):
    parts = sorted(path.name for path in (folder / "plain-fsdp" / "checkpoints" / "step-00000012").iterdir())
    assert parts == [*(f"shard-0000{i}-model-00001-of-00001.safetensors" for i in (1, 2)), "state.json"]
    whole = read_weights(folder / "plain-one" / "checkpoints" / "step-00000012" / "model.safetensors")
    halves = [load_file(folder / "plain-fsdp" / "checkpoints" / "step-00000012" / name) for name in parts[:2]]
    for name, weight in whole.items():
        pieces = [half[name] for half in halves if name in half]
        assert len(pieces) == 2 and all(len(piece) < len(weight) for piece in pieces), name
        torch.testing.assert_close(torch.cat(pieces), weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("source", ["one", *ENGINES])
def test_a_checkpoint_goes_on_on_two_processes(folder, source, engine):
    assert_same_run(folder / "everything-one", folder / f"{source}-to-{engine}")


def half_way(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    shutil.rmtree(target / "checkpoints" / "step-00000012")
    return target


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_goes_on_on_one_process(folder, tmp_path, engine):
    place = half_way(folder / f"everything-{engine}", tmp_path / "run")
    trainer = make(place, alone(CASES["everything"]))
    assert trainer.resume() and trainer.step == 6 and trainer.run()
    assert_same_run(folder / "everything-one", place)


def test_another_batch_is_said(folder, tmp_path, capsys):
    place = half_way(folder / "plain-ddp", tmp_path / "run")
    assert make(place, CASES["plain"]).resume()
    assert "a step now uses 1 batches, not 2" in capsys.readouterr().err


def test_the_mean_of_checkpoints_of_either_kind(folder):
    assert_close(average(folder / "plain-fsdp", 2), average(folder / "plain-one", 2))
    assert_close(average(folder / "plain-ddp", 2), average(folder / "plain-one", 2))


def damage(path: Path, how: str) -> None:
    match how:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "missing":
            path.unlink()
        case "one more":
            shutil.copy(path, path.with_name("shard-00003-model-00001-of-00001.safetensors"))


@pytest.mark.parametrize("how", ["truncated", "missing", "one more"])
@pytest.mark.parametrize("shard", [1, 2])
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_used(folder, tmp_path, capsys, how, shard):
    place = shutil.copytree(folder / "everything-fsdp", tmp_path / "run")
    path = place / "checkpoints" / "step-00000012" / f"shard-0000{shard}-model-00001-of-00001.safetensors"
    damage(path, how)
    trainer = make(place, alone(CASES["everything"]))
    assert trainer.resume() and trainer.step == 6
    named = "shard-00003" if how == "one more" else path.name
    assert f"{path.parent}: skipped: {named}" in capsys.readouterr().err
    assert trainer.run()
    assert_same_run(folder / "everything-one", place)


class Trap:
    def __reduce__(self):
        return os.mkdir, (os.environ["TRAP"],)


def test_a_pickle_beside_the_shards_is_never_opened(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    place = half_way(folder / "everything-fsdp", tmp_path / "run")
    for name in (".metadata", "__0_0.distcp", "optimizer.bin"):
        (place / "checkpoints" / "step-00000006" / name).write_bytes(pickle.dumps(Trap()))
    assert make(place, alone(CASES["everything"])).resume()
    assert not (tmp_path / "sprung").exists()


def test_shards_of_another_model_are_refused_by_name(folder):
    path = folder / "plain-fsdp" / "checkpoints" / "step-00000012"
    for model, words in (
        (replace(STILL, ff_dim=64), r"shape \(32, 16\), but \[model\] requires \(64, 16\)"),
        (replace(STILL, layers=2), r"lacks encoder\.blocks\.1"),
    ):
        trainer = make(folder / "nowhere", CASES["plain"], model)
        with pytest.raises(UserError, match=words):
            checkpoint.Checkpoint(path, {}).restore(trainer.model, trainer.optimizer)
    trainer = make(folder / "nowhere", CASES["everything"])
    with pytest.raises(UserError, match=r"lacks .*/mean"):
        checkpoint.Checkpoint(path, {}).restore(trainer.model, trainer.optimizer, trainer.mean)


def test_pieces_that_do_not_make_a_whole_are_noticed(folder, tmp_path):
    source = folder / "plain-fsdp" / "checkpoints" / "step-00000012" / "shard-00002-model-00001-of-00001.safetensors"
    shutil.copy(source, tmp_path)
    with pytest.raises(UserError, match="is incomplete"):
        checkpoint.read_shards(tmp_path)
    (tmp_path / source.name).write_bytes(b"no safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.read_shards(tmp_path)


# --- ends that all share


def reports(folder: Path, name: str) -> list[list[object]]:
    return [json.loads((folder / f"report-{name}-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_signal_to_one_stops_all_at_the_same_step_and_saves(folder, tmp_path, engine):
    first, second = reports(folder, f"stopped-{engine}")
    assert first == second == [False, 5]  # asked in step 4, agreed upon one step later
    place = shutil.copytree(folder / f"stopped-{engine}", tmp_path / "run")
    assert [path.name for path in (place / "checkpoints").iterdir()] == ["step-00000005"]
    assert go_on(place, alone(BASE)).step == 12
    assert_same_run(folder / "plain-one", place)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_is_no_number_on_one_ends_all(folder, engine):
    (kind, first), (_, second) = reports(folder, f"diverged-{engine}")
    assert kind == "UserError" and first == second and "loss = nan at step 8" in first
    assert [path.name for path in (folder / f"diverged-{engine}" / "checkpoints").iterdir()] == ["step-00000006"]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_disk_on_one_ends_all_with_the_last_checkpoint_intact(folder, engine):
    (_, first), (kind, second) = reports(folder, f"full-{engine}")
    assert "step-00000012: cannot be written (" in first and "No space left" in first
    assert kind == "PeerError" if engine == "ddp" else second == first
    place = folder / f"full-{engine}" / "checkpoints"
    assert [path.name for path in place.iterdir()] == ["step-00000006"]
    assert checkpoint.newest(place)[1] == []


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_the_run_ends_as_if_it_had_lived(folder, tmp_path):
    done = play(tmp_path, "killed", restarts=2)
    assert done.returncode == 0, done.stderr
    # the other one says "has ended without a message", unless torchrun ends it before it can
    for engine in ENGINES:
        whole, killed = (place / "checkpoints" / "step-00000012" for place in (
            folder / f"dropout-{engine}", tmp_path / f"killed-{engine}"
        ))  # fmt: skip
        for path in whole.glob("*.safetensors"):  # moments and generators too
            expected, found = load_file(path), load_file(killed / path.name)
            assert expected.keys() == found.keys()
            assert all(torch.equal(expected[name], found[name]) for name in expected)
        torch.testing.assert_close(curve(tmp_path / f"killed-{engine}"), curve(folder / f"dropout-{engine}"))


def test_an_error_of_one_ends_all_with_one_message(tmp_path):
    done = play(tmp_path, "broken")
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: the data of rank 1 cannot be read"]


# --- the command


@pytest.mark.slow
def test_the_same_command_under_torchrun(tmp_path, monkeypatch, capsys):
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = [*SMALL, "--device", "cpu", "--set", "train.parallel=fsdp", "-o", "run"]
    done = torchrun("-m", "regard", "train", "mine.toml", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("6 steps in") == 1 and "error" not in done.stderr
    assert {path.name for path in Path("run").iterdir()} == {
        "recipe.toml", "tokenizer.json", "data", "checkpoints", "metrics.jsonl", WEIGHTS, "scores.json", "summary.json",
        "predictions", "report.html", "examples.json",
    }  # fmt: skip
    for command in (["evaluate", "run", "--device", "cpu"], ["average", "run", "--last", "2"], ["resume", "run"]):
        assert main(command) == 0
    assert "6 steps in" in capsys.readouterr().out


def test_a_mistake_under_torchrun_is_told_once_and_leaves_nothing(tmp_path):
    write_corpus(tmp_path)
    arguments = [*SMALL, "--device", "cpu", "--set", "train.batch_tokens=4", "-o", "runs/mine"]
    done = torchrun("-m", "regard", "train", "mine.toml", *arguments, cwd=tmp_path)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "train.batch_tokens = 4 is too small" in errors[0]
    assert not (tmp_path / "runs").exists()


# --- one process


def test_alone_nothing_is_asked_of_anyone():
    workers = distributed.current()
    assert workers.leads and workers.world == 1 and workers.gather(3) == [3] and workers.on_lead(lambda: 4) == 4
    tensor = torch.tensor(5.0)
    assert workers.total(tensor) is tensor and tensor == 5
    with workers.agreement(lambda: True) as stop:
        assert stop()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("device", "words"), [("cuda:1", "each process has its own GPU"), ("cuda", "3 processes or more on a machine")]
)
def test_a_device_that_cannot_be_shared_is_refused(monkeypatch, device, words):
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=words), distributed.join(device):
        pass
