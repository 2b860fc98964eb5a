"""The objective: cross-entropy with label smoothing.

    loss = -Σ_k t_k log softmax(logits)_k        t: 1 - ε + ε / V for the correct token, ε / V for every other one

ε is label smoothing (Szegedy et al. 2016), which keeps the model from becoming overconfident. R-Drop (Liang et al.
2021) computes every batch twice; the two dropout masks give two distributions P and Q, which are pulled together:

    loss = (CE(P) + CE(Q)) / 2 + α · (KL(P‖Q) + KL(Q‖P)) / 4

The sum over tokens and their number are returned separately, so that batches of different sizes are averaged
correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.data.batch import PairBatch, Tensors
from regard.data.pack import PackedBatch
from regard.errors import UserError
from regard.models import SequenceToSequence
from regard.models.output_head import OutputHead
from regard.nn.feedforward import Experts
from regard.text.tokenizer import Tokenizer
from regard.training.config import TrainConfig
from regard.training.parallel import Objective
from regard.training.vocabulary import chunked

Batch = TypeVar("Batch", bound=Tensors)
Loss = Callable[[Tensor, OutputHead, Tensor, float, float], Tensor]
BALANCE = 0.01  # weight of a mixture of experts' load-balancing loss (Fedus et al. 2021)


def translation(
    model: SequenceToSequence,
    batch: PairBatch | PackedBatch,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
    loss: Loss | None = None,
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of target tokens) under teacher forcing; `loss` is `unchunked`, or `vocabulary.chunked`."""
    read = repeat_batch(batch) if r_drop else batch
    total = (loss or unchunked)(target_states(model, read), model.output_head, read.labels, label_smoothing, r_drop)
    return total + balance(model, batch.tokens), batch.tokens


def target_states(model: SequenceToSequence, batch: PairBatch | PackedBatch) -> Tensor:
    """The decoder's states of the target tokens under teacher forcing, [R, T, dim]."""
    if isinstance(batch, PackedBatch):
        source, target = batch.source_document, batch.target_document  # 0 is padding
        return model.states(batch.target, model.encode(batch.source, source > 0, source), target > 0, target)
    return model.states(batch.target, model.encode(batch.source, batch.source_is_real))


def make_objective(objective: Callable[..., tuple[Tensor, Tensor]], config: TrainConfig) -> Objective:
    """An objective over a vocabulary with the settings of [train]."""
    return partial(
        objective, label_smoothing=config.label_smoothing, r_drop=config.r_drop, loss=token_loss(config.loss_chunk)
    )


def token_loss(chunk: int) -> Loss:
    """The loss over a vocabulary as `train.loss_chunk` says: so many tokens at a time, or all with -1."""
    return unchunked if chunk < 0 else partial(chunked, chunk=chunk)


def unchunked(
    states: Tensor, head: OutputHead, labels: Tensor, label_smoothing: float = 0.0, r_drop: float = 0.0
) -> Tensor:
    """The summed loss, with the logits of all tokens in memory at once."""
    return cross_entropy(head(states), labels, label_smoothing, r_drop)


def balance(model: nn.Module, tokens: Tensor) -> Tensor | float:
    """The load-balancing loss of mixtures of experts, without which a few experts would get all tokens."""
    if not model.training:
        return 0.0
    parts = [module.balance for module in model.modules() if isinstance(module, Experts)]
    return BALANCE * tokens * sum(part for part in parts if part is not None)


def cross_entropy(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, r_drop: float = 0.0, weight: Tensor | None = None
) -> Tensor:
    """The summed loss of logits [R, T, V]; with `r_drop` the second half of the rows repeats the first.

    `weight` [V] is the weight of each label.
    """
    log_probabilities = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
    counted = labels != PairBatch.IGNORE
    correct = log_probabilities.gather(-1, torch.where(counted, labels, 0)[..., None])[..., 0]
    each = -(1 - label_smoothing) * correct
    if label_smoothing:
        each = each - label_smoothing * log_probabilities.mean(dim=-1)
    if weight is not None:
        each = each * weight[torch.where(counted, labels, 0)]
    total = torch.where(counted, each, 0.0).sum()
    if not r_drop:
        return total
    p, q = log_probabilities.chunk(2)
    divergence = ((p.exp() - q.exp()) * (p - q)).sum(dim=-1)  # KL(P‖Q) + KL(Q‖P), [R / 2, T]
    return total / 2 + r_drop * torch.where(counted.chunk(2)[0], divergence, 0.0).sum() / 4


def repeat_batch(batch: Batch) -> Batch:
    """Every row a second time, for a second dropout mask."""
    return batch.each(lambda part: torch.cat((part, part)))


@dataclass(frozen=True)
class WordDropout:
    """In training, a random fraction of the tokens, except <s> and </s>, is replaced by one without meaning.

        input      <s> a large bag above two coats </s>
        replaced   <s> a <unk> bag above <unk> coats </s>

    A classifier then cannot rely on single words (Iyyer et al. 2015), and a decoder cannot rely on the previous tokens
    alone: it has to attend to its source (Bowman et al. 2016). The random numbers come from torch's generator on the
    device of the tokens, so a recorded step (`train.cuda_graph`) samples new ones each time.
    """

    fraction: float
    replacement: int
    kept: tuple[int, int]

    def __call__(self, ids: Tensor) -> Tensor:
        bos, eos = self.kept
        dropped = (torch.rand(ids.shape, device=ids.device) < self.fraction) & (ids != bos) & (ids != eos)
        return torch.where(dropped, self.replacement, ids)

    @classmethod
    def of(cls, fraction: float, tokenizer: Tokenizer) -> WordDropout | None:
        """For `data.word_dropout`: by <mask> where the tokenizer has it (a pretrained encoder knows it), else <unk>."""
        if not fraction:
            return None
        replacement = tokenizer.unk if tokenizer.mask is None else tokenizer.mask
        if replacement is None:
            raise UserError(f"data.word_dropout = {fraction}: the tokenizer has neither <mask> nor <unk>; remove it")
        return cls(fraction, replacement, (tokenizer.special_id("bos"), tokenizer.special_id("eos")))
