"""Muon beside AdamW: each parameter moves exactly as PyTorch's own optimizer would move it, also after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from regard.errors import UserError
from regard.models.transformer import build
from regard.training.config import TrainConfig
from regard.training.optimizer import Muon, block_matrices, make_optimizer, rate
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


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_each_parameter_moves_as_its_own_optimizer_says(cuda_graph: bool):
    """Also with the learning rates that a graph reads: tensors which the trainer fills."""
    torch.manual_seed(0)
    config = replace(MUON, lr=0.01, cuda_graph=cuda_graph, pack=16 if cuda_graph else 0)
    ours, plain = build(MODEL), build(MODEL)
    plain.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, config, torch.device("cpu"))
    matrices = {id(matrix) for matrix in block_matrices(plain)}
    settings = {"lr": config.lr, "weight_decay": config.weight_decay}
    muon = torch.optim.Muon(
        [p for p in plain.parameters() if id(p) in matrices], **settings, adjust_lr_fn="match_rms_adamw"
    )
    others = [p for p in plain.parameters() if id(p) not in matrices]
    groups = [
        {"params": [p for p in others if p.dim() > 1]},
        {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, **settings, betas=config.betas, eps=config.eps)
    for step in range(1, 6):
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"].fill_(rate(step, config)) if cuda_graph else rate(step, config)
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for each in (optimizer, muon, adamw):
            each.step()
    for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_decay_leaves_gains_and_biases_alone():
    model = build(MODEL)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, replace(TRAIN, lr=0.1, weight_decay=0.5), torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] * (0.95 if parameter.dim() > 1 else 1.0), msg=name)


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
    from regard.training.history import read_metrics

    trainer.run()
    losses = [line["loss"] for line in read_metrics(tmp_path)]
    assert losses[-1] < 0.7 * losses[0]


def test_it_needs_whole_matrices():
    with pytest.raises(UserError, match="optimizer = 'muon'"):
        TrainConfig(optimizer="muon", parallel="fsdp")


SHAPES = ((8, 24), (24, 8), (8, 8), (8, 24), (24, 8))  # wide, tall and square ones, two of them twice


def matrices(device: str = "cpu") -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(shape, device=device, requires_grad=True) for shape in SHAPES]


def give_gradients(*lists: list[torch.Tensor]) -> None:
    for alike in zip(*lists, strict=True):
        gradient = torch.randn_like(alike[0])
        for one in alike:
            one.grad = gradient.clone()


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_matrices_of_one_shape_at_once_are_each_by_itself(as_tensor: bool):
    ours, theirs = matrices(), matrices()
    muon = Muon(ours, lr=torch.tensor(0.0) if as_tensor else 0.0, weight_decay=0.1)
    plain = torch.optim.Muon(theirs, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for lr in (0.01, 0.03, 0.02):
        muon.param_groups[0]["lr"] = torch.tensor(lr) if as_tensor else lr
        plain.param_groups[0]["lr"] = lr
        give_gradients(ours, theirs)
        muon.step()
        plain.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)  # a step here is 0.01 or more, rounded to bf16


def test_steps_have_all_singular_values_near_one():
    """Also those of a matrix whose own singular values are far apart; Jordan et al. 2024 give 0.7 to 1.2."""
    torch.manual_seed(1)
    spread = torch.linalg.qr(torch.randn(3, 32, 16))[0] * torch.logspace(-1.5, 0, 16)
    for stack in (spread, spread.mT):
        values = torch.linalg.svdvals(Muon.orthogonalize(stack).float())
        assert values.min() > 0.6 and values.max() < 1.3


def test_a_matrix_without_a_gradient_stays_where_it_is():
    some = matrices()
    before = some[1].detach().clone()
    give_gradients(some)
    some[1].grad = None
    Muon(some, lr=0.1, weight_decay=0.1).step()
    assert torch.equal(some[1], before)


@pytest.mark.cuda
def test_a_recorded_step_follows_the_rate_on_the_device():
    ours, plain = matrices("cuda"), matrices("cuda")
    lr = torch.tensor(0.01, device="cuda")
    recorded, eager = (Muon(some, lr=rate, weight_decay=0.1) for some, rate in ((ours, lr), (plain, 0.01)))
    give_gradients(ours, plain)
    recorded.step()  # makes the state
    eager.step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        recorded.step()
    for value in (0.02, 0.03):
        lr.fill_(value)
        eager.param_groups[0]["lr"] = value
        graph.replay()
        eager.step()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
