"""Direct logit attribution: which head and which feed-forward layer wrote the output.

With residual connections the state after the last block is a sum of everything that was added on the way,

    x_L = embeddings + Σ_l Σ_h head_{l,h} W_o,h + Σ_l FF_l + biases

and the logit of a token is W · N(x_L) + b. With the scale of the norm frozen, s = 1 / σ(x_L), N is linear, so that
each term has its share of the logit (Elhage et al. 2021):

    contribution of a term f  =  W · g ⊙ (f - mean f) · s          layer norm; RMS norm without the mean

and the contributions, with those of the biases, sum to the logit. In a post-LN model a term passes through the norm of
every later sub-layer; these are frozen in the same way. Of a classifier that takes the mean over positions, a
contribution is the mean over them.

This is the direct path only: a head that enables a later head contributes through that one. `regard.explore.patching`
measures the total effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.explore.cells import cell_map
from regard.explore.changes import PartName
from regard.explore.inside import Look, NotebookFigure
from regard.explore.readout import Readout, output_position, output_token
from regard.nn.multihead import MultiHead


@dataclass(frozen=True)
class Attribution:
    """The terms of one logit (or of the difference of two): their sum is `logit`."""

    at: int  # the position of the output
    token: str
    minus: str | None  # the other token, of a difference of two logits
    logit: float
    embeddings: float
    attention: Mapping[PartName, tuple[float, ...]]  # the whole sub-layer of every layer, its bias included
    heads: Mapping[PartName, tuple[Tensor, ...]]  # [heads] of every layer: the part of `attention` of each head
    feedforward: tuple[float, ...]
    biases: float  # of the norms on the way and of the output

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return self.embeddings + sum(map(sum, self.attention.values())) + sum(self.feedforward) + self.biases

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {name: getattr(self, name) for name in ("at", "token", "minus", "logit", "embeddings", "biases")}
        heads = {part: [layer.tolist() for layer in layers] for part, layers in self.heads.items()}
        return plain | {"attention": dict(self.attention), "heads": heads, "feedforward": self.feedforward}

    def _repr_html_(self) -> str:
        most = max((len(layer) for layers in self.heads.values() for layer in layers), default=0)
        rows, values = [], []
        for layer, written in enumerate(self.feedforward):
            for part, layers in self.heads.items():
                missing = [float("nan")] * (most - len(layers[layer]))
                rows.append(f"{part} {layer}")
                values.append([*layers[layer].tolist(), *missing, float("nan")])
            rows.append(f"feed-forward {layer}")
            values.append([float("nan")] * most + [written])
        columns = [*(f"head {head}" for head in range(most)), "feed-forward"]
        texts = [["" if value != value else f"{value:.2f}" for value in row] for row in values]
        name = self.token if self.minus is None else f"{self.token} - {self.minus}"
        figure = cell_map(
            [[0.0 if value != value else value for value in row] for row in values], rows, columns,
            texts=texts, title=f"Direct logit attribution of {name}",
        )  # fmt: skip
        note = f"Logit {self.logit:.3f} = embeddings {self.embeddings:.3f} + the cells and the biases of attention + "
        return NotebookFigure(figure, note=f"{note}other biases {self.biases:.3f}.")._repr_html_()


@torch.inference_mode()
def direct_logit_attribution(
    look: Look, at: int | None = None, *, token: int | str | None = None, minus: int | str | None = None
) -> Attribution:
    """The terms of the logit of `token` (by default the most probable one) at position `at` of the output.

    With `minus`, of the difference of the two logits. contribution = W · g ⊙ (f - mean f) / σ(x_L), σ frozen.
    """
    readout, at = Readout.of(look.inside), output_position(look, at)
    if not look.inside.config.residual:
        raise UserError("residual = false: without residual connections the output is no sum of contributions")
    id = output_token(look, at, token)
    other = None if minus is None else output_token(look, at, minus)
    weight, bias = readout.matrix()
    direction = weight[id].double() - (0 if other is None else weight[other].double())
    constant = 0.0 if bias is None else float(bias[id] - (0 if other is None else bias[other]))
    seen = look.inside.trace(look.input, look.changes, f"{readout.name}*.[eosh][mue][btma]*")
    terms = _Terms(look, readout, seen, None if readout.pooled else at)
    logits = look.output.logits[at].double()
    return Attribution(
        at,
        look.inside.reader.label(id),
        None if other is None else look.inside.reader.label(other),
        float(logits[id] - (0 if other is None else logits[other])),
        *terms.split(direction, constant),
    )


class _Terms:
    """The residual stream of one pass, taken apart: what every sub-layer added at the positions that are read."""

    def __init__(self, look: Look, readout: Readout, seen: Any, at: int | None) -> None:
        self.readout, self.seen = readout, seen
        self.skipped = {layer for stack, layer in look.changes.layers if stack == readout.name}
        count = seen[f"{readout.name}.embedded"].shape[1]
        pooling = readout.inside.config.pooling
        self.rows = slice(at, at + 1) if at is not None else slice(0, 1) if pooling == "cls" else slice(0, count)

    def state(self, stage: str) -> Tensor:
        """[positions read, dim]"""
        return cast(Tensor, self.seen[stage][0, self.rows].double())

    def split(self, direction: Tensor, constant: float) -> tuple[float, dict, dict, tuple[float, ...], float]:
        """Follow `direction` back from the logit to the embeddings: at each sum, what it says of the term added."""
        stack, name, config = self.readout.stack, self.readout.name, self.readout.inside.config
        rows = len(self.state(f"{name}.embedded"))
        back = (direction / rows).expand(rows, -1)  # the mean over the positions that are read
        back, more = _through(stack.norm, self.state(self.readout.stages[-1]), back)
        constant += more
        attention: dict[PartName, list[float]] = {}
        heads: dict[PartName, list[Tensor]] = {}
        feedforward: list[float] = []
        for layer, sublayer, module, norm in reversed(self._sublayers()):
            live = layer not in self.skipped
            if config.norm_order == "post" and live:
                back, more = _through(norm, self.state(f"{name}.{layer}.{sublayer}.sum"), back)
                constant += more
            value = float((back * self.state(f"{name}.{layer}.{sublayer}.output")).sum()) if live else 0.0
            if sublayer == "feedforward":
                feedforward.insert(0, value)
                continue
            part: PartName = "cross" if sublayer == "cross" else name
            attention.setdefault(part, []).insert(0, value)
            heads.setdefault(part, []).insert(0, self._heads(f"{name}.{layer}.{sublayer}", module, back, live))
        embeddings = float((back * self.state(f"{name}.embedded")).sum())
        plain = {part: tuple(values) for part, values in attention.items()}
        return embeddings, plain, {part: tuple(some) for part, some in heads.items()}, tuple(feedforward), constant

    def _sublayers(self) -> list[tuple[int, str, nn.Module, nn.Module]]:
        """(layer, name, module, norm) in the order of computation."""
        found = []
        for layer, block in enumerate(self.readout.blocks):
            found.append((layer, "attention", cast(nn.Module, block.attention), block.attention_norm))
            if block.cross is not None and block.cross_norm is not None:
                found.append((layer, "cross", block.cross, block.cross_norm))
            found.append((layer, "feedforward", block.feedforward, block.feedforward_norm))
        return found

    def _heads(self, path: str, module: nn.Module, back: Tensor, live: bool) -> Tensor:
        """[heads]: back · (head W_o,h), summed over the positions that are read."""
        if not isinstance(module, MultiHead):
            return torch.zeros(0)
        if not live:
            return torch.zeros(module.heads)
        z = self.seen[f"{path}.heads"][0, :, self.rows].double()  # [H, positions, Dv]
        matrix = module.out.weight.double().view(-1, module.heads, z.shape[-1])  # [dim, H, Dv]
        return torch.einsum("nd,dhv,hnv->h", back, matrix, z).cpu()


def _frozen(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """g / σ(x) and b of a norm: N(x) = slope ⊙ (x - mean x) + shift."""
    if isinstance(norm, nn.LayerNorm):
        scale = (x.var(dim=-1, unbiased=False, keepdim=True) + norm.eps).rsqrt()
        shift = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
        return scale * norm.weight.double(), shift.double()
    if isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        return (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt() * norm.weight.double(), x.new_zeros(())
    return x.new_ones(()), x.new_zeros(())  # none


def _through(norm: nn.Module, x: Tensor, back: Tensor) -> tuple[Tensor, float]:
    """A direction before a frozen norm that gives what `back` gives after it, and the constant of its bias."""
    slope, shift = _frozen(norm, x)
    before = back * slope
    if isinstance(norm, nn.LayerNorm):
        before = before - before.mean(dim=-1, keepdim=True)
    return before, float((back * shift).sum())
