"""Every head off once, for one input: which heads does this prediction need, and at which position?

For each head h, one pass with its output set to 0, all others as they are. At position n with the token y_n:

    change   Δ_h,n = log p(y_n) - log p_h(y_n)      in nats: above 0, the prediction is worse without the head
    flipped  argmax p_h ≠ argmax p                  another token has become the most probable one

y_n is the token that the text (or the target) has there; where it has none (after the end of a text, at a mask, for a
class), it is the one that the unchanged model finds most probable. Of a model that gives vectors, the change is
1 - cosine between its output with and without the head. The mean over positions with a token of the text is the change
of the loss, as `regard.explore.importance` measures it over many examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.explore.changes import Head
from regard.explore.inside import Look
from regard.nn.trace import trace


@dataclass(frozen=True)
class HeadsOff:
    """One row per head, one column per position of the output."""

    heads: tuple[Head, ...]
    changes: Tensor  # [H, N]
    flipped: Tensor  # bool [H, N]; of vectors all False
    labels: tuple[str, ...]  # of the tokens y_n

    def _repr_html_(self) -> str:
        """A notebook shows the mean change of every head as a table, the largest first."""
        from regard.explore.html import table

        means = sorted(zip(self.changes.mean(dim=1).tolist(), self.heads, strict=True), reverse=True)
        rows = [[".".join(map(str, head)), f"{mean:+.4f}"] for mean, head in means]
        return table(["head", "mean change when off, in nats"], rows)


@torch.inference_mode()
def heads_off(
    look: Look, heads: Iterable[Head] | None = None, *, watch: Callable[[list[Head]], Iterable[Head]] = iter
) -> HeadsOff:
    """Δ_h,n = log p(y_n) - log p_h(y_n) at every position n, for each head h set to 0.

    `heads` are by default all that are on; changes of `look` stay. `watch` may show progress.
    """
    inside, before = look.inside, look.output
    chosen = [head for head in heads or inside.anatomy.heads if head not in look.changes.heads]
    labels = predicted_tokens(look)
    log_p = None if before.kind == "vector" else before.logits.log_softmax(dim=-1)
    changes, flipped = [], []
    for head in watch(chosen):
        inside.anatomy.path(*head)  # raises for a head that the model does not have
        off = replace(look.changes, heads=(*look.changes.heads, head))
        with inside.lock, trace(inside.model, inside.edits(off, look.input), only=""):
            logits = inside.forward(look.input)[0].float().cpu().view(before.logits.shape)
        if log_p is None:
            distance = 1 - torch.cosine_similarity(before.logits.double(), logits.double(), dim=-1)
            changes.append(distance.clamp_min(0).float())
            flipped.append(torch.zeros(len(distance), dtype=torch.bool))
            continue
        log_q, at = logits.log_softmax(dim=-1), labels[:, None]
        changes.append((log_p.gather(1, at) - log_q.gather(1, at))[:, 0])
        flipped.append(log_p.argmax(dim=-1) != log_q.argmax(dim=-1))
    names = () if log_p is None else tuple(inside.reader.label(id) for id in labels.tolist())
    none = torch.zeros(0, len(before.logits))
    table, flips = (torch.stack(changes), torch.stack(flipped)) if chosen else (none, none.bool())
    return HeadsOff(tuple(chosen), table, flips, names)


def predicted_tokens(look: Look) -> Tensor:
    """y_n of every position, [N]; of a model that gives vectors, nothing."""
    if look.output.kind == "vector":
        return torch.zeros(0, dtype=torch.long)
    best = look.output.logits.argmax(dim=-1)
    for position in look.output.positions:
        if position.expected is not None:
            best[position.at] = position.expected.id
    return best
