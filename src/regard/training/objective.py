"""The objective: cross-entropy with label smoothing.

    loss = -Σ_k t_k log softmax(logits)_k        t: 1 - ε + ε / V for the correct token, ε / V for every other one

ε is label smoothing (Szegedy et al. 2016), which keeps the model from becoming overconfident. R-Drop (Liang et al.
2021) computes every batch twice; the two dropout masks give two distributions P and Q, which are pulled together:

    loss = (CE(P) + CE(Q)) / 2 + α · (KL(P‖Q) + KL(Q‖P)) / 4

The sum over tokens and their number are returned separately, so that batches of different sizes are averaged
correctly.

Over a large vocabulary the logits of only a few tokens are in memory at a time, never of all (`token_loss`). A batch of
32 x 1024 tokens has 1.6 billion logits over GPT-2's vocabulary: 6.6 GB in float32, and the same again for their
gradients; the states that they are computed from are 0.1 GB. But the loss is a sum over tokens, and the gradient of a
token's logits is known as soon as they are (y is the correct token):

    z = W h          loss = Σ_t  logsumexp(z_t) - (1 - ε) z_t[y] - ε mean(z_t)
    ∂loss/∂z_t = softmax(z_t) - (1 - ε) onehot(y) - ε / V

So the tokens are processed in chunks: logits, loss, gradient of the logits, and from it their part of ∂loss/∂h and
∂loss/∂W; then the logits are discarded. The matrix multiplications are the usual ones, only earlier: the backward pass
merely scales the result (as in Liger Kernel's fused linear cross-entropy, Hsu et al. 2024, arXiv 2410.10989). On a CPU
a chunk stays in the cache, so that the element-wise operations on it are nearly free.

R-Drop adds, for two rows of logits y, z of the same token with P = softmax(y), Q = softmax(z) and a = log P - log Q,

    divergence = KL(P‖Q) + KL(Q‖P) = Σ (P - Q) a
    ∂divergence/∂y = P (a - KL(P‖Q)) + P - Q          ∂divergence/∂z = -Q (a + KL(Q‖P)) - P + Q

    states [N, dim]   weight [V, dim]   labels [N]   ->   a scalar; memory: chunk x V
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batch import PairBatch, Tensors
from regard.data.pack import PackedBatch
from regard.errors import UserError
from regard.models.output_head import OutputHead
from regard.models.transformer import SequenceToSequence
from regard.text.tokenizer import Tokenizer

Batch = TypeVar("Batch", bound=Tensors)
WordDropout = Callable[[Tensor], Tensor]
Score = Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
CHUNK = {"cpu": 256, "cuda": 16384}  # tokens: they fit in the cache; they keep a GPU busy in little memory
LARGE = 1024  # vocabulary from which the Triton kernel is worth its compilation


def translation(
    model: SequenceToSequence,
    batch: PairBatch | PackedBatch,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
    loss_chunk: int = -1,
) -> tuple[Tensor, Tensor]:
    """(summed loss, number of target tokens) under teacher forcing."""
    read = repeat_batch(batch) if r_drop else batch
    states = target_states(model, read)
    return token_loss(states, model.output_head, read.labels, label_smoothing, r_drop, loss_chunk), batch.tokens


def target_states(model: SequenceToSequence, batch: PairBatch | PackedBatch) -> Tensor:
    """The decoder's states of the target tokens under teacher forcing, [R, T, dim]."""
    if isinstance(batch, PackedBatch):
        source, target = batch.source_document, batch.target_document  # 0 is padding
        return model.states(batch.target, model.encode(batch.source, source > 0, source), target > 0, target)
    memory = model.encode(batch.source, batch.source_is_real)
    if model.config.causal:  # padding on the right is in the future
        return model.states(batch.target, memory)
    return model.states(batch.target, memory, batch.labels != PairBatch.IGNORE)


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


def make_word_dropout(fraction: float, tokenizer: Tokenizer) -> WordDropout | None:
    """`data.word_dropout`: a random fraction of the tokens, except <s> and </s>, is replaced by one without meaning.

        input      <s> a large bag above two coats </s>
        replaced   <s> a <unk> bag above <unk> coats </s>

    It is <mask> where the tokenizer has it (a pretrained encoder knows it), else <unk>. A classifier then cannot rely
    on single words (Iyyer et al. 2015), and a decoder cannot rely on the previous tokens alone: it has to attend to its
    source (Bowman et al. 2016). The random numbers come from torch's generator on the device of the tokens, so a
    recorded step (`train.cuda_graph`) samples new ones each time.
    """
    if not fraction:
        return None
    bos, eos = tokenizer.special_id("bos"), tokenizer.special_id("eos")
    replacement = tokenizer.unk if tokenizer.mask is None else tokenizer.mask
    if replacement is None:
        raise UserError(f"data.word_dropout = {fraction}: the tokenizer has neither <mask> nor <unk>; remove it")

    def drop(ids: Tensor) -> Tensor:
        dropped = (torch.rand(ids.shape, device=ids.device) < fraction) & (ids != bos) & (ids != eos)
        return torch.where(dropped, replacement, ids)

    return drop


# --- a large vocabulary


def token_loss(
    states: Tensor, head: OutputHead, labels: Tensor, label_smoothing: float, r_drop: float, loss_chunk: int
) -> Tensor:
    """The summed loss (`cross_entropy`) of `head`'s logits for states [R, T, dim], in chunks of `loss_chunk` tokens.

    0: a default for the device; -1: the logits of all tokens are in memory at once.
    """
    if loss_chunk < 0:
        return cross_entropy(head(states), labels, label_smoothing, r_drop)
    ready, kind = head.transform(states).flatten(0, 1), states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else ready.dtype
    chunk = loss_chunk or CHUNK.get(kind, CHUNK["cuda"])
    arguments = (labels.flatten(), label_smoothing, r_drop, chunk, dtype)
    return _Chunked.apply(ready, head.project.weight, head.bias, *arguments)  # type: ignore[no-any-return]


def score(logits: Tensor, labels: Tensor, label_smoothing: float, r_drop: float) -> tuple[Tensor, Tensor]:
    """The summed loss of logits [n, V], and its gradient with respect to them; the logits are overwritten.

    With `r_drop` the second half of the rows repeats the tokens of the first.
    """
    counted, floor = labels != PairBatch.IGNORE, label_smoothing / logits.shape[1]
    correct = torch.where(counted, labels, 0)[:, None]
    z = logits if logits.dtype == torch.float64 else logits.float()
    total = z.logsumexp(dim=1, keepdim=True)
    each = total - (1 - label_smoothing) * z.gather(1, correct)
    if label_smoothing:
        each = each - label_smoothing * z.mean(dim=1, keepdim=True)
    log_probabilities = z.sub_(total)
    minus = torch.full_like(correct, label_smoothing - 1, dtype=z.dtype)
    if not r_drop:
        gradient = log_probabilities.exp_().sub_(floor).scatter_add_(1, correct, minus)
        return torch.where(counted[:, None], each, 0.0).sum(), gradient.mul_(counted[:, None]).to(logits.dtype)
    ratio = torch.sub(*log_probabilities.chunk(2))  # log P - log Q
    gradient = log_probabilities.exp_()
    p, q = gradient.chunk(2)
    p_to_q, q_to_p = (p * ratio).sum(dim=1, keepdim=True), -(q * ratio).sum(dim=1, keepdim=True)  # KL(P‖Q), KL(Q‖P)
    each = each / 2 + torch.cat((p_to_q + q_to_p, torch.zeros_like(q_to_p))) * (r_drop / 4)
    difference = (p - q) * (r_drop / 4)
    of_p = p * ((ratio - p_to_q) * (r_drop / 4) + 0.5) + difference
    of_q = q * (0.5 - (ratio + q_to_p) * (r_drop / 4)) - difference
    gradient = torch.cat((of_p, of_q)).sub_(floor / 2).scatter_add_(1, correct, minus / 2)
    return torch.where(counted[:, None], each, 0.0).sum(), gradient.mul_(counted[:, None]).to(logits.dtype)


@cache
def score_on_gpu() -> Score:
    """`score` as one kernel, where Triton is installed, as with PyTorch for NVIDIA GPUs on Linux."""
    if importlib.util.find_spec("triton") is None:
        return score
    from regard.training import kernel

    return kernel.score


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, label_smoothing: float,
        r_drop: float, chunk: int, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        large = len(weight) >= LARGE and dtype != torch.float64
        run = score_on_gpu() if states.is_cuda and large else score
        wide = weight.dtype  # gradients are summed in the precision of the weights
        loss = torch.zeros((), dtype=torch.promote_types(wide, torch.float32), device=states.device)
        # [1, N, dim], or with R-Drop [2, N / 2, dim]: both rows of a token are in one chunk
        rows = states.view(2 if r_drop else 1, -1, states.shape[1])
        labels = labels.view(len(rows), -1)
        to_rows, to_weight = torch.empty_like(rows), torch.zeros_like(weight)
        to_bias = None if bias is None else torch.zeros_like(bias)
        narrow, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(states.device.type, enabled=False):
            for begin in range(0, rows.shape[1], chunk):
                at = slice(begin, begin + chunk)
                part, named = rows[:, at].flatten(0, 1).to(dtype), labels[:, at].flatten()
                some, gradient = run(F.linear(part, narrow, shift), named, label_smoothing, r_drop)
                loss += some
                to_rows[:, at] = F.linear(gradient, narrow.T).view_as(to_rows[:, at])
                if dtype == wide:
                    to_weight.addmm_(gradient.T, part)
                else:
                    to_weight += (gradient.T @ part).to(wide)
                if to_bias is not None:
                    to_bias += gradient.sum(dim=0, dtype=wide)
        ctx.save_for_backward(to_rows.view_as(states), to_weight, *([] if to_bias is None else [to_bias]))
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [gradient * outer[0].to(gradient.dtype) for gradient in ctx.saved_tensors]
        return (*scaled, *[None] * (8 - len(scaled)))
