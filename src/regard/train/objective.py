"""What is made small: the surprise at the right answer.

    loss = -Σ_k target_k log softmax(logits)_k        target: 1 - ε on the right token, ε / V on every one

ε is label smoothing (Szegedy et al. 2016): the model is kept from becoming certain. The sum over tokens
and their number are returned apart, so that batches of different size can be averaged rightly.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from regard.data.batch import PairBatch
from regard.models import EncoderDecoder


def translation(model: EncoderDecoder, batch: PairBatch, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """(summed loss, number of target tokens) under teacher forcing."""
    logits = model(batch.source, batch.target, batch.source_valid)
    expected = batch.expected.flatten()
    loss = F.cross_entropy(
        logits.flatten(0, 1).float(),
        expected,
        ignore_index=PairBatch.IGNORE,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return loss, (expected != PairBatch.IGNORE).sum()
