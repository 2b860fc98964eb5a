"""The logit lens: what the model would predict if it ended after each layer (nostalgebraist 2020).

    p_l = softmax(W · N(x_l) + b)         x_l the residual stream after block l; x_0 the embeddings; N the final norm

At the last layer this is the output of the model. Earlier layers show how the prediction develops: where the correct
token first becomes the most probable one, and what was there before. With post-LN every block ends with a norm of its
own and there is no final one, so N is the identity. An early layer need not use the directions of the last one: where
the lens shows nonsense, the layer may still contain the information (Belrose et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.cells import cell_map
from regard.explore.forward import Kind
from regard.explore.inside import Look, NotebookFigure
from regard.explore.readout import Readout

LARGEST = 2**27  # logits computed at a time: 512 MiB


@dataclass(frozen=True)
class Lens:
    """Predictions [layers + 1, positions]: row 0 reads the embeddings, row l + 1 the output of layer l.

    final   the probability of the token that the whole model predicts
    rank    its rank, 0: the most probable
    """

    kind: Kind
    positions: tuple[int, ...]
    read: tuple[str, ...]  # the label of each position
    rows: tuple[str, ...]  # "embeddings", "layer 0", …
    ids: Tensor  # [rows, positions, top]
    labels: tuple[tuple[tuple[str, ...], ...], ...]  # [rows][positions][top]
    probabilities: Tensor  # [rows, positions, top]
    entropy: Tensor  # [rows, positions] in nats
    final: Tensor
    rank: Tensor
    applied: str  # what is applied before the output matrix
    final_norm: bool  # whether a final norm is among it; False: every block ends with its own (post-LN)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("kind", "positions", "read", "rows", "labels", "applied", "final_norm")
        tensors = ("probabilities", "entropy", "final", "rank")
        plain = {name: getattr(self, name) for name in names}
        return plain | {name: getattr(self, name).double().round(decimals=6).tolist() for name in tensors}

    def _repr_html_(self) -> str:
        texts = [[one[0] for one in row] for row in self.labels]
        title = "Logit lens: the most probable token after each layer"
        figure = cell_map(self.probabilities[..., 0], self.rows, self.read, texts=texts, title=title)
        return NotebookFigure(figure, note=f"Applied before the output matrix: {self.applied}.")._repr_html_()


@torch.inference_mode()
def logit_lens(look: Look, positions: Sequence[int] | None = None, *, top: int = 5) -> Lens:
    """p_l = softmax(W · N(x_l) + b) after every layer l, at these positions of the output (by default all)."""
    inside, readout, output = look.inside, Readout.of(look.inside), look.output
    count, size = output.logits.shape
    chosen = tuple(range(count)) if positions is None else tuple(positions)
    if not chosen or not all(0 <= at < count for at in chosen):
        raise UserError(f"positions = {list(chosen)[:8]}: the output has positions 0 to {count - 1}")
    if top < 1:
        raise UserError(f"top = {top}: must be 1 or more")
    seen = inside.trace(look.input, look.changes, readout.states)
    best = output.logits[list(chosen)].argmax(dim=-1)  # what the whole model predicts
    rows = []
    for stage in readout.stages:
        residual = seen[stage] if readout.pooled else seen[stage][:, list(chosen)]
        step = max(1, LARGEST // size)
        parts = [residual] if readout.pooled else residual.split(step, dim=1)
        rows.append(_read(torch.cat([readout.logits(part)[0] for part in parts]).float().cpu(), best, min(top, size)))
    ids, probabilities, entropy, final, rank = (torch.stack(values) for values in zip(*rows, strict=True))
    label = inside.reader.label
    labels = tuple(tuple(tuple(map(label, some)) for some in row) for row in ids.tolist())
    names = ("embeddings", *(f"layer {layer}" for layer in range(len(rows) - 1)))
    read = tuple(output.positions[at].read or "output" for at in chosen)
    return Lens(
        output.kind,
        chosen,
        read,
        names,
        ids,
        labels,
        probabilities,
        entropy,
        final,
        rank,
        readout.applied,
        inside.config.ends_with_norm,
    )


def _read(logits: Tensor, best: Tensor, top: int) -> tuple[Tensor, ...]:
    """Ids and probabilities of the most probable tokens, the entropy, and probability and rank of `best`."""
    p = logits.softmax(dim=-1)
    probabilities, ids = p.topk(top, dim=-1)
    entropy = -(p * p.clamp_min(1e-30).log()).sum(dim=-1)
    final = p.gather(1, best[:, None])
    return ids, probabilities, entropy, final[:, 0], (p > final).sum(dim=-1)
