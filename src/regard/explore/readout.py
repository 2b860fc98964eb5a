"""Readout: how the output of a model is computed from the residual stream.

The residual stream is the vector of each position that the blocks read and add to. After the last block, L,

    logits = W · N(x_L) + b                   N the final norm; identity where the blocks end with a norm (post-LN)

    tokens    a decoder, or an encoder with token logits: at every position
    tags      an encoder with a class for every token: at every position
    classes   an encoder with one class: N(x_L) of [CLS], or the mean of all positions, is one vector

The same readout of the residual stream after an earlier block is the logit lens (`regard.explore.lens`). Because it is
linear apart from the norm, the logit is a sum over everything that was added (`regard.explore.attribution`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from regard.errors import UserError
from regard.explore.changes import PartName
from regard.explore.inside import Inside, Look
from regard.models.transformer import Encoder
from regard.nn.block import Block, Stack


@dataclass(frozen=True)
class Readout:
    """The last stack of a model, and what is computed from its states."""

    inside: Inside
    name: PartName  # of the stack: "encoder" or "decoder"

    @classmethod
    def of(cls, inside: Inside) -> Readout:
        config = inside.config
        if config.architecture == "recurrent":
            raise UserError("architecture = 'recurrent': has no residual stream; use a Transformer")
        if config.output_head not in ("tokens", "classes"):
            raise UserError(
                f"output_head = {config.output_head!r}: the model outputs vectors, not logits of tokens or classes, so "
                "there is no prediction to read from its layers"
            )
        return cls(inside, "encoder" if config.architecture == "encoder" else "decoder")

    @property
    def stack(self) -> Stack:
        return cast(Stack, getattr(self.inside.model, self.name))

    @property
    def blocks(self) -> list[Block]:
        return [cast(Block, block) for block in self.stack.blocks]

    @property
    def pooled(self) -> bool:
        """Whether there is one output for the whole input."""
        return not self.inside.config.per_token

    @property
    def stages(self) -> list[str]:
        """The residual stream in a trace: the embeddings, then the output of every block."""
        return [f"{self.name}.embedded", *(f"{self.name}.{layer}.output" for layer in range(len(self.blocks)))]

    @property
    def states(self) -> str:
        """A pattern of a trace that matches `stages` and the outputs of sub-layers, and nothing large."""
        return f"{self.name}*.[eo][mu][bt]*"

    @property
    def applied(self) -> str:
        """What is applied to the residual stream before the output matrix, in words."""
        config = self.inside.config
        norm = {"layer": "layer norm", "rms": "RMS norm", "none": "no norm"}[config.norm]
        parts = [f"the final {norm}" if config.ends_with_norm and config.norm != "none" else "no final norm"]
        if not config.ends_with_norm and config.norm != "none":
            parts = [f"nothing: every block ends with its own {norm} (post-LN)"]
        if self.pooled:
            parts.append("the state of [CLS]" if config.pooling == "cls" else "the mean over positions")
        if config.pooler:
            parts.append("the pooler")
        if config.head_layer:
            parts.append("the layer, GELU and norm of the output head")
        return ", ".join(parts)

    def logits(self, residual: Tensor) -> Tensor:
        """The residual stream [B, N, dim] -> logits [B, N, vocab_size or classes]; of one class per input [B, 1, …]."""
        model, states = self.inside.model, self.stack.norm(residual)
        if isinstance(model, Encoder) and model.classifier is not None:
            return cast(Tensor, model.classifier(model.pooled(states)[:, None] if self.pooled else states))
        return cast(Tensor, cast(nn.Module, model.output_head)(states))

    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """W [outputs, dim], with the scale of the logits, and b, where nothing but a norm and pooling precede them."""
        model, config = self.inside.model, self.inside.config
        if config.head_layer or config.pooler:
            name = "head_layer" if config.head_layer else "pooler"
            kind = "GELU" if config.head_layer else "tanh"
            raise UserError(
                f"{name} = true: a layer with {kind} lies between the residual stream and the logits, so a logit is "
                "not a sum of contributions; use activation patching, or switch heads off"
            )
        if isinstance(model, Encoder) and model.classifier is not None:
            return model.classifier.weight, model.classifier.bias
        assert model.output_head is not None
        return model.output_head.project.weight * model.output_head.scale, model.output_head.bias


def output_position(look: Look, at: int | None = None) -> int:
    """A position of the output that exists; by default the last one of a decoder, and the first one of others."""
    count = len(look.output.positions)
    if at is None:
        return count - 1 if look.output.kind == "next" else 0
    if not 0 <= at < count:
        raise UserError(f"position = {at}: the output has positions 0 to {count - 1}")
    return at


def output_token(look: Look, at: int, token: int | str | None = None) -> int:
    """The id of a token (or class) by id or label; by default the most probable one at that position."""
    size = look.output.logits.shape[-1]
    if token is None:
        return int(look.output.logits[at].argmax())
    if isinstance(token, int):
        if not 0 <= token < size:
            raise UserError(f"token = {token}: the output has ids 0 to {size - 1}")
        return token
    reader = look.inside.reader
    matches = [id for id in range(size) if token in (label := reader.label(id), label.removeprefix("▁"))]
    if not matches:
        raise UserError(f"token = {token!r}: is not a token (or class) of the output; give its id or its label")
    return matches[0]
