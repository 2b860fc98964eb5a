"""How many tokens each stack processes.

    architecture     encoder          decoder
    encoder-decoder  seq              target_seq, and cross-attention to the seq states of the encoder
    decoder          -                seq
    encoder          seq              -
    recurrent        seq              target_seq, and cross-attention to the seq states of the encoder

The length of an image is the number of its patches (and one for [CLS]). Learned positions end at max_length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from regard.errors import UserError

if TYPE_CHECKING:
    from regard.models.config import ModelConfig


@dataclass(frozen=True)
class StackShape:
    """One stack: its layers, its tokens, and the tokens it attends to in a memory."""

    name: Literal["encoder", "decoder"]
    layers: int
    length: int
    memory: int = 0  # tokens that cross-attention attends to; 0: no cross-attention

    @property
    def causal(self) -> bool:
        return self.name == "decoder"

    @property
    def sublayers(self) -> int:
        """Of one block: attention, cross-attention if there is a memory, feed-forward."""
        return 3 if self.memory else 2


def stack_shapes(config: ModelConfig, source: int = 1, target: int = 1) -> list[StackShape]:
    match config.architecture:
        case "encoder-decoder" | "recurrent":
            layers = config.layers if config.decoder_layers is None else config.decoder_layers
            return [StackShape("encoder", config.layers, source), StackShape("decoder", layers, target, source)]
        case "decoder" | "encoder":
            return [StackShape(config.architecture, config.layers, source)]


def lengths(config: ModelConfig, seq: int | None, target_seq: int | None) -> tuple[int, int]:
    """Source and target length, validated; the target length is 0 if there is only one sequence."""
    two = config.architecture in ("encoder-decoder", "recurrent")
    patches = config.source_length if config.input == "patches" else None
    if patches is not None and seq not in (None, patches):
        raise UserError(
            f"seq = {seq}: an image of {config.image_size} x {config.image_size} in patches of {config.patch_size} "
            f"has {patches} positions; remove seq, or change image_size or patch_size"
        )
    if target_seq is not None and not two:
        raise UserError(
            f"target_seq = {target_seq}: architecture = {config.architecture!r} has one sequence; set only seq"
        )
    source = patches or (config.max_length if seq is None else seq)
    target = source if target_seq is None else target_seq
    for name, length in (("seq", source), ("target_seq", target))[: 2 if two else 1]:
        at_least_one(name, length)
        if config.position_limit is not None and length > config.position_limit:
            raise UserError(
                f"{name} = {length}: longer than max_length = {config.max_length} of the learned positions; "
                f"use {config.max_length} or less, raise max_length, or use position = 'rope'"
            )
    return source, target if two else 0


def at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise UserError(f"{name} = {value}: must be 1 or more")
