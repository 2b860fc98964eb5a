"""What is made small: the surprise at the right answer.

    loss = -Σ_k target_k log softmax(logits)_k        target: 1 - ε on the right token, ε / V on every one

ε is label smoothing (Szegedy et al. 2016): the model is kept from becoming certain. R-Drop (Liang et al.
2021) reads every batch twice; dropout makes two models of one, and their answers P and Q shall agree:

    loss = (CE(P) + CE(Q)) / 2 + α · (KL(P‖Q) + KL(Q‖P)) / 4

The sum over tokens and their number are returned apart, so that batches of different size can be averaged
rightly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.data.batch import PairBatch, Tensors
from regard.data.pack import PackedBatch
from regard.models import SequenceToSequence
from regard.models.output_head import Head
from regard.nn.feedforward import Experts

Batch = TypeVar("Batch", bound=Tensors)
Loss = Callable[[Tensor, Head, Tensor, float, float], Tensor]
BALANCE = 0.01  # weight of a mixture of experts' load-balancing loss (Fedus et al. 2021)


def translation(
    model: SequenceToSequence,
    batch: PairBatch | PackedBatch,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
    loss: Loss | None = None,
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of target tokens) under teacher forcing; `loss` is `whole`, or `vocabulary.chunked`."""
    read = twice(batch) if r_drop else batch
    total = (loss or whole)(read_states(model, read), model.output_head, read.labels, label_smoothing, r_drop)
    return total + balance(model, batch.tokens), batch.tokens


def read_states(model: SequenceToSequence, batch: PairBatch | PackedBatch) -> Tensor:
    """What the decoder makes of each target token under teacher forcing, [R, T, dim]."""
    if isinstance(batch, PackedBatch):
        source, target = batch.source_document, batch.target_document  # 0 is filler
        return model.states(batch.target, model.encode(batch.source, source > 0, source), target > 0, target)
    return model.states(batch.target, model.encode(batch.source, batch.source_is_real))


def whole(states: Tensor, head: Head, labels: Tensor, label_smoothing: float = 0.0, r_drop: float = 0.0) -> Tensor:
    """The loss of all scores at once."""
    return surprise(head(states), labels, label_smoothing, r_drop)


def balance(model: nn.Module, tokens: Tensor) -> Tensor | float:
    """What makes experts share the tokens evenly in training, or else a few of them do all the work."""
    if not model.training:
        return 0.0
    parts = [module.balance for module in model.modules() if isinstance(module, Experts)]
    return BALANCE * tokens * sum(part for part in parts if part is not None)


def surprise(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, r_drop: float = 0.0, weight: Tensor | None = None
) -> Tensor:
    """The summed loss of logits [R, T, V]; with `r_drop` the second half of the rows reads what the first does.

    `weight` [vocab_size] is how much an answer counts, by what is right.
    """
    chance = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
    learned = labels != PairBatch.IGNORE
    right = chance.gather(-1, torch.where(learned, labels, 0)[..., None])[..., 0]
    each = -(1 - label_smoothing) * right
    if label_smoothing:
        each = each - label_smoothing * chance.mean(dim=-1)
    if weight is not None:
        each = each * weight[torch.where(learned, labels, 0)]
    total = torch.where(learned, each, 0.0).sum()
    if not r_drop:
        return total
    p, q = chance.chunk(2)
    apart = ((p.exp() - q.exp()) * (p - q)).sum(dim=-1)  # KL(P‖Q) + KL(Q‖P), [R / 2, T]
    return total / 2 + r_drop * torch.where(learned.chunk(2)[0], apart, 0.0).sum() / 4


def twice(batch: Batch) -> Batch:
    """The same rows again below them: dropout will treat them differently."""
    return batch.each(lambda part: torch.cat((part, part)))
