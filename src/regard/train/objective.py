"""What is made small: the surprise at the right answer.

    loss = -Σ_k target_k log softmax(logits)_k        target: 1 - ε on the right token, ε / V on every one

ε is label smoothing (Szegedy et al. 2016): the model is kept from becoming certain. R-Drop (Liang et al.
2021) reads every batch twice; dropout makes two models of one, and their answers P and Q shall agree:

    loss = (CE(P) + CE(Q)) / 2 + α · (KL(P‖Q) + KL(Q‖P)) / 4

The sum over tokens and their number are returned apart, so that batches of different size can be averaged
rightly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batch import PairBatch
from regard.data.pack import PackedBatch
from regard.models import SequenceToSequence
from regard.nn.feedforward import Experts

BALANCE = 0.01  # weight of a mixture of experts' load-balancing loss (Fedus et al. 2021)


def predict(model: SequenceToSequence, batch: PairBatch | PackedBatch) -> Tensor:
    """Logits [R, T, vocab] under teacher forcing."""
    if isinstance(batch, PackedBatch):
        source, target = batch.source_document, batch.target_document  # 0 is filler
        memory = model.encode(batch.source, source > 0, source)
        return model.decode(batch.target, memory, target > 0, target)
    return model(batch.source, batch.target, batch.source_valid)


def translation(
    model: SequenceToSequence, batch: PairBatch | PackedBatch, label_smoothing: float = 0.0, r_drop: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of target tokens) under teacher forcing."""
    loss, first = _surprise(model, batch, label_smoothing)
    if not r_drop:
        return loss, batch.tokens
    again, second = _surprise(model, batch, label_smoothing)
    p, q = first.log_softmax(dim=-1), second.log_softmax(dim=-1)
    apart = ((p.exp() - q.exp()) * (p - q)).sum(dim=-1)  # KL(P‖Q) + KL(Q‖P), [R, T]
    learned = batch.expected != PairBatch.IGNORE
    return (loss + again) / 2 + r_drop * torch.where(learned, apart, 0.0).sum() / 4, batch.tokens


def _surprise(
    model: SequenceToSequence, batch: PairBatch | PackedBatch, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    logits = predict(model, batch).float()
    loss = F.cross_entropy(
        logits.flatten(0, 1),
        batch.expected.flatten(),
        ignore_index=PairBatch.IGNORE,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    if model.training:  # experts share the tokens evenly, or a few of them do all the work
        balances = [module.balance for module in model.modules() if isinstance(module, Experts)]
        loss = loss + BALANCE * batch.tokens * sum(balance for balance in balances if balance is not None)
    return loss, logits
