"""A model exported with `torch.export` for one batch size and length gives the model's numbers for all others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.nn.position import KINDS
from variants import mostly_slow


def inputs(rows: int, source: int, target: int) -> tuple[Tensor, ...]:
    lengths = torch.arange(1, rows + 1)[:, None] + 1
    ids = (torch.randint(11, (rows, length)) for length in (source, target))
    return *ids, torch.arange(source) < lengths, torch.arange(target) < lengths


@torch.no_grad()
@pytest.mark.parametrize("position", mostly_slow(KINDS, ["relative"]))
def test_batch_and_lengths_stay_dynamic(position: str) -> None:
    sizes = {"dim": 8, "layers": 1, "heads": 2, "ff_dim": 12, "vocab_size": 11, "max_length": 32}
    model = build(ModelConfig(**sizes, position=position)).eval()
    example = inputs(2, 5, 4)
    shapes = tuple({0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for _ in example)
    exported = torch.export.export(model, example, dynamic_shapes=shapes).module(check_guards=False)
    for rows, source, target in ((1, 2, 3), (3, 9, 2), (7, 4, 8)):
        some = inputs(rows, source, target)
        torch.testing.assert_close(exported(*some), model(*some), rtol=1e-5, atol=1e-5)
