"""A run that is stopped, killed or damaged and goes on ends as if nothing had happened, byte for byte."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.errors import UserError
from regard.training.config import TrainConfig
from regard.training.history import read_metrics
from regard.training.objective import translation
from regard.training.trainer import interruptible
from reversal import TRAIN, make_trainer, train

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
LOGGED = ("step", "loss", "lr")  # of metrics.jsonl; the rest is measured time


# --- the same run, whatever happens to it


def final(folder: Path) -> dict[str, bytes]:
    """Weights, moments, generators and the place in the data at the last step, byte for byte."""
    (newest,) = (folder / "checkpoints").glob(f"step-{TRAIN.steps:08d}")
    files = {name: (newest / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}
    return {**files, "data": json.dumps(json.loads((newest / "state.json").read_text())["data"]).encode()}


def logged(folder: Path) -> list[tuple[float, ...]]:
    return [tuple(line[name] for name in LOGGED) for line in read_metrics(folder)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(folder)
    return folder


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(uninterrupted, tmp_path):
    train(tmp_path / "same")
    assert final(tmp_path / "same") == final(uninterrupted) and logged(tmp_path / "same") == logged(uninterrupted)
    train(tmp_path / "other", replace(TRAIN, seed=2))
    assert final(tmp_path / "other")["model.safetensors"] != final(uninterrupted)["model.safetensors"]


def signalling(at: set[int], number: signal.Signals):
    """An objective that sends this process a signal during the steps named (counted from 1 in each process)."""
    steps = 0

    def objective(model, batch):
        nonlocal steps
        steps += 1
        if steps in at:
            os.kill(os.getpid(), number)
        return translation(model, batch, TRAIN.label_smoothing)

    return objective


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("stops", [[1], [3], [5], [7], [12], [22], [2, 4, 1, 9]], ids=str)
def test_stopped_and_resumed_is_as_if_it_had_never_stopped(uninterrupted, tmp_path, capfd, stops, number):
    done = 0
    for stop in stops:
        trainer = train(tmp_path, objective=signalling({stop}, number))
        done += stop
        assert trainer.step == done and not trainer.model.training
        assert (tmp_path / "checkpoints" / f"step-{done:08d}").is_dir()
        assert "stopping after this step" in capfd.readouterr().err
    assert train(tmp_path).step == TRAIN.steps
    assert final(tmp_path) == final(uninterrupted)
    assert logged(tmp_path) == logged(uninterrupted)
    assert train(tmp_path).step == TRAIN.steps  # a finished run stays as it is
    assert final(tmp_path) == final(uninterrupted)


def run_in_child(folder: Path, config: TrainConfig, pause: float = 0.0) -> None:
    def slow(model, batch):
        time.sleep(pause)
        return translation(model, batch, config.label_smoothing)

    with open(os.devnull, "w") as sys.stderr:
        try:
            train(folder, config, slow)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the exit is not to be interrupted by another one
            os._exit(130)
    os._exit(0)


def start_child(*arguments: object) -> multiprocessing.Process:
    child = multiprocessing.get_context("fork").Process(target=run_in_child, args=arguments)
    child.start()
    return child


@needs_fork
def test_killed_at_any_moment_and_resumed_is_as_if_it_had_never_stopped(uninterrupted, tmp_path):
    """SIGKILL leaves no time for anything; with a checkpoint a step, most of the time is spent writing one."""
    chance = random.Random(0)
    config = replace(TRAIN, save_every=1)
    for _ in range(8):
        child = start_child(tmp_path, config)
        time.sleep(chance.uniform(0.02, 0.25))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    train(tmp_path, config)
    assert final(tmp_path) == final(uninterrupted) and logged(tmp_path) == logged(uninterrupted)
    assert not list((tmp_path / "checkpoints").glob(".*"))


@needs_fork
def test_a_second_ctrl_c_does_not_wait_for_the_step(tmp_path):
    child = start_child(tmp_path, TRAIN, 30.0)
    time.sleep(0.3)
    began = time.monotonic()
    while child.exitcode is None and time.monotonic() - began < 10:
        os.kill(child.pid, signal.SIGINT)  # on a busy machine, two signals can arrive as one
        child.join(0.2)
    assert child.exitcode not in (None, 0) and time.monotonic() - began < 10
    assert not (tmp_path / "checkpoints").exists()


def test_an_ignored_signal_stays_ignored_and_handlers_come_back():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    with interruptible() as stop:
        assert signal.getsignal(signal.SIGINT) is not before and not stop()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_in_a_thread(uninterrupted, tmp_path):
    thread = threading.Thread(target=train, args=(tmp_path,))
    thread.start()
    thread.join()
    assert final(tmp_path) == final(uninterrupted)


# --- when it diverges


def spoiling(step: int, how: str):
    done = 0

    def objective(model, batch):
        nonlocal done
        done += 1
        loss, count = translation(model, batch)
        if done != step:
            return loss, count
        # the second: a loss that is finite, with a gradient that is not, at sqrt(0)
        return (loss * math.nan, count) if how == "loss" else (loss + (loss - loss).abs().sqrt(), count)

    return objective


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("step", [8, 12, 14, 20], ids=["between", "before", "at a checkpoint", "at a line"])
def test_a_loss_that_is_no_number_stops_the_run_and_spoils_no_checkpoint(tmp_path, step, how):
    trainer = make_trainer(tmp_path, objective=spoiling(step, how))
    with pytest.raises(UserError, match=r"diverged.*train\.lr = 0\.01.*train\.warmup = 5"):
        trainer.run()
    saved = [number for number in (7, 14, 21) if number < step]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-{number:08d}" for number in saved]
    again = make_trainer(tmp_path)
    assert again.resume() and again.step == saved[-1]
    assert all(torch.isfinite(parameter).all() for parameter in again.model.parameters())
    assert all(math.isfinite(line["loss"]) for line in read_metrics(tmp_path))


# --- a damaged log


@pytest.mark.parametrize(
    "damage",
    [b'{"step": 9, "lo', b"\xff\xfe\x00garbage\n", b"5\n", b"[]\n", b'{"step": 9}\n', b"\n\n"],
)
def test_a_damaged_log_costs_no_more_than_its_damaged_lines(uninterrupted, tmp_path, damage):
    train(tmp_path, objective=signalling({7}, signal.SIGINT))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    train(tmp_path)
    assert logged(tmp_path) == logged(uninterrupted) and final(tmp_path) == final(uninterrupted)


def test_a_lost_log_does_not_stop_the_run(uninterrupted, tmp_path):
    train(tmp_path, objective=signalling({7}, signal.SIGINT))
    (tmp_path / "metrics.jsonl").unlink()
    train(tmp_path)
    assert final(tmp_path) == final(uninterrupted)
    assert logged(tmp_path) == logged(uninterrupted)[1:]  # the first line was written before
