"""Word alignment: which source word does each word of an output translate? Read from cross-attention.

    w_ts = 1/H Σ_h a_hts                                           a [H, T, S]: weights of one layer; row t predicts y_t
    link of target word j = argmax_i max {w_ts : t in j, s in i}   every target word has one link; </s> has none

Words are between white space, numbered from 0, and written as in Pharaoh: "0-0 1-2" links source word 1 to target
word 2. The layer matters: in a model of six layers the mean of the heads of the second-last aligns best (Garg et al.
2019, arXiv 1909.02074), which is the default; with fewer than three layers it is the last. The model reads the output
again (teacher forcing), so any pair can be aligned, whichever search has found it. Attention approximates alignment:
nothing has trained it to align.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.nn.trace import Trace

Links = tuple[tuple[int, int], ...]  # (source word, target word)


def alignment_layer(model: Any, layer: int | None = None) -> str:
    """The name of the cross-attention weights of a layer, numbered from 0; None: the default."""
    names = [name for name in Trace(model).names if name.endswith("cross.weights")]
    if layer is None:
        layer = len(names) - (2 if len(names) > 2 else 1)
    if not 0 <= layer < len(names):
        raise UserError(f"alignment layer {layer}: the decoder has layers 0 to {len(names) - 1}; choose one of them")
    return names[layer]


def link_words(weights: Tensor, source: Sequence[int], target: Sequence[int]) -> Links:
    """The links of weights [T, S], where `source` and `target` are the word of each token, -1 where it has none."""
    size = 1 + max(target, default=-1), 1 + max(source, default=-1)
    if not all(size):
        return ()
    words = torch.tensor(target)[:, None] * size[1] + torch.tensor(source)  # [T, S]: a number for each pair of words
    real = (torch.tensor(target) >= 0)[:, None] & (torch.tensor(source) >= 0)
    table = torch.full((size[0] * size[1],), -1.0, dtype=weights.dtype)
    table = table.scatter_reduce(0, words[real], weights[: len(target), : len(source)][real], "amax").view(size)
    weight, best = (part.tolist() for part in table.max(dim=1))
    return tuple(sorted((i, j) for j, i in enumerate(best) if weight[j] >= 0))  # a word may have no tokens


def pharaoh(links: Links) -> str:
    """As text: "0-0 1-2"."""
    return " ".join(f"{source}-{target}" for source, target in links)
