"""Saliency: which tokens of the input an output depends on, in three ways beside each other.

    attention         the weights of one layer, mean of its heads: what was mixed there, not what reached the output
    rollout           Ā_l = ½ (mean of the heads of layer l) + ½ I          half for the residual connection
                      R = Ā_L · … · Ā_1                                     Abnar & Zuidema 2020
    gradient × input  (∂ logit / ∂ e_i) · e_i                               e_i the embedding of token i, its position
                                                                            included; Shrikumar et al. 2016

A row of R sums to 1. In an encoder-decoder the same rule holds for cross-attention C: each sub-layer adds one half to
the residual stream, so that an output is traced to the tokens of the source and of the target read so far:

    self-attention   R ← Ā R,   M ← Ā M           cross-attention   R ← ½ R,   M ← ½ M + ½ C R_encoder

Rollout follows attention weights alone and knows no feed-forward layer and no sign. Gradient × input is the first-order
effect on the logit: positive where a larger embedding would raise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.cells import cell_map
from regard.explore.inside import Look, NotebookFigure, Part
from regard.explore.readout import Readout, output_position, output_token
from regard.nn.trace import trace


@dataclass(frozen=True)
class Saliency:
    """Numbers for every input token: those of the source, then (encoder-decoder) those of the target read so far."""

    at: int
    token: str  # whose logit the gradient is of
    sides: tuple[str, ...]  # "source" or "read" of every token
    labels: tuple[str, ...]
    attention: Tensor  # [tokens]: last layer, mean of its heads
    rollout: Tensor
    gradient: Tensor  # gradient × input, signed

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {name: getattr(self, name) for name in ("at", "token", "sides", "labels")}
        return plain | {name: getattr(self, name).tolist() for name in ("attention", "rollout", "gradient")}

    def _repr_html_(self) -> str:
        rows = ("attention", "rollout", "gradient × input")
        parts = (self.attention, self.rollout, self.gradient)
        scaled = torch.stack([part / part.abs().max().clamp_min(1e-30) for part in parts])
        texts = [[f"{value:.2f}" for value in part.tolist()] for part in parts]
        figure = cell_map(scaled, rows, self.labels, texts=texts, title=f"What {self.token} depends on")
        return NotebookFigure(figure, note="Each row has its own colour scale.")._repr_html_()


def token_saliency(look: Look, at: int | None = None, *, token: int | str | None = None) -> Saliency:
    """Mean attention Ā_L of the last layer, rollout R = Π (½ Ā + ½ I), and (∂ logit / ∂ e_i) · e_i of one output.

    By default the logit of its most probable token.
    """
    at = output_position(look, at)
    id = output_token(look, at, token)
    labels, sides, attention = list(look.input.source_labels), ["source"] * len(look.input.source_labels), []
    name = "cross" if "cross" in look.parts else Readout.of(look.inside).name
    attention.append(_row(look, _mean(look.parts[name], -1), at))  # type: ignore[index]
    if look.input.target is not None:
        labels += look.input.read
        sides += ["read"] * len(look.input.read)
        own = look.parts.get("decoder")
        attention.append(torch.zeros(len(look.input.read)) if own is None else _mean(own, -1)[at])
    return Saliency(
        at, look.inside.reader.label(id), tuple(sides), tuple(labels),
        torch.cat(attention), _row(look, attention_rollout(look), at), gradient_times_input(look, at, token=id),
    )  # fmt: skip


def _mean(part: Part, layer: int) -> Tensor:
    """[queries, keys], mean of the heads of a layer."""
    weights = part.weights[layer]
    if not len(weights):
        raise UserError(f"layer {layer % len(part.weights)} of the {part.name} computes no attention weights")
    return weights.mean(dim=0)


def _row(look: Look, rows: Tensor, at: int) -> Tensor:
    """The row of an output; of a class the row of [CLS], or the mean of all."""
    if look.output.kind != "classes":
        return rows[at]
    return rows[0] if look.inside.config.pooling == "cls" else rows.mean(dim=0)


def rollout(layers: Sequence[Tensor]) -> Tensor:
    """R = Ā_L · … · Ā_1 with Ā = ½ A + ½ I, from the weights [N, N] of every layer (mean of its heads)."""
    joint = torch.eye(len(layers[0]))
    for weights in layers:
        joint = 0.5 * (weights + torch.eye(len(weights))) @ joint
    return joint


def attention_rollout(look: Look) -> Tensor:
    """R = Ā_L · … · Ā_1 with Ā = ½ A + ½ I, A the mean of the heads: [output positions, input tokens].

    Of an encoder-decoder [target, source + target]: per layer first the decoder's own attention, then
    R ← ½ R + ½ C · R_encoder with its cross-attention C.
    """
    parts = look.parts
    means = {name: [_mean(part, layer) for layer in range(len(part.weights))] for name, part in parts.items()}
    if "cross" not in parts:
        return rollout(next(iter(means.values())))
    if "decoder" not in parts:
        raise UserError("rollout: needs self-attention in the decoder, which this model does not have")
    size = len(parts["cross"].columns)
    encoder = rollout(means["encoder"]) if "encoder" in means else torch.eye(size)
    own, source = torch.eye(len(parts["decoder"].rows)), torch.zeros(len(parts["cross"].rows), size)
    for weights, cross in zip(means["decoder"], means["cross"], strict=True):
        mixed = 0.5 * (weights + torch.eye(len(weights)))
        own, source = mixed @ own, mixed @ source
        own, source = 0.5 * own, 0.5 * source + 0.5 * cross @ encoder
    return torch.cat((source, own), dim=1)


def gradient_times_input(look: Look, at: int | None = None, *, token: int | str | None = None) -> Tensor:
    """(∂ logit / ∂ e_i) · e_i for every input token i: [source], of an encoder-decoder [source + target]."""
    inside, readout, at = look.inside, Readout.of(look.inside), output_position(look, at)
    id = output_token(look, at, token)
    stages = [f"{name}.embedded" for name in ("encoder", "decoder") if hasattr(inside.model, name)]
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, value: Tensor) -> Tensor:
        leaves[name] = value.detach().clone().requires_grad_()
        return leaves[name]

    edits = inside.edits(look.changes, look.input)
    for name in stages:
        before = edits.get(name, lambda value: value)
        edits[name] = lambda value, name=name, before=before: leaf(name, before(value))  # type: ignore[misc]
    with inside.lock, torch.inference_mode(False), torch.enable_grad(), trace(inside.model, edits, only=""):
        logits = inside.forward(look.input)[0]
        logit = logits[id] if readout.pooled else logits[at, id]
        gradients = torch.autograd.grad(logit, [leaves[name] for name in stages])
    parts = [(one * leaves[name]).sum(dim=-1)[0] for one, name in zip(gradients, stages, strict=True)]
    return torch.cat(parts).float().detach().cpu()
