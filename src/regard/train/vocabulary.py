"""The loss over a large vocabulary in little memory: scores of a few tokens at a time, never of all.

A batch of 32 x 1024 tokens has 1.6 billion scores over GPT-2's vocabulary, 6.6 GB in float32, and as many once more for
their gradients; the states they come from are 0.1 GB. But the loss is a sum over tokens, and the gradient of a token's
scores is known as soon as they are:

    z = W h          loss = Σ_t  logsumexp(z_t) - (1 - ε) z_t[right] - ε mean(z_t)
    ∂loss/∂z_t = softmax(z_t) - (1 - ε) onehot(right) - ε / V

So the tokens are taken in chunks: scores, loss, gradient of the scores, and from it the part of ∂loss/∂h and ∂loss/∂W,
after which the scores are forgotten. The products are those of the usual way, only earlier: the backward pass has
nothing left to do but to scale (as in Liger Kernel's fused linear cross entropy, Hsu et al. 2024, arXiv 2410.10989).
On a CPU a chunk stays in the cache, so that what is done to it number by number is nearly free.

R-Drop adds, for two rows of scores y, z of the same token with P = softmax(y), Q = softmax(z) and a = log P - log Q,

    apart = KL(P‖Q) + KL(Q‖P) = Σ (P - Q) a
    ∂apart/∂y = P (a - KL(P‖Q)) + P - Q          ∂apart/∂z = -Q (a + KL(Q‖P)) - P + Q

    states [N, dim]   weight [V, dim]   labels [N]   ->   one number; memory: chunk x V
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.batch import PairBatch
from regard.models.output_head import Head

CHUNK = {"cpu": 256, "cuda": 16384}  # tokens: what stays in the cache; what keeps a GPU busy in little memory
LARGE = 1024  # pieces: below, a kernel of our own has little to save, and would have to be compiled first
Score = Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def chunked(
    states: Tensor,
    head: Head,
    labels: Tensor,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
    *,
    chunk: int = 0,
) -> Tensor:
    """The summed loss (`objective.surprise`) of `head`'s scores for states [R, T, dim], `chunk` tokens at a time.

    chunk = 0 chooses what suits the device.
    """
    ready, kind = head.ready(states).flatten(0, 1), states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else ready.dtype
    chunk = chunk or CHUNK.get(kind, CHUNK["cuda"])
    arguments = (labels.flatten(), label_smoothing, r_drop, chunk, dtype)
    return _Chunked.apply(ready, head.project.weight, head.bias, *arguments)  # type: ignore[no-any-return]


def score(logits: Tensor, labels: Tensor, label_smoothing: float, r_drop: float) -> tuple[Tensor, Tensor]:
    """The summed loss of scores [n, V], and its gradient with respect to them; the scores are overwritten.

    With `r_drop` the second half of the rows stands for the same tokens as the first.
    """
    learned, floor = labels != PairBatch.IGNORE, label_smoothing / logits.shape[1]
    right = torch.where(learned, labels, 0)[:, None]
    z = logits if logits.dtype == torch.float64 else logits.float()
    total = z.logsumexp(dim=1, keepdim=True)
    each = total - (1 - label_smoothing) * z.gather(1, right)
    if label_smoothing:
        each = each - label_smoothing * z.mean(dim=1, keepdim=True)
    chance = z.sub_(total)  # log-probabilities from here on
    less = torch.full_like(right, label_smoothing - 1, dtype=z.dtype)
    if not r_drop:
        gradient = chance.exp_().sub_(floor).scatter_add_(1, right, less)
        return torch.where(learned[:, None], each, 0.0).sum(), gradient.mul_(learned[:, None]).to(logits.dtype)
    apart = torch.sub(*chance.chunk(2))
    gradient = chance.exp_()
    p, q = gradient.chunk(2)
    forth, back = (p * apart).sum(dim=1, keepdim=True), -(q * apart).sum(dim=1, keepdim=True)  # KL(P‖Q), KL(Q‖P)
    each = each / 2 + torch.cat((forth + back, torch.zeros_like(back))) * (r_drop / 4)
    moved = (p - q) * (r_drop / 4)
    to_p = p * ((apart - forth) * (r_drop / 4) + 0.5) + moved
    to_q = q * (0.5 - (apart + back) * (r_drop / 4)) - moved
    gradient = torch.cat((to_p, to_q)).sub_(floor / 2).scatter_add_(1, right, less / 2)
    return torch.where(learned[:, None], each, 0.0).sum(), gradient.mul_(learned[:, None]).to(logits.dtype)


@functools.cache
def score_on_gpu() -> Score:
    """`score` as one kernel, where Triton is, which comes with PyTorch for NVIDIA's GPUs on Linux."""
    if importlib.util.find_spec("triton") is None:
        return score
    from regard.train import kernel

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
        to_states, to_weight = torch.empty_like(states), torch.zeros_like(weight)
        to_bias = None if bias is None else torch.zeros_like(bias)
        narrow, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
        half = len(states) // 2
        with torch.autocast(states.device.type, enabled=False):
            for begin in range(0, half if r_drop else len(states), chunk):
                end = min(begin + chunk, half) if r_drop else begin + chunk
                at = [slice(begin, end)] + [slice(half + begin, half + end)] * bool(r_drop)  # the same tokens again
                part = torch.cat([states[piece] for piece in at]).to(dtype)
                named = torch.cat([labels[piece] for piece in at])
                some, gradient = run(F.linear(part, narrow, shift), named, label_smoothing, r_drop)
                loss += some
                for piece, new in zip(at, F.linear(gradient, narrow.T).chunk(len(at)), strict=True):
                    to_states[piece] = new
                if dtype == wide:
                    to_weight.addmm_(gradient.T, part)
                else:
                    to_weight += (gradient.T @ part).to(wide)
                if to_bias is not None:
                    to_bias += gradient.sum(dim=0, dtype=wide)
        ctx.save_for_backward(to_states, to_weight, *([] if to_bias is None else [to_bias]))
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [gradient * outer[0].to(gradient.dtype) for gradient in ctx.saved_tensors]
        return (*scaled, *[None] * (8 - len(scaled)))
