"""Neurons: the units of a feed-forward layer, when they are active and what they write.

    FF(x) = Σ_u h_u(x) · d_u + b            h = act(W₁ x + b₁), d_u column u of W₂

A unit u is a pair: h_u says at which tokens it is active, d_u is the vector that it then adds to the residual stream
(Geva et al. 2021). Read as logits with the final norm's gain, W · g ⊙ (d_u - mean d_u), that vector shows which tokens
the unit makes more or less probable, on the direct path to the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.cells import cell_map
from regard.explore.changes import PartName, check_layer
from regard.explore.inside import Look, NotebookFigure
from regard.explore.readout import Readout
from regard.explore.scores import linear_part
from regard.nn.feedforward import FeedForward


@dataclass(frozen=True)
class Neurons:
    """The units of one feed-forward layer over one text."""

    look: Look
    stack: PartName
    layer: int
    labels: tuple[str, ...]  # of the positions
    activations: Tensor  # [positions, units]

    def check(self, unit: int) -> int:
        if not 0 <= unit < self.activations.shape[1]:
            raise UserError(f"unit = {unit}: this layer has units 0 to {self.activations.shape[1] - 1}")
        return unit

    def top_units(self, count: int = 10) -> list[tuple[int, int, float]]:
        """The units with the largest |activation|: (unit, position, activation), largest first."""
        at = self.activations.abs().argmax(dim=0)  # [units]
        largest = self.activations.gather(0, at[None])[0]
        order = largest.abs().topk(min(count, len(largest))).indices.tolist()
        return [(unit, int(at[unit]), float(largest[unit])) for unit in order]

    def top_tokens(self, unit: int, count: int = 10) -> list[tuple[int, str, float]]:
        """Where a unit is most active: (position, token, activation), largest first."""
        values, at = self.activations[:, self.check(unit)].topk(min(count, len(self.labels)))
        pairs = zip(at.tolist(), values.tolist(), strict=True)
        return [(position, self.labels[position], value) for position, value in pairs]

    @torch.inference_mode()
    def writes(self, unit: int, count: int = 5) -> tuple[list[tuple[str, float]], list[tuple[str, float]]] | None:
        """The tokens (or classes) whose logits the unit raises and those that it lowers most, per unit of activation.

        None where the way to the output is not direct: a layer of an encoder before a decoder, an output head with a
        layer of its own, a model that outputs vectors.
        """
        inside, config = self.look.inside, self.look.inside.config
        last = "encoder" if config.architecture == "encoder" else "decoder"
        if self.stack != last or config.head_layer or config.pooler or config.output_head not in ("tokens", "classes"):
            return None
        readout = Readout.of(inside)
        weight, _ = readout.matrix()
        column = _feedforward(self.look, self.stack, self.layer).down.weight[:, self.check(unit)].double().cpu()
        norm = linear_part(readout.stack.norm, inside.config.dim)
        logits = weight.double().cpu() @ (norm @ column)

        def largest(sign: int) -> list[tuple[str, float]]:
            order = (sign * logits).topk(min(count, len(logits))).indices.tolist()
            return [(inside.reader.label(id), float(logits[id])) for id in order if sign * logits[id] > 0]

        return largest(1), largest(-1)

    def _repr_html_(self) -> str:
        units = [unit for unit, _, _ in self.top_units()]
        grid = self.activations[:, units].T
        title = f"Most active units of feed-forward {self.stack}.{self.layer}"
        figure = cell_map(grid, [f"unit {unit}" for unit in units], self.labels, title=title)
        return NotebookFigure(figure, note="After the activation function.")._repr_html_()


def neuron_activations(look: Look, layer: int, stack: PartName | None = None) -> Neurons:
    """The units of a feed-forward layer: h = act(W₁ x + b₁) at every position."""
    own_stack: PartName = "encoder" if look.inside.config.architecture == "encoder" else "decoder"
    name = own_stack if stack is None else stack
    _feedforward(look, name, layer)
    path = f"{name}.{layer}.feedforward.hidden"
    hidden = look.inside.trace(look.input, look.changes, path)[path][0].float().cpu()
    own = look.input.read if name == "decoder" and look.input.target is not None else look.input.source_labels
    return Neurons(look, name, layer, own, hidden)


def _feedforward(look: Look, stack: PartName, layer: int) -> FeedForward:
    inside = look.inside
    if inside.config.architecture == "recurrent":
        raise UserError("architecture = 'recurrent': has no feed-forward layers; use a Transformer")
    check_layer(inside.anatomy, stack, layer, "neurons")
    module = cast(Any, getattr(inside.model, stack)).blocks[layer].feedforward
    if not isinstance(module, FeedForward):
        raise UserError("experts: a mixture of experts sends tokens to different layers; units cannot be compared")
    return module
