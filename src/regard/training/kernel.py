"""The loss of `regard.training.objective.score` and its gradient on a GPU: each row of logits is loaded once.

Written as tensor operations the gradient takes some twenty passes over the logits, and with 10,000 to 50,000 of them
per token its cost is memory traffic. Here one program handles one row (with R-Drop: both rows of one token):

    1. the maximum m and Σ exp(z - m) in one pass: the sum is rescaled when m grows
    2. with R-Drop, KL(P‖Q) and KL(Q‖P)
    3. the gradient, which overwrites the logits

2 and 3 read the row again from the cache. The running maximum: Milakov & Gimelshein 2018 (arXiv 1805.02867); Triton:
Tillet et al. 2019. The formulas are those of `objective`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.data.batch import PairBatch

BLOCK, WARPS = 2048, 4  # logits per iteration, and warps of 32 threads: the fastest on an H200


@triton.jit
def _sums(row, correct, size: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """log Σ exp and Σ of a row, and the logit of the correct token."""
    high = tl.full((BLOCK,), float("-inf"), tl.float32)
    scaled, total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    chosen = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        z = tl.load(row + at, at < size, float("-inf")).to(tl.float32)
        ratio = tl.exp(tl.where(z == float("-inf"), z, -tl.abs(z - high)))  # of the smaller to the larger
        scaled = tl.where(z > high, scaled * ratio + 1.0, scaled + ratio)
        total += tl.where(at < size, z, 0.0)
        chosen += tl.where(at == correct, z, 0.0)
        high = tl.maximum(high, z)
    top = tl.max(high, 0)
    return top + tl.log(tl.sum(scaled * tl.exp(high - top), 0)), tl.sum(total, 0), tl.sum(chosen, 0)


@triton.jit
def _single(scores, labels, losses, size: tl.constexpr, smoothing, ignore, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0).to(tl.int64)
    row, correct = scores + number * size, tl.load(labels + number)
    counted = correct != ignore
    correct = tl.where(counted, correct, 0)
    log_sum, total, chosen = _sums(row, correct, size, BLOCK)
    loss = log_sum - (1.0 - smoothing) * chosen - smoothing * total / size
    tl.store(losses + number, tl.where(counted, loss, 0.0))
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        z = tl.load(row + at, at < size, 0.0).to(tl.float32)
        gradient = tl.exp(z - log_sum) - smoothing / size - tl.where(at == correct, 1.0 - smoothing, 0.0)
        tl.store(row + at, tl.where(counted, gradient, 0.0).to(row.dtype.element_ty), at < size)


@triton.jit
def _double(scores, labels, losses, rows, size: tl.constexpr, smoothing, weight, ignore, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0).to(tl.int64)
    first, second, correct = scores + number * size, scores + (rows + number) * size, tl.load(labels + number)
    counted = correct != ignore
    correct = tl.where(counted, correct, 0)
    log_first, total_first, chosen_first = _sums(first, correct, size, BLOCK)
    log_second, total_second, chosen_second = _sums(second, correct, size, BLOCK)
    forth, back = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        y = tl.load(first + at, at < size, float("-inf")).to(tl.float32) - log_first
        z = tl.load(second + at, at < size, float("-inf")).to(tl.float32) - log_second
        apart = tl.where(at < size, y - z, 0.0)
        forth += tl.exp(y) * apart
        back -= tl.exp(z) * apart
    to_second, to_first = tl.sum(forth, 0), tl.sum(back, 0)  # KL(P‖Q), KL(Q‖P)
    each = log_first + log_second - smoothing * (total_first + total_second) / size
    each -= (1.0 - smoothing) * (chosen_first + chosen_second)
    tl.store(losses + number, tl.where(counted, each / 2 + weight * (to_second + to_first), 0.0))
    for begin in range(0, size, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        y = tl.load(first + at, at < size, 0.0).to(tl.float32) - log_first
        z = tl.load(second + at, at < size, 0.0).to(tl.float32) - log_second
        p, q, apart = tl.exp(y), tl.exp(z), y - z
        less, moved = smoothing / size / 2 + tl.where(at == correct, (1.0 - smoothing) / 2, 0.0), weight * (p - q)
        of_first = p * (weight * (apart - to_second) + 0.5) + moved - less
        of_second = q * (0.5 - weight * (apart + to_first)) - moved - less
        tl.store(first + at, tl.where(counted, of_first, 0.0).to(first.dtype.element_ty), at < size)
        tl.store(second + at, tl.where(counted, of_second, 0.0).to(second.dtype.element_ty), at < size)


def score(logits: Tensor, labels: Tensor, label_smoothing: float, r_drop: float) -> tuple[Tensor, Tensor]:
    """As `objective.score`; the gradient overwrites the logits [n, V]."""
    count, size = logits.shape
    rows = count // 2 if r_drop else count
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    last: dict[str, Any] = {"BLOCK": min(BLOCK, triton.next_power_of_2(size)), "num_warps": WARPS}
    if r_drop:
        arguments = (rows, size, label_smoothing, r_drop / 4, PairBatch.IGNORE)
        _double[(rows,)](logits, labels, losses, *arguments, **last)
    else:
        _single[(rows,)](logits, labels, losses, size, label_smoothing, PairBatch.IGNORE, **last)
    return losses.sum(), logits
