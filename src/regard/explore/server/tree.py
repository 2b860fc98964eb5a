"""The tree of a beam search: every beginning it weighed, and which ones it followed.

    root <s>  ->  the likeliest first tokens  ->  what may follow each  ->  …  ->  </s>

A node is one token after the beginning that leads to it, with p(token | beginning) and the sum of the
logarithms up to it. At each step the search weighs the 2 · beam best extensions of all beginnings together;
the first `beam` that do not end are followed, and those among the first `beam` that end are answers. The
search is `regard.predict.beam`'s own, which is only watched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.changes import edits
from regard.explore.inside import Look
from regard.nn.trace import trace
from regard.predict.beam import beam

WIDEST = 8  # beams that still make a readable tree


@dataclass
class Twig:
    """One token of the tree; `kept` is followed, `ended` is an answer, `best` lies on the way to the best one."""

    id: int
    parent: int | None
    token: str
    probability: float
    total: float
    kept: bool
    ended: bool
    best: bool = False


class Tree:
    """Grows while a search of one sentence is watched."""

    def __init__(self, width: int, eos: int, name: Callable[[int], str]) -> None:
        self.width, self.eos, self.name = width, eos, name
        self.twigs: list[Twig] = []
        self.children: dict[tuple[int | None, int], Twig] = {}  # (parent, token id): no beginning stands there twice
        self.live: list[int | None] = [None]  # the twig that each row of the search continues

    def weigh(self, totals: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Add what one step weighed, [1, 2 · beam] each, best first."""
        following: list[int | None] = []
        weighed = zip(totals[0].tolist(), tokens[0].tolist(), rows[0].tolist(), strict=True)
        for rank, (total, token, row) in enumerate(weighed):
            if total == -math.inf:
                continue
            parent, ends = self.live[row], token == self.eos
            before = 0.0 if parent is None else self.twigs[parent].total
            kept, ended = not ends and len(following) < self.width, ends and rank < self.width
            twig = Twig(len(self.twigs), parent, self.name(token), math.exp(total - before), total, kept, ended)
            if kept:
                following.append(twig.id)
            self.twigs.append(twig)
            self.children[parent, token] = twig
        self.live = following

    def mark(self, tokens: Sequence[int]) -> None:
        """The way of the best answer, from the root on."""
        at: int | None = None
        for token in tokens:
            twig = self.children[at, token]
            twig.best, at = True, twig.id


@torch.inference_mode()
def grow(look: Look, width: int) -> dict[str, Any]:
    """Search again from what `look` read, under its changes, with `width` beams; gives plain values for JSON."""
    inside = look.inside
    if not inside.readings.writes:
        raise UserError(
            f"search: a model with architecture = {inside.config.architecture!r} writes no answer, so it has no search"
        )
    if not 1 <= width <= WIDEST:
        raise UserError(f"beam = {width}: must be from 1 to {WIDEST}")
    config, model = replace(inside.search, beam=width, n_best=width), inside.config
    if model.position == "learned" and model.architecture != "recurrent":
        config = replace(config, max_length=min(config.max_length or model.max_length, model.max_length))
    bos, eos = inside.readings.frame
    tree = Tree(width, eos, inside.readings.label)
    with inside.lock, trace(inside.model, edits(look.changes, inside.anatomy), only="encoder.output"):
        found = beam(cast(Any, inside.model), look.reading.source, None, config, bos, eos, watch=tree.weigh)[0]
    tree.mark([*found[0].tokens, *([eos] if found[0].finished else [])])
    texts = [
        {"text": inside.readings.decode(one.tokens), "score": one.score, "log_probability": one.log_probability}
        for one in found
    ]
    return {"twigs": [asdict(twig) for twig in tree.twigs], "found": texts}
