"""Pruning: heads that are not needed go, and their parameters with them.

    MultiHead(x) = Σ_h head_h(x) W_o,h          head_h off  =  leave the term out

A head owns D rows of W_q, W_k and W_v each, and Dv columns of W_o. Where those are cut out, the model computes
exactly what it computed with that head switched off, and is smaller: for width d, 4·d·D numbers a head. Key heads
that several query heads share (grouped queries) go with the last one that they serve.

The config keeps the heads' old numbers, `pruned = {"encoder.0.attention": [1, 3]}`, so that positions which
know heads by number (T5's table, ALiBi's slopes) keep theirs, and a saved model loads like any other. Michel et al.
2019; Voita et al. 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from regard.errors import UserError
from regard.models.folder import fill, weights_of
from regard.models.transformer import Model, build
from regard.nn.multihead import MultiHead


def prune(model: Model, heads: Mapping[str, Iterable[int]]) -> Model:
    """A smaller model without these heads: {"encoder.0.attention": [1, 3]}, numbered as they are in `model`."""
    if model.config.architecture == "recurrent":
        raise UserError("architecture = 'recurrent': it has one head, so there is none to take out")
    old = {name.replace("blocks.", ""): part for name, part in model.named_modules() if isinstance(part, MultiHead)}
    gone = {place: list(positions) for place, positions in (model.config.pruned or {}).items()}
    kept: dict[str, list[int]] = {}
    for place, some in heads.items():
        off = set(some)
        if place not in old:
            raise UserError(f"heads: this model has no {place}; it has {', '.join(old)}")
        part = old[place]
        if wrong := sorted(off - set(range(part.heads))):
            raise UserError(f"heads: {place} has no head {wrong[0]}; its heads are 0 to {part.heads - 1}")
        kept[place] = [head for head in range(part.heads) if head not in off]
        if not kept[place]:
            raise UserError(f"heads: {place} would lose all its heads; leave it at least one")
        gone.setdefault(place, []).extend(part.kept[head] for head in off)
    pruned = {place: tuple(sorted(some)) for place, some in sorted(gone.items()) if some}
    with torch.random.fork_rng(devices=[]):
        small = build(replace(model.config, pruned=pruned or None))
    like = next(model.parameters())
    small = small.to(device=like.device, dtype=like.dtype)
    tensors = weights_of(model)
    for place, some in kept.items():
        tensors.update(_cut(old[place], some, _module(place)))
    with torch.no_grad():
        fill(small, tensors, "prune")
    return small.train(model.training)


def _module(place: str) -> str:
    """encoder.0.attention -> encoder.blocks.0.attention"""
    stack, rest = place.split(".", 1)
    return f"{stack}.blocks.{rest}"


def _cut(part: MultiHead, kept: list[int], name: str) -> dict[str, Tensor]:
    """The tensors of one attention with only these heads, by name."""
    config = part.config
    key_heads = sorted({part.key_of[head] for head in kept})
    rows = (_rows(kept, config.key_dim), _rows(key_heads, config.key_dim), _rows(key_heads, config.val_dim))
    columns = _rows(kept, config.val_dim)
    q_size, k_size, _ = part.sizes
    cut = {f"{name}.out.weight": part.out.weight[:, columns]}
    if part.out.bias is not None:
        cut[f"{name}.out.bias"] = part.out.bias
    inner = {"q": (rows[0],), "kv": (rows[1], rows[2] + k_size)}
    if not part.cross:
        inner = {"qkv": (rows[0], rows[1] + q_size, rows[2] + q_size + k_size)}
    for linear, chosen in inner.items():
        for parameter, tensor in getattr(part, linear).named_parameters():
            cut[f"{name}.{linear}.{parameter}"] = tensor[torch.cat(chosen)]
    if part.score is not None:
        for parameter, tensor in part.score.named_parameters():
            cut[f"{name}.score.{parameter}"] = tensor[kept]
    return {key: tensor.detach() for key, tensor in cut.items()}


def _rows(heads: list[int], size: int) -> Tensor:
    """The rows that these heads own, each `size` of them."""
    return (torch.tensor(heads)[:, None] * size + torch.arange(size)).flatten()
