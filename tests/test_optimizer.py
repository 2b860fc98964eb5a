"""Muon beside AdamW: each parameter moves exactly as PyTorch's own optimizer would move it, also after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.errors import UserError
from regard.models import build
from regard.train.config import TrainConfig
from regard.train.optimizer import block_matrices, make_optimizer
from regard.train.schedule import rate
from reversal import MODEL, TRAIN, make_trainer

MUON = replace(TRAIN, optimizer="muon", weight_decay=0.05, steps=8, save_every=4)


def test_the_matrices_of_the_blocks_and_nothing_else():
    model = build(MODEL)
    found = {id(matrix) for matrix in block_matrices(model)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in found}
    assert names == {
        name for name, parameter in model.named_parameters() if ".blocks." in name and parameter.dim() == 2
    }
    assert all("norm" not in name and name.endswith("weight") for name in names) and len(names) > 4


def test_each_parameter_moves_as_its_own_optimizer_says():
    torch.manual_seed(0)
    config = replace(MUON, lr=0.01)
    ours, plain = build(MODEL), build(MODEL)
    plain.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, config, torch.device("cpu"))
    matrices = {id(matrix) for matrix in block_matrices(plain)}
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    muon = torch.optim.Muon(
        [p for p in plain.parameters() if id(p) in matrices], **settings, adjust_lr_fn="match_rms_adamw"
    )
    others = [p for p in plain.parameters() if id(p) not in matrices]
    adamw = torch.optim.AdamW(others, **settings, betas=config.betas, eps=config.eps)
    for step in range(1, 6):
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = rate(step, config)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_a_resumed_run_is_the_same(tmp_path: Path):
    whole = make_trainer(tmp_path / "whole", MUON)
    assert whole.run()
    first = make_trainer(tmp_path / "parts", replace(MUON, steps=4))
    assert first.run()
    later = make_trainer(tmp_path / "parts", MUON)
    assert later.resume() and later.step == 4 and later.run()
    for one, other in zip(whole.model.parameters(), later.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_learns(tmp_path: Path):
    trainer = make_trainer(tmp_path, replace(MUON, steps=60, save_every=100, lr=0.02, warmup=5))
    from regard.train.trainer import read_metrics

    trainer.run()
    losses = [line["loss"] for line in read_metrics(tmp_path)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("other", [{"graph": True, "pack": 64}, {"parallel": "fsdp"}])
def test_what_does_not_go_together(other):
    with pytest.raises(UserError, match="optimizer = 'muon'"):
        TrainConfig(optimizer="muon", **other)
