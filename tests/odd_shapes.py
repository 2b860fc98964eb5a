"""Two implementations side by side: random odd shapes, random masks, and what "the same" means in a precision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.nn.mask import Mask, causal, everything

DTYPES = (torch.float64, torch.float32)
VALUES = {torch.float64: 1e-10, torch.float32: 1e-5}
GRADIENTS = {torch.float64: 1e-9, torch.float32: 1e-4}  # sums over batch and length: a digit less
HIDDEN = ("plain", "causal", "padding", "both")
Pair = tuple[list[Tensor], Tensor]  # our parameters and the one of the other side that holds them all


@dataclass(frozen=True)
class Shape:
    batch: int
    length: int
    memory: int  # length of the memory
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    ff_dim: int
    layers: int
    bias: bool

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}x{self.memory}-{self.heads}({self.kv_heads})x{self.head_dim}-{self.ff_dim}"


def shapes(count: int, seed: int = 0) -> list[Shape]:
    """The smallest, the largest, and random ones between them."""
    draw = random.Random(seed)
    found = [Shape(1, 1, 1, 1, 1, 1, 1, 1, 1, True), Shape(4, 17, 17, 6, 3, 9, 9, 31, 2, True)]
    while len(found) < count:
        heads = draw.randint(1, 6)
        found.append(
            Shape(
                batch=draw.randint(1, 4),
                length=draw.randint(1, 17),
                memory=draw.randint(1, 17),
                heads=heads,
                kv_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
                head_dim=draw.randint(1, 9),
                value_dim=draw.randint(1, 9),
                ff_dim=draw.randrange(1, 32, 2),
                layers=draw.randint(1, 2),
                bias=draw.random() < 0.7,
            )
        )
    return found


def random_is_real(batch: int, length: int, first: bool = False) -> Tensor:
    """MaskPredictor anywhere, but a real token in every row; `first`: at its start, so that causal queries see one."""
    is_real = torch.rand(batch, length) < 0.6
    at = torch.zeros(batch, dtype=torch.long) if first else torch.randint(length, (batch,))
    is_real[torch.arange(batch), at] = True
    return is_real


def hide(kind: str, batch: int, length: int) -> tuple[Mask, Tensor | None, Tensor | None]:
    """One of `HIDDEN`: our mask, who is real, and torch's attention mask (True = hidden)."""
    future = kind in ("causal", "both")
    is_real = random_is_real(batch, length, first=future) if kind in ("padding", "both") else None
    return causal if future else everything, is_real, torch.ones(length, length).triu(1).bool() if future else None


def key_padding_mask(is_real: Tensor | None) -> Tensor | None:
    """torch's key_padding_mask: True = padding."""
    return None if is_real is None else ~is_real


def keep_real(x: Tensor, is_real: Tensor | None) -> Tensor:
    """The output at padding is not compared."""
    return x if is_real is None else x * is_real[..., None]


def slopes(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    weight = torch.arange(output.numel(), dtype=output.dtype).view_as(output).cos()
    return list(torch.autograd.grad((output * weight).sum(), inputs))


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerances: dict[torch.dtype, float]) -> None:
    """To the tolerance of the precision, measured against the largest number (at least 1)."""
    for own, other in zip(ours, theirs, strict=True):
        largest = max(1.0, other.detach().abs().max().item())
        torch.testing.assert_close(own, other, atol=tolerances[other.dtype] * largest, rtol=0.0)


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor], pairs: list[Pair]) -> None:
    """Values, and the gradients of inputs and of every parameter."""
    assert_close([ours], [theirs], VALUES)
    grads = iter(slopes(ours, inputs + [part for parts, _ in pairs for part in parts]))
    joined = [next(grads) for _ in inputs] + [torch.cat([next(grads) for _ in parts]) for parts, _ in pairs]
    assert_close(joined, slopes(theirs, inputs + [whole for _, whole in pairs]), GRADIENTS)


def copy_pairs(pairs: list[Pair]) -> None:
    """Our numbers into the other side."""
    for parts, whole in pairs:
        whole.data.copy_(torch.cat([part.data for part in parts]))


def attention_pairs(ours: torch.nn.Module, theirs: torch.nn.MultiheadAttention) -> list[Pair]:
    """Our projections beside those of torch, which keeps q, k and v in one matrix."""
    parts = [ours.q, ours.kv] if ours.cross else [ours.qkv]
    pairs = [([part.weight for part in parts], theirs.in_proj_weight), ([ours.out.weight], theirs.out_proj.weight)]
    if ours.out.bias is not None:
        pairs += [([part.bias for part in parts], theirs.in_proj_bias), ([ours.out.bias], theirs.out_proj.bias)]
    return pairs
