"""Weight maps: which tensor of theirs is which of ours.

Two implementations of one architecture hold the same numbers under other names and in other shapes. A map is
a list of rules; each names one tensor of ours and what it is made of, and works in both directions:

    same      ours = theirs                          a table, a norm's weight
    linear    ours = [theirs₁; theirs₂; …]           q, k and v of shape [out, in], stacked to one product
    conv1d    ours = theirsᵀ                         GPT-2 stores its matrices as [in, out]
    rows      ours = theirs[before:]                 BART's position table begins with two unused rows
    batch     ours = theirs[0]                       a table stored as [1, N, dim]

A rule's way back, applied to a tensor without data (the `meta` device), says which shapes theirs must have,
so a wrong file is refused by the name and shape that stand in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import UserError
from regard.files import name_some

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    ours: str
    theirs: tuple[str, ...]
    read: Callable[[list[Tensor]], Tensor] = lambda parts: parts[0]
    write: Callable[[Tensor], list[Tensor]] = lambda tensor: [tensor]


def same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,))


def norm(ours: str, theirs: str, *, bias: bool = True) -> list[Rule]:
    return [same(f"{ours}.{part}", f"{theirs}.{part}") for part in (("weight", "bias") if bias else ("weight",))]


def linear(ours: str, *theirs: str, bias: bool = True) -> list[Rule]:
    """One linear map of ours from one or several of theirs of equal size, stacked along the output."""

    def split(x: Tensor) -> list[Tensor]:
        return list(x.chunk(len(theirs)))

    parts = ("weight", "bias") if bias else ("weight",)
    return [Rule(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs), torch.cat, split) for part in parts]


def conv1d(ours: str, theirs: str) -> list[Rule]:
    weight = Rule(f"{ours}.weight", (f"{theirs}.weight",), lambda parts: parts[0].T, lambda x: [x.T])
    return [weight, same(f"{ours}.bias", f"{theirs}.bias")]


def rows(ours: str, theirs: str, before: int) -> Rule:
    return Rule(
        ours, (theirs,), lambda parts: parts[0][before:], lambda x: [torch.cat((x.new_zeros(before, x.shape[1]), x))]
    )


def batch(ours: str, theirs: str, count: int | None = None) -> Rule:
    """`count` rows of ours are theirs; a longer table of ours has rows that are never used."""
    return Rule(ours, (theirs,), lambda parts: parts[0][0], lambda x: [x[None, :count]])


def read(
    rules: Iterable[Rule], tensors: Mapping[str, Tensor], shapes: Mapping[str, Tensor], unused: str
) -> tuple[Tensors, list[str]]:
    """Our tensors, and the names of theirs that were left out because they match the pattern `unused`.

    `shapes` holds our tensors without data.
    """
    rules = list(rules)
    wanted = {
        name: tuple(part.shape)
        for rule in rules
        for name, part in zip(rule.theirs, rule.write(shapes[rule.ours]), strict=True)
    }
    if missing := [name for name in wanted if name not in tensors]:
        raise UserError(f"the weights lack {name_some(missing)}: the file is incomplete or config.json another's")
    left = [name for name in tensors if name not in wanted]
    if extra := [name for name in left if not re.fullmatch(unused, name)]:
        raise UserError(f"the weights hold {name_some(extra)}, unknown here: config.json is another model's")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{name} has shape {tuple(tensors[name].shape)}, but by config.json it should be {shape}: "
                "one of the two files belongs to another model"
            )
    return {rule.ours: rule.read([tensors[name] for name in rule.theirs]) for rule in rules}, left


def write(rules: Iterable[Rule], tensors: Mapping[str, Tensor]) -> Tensors:
    """Their tensors from ours, each with memory of its own."""
    return {
        name: part.clone(memory_format=torch.contiguous_format)
        for rule in rules
        for name, part in zip(rule.theirs, rule.write(tensors[rule.ours]), strict=True)
    }
