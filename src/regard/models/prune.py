"""Pruning: attention heads that are not needed are removed, with their parameters.

    MultiHead(x) = Σ_h head_h(x) W_o,h          removing head h leaves out its term

A head owns D rows of W_q, W_k and W_v each, and Dv columns of W_o. Without them the model computes exactly what it
computed with the output of that head set to zero, and is smaller by 4 · dim · D parameters per head. A key/value head
that several query heads share (grouped-query attention) is removed with the last of them.

The config keeps the original numbers of the heads, `pruned = {"encoder.0.attention": [1, 3]}`, so that position
biases with values per head (T5, ALiBi) stay correct, and a saved model loads like any other. Michel et al. 2019;
Voita et al. 2019.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.longformer import GlobalMultiHead
from regard.nn.multihead import Context, MultiHead
from regard.nn.position import At, Bias

if TYPE_CHECKING:
    from regard.models.transformer import Model


class PrunedMultiHead(MultiHead):
    """`whole` with only these of its heads."""

    def __init__(self, whole: MultiHead, heads: list[int]) -> None:
        with torch.device("meta"):
            super().__init__(whole.config, layer=whole.layer, cross=whole.cross)
        config, key_heads = whole.config, sorted({whole.key_of[head] for head in heads})
        self.numbers = tuple(whole.numbers[head] for head in heads)
        self.key_of = tuple(key_heads.index(whole.key_of[head]) for head in heads)
        self.heads, self.key_heads = len(heads), len(key_heads)
        self.uneven = self.key_of != tuple(index // (self.heads // self.key_heads) for index in range(self.heads))
        q, k, v = _rows(heads, config.key_dim), _rows(key_heads, config.key_dim), _rows(key_heads, config.val_dim)
        q_size, k_size, _ = whole.sizes
        self.sizes = (len(q), len(k), len(v))
        if whole.cross:
            self.q, self.kv = _output_rows(whole.q, q), _output_rows(whole.kv, torch.cat((k, v + k_size)))
        else:
            self.qkv = _output_rows(whole.qkv, torch.cat((q, k + q_size, v + q_size + k_size)))
        self.out = _linear(whole.out.weight[:, _rows(heads, config.val_dim)], whole.out.bias)
        if self.score is not None and whole.score is not None:
            self.score.weights = nn.ParameterList(_parameter(weight[heads]) for weight in whole.score.weights)
        self.q_norm, self.k_norm = whole.q_norm, whole.k_norm
        self.train(whole.training)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        bias = None if context.bias is None else _bias_of_heads(context.bias, self.numbers)
        return super().forward(x, replace(context, bias=bias))


def prune(model: Model, heads: Mapping[str, Iterable[int]]) -> Model:
    """A smaller model without these heads: {"encoder.0.attention": [1, 3]}, numbered as they are in `model`."""
    if model.config.architecture == "recurrent":
        raise UserError("architecture = 'recurrent': its attention has one head, which cannot be pruned")
    small = copy.deepcopy(model)
    parts = attention_layers(small)
    pruned = {name: list(numbers) for name, numbers in (model.config.pruned or {}).items()}
    for name, numbers in heads.items():
        removed = set(numbers)
        if name not in parts:
            raise UserError(f"heads: this model has no {name}; it has {', '.join(parts)}")
        part = parts[name]
        if isinstance(part, GlobalMultiHead):
            raise UserError(f"heads: {name} has projections for global tokens (global_projections), and is not pruned")
        if unknown := sorted(removed - set(range(part.heads))):
            raise UserError(f"heads: {name} has no head {unknown[0]}; its heads are 0 to {part.heads - 1}")
        if len(removed) == part.heads:
            raise UserError(f"heads: {name} would lose all its heads; keep at least one")
        pruned.setdefault(name, []).extend(part.numbers[head] for head in removed)
        remove_heads(small, name, part, removed)
    sorted_heads = {name: tuple(sorted(numbers)) for name, numbers in sorted(pruned.items()) if numbers}
    small.config = replace(model.config, pruned=sorted_heads or None)
    return small


def remove_heads(model: nn.Module, name: str, part: MultiHead, heads: Iterable[int]) -> None:
    """Replace `part`, the attention layer called `name` in `model`, by one without these heads."""
    removed = set(heads)
    stack, layer, attribute = name.split(".")
    block = model.get_submodule(f"{stack}.blocks.{layer}")
    setattr(block, attribute, PrunedMultiHead(part, [head for head in range(part.heads) if head not in removed]))


def attention_layers(model: nn.Module) -> dict[str, MultiHead]:
    """The attention layers by name, such as encoder.0.attention."""
    modules = model.named_modules()
    return {name.replace("blocks.", ""): module for name, module in modules if isinstance(module, MultiHead)}


def _bias_of_heads(bias: Bias, heads: tuple[int, ...]) -> Bias:
    """The bias of a layer that has only these heads."""
    if bias.content:  # computed from the queries, of which only these heads are left
        return Bias(bias.at, len(heads), bias.q_pos, bias.k_pos, content=True)
    numbers = torch.tensor(heads, device=bias.q_pos.device)

    def at(q: Tensor) -> At:
        value = bias.at(q)
        return lambda b, h, i, j: value(b, numbers[h], i, j)

    return Bias(at, len(heads), bias.q_pos, bias.k_pos, content=False, relative=bias.relative)


def _output_rows(linear: nn.Linear, rows: Tensor) -> nn.Linear:
    return _linear(linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = _parameter(weight)
    if bias is not None:
        linear.bias = _parameter(bias)
    return linear


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone())


def _rows(heads: list[int], size: int) -> Tensor:
    """The rows of these heads in a projection, `size` each."""
    return (torch.tensor(heads)[:, None] * size + torch.arange(size)).flatten()
