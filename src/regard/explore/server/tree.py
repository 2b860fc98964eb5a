"""The search tree of a beam search: every hypothesis it scored, and which ones it kept.

    root <s>  ->  the most probable first tokens  ->  their continuations  ->  …  ->  </s>

A node is one token after the prefix that leads to it, with p(token | prefix) and the sum of the log-probabilities up to
it. At each step the search ranks the 2 · beam best extensions of all hypotheses together; the first `beam` that do not
end are kept, and those among the first `beam` that end are finished. The search is that of `regard.predict.beam`,
observed through `watch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.errors import UserError
from regard.explore.inside import Look

WIDEST = 8  # hypotheses that still make a readable tree


@dataclass
class Node:
    """One token of the tree; `kept` is extended, `ended` is finished, `best` is part of the best hypothesis."""

    id: int
    parent: int | None
    token: str
    probability: float
    total: float
    kept: bool
    ended: bool
    best: bool = False


class Tree:
    """Records the search of one sentence."""

    def __init__(self, width: int, eos: int, name: Callable[[int], str]) -> None:
        self.width, self.eos, self.name = width, eos, name
        self.nodes: list[Node] = []
        self.children: dict[tuple[int | None, int], Node] = {}  # by (parent, token id)
        self.live: list[int | None] = [None]  # the node that each row of the search extends

    def add_step(self, totals: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Add the candidates of one step, [1, 2 · beam] each, best first."""
        extended: list[int | None] = []
        candidates = zip(totals[0].tolist(), tokens[0].tolist(), rows[0].tolist(), strict=True)
        for rank, (total, token, row) in enumerate(candidates):
            if total == -math.inf:
                continue
            parent, ends = self.live[row], token == self.eos
            before = 0.0 if parent is None else self.nodes[parent].total
            kept, ended = not ends and len(extended) < self.width, ends and rank < self.width
            node = Node(len(self.nodes), parent, self.name(token), math.exp(total - before), total, kept, ended)
            if kept:
                extended.append(node.id)
            self.nodes.append(node)
            self.children[parent, token] = node
        self.live = extended

    def mark(self, tokens: Sequence[int]) -> None:
        """Mark the path of the best hypothesis from the root on."""
        at: int | None = None
        for token in tokens:
            node = self.children[at, token]
            node.best, at = True, node.id


@torch.inference_mode()
def search_tree(look: Look, width: int) -> dict[str, Any]:
    """Repeat the search for the input of `look`, under its changes, with `width` hypotheses; plain values for JSON."""
    inside = look.inside
    if not inside.reader.writes:
        raise UserError(f"search: architecture = {inside.config.architecture!r} generates no text, so there is none")
    if not 1 <= width <= WIDEST:
        raise UserError(f"beam = {width}: must be from 1 to {WIDEST}")
    config = replace(inside.search, beam=width, n_best=width)
    eos = inside.bundle.target_frame[1]
    tree = Tree(width, eos, inside.reader.label)
    hypotheses = inside.generate(look.input, look.changes, config, tree.add_step)
    best = hypotheses[0]
    tree.mark([*best.tokens, *([eos] if best.finished else [])])
    texts = [
        {"text": inside.reader.decode(one.tokens), "score": one.score, "log_probability": one.log_probability}
        for one in hypotheses
    ]
    return {"twigs": [asdict(node) for node in tree.nodes], "found": texts}
