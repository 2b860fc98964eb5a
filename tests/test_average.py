"""The mean of checkpoints, against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from regard.cli import main
from regard.errors import UserError
from regard.models.folder import RECIPE, WEIGHTS, load
from regard.settings import to_dict, write_toml
from regard.training.checkpoint import average
from reversal import MODEL, TRAIN, make_trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with checkpoints at steps 4, 8, 12, 16."""
    folder = tmp_path_factory.mktemp("average") / "run"
    make_trainer(folder, replace(TRAIN, steps=16, save_every=4, keep=4)).run()
    write_toml(folder / RECIPE, {"model": to_dict(MODEL)})
    return folder


@pytest.fixture
def run(trained, tmp_path):
    import shutil

    return shutil.copytree(trained, tmp_path / "run")


def mean(run, *steps):
    found = [load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors") for step in steps]
    return {name: np.mean([one[name].astype(np.float64) for one in found], axis=0) for name in found[0]}


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name].numpy(), theirs[name], rtol=1e-6, atol=1e-8)
        assert ours[name].dtype == torch.float32


@pytest.mark.parametrize("last", [1, 3, 4])
def test_it_is_the_mean_of_the_newest(run, last):
    assert_close(average(run, last), mean(run, *(4, 8, 12, 16)[-last:]))


def test_a_damaged_checkpoint_is_left_out(run):
    path = run / "checkpoints" / "step-00000012" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    expected = mean(run, 4, 8, 16)
    path.write_bytes(content)
    assert_close(average(run, 3), expected)
    with pytest.raises(UserError, match=r"has 3 complete checkpoints, not 4: use fewer, or train with keep = 4"):
        average(run, 4)


def test_a_folder_without_checkpoints(tmp_path):
    with pytest.raises(UserError, match="has 0 complete checkpoints"):
        average(tmp_path, 2)


def test_the_command_makes_it_the_model(run, capsys):
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert main(["average", str(run), "--last", "2"]) == 0
    assert "mean of the last 2 checkpoints" in capsys.readouterr().out
    assert_close(dict(load(run).state_dict()) | {}, {**mean(run, 12, 16)} | tied(run))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


def tied(run):
    """Names under which load_state_dict shows a tensor a second time."""
    model = load(run)
    known = {tensor.data_ptr(): name for name, tensor in model.named_parameters()}
    values = load_file(run / WEIGHTS)
    return {name: values[known[t.data_ptr()]] for name, t in model.state_dict().items() if t.data_ptr() in known}


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--last", "9"], "has 4 complete checkpoints, not 9"), (["--last", "0"], "--last: 0")]
)
def test_the_command_says_what_is_wrong(run, capsys, arguments, message):
    assert main(["average", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (run / WEIGHTS).exists()
