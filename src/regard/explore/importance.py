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

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.changes import Changes, Head, edits
from regard.explore.examples import Batch
from regard.explore.inside import Inside
from regard.nn.trace import Edit, trace


@torch.inference_mode()
def mean_loss(inside: Inside, batches: Sequence[Batch], changes: Changes | None = None) -> float:
    """Nats per token over all batches, of the model as it is or changed."""
    total, count = 0.0, 0.0
    with inside.lock, trace(inside.model, edits(changes or Changes(), inside.anatomy), only=_smallest_stage(inside)):
        for batch in batches:
            losses, counts = batch.losses(inside.model)
            total, count = total + float(losses.double().sum()), count + float(counts.sum())
    if not count:
        raise UserError("the data has no token to predict, so there is no loss; give longer texts")
    return total / count


def _smallest_stage(inside: Inside) -> str:
    """The smallest stage that a trace can store."""
    return "encoder.output" if inside.config.architecture != "decoder" else "decoder.output"


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
    change = output_change if batches[0].expected is None else mean_loss
    whole = change(inside, batches, Changes(heads=tuple(off)))
    rest = [head for head in inside.anatomy.heads if head not in off]
    return {head: change(inside, batches, Changes(heads=(*off, head))) - whole for head in watch(rest)}


@torch.inference_mode()
def output_change(inside: Inside, batches: Sequence[Batch], changes: Changes) -> float:
    """1 - cosine between the vectors with and without changes, mean over all of them."""
    total, count = 0.0, 0
    for batch in batches:
        with inside.lock:
            before = batch.output(inside.model)
            with trace(inside.model, edits(changes, inside.anatomy), only=_smallest_stage(inside)):
                after = batch.output(inside.model)
        change = 1 - torch.cosine_similarity(before.double(), after.double(), dim=-1)  # [B] or [B, N]
        if change.dim() == 2 and batch.source_is_real is not None:
            change = change[batch.source_is_real]
        total, count = total + float(change.sum()), count + change.numel()
    return total / max(1, count)


def gradients(inside: Inside, batches: Sequence[Batch], *, off: Sequence[Head] = ()) -> dict[Head, float]:
    """I_h of every head that is not `off`, from one backward pass per batch."""
    if batches[0].expected is None:
        return {}
    layers = [
        (part, layer, path, heads)
        for part, some in inside.anatomy.parts.items()
        for layer, (path, heads) in enumerate(some)
    ]
    like = next(inside.model.parameters())
    totals = dict.fromkeys(inside.anatomy.heads, 0.0)
    rows = 0
    for batch in batches:
        # a gate per row, 0 for heads that are off: rows are independent, so the gradient of the sum is each row's own
        gates = [like.new_ones(len(batch.source), heads, 1, 1) for *_, heads in layers]
        for gate, (part, layer, *_) in zip(gates, layers, strict=True):
            gate[:, [head for *where, head in off if where == [part, layer]]] = 0
            gate.requires_grad_()
        put = {f"{path}.heads": _times(gate) for (*_, path, _), gate in zip(layers, gates, strict=True)}
        with inside.lock, torch.enable_grad(), trace(inside.model, put, only=_smallest_stage(inside)):
            losses, counts = batch.losses(inside.model)
            by_gate = torch.autograd.grad((losses / counts.clamp_min(1)).sum(), gates)
        for (part, layer, *_), gradient in zip(layers, by_gate, strict=True):
            for head, value in enumerate(gradient.abs().double().sum(dim=(0, 2, 3)).tolist()):
                totals[part, layer, head] += value
        rows += len(batch.source)
    return {head: total / rows for head, total in totals.items() if head not in off}


def _times(gate: Tensor) -> Edit:
    return lambda heads: heads * gate


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
    most = sum(heads - 1 for layers in inside.anatomy.parts.values() for _, heads in layers)
    if not 0 < count <= most:
        total = len(inside.anatomy.heads)
        raise UserError(f"{count} heads of {total}: at most {most} can be removed, one stays in every layer")
    off: list[Head] = []
    for turn in range(rounds, 0, -1):
        wanted = -(-(count - len(off)) // turn)
        if not wanted:
            continue
        if by == "loss":
            importance = losses_when_off(inside, batches, off=off, watch=watch)
        else:
            importance = gradients(inside, batches, off=off)
        left = Counter(head[:2] for head in importance)  # heads of each layer
        for head in sorted(importance, key=importance.__getitem__):
            if wanted and left[head[:2]] > 1:
                off.append(head)
                left[head[:2]] -= 1
                wanted -= 1
    return off
