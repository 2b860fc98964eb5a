"""Weight maps: how tensors of a Hugging Face checkpoint correspond to tensors of a Regard model.

Two implementations of one architecture store the same values under different names and in different shapes. A map is a
list of rules; each names one tensor of ours, the tensors of theirs it is made of, and converts in both directions:

    same      ours = theirs                          an embedding matrix
    linear    ours = [theirs₁; theirs₂; …]           q, k and v of shape [out, in] stacked into one matrix; also norms
    conv1d    ours = theirsᵀ                         GPT-2 stores its matrices as [in, out]
    rows      ours = theirs[offset:]                 BART's position embeddings begin with two unused rows
    squeeze   ours = theirs[0]                       an embedding matrix stored as [1, N, dim]

Converting tensors without data (on the `meta` device) from ours to theirs gives the expected shapes of theirs, so an
error about a wrong file names the tensor and the shape in that file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    from_hf: Callable[[list[Tensor]], Tensor] = lambda parts: parts[0]
    to_hf: Callable[[Tensor], list[Tensor]] = lambda tensor: [tensor]


def same(ours: str, theirs: str) -> Rule:
    return Rule(ours, (theirs,))


def linear(ours: str, *theirs: str, bias: bool = True) -> Iterator[Rule]:
    """Weight and bias of a linear layer or a norm, from one or several of theirs stacked along the output."""
    for part in ("weight", "bias") if bias else ("weight",):
        names = tuple(f"{name}.{part}" for name in theirs)
        yield Rule(f"{ours}.{part}", names, torch.cat, lambda x: list(x.chunk(len(theirs))))


def conv1d(ours: str, theirs: str) -> Iterator[Rule]:
    yield Rule(f"{ours}.weight", (f"{theirs}.weight",), lambda parts: parts[0].T, lambda x: [x.T])
    yield same(f"{ours}.bias", f"{theirs}.bias")


def rows(ours: str, theirs: str, offset: int) -> Rule:
    return Rule(
        ours, (theirs,), lambda parts: parts[0][offset:], lambda x: [torch.cat((x.new_zeros(offset, x.shape[1]), x))]
    )


def squeeze(ours: str, theirs: str, count: int | None = None) -> Rule:
    """The first `count` rows of ours are theirs; the others are never used."""
    return Rule(ours, (theirs,), lambda parts: parts[0][0], lambda x: [x[None, :count]])


def layer(ours: str, theirs: str, parts: Mapping[str, tuple[str, ...]], *, bias: bool = True) -> Iterator[Rule]:
    """The linear layers and norms of one block: {module of ours: modules of theirs}."""
    for name, names in parts.items():
        yield from linear(f"{ours}.{name}", *(f"{theirs}.{part}" for part in names), bias=bias)


def from_hf(
    rules: Iterable[Rule], tensors: Mapping[str, Tensor], shapes: Mapping[str, Tensor], unused: str
) -> tuple[Tensors, list[str]]:
    """Our tensors, and the names of theirs that were skipped because they match the pattern `unused`.

    `shapes` contains our tensors without data.
    """
    rules = list(rules)
    expected = {
        name: tuple(part.shape)
        for rule in rules
        for name, part in zip(rule.theirs, rule.to_hf(shapes[rule.ours]), strict=True)
    }
    if missing := [name for name in expected if name not in tensors]:
        raise UserError(
            f"missing weights: {name_some(missing)}; the file is incomplete, or config.json belongs to another model"
        )
    skipped = [name for name in tensors if name not in expected]
    if unknown := [name for name in skipped if not re.fullmatch(unused, name)]:
        raise UserError(f"unknown weights: {name_some(unknown)}; config.json belongs to another model")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(
                f"{name} has shape {tuple(tensors[name].shape)}, but according to config.json it should be {shape}; "
                "one of the two files belongs to another model"
            )
    return {rule.ours: rule.from_hf([tensors[name] for name in rule.theirs]) for rule in rules}, skipped


def to_hf(rules: Iterable[Rule], tensors: Mapping[str, Tensor]) -> Tensors:
    """Their tensors from ours, each with its own memory."""
    return {
        name: part.clone(memory_format=torch.contiguous_format)
        for rule in rules
        for name, part in zip(rule.theirs, rule.to_hf(tensors[rule.ours]), strict=True)
    }
