"""Importance: how much the loss depends on each head, whatever it attends to.

Put a gate ξ_h on the output of head h, 1 as it is, 0 where it is off:

    measured    L(ξ_h = 0) - L(1)                             what happens when it is off, one head at a time
    gradient    I_h = mean over examples x of |∂L(x) / ∂ξ_h|    sensitivity of the loss, all heads in one
                                                              backward pass; Michel et al. 2019, eq. 2

L(x) is the mean loss of the tokens of one example. Measured one at a time, redundant heads all seem unimportant; what
a set of heads contributes is known only by switching the set off (`regard prune` measures it). A model that gives
vectors has no loss: then the change is 1 - cosine between its output with and without the head.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from regard.errors import UserError
from regard.explore.changes import Changes, Head, edits
from regard.explore.examples import Batch
from regard.explore.inside import Inside
from regard.nn.trace import trace


@torch.inference_mode()
def mean_loss(inside: Inside, batches: Sequence[Batch], changes: Changes | None = None) -> float:
    """Nats per token over all batches, of the model as it is or changed."""
    total, count = 0.0, 0.0
    with inside.lock, trace(inside.model, edits(changes or Changes(), inside.anatomy), only=""):
        for batch in batches:
            losses, counts = batch.losses(inside.model)
            total, count = total + float(losses.double().sum()), count + float(counts.sum())
    if not count:
        raise UserError("the data has no token to predict, so there is no loss; give longer texts")
    return total / count


def losses_when_off(
    inside: Inside,
    batches: Sequence[Batch],
    *,
    off: Sequence[Head] = (),
    watch: Callable[[list[Head]], Iterable[Head]] = iter,
) -> dict[Head, float]:
    """For each head the change of the loss when it is off, in addition to those that are `off` already.

    `watch` may show the progress.
    """
    if batches[0].expected is None:  # vectors are compared with those of the whole model
        with inside.lock, torch.inference_mode():
            batches = [replace(batch, expected=batch.output(inside.model)) for batch in batches]
    whole = mean_loss(inside, batches, Changes(heads=tuple(off)))
    rest = [head for head in inside.anatomy.heads if head not in off]
    return {head: mean_loss(inside, batches, Changes(heads=(*off, head))) - whole for head in watch(rest)}


def gradients(inside: Inside, batches: Sequence[Batch], *, off: Sequence[Head] = ()) -> dict[Head, float]:
    """I_h of every head that is not `off`, from one backward pass per batch."""
    if batches[0].expected is None:
        return {}
    heads, like = inside.anatomy.heads, next(inside.model.parameters())
    layers = [layer for layers in inside.anatomy.parts.values() for layer in layers if layer[1]]
    is_on = like.new_tensor([head not in off for head in heads])
    total, rows = torch.zeros(len(heads), dtype=torch.float64), 0
    for batch in batches:
        with inside.lock, torch.enable_grad():
            # a gate per row, 0 for heads that are off: rows are independent, so the gradient of the sum is each row's
            gate = is_on.repeat(len(batch.source), 1)[
                ..., None, None
            ].requires_grad_()  # [B, heads of all layers, 1, 1]
            gates = gate.split([count for _, count in layers], dim=1)
            put = {f"{path}.heads": partial(torch.mul, one) for (path, _), one in zip(layers, gates, strict=True)}
            with trace(inside.model, put, only=""):
                losses, counts = batch.losses(inside.model)
            (gradient,) = torch.autograd.grad((losses / counts.clamp_min(1)).sum(), gate)
        total, rows = total + gradient.abs().double().sum(dim=(0, 2, 3)).cpu(), rows + len(batch.source)
    return {head: value for head, value in zip(heads, (total / rows).tolist(), strict=True) if head not in off}


def least_important(
    inside: Inside,
    batches: Sequence[Batch],
    count: int,
    *,
    by: Literal["loss", "gradient"] = "loss",
    rounds: int = 4,
    watch: Callable[[list[Head]], Iterable[Head]] = iter,
) -> list[Head]:
    """The `count` least important heads, chosen in `rounds`: each round measures the others without those chosen.

    Redundant heads would all be removed at once if importance were measured only once. Every layer keeps one.
    """
    inside.anatomy.check_weights()
    most = sum(heads - 1 for layers in inside.anatomy.parts.values() for _, heads in layers if heads)
    if not 0 < count <= most:
        total = len(inside.anatomy.heads)
        raise UserError(f"{count} heads of {total}: at most {most} can be removed, one stays in every layer")
    measure = partial(losses_when_off, watch=watch) if by == "loss" else gradients
    off: list[Head] = []
    for turn in range(rounds, 0, -1):
        goal = len(off) + math.ceil((count - len(off)) / turn)
        importance = measure(inside, batches, off=off) if goal > len(off) else {}
        left = Counter(head[:2] for head in importance)  # heads of each layer
        for head in sorted(importance, key=importance.__getitem__):
            if len(off) < goal and left[head[:2]] > 1:
                off.append(head)
                left[head[:2]] -= 1
    return off
