"""A task small enough to train in a test: write the source backwards. Dropout is on, so generators matter."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from regard.data.batch import Pairs
from regard.data.streams import Batches
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.training.config import TrainConfig
from regard.training.objective import translation
from regard.training.trainer import Objective, Trainer

BOS, EOS, WORDS = 2, 3, 8
MODEL = ModelConfig(dim=16, layers=1, heads=2, ff_dim=32, norm_order="pre", position="rope", vocab_size=4 + WORDS)
TRAIN = TrainConfig(steps=23, batch_tokens=48, lr=1e-2, warmup=5, log_every=5, save_every=7)


def reversal_pairs(count: int = 20, seed: int = 0) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 6, (count,), generator=generator).tolist()
    words = [torch.randint(4, 4 + WORDS, (length,), generator=generator).tolist() for length in lengths]
    return Pairs([[*line, EOS] for line in words], [[BOS, *reversed(line), EOS] for line in words])


def make_trainer(
    folder: Path, config: TrainConfig = TRAIN, model: ModelConfig = MODEL, objective: Objective | None = None
) -> Trainer:
    """A trainer that has done nothing yet: the same every time."""
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    batches = Batches(reversal_pairs(), config.batch_tokens, config.seed)
    usual = partial(translation, label_smoothing=config.label_smoothing)
    return Trainer(build(model), batches, objective or usual, config, folder)


def train(folder: Path, config: TrainConfig = TRAIN, objective: Objective | None = None) -> Trainer:
    """Go on from what `folder` holds, to the end or to the next signal."""
    trainer = make_trainer(folder, config, objective=objective)
    trainer.resume()
    trainer.run()
    return trainer


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """The same weights, bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
