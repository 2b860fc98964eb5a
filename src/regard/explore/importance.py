"""Importance: which heads matter. Not where they look, but what is lost without them.

Put a gate ξ_h on the output of head h, 1 as it is, 0 where it is off:

    measured    L(ξ_h = 0) - L(1)                             what happens when it is off, one head at a time
    gradient    I_h = mean over examples x of |∂L(x) / ∂ξ_h|    how much the loss leans on it, all heads in one
                                                              backward pass; Michel et al. 2019, eq. 2

L(x) is the mean loss of the tokens of one example. Measured one at a time, heads that stand in for each other all look
idle; what a set of heads costs is known only by taking the set away (`regard prune` tells it). A model that gives
vectors has no loss: then the change is 1 - cosine between its output with and without the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.changes import Changes, Head, edits
from regard.explore.examples import Batch
from regard.explore.inside import Inside
from regard.nn.trace import Edit, trace


def all_heads(inside: Inside) -> list[Head]:
    return [
        (part, layer, head)
        for part, layers in inside.anatomy.parts.items()
        for layer, (_, heads) in enumerate(layers)
        for head in range(heads)
    ]


@torch.inference_mode()
def mean_loss(inside: Inside, batches: Sequence[Batch], changes: Changes | None = None) -> float:
    """Nats a token over all batches, as the model is or changed."""
    total, count = 0.0, 0.0
    with inside.lock, trace(inside.model, edits(changes or Changes(), inside.anatomy), only=_little(inside)):
        for batch in batches:
            losses, counts = batch.losses(inside.model)
            total, count = total + float(losses.double().sum()), count + float(counts.sum())
    if not count:
        raise UserError("the data has no token that the model should foresee, so there is no loss; give longer texts")
    return total / count


def _little(inside: Inside) -> str:
    """The smallest thing that a trace can keep."""
    return "encoder.output" if inside.config.architecture != "decoder" else "decoder.output"


def losses_when_off(
    inside: Inside,
    batches: Sequence[Batch],
    *,
    off: Sequence[Head] = (),
    watch: Callable[[list[Head]], Iterable[Head]] = iter,
) -> dict[Head, float]:
    """For each head the change of the loss when it is off, beside those that are `off` already.

    `watch` may show how far it is.
    """
    rest = [head for head in all_heads(inside) if head not in off]
    if batches[0].expected is None:
        whole = output_change(inside, batches, Changes(heads=tuple(off))) if off else 0.0
        return {head: output_change(inside, batches, Changes(heads=(*off, head))) - whole for head in watch(rest)}
    whole = mean_loss(inside, batches, Changes(heads=tuple(off)))
    return {head: mean_loss(inside, batches, Changes(heads=(*off, head))) - whole for head in watch(rest)}


@torch.inference_mode()
def output_change(inside: Inside, batches: Sequence[Batch], changes: Changes) -> float:
    """1 - cosine between the vectors with and without changes, mean over all of them."""
    total, count = 0.0, 0
    for batch in batches:
        with inside.lock:
            before = batch.output(inside.model)
            with trace(inside.model, edits(changes, inside.anatomy), only=_little(inside)):
                after = batch.output(inside.model)
        apart = 1 - torch.cosine_similarity(before.double(), after.double(), dim=-1)  # [B] or [B, N]
        if apart.dim() == 2 and batch.source_is_real is not None:
            apart = apart[batch.source_is_real]
        total, count = total + float(apart.sum()), count + apart.numel()
    return total / max(1, count)


def gradients(inside: Inside, batches: Sequence[Batch], *, off: Sequence[Head] = ()) -> dict[Head, float]:
    """I_h of every head that is not `off`, from one backward pass a batch."""
    if batches[0].expected is None:
        return {}
    paths = {
        (part, layer): (path, heads)
        for part, layers in inside.anatomy.parts.items()
        for layer, (path, heads) in enumerate(layers)
    }
    totals: dict[Head, float] = dict.fromkeys(all_heads(inside), 0.0)
    rows = 0
    for batch in batches:
        size = batch.source.shape[0]
        like = next(inside.model.parameters())
        # one gate a row: rows do not meet, so the slope of the sum is each row's own
        gates = [
            _gate(like, size, heads, [h for *place, h in off if tuple(place) == key])
            for key, (_, heads) in paths.items()
        ]
        put = {f"{path}.heads": _times(gate) for (path, _), gate in zip(paths.values(), gates, strict=True)}
        with inside.lock, torch.enable_grad(), trace(inside.model, put, only=_little(inside)):
            losses, counts = batch.losses(inside.model)
            slopes = torch.autograd.grad((losses / counts.clamp_min(1)).sum(), gates)
        for (part, layer), slope in zip(paths, slopes, strict=True):
            for head, value in enumerate(slope.abs().double().sum(dim=(0, 2, 3)).tolist()):
                totals[part, layer, head] += value
        rows += size
    return {head: total / rows for head, total in totals.items() if head not in off}


def _gate(like: Tensor, rows: int, heads: int, off: Sequence[int]) -> Tensor:
    """Ones [rows, heads, 1, 1], zero for heads that are off."""
    gate = like.new_ones(rows, heads, 1, 1)
    gate[:, list(off)] = 0
    return gate.requires_grad_()


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
    """`count` heads whose loss is small, chosen in `rounds`: after each, those left are judged without those gone.

    Heads that stand in for each other would all go at once if they were judged only once. Every layer keeps one.
    """
    most = sum(heads - 1 for layers in inside.anatomy.parts.values() for _, heads in layers)
    if not 0 < count <= most:
        raise UserError(f"{count} heads of {len(all_heads(inside))}: at most {most} can go, one stays in every layer")
    off: list[Head] = []
    for turn in range(rounds, 0, -1):
        wanted = -(-(count - len(off)) // turn)
        if not wanted:
            continue
        judged = (
            losses_when_off(inside, batches, off=off, watch=watch)
            if by == "loss"
            else gradients(inside, batches, off=off)
        )
        left = {
            (part, at): heads for part, layers in inside.anatomy.parts.items() for at, (_, heads) in enumerate(layers)
        }
        for part, layer, _ in off:
            left[part, layer] -= 1
        for head in sorted(judged, key=lambda head: judged[head]):
            if wanted and left[head[:2]] > 1:
                off.append(head)
                left[head[:2]] -= 1
                wanted -= 1
    return off
