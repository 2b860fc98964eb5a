"""TensorBoard events: read back with TensorBoard itself, they are the lines of metrics.jsonl."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace

import pytest

from regard.errors import MissingExtra
from regard.training.progress import Board
from regard.training.trainer import read_metrics
from reversal import TRAIN, make_trainer


def test_events_are_the_lines_of_the_log(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(TRAIN, steps=8, log_every=2, save_every=4, tensorboard=True)
    make_trainer(tmp_path, config).run()
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000008")  # what was logged after step 4 happens again
    again = make_trainer(tmp_path, config)
    assert again.resume() and again.step == 4 and again.run()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    lines = read_metrics(tmp_path)
    for name in ("loss", "lr", "seconds"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        wanted = [(line["step"], line[name]) for line in lines if name in line]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted]


def test_without_the_package_it_says_which_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match=r"train.tensorboard = true needs .* pip install 'regard\[tensorboard\]'"):
        Board(tmp_path)
