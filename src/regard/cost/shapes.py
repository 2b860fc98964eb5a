"""How many tokens each stack processes, and how an image becomes tokens.

    architecture     encoder          decoder
    encoder-decoder  seq              target_seq, and cross-attention to the seq states of the encoder
    decoder          -                seq
    encoder          seq              -
    recurrent        seq              target_seq, and cross-attention to the seq states of the encoder

The length of an image is the number of its patches (and one for [CLS]). Learned positions end at max_length.
Patches are embedded by matmuls:

    linear   side² patches, each a matmul [channels · patch²] x [dim]
    conv     3 x 3 convolutions with stride 2 until a patch is one position: [9 · channels in] x [channels out] at each
             output position, each followed by a norm and a relu; then [dim] x [dim]

A shifted window cuts each axis into pieces of s_i positions, and a patch attends to those of its window, so a layer
has (Σ s_i²)² pairs instead of side⁴ (Liu et al. 2021).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

from regard.errors import UserError
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
            layers = config.decoder_layers or config.layers
            return [StackShape("encoder", config.layers, source), StackShape("decoder", layers, target, source)]
        case "decoder" | "encoder":
            return [StackShape(config.architecture, config.layers, source)]


def lengths(config: ModelConfig, seq: int | None, target_seq: int | None) -> tuple[int, int]:
    """Source and target length, validated; the target length is 0 if there is only one sequence."""
    two = len(stack_shapes(config)) == 2
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
        if length < 1:
            raise UserError(f"{name} = {length}: must be 1 or more")
        if config.position_limit is not None and length > config.position_limit:
            learned = config.position == "learned"
            owner, other = ("the learned positions", "position = 'rope'") if learned else ("linformer", "another mixer")
            raise UserError(
                f"{name} = {length}: longer than max_length = {config.max_length} of {owner}; "
                f"use {config.max_length} or less, raise max_length, or use {other}"
            )
    return source, target if two else 0


class Matmul(NamedTuple):
    """[inputs] x [outputs] at each of `positions`."""

    inputs: int
    outputs: int
    positions: int


def patch_matmuls(config: ModelConfig) -> list[Matmul]:
    """The matmuls that embed an image, in order: the convolutions of the stem, if there is one, and the projection."""
    side, matmuls = config.image_size, []
    for before, after in itertools.pairwise((config.channels, *config.stem_widths)):
        side //= 2
        matmuls.append(Matmul(9 * before, after, side * side))
    inputs = config.dim if matmuls else config.channels * config.patch_size**2
    return [*matmuls, Matmul(inputs, config.dim, (config.image_size // config.patch_size) ** 2)]


def tile_pairs(config: ModelConfig, layers: int) -> int:
    """Query-key pairs of `layers` layers with a shifted window, [CLS] included."""
    assert config.shifted_window is not None
    size, side, first = config.shifted_window, config.image_size // config.patch_size, int(config.has_cls)
    total = 0
    for shift, count in ((0, -(-layers // 2)), (size // 2, layers // 2)):
        edges = sorted({0, *range(shift, side, size), side})
        pieces = sum((end - begin) ** 2 for begin, end in itertools.pairwise(edges))
        total += count * (pieces**2 + 2 * first * side**2 + first)
    return total
