"""Heads: what each one attends to, in numbers, over many examples.

For query i of a head with weights a_ij, averaged over all queries that have a choice (two keys or more):

    entropy      -Σ_j a_ij log a_ij, in nats; breadth divides it by log(visible keys): 1 is uniform, 0 a single key
    distance     Σ_j a_ij |i - j| in tokens; over an image in patches; of cross-attention from the diagonal
    fraction     Σ a_ij over the keys of a pattern: how much of its attention the head pays to them

    previous, next, self     j = i - 1, i + 1, i          first, last    the first and the last visible key
    punctuation              punctuation tokens           positional     one other fixed offset j - i
    alignment                cross-attention: the source word that IBM model 1 (`Lexicon`), which knows
                             nothing of the model, aligns with the word being predicted

The pattern of a head is the one with the largest fraction, if that is 40 % of its attention or more; else "broad"
if its breadth is 0.75 or more, else "mixed". Patterns after Voita et al. 2019 and Clark et al. 2019. A pattern says
what a head attends to. Whether it matters is another question: `regard.explore.importance`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.explore.changes import Head, PartName
from regard.explore.examples import Batch
from regard.explore.forward import Grid, grid_of
from regard.explore.inside import Inside
from regard.nn.trace import trace

ROUNDS = 10  # of expectation maximisation
REACH = 10  # largest offset of a positional head
CLEAR = 0.4  # fraction of the attention that makes a pattern
EVEN = 0.75  # breadth that makes a head broad
STAGES = "*.[wm][ea][is][gk]*"  # weights and masked
Lexicon = dict[tuple[int, int], float]  # t(f | e) by (e, f), the ids of a source and a target token
NAMES = {"previous": "previous token", "next": "next token", "first": "first token", "last": "last token"}


@dataclass(frozen=True)
class HeadMetrics:
    """The metrics of one head; a fraction that does not apply is not in `fractions`."""

    part: PartName
    layer: int
    head: int
    entropy: float
    breadth: float
    distance: float | None  # None over images and features, where cross-attention has no diagonal
    fractions: dict[str, float]
    offset: int | None  # of `fractions["positional"]`
    loss_change: float | None = None  # change of the loss (of vectors, of the output) when the head is off
    gradient: float | None = None  # mean |dL / d gate|

    @property
    def name(self) -> str:
        return f"{self.part}.{self.layer}.{self.head}"

    @property
    def pattern(self) -> tuple[str, float]:
        """What the head attends to, and the fraction of its attention that does."""
        kind, score = max(self.fractions.items(), key=lambda item: item[1], default=("", 0.0))
        if score >= CLEAR:
            return (f"{self.offset:+d} tokens" if kind == "positional" else NAMES.get(kind, kind)), score
        return ("broad", self.breadth) if self.breadth >= EVEN else ("mixed", score)

    def to_dict(self) -> dict[str, Any]:
        pattern, score = self.pattern
        return {"name": self.name, "pattern": pattern, "score": score, **asdict(self)}


class Sums(dict[str, tuple[Tensor, float]]):
    """Running sums over queries by name: a total per head, and the number of queries."""

    def add(self, name: str, values: Tensor, counted: Tensor) -> None:
        """values [B, H, Q] where counted [B, Q] is True."""
        more = (values.double() * counted[:, None]).sum(dim=(0, 2)).cpu()
        total, count = self.get(name, (torch.zeros_like(more), 0.0))
        self[name] = total + more, count + float(counted.sum())


@dataclass(frozen=True)
class View:
    """What is known about the queries and keys of one part over a batch."""

    queries: Tensor  # bool [B, Q] real ones
    keys: Tensor  # bool [B, K]
    punctuation: Tensor | None = None  # bool [B, K]; None: the keys are not tokens
    aligned: Tensor | None = None  # bool [B, Q, K]
    grid: Grid | None = None  # the keys are patches of an image
    within: bool = True  # queries and keys are the same sequence


@torch.inference_mode()
def measure(
    inside: Inside,
    batches: Sequence[Batch],
    known: Sequence[Batch] = (),
    *,
    loss_changes: Mapping[Head, float] | None = None,
    gradients: Mapping[Head, float] | None = None,
) -> list[HeadMetrics]:
    """The metrics of every head. `known` are more pairs to learn alignment from; `loss_changes` and `gradients` are
    its importance, measured before."""
    inside.anatomy.check_weights()
    parts, lexicon = inside.anatomy.parts, None
    if "cross" in parts and inside.config.input == "tokens":
        lexicon = learn_lexicon([pair for batch in known or batches for pair in _sequences(batch)])
    sums = {path: Sums() for layers in parts.values() for path, _ in layers}
    with inside.lock:
        for batch in batches:
            with trace(inside.model, only=STAGES) as seen:
                batch.output(inside.model)
            for part, layers in parts.items():
                view = _view(inside, batch, part, lexicon)
                for path in (path for path, heads in layers if heads):
                    visible = seen[f"{path}.masked"][:, 0] > float("-inf")  # [B, Q, K]
                    add_weights(sums[path], seen[f"{path}.weights"].float(), visible, view)
    changes, slopes, anatomy = loss_changes or {}, gradients or {}, inside.anatomy
    return [summarise(sums[anatomy.path(*one)], *one, changes.get(one), slopes.get(one)) for one in anatomy.heads]


def add_weights(sums: Sums, weights: Tensor, visible: Tensor, view: View) -> None:
    """Add weights [B, H, Q, K], of which visible [B, Q, K] are not masked."""
    sees = visible.sum(dim=-1)  # [B, Q]
    counted = view.queries & (sees >= 2)
    log = torch.where(weights > 0, weights, 1.0).log()
    entropy = -(weights * log).sum(dim=-1)  # [B, H, Q]
    sums.add("entropy", entropy, counted)
    sums.add("breadth", entropy / sees.clamp_min(2).log()[:, None], counted)
    if view.within or view.punctuation is not None:  # else there is no diagonal
        sums.add("distance", torch.einsum("bhqk,bqk->bhq", weights, _distances(view).to(weights)), counted)
    if view.grid is None or view.grid.first:
        sums.add("first", weights[..., 0], counted & visible[..., 0])
    if view.grid is None and (not view.within or bool(visible[:, 0].sum(dim=-1).gt(1).any())):
        last = view.keys.long().sum(dim=1) - 1  # of causal attention the last key is the query itself: `self`
        at = last[:, None, None, None].expand(*weights.shape[:3], 1)
        sums.add("last", weights.gather(3, at)[..., 0], counted)
    if view.punctuation is not None:
        sums.add("punctuation", torch.einsum("bhqk,bk->bhq", weights, view.punctuation.to(weights)), counted)
    if view.aligned is not None:
        known = counted & view.aligned.any(dim=-1)
        sums.add("alignment", torch.einsum("bhqk,bqk->bhq", weights, view.aligned.to(weights)), known)
    reach = 0 if view.grid is not None else min(REACH, weights.shape[-1] - 1)  # over an image only the patch itself
    for offset in range(-reach, reach + 1) if view.within else ():  # fixed offsets j - i
        values = weights.diagonal(offset, dim1=-2, dim2=-1)  # [B, H, L]
        there = visible.diagonal(offset, dim1=-2, dim2=-1)
        first = max(0, -offset)  # the first query that has such a key
        sums.add(f"offset{offset}", values, counted[:, first : first + values.shape[-1]] & there)


def _distances(view: View) -> Tensor:
    """[B, Q, K] the distance of a key from its query."""
    (rows, queries), keys, device = view.queries.shape, view.keys.shape[1], view.keys.device
    if not view.within:
        lengths = [side.sum(dim=1).clamp_min(2)[:, None, None] - 1 for side in (view.queries, view.keys)]
        i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
        return (j - i * lengths[1] / lengths[0]).abs()
    across, first = (1, 0) if view.grid is None else (view.grid.across, view.grid.first)
    i = torch.arange(queries, device=device) - first
    at = torch.stack((i // across, i % across), dim=-1).float()  # row and column; in a text there is one column
    apart = (at[:, None] - at).square().sum(dim=-1).sqrt()
    outside = i < 0  # [CLS] has no location
    return apart.masked_fill(outside[:, None] | outside, 0.0).expand(rows, -1, -1)


def _view(inside: Inside, batch: Batch, part: PartName, lexicon: Lexicon | None) -> View:
    config, device = inside.config, inside.device
    grid = grid_of(config) if config.input == "patches" and part != "decoder" else None
    keys, queries = batch.source_is_real, batch.target_is_real
    if keys is None:
        positions = config.source_length if grid is not None else batch.source.shape[1]
        keys = torch.ones(len(batch.source), positions, dtype=torch.bool, device=device)
    if batch.target is None or part == "encoder":
        queries = keys
    elif queries is None:
        queries = torch.ones_like(batch.target, dtype=torch.bool)
    keys = queries if part == "decoder" else keys
    ids = batch.target if part == "decoder" and batch.target is not None else batch.source
    punctuation = None
    if ids.dim() == 2:
        tokenizer = inside.bundle.target if part == "decoder" else inside.bundle.source
        kinds, at = ids.unique(return_inverse=True)
        signs = [id < len(tokenizer) and is_punctuation(tokenizer.token(id)) for id in kinds.tolist()]
        punctuation = torch.tensor(signs, device=device)[at]
    aligned = _aligned(batch, lexicon).to(device) if part == "cross" and lexicon is not None else None
    return View(queries, keys, punctuation, aligned, grid, part != "cross")


def is_punctuation(token: str) -> bool:
    """Whether a token is punctuation, apart from the mark of a space."""
    bare = token.strip("▁ ").removeprefix("##")
    return bool(bare) and all(unicodedata.category(char).startswith("P") for char in bare)


def learn_lexicon(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], rounds: int = ROUNDS) -> Lexicon:
    """Word alignment from counts alone, IBM model 1: t(f | e) for the words (e, f) that occur in the same pair.

        p(f_1 … f_m | e_1 … e_l)  ∝  Π_j Σ_i t(f_j | e_i)                 Brown et al. 1993, section 4.2

    Words that translate each other occur in the same pairs more often than by chance. Expectation maximisation finds
    t: distribute every target word over the source words of its pair in proportion to t, count, normalise, repeat. The
    likelihood is concave, so any start reaches the maximum. The result is independent of the model whose
    cross-attention is compared with it.

    Subwords are aligned as the model sees them, </s> included. A subword that occurs twice in a sentence is one word
    to this model; both positions count.
    """
    e, f, word, words = [], [], [], 0  # one entry for each source word with each target word of its pair
    for source, target in pairs:
        kinds = sorted(set(source))
        e.append(np.tile(kinds, len(target)))
        f.append(np.repeat(target, len(kinds)))
        word.append(words + np.repeat(np.arange(len(target)), len(kinds)))
        words += len(target)
    sources, targets, where = map(np.concatenate, (e, f, word))
    width = int(targets.max(initial=0)) + 1
    keys, index = np.unique(sources * width + targets, return_inverse=True)
    owner = keys // width  # the e of every entry of t
    t = np.ones(len(keys))
    for _ in range(rounds):
        fraction = t[index]
        fraction = fraction / np.bincount(where, fraction, minlength=words)[where]  # sums to 1 per target word
        counts = np.bincount(index, fraction, minlength=len(keys))
        t = counts / np.bincount(owner, counts)[owner]
    return dict(zip(zip(owner.tolist(), (keys % width).tolist(), strict=True), t.tolist(), strict=True))


def align(lexicon: Lexicon, source: Sequence[int], target: Sequence[int]) -> np.ndarray:
    """bool [len(target), len(source)]: the source positions whose word best explains each target word."""
    kinds = sorted(set(source))
    table = np.array([[lexicon.get((e, f), 0.0) for e in kinds] for f in target])  # [m, kinds]
    best = np.array(kinds)[table.argmax(axis=1)]
    aligned: np.ndarray = (best[:, None] == np.array(source)[None]) & (table.max(axis=1) > 0)[:, None]
    return aligned


def _sequences(batch: Batch) -> Iterator[tuple[list[int], list[int]]]:
    """Source and target ids of every row, without padding."""
    assert batch.expected is not None
    for row in range(batch.source.shape[0]):
        source = batch.source[row] if batch.source_is_real is None else batch.source[row][batch.source_is_real[row]]
        expected = batch.expected[row]
        yield source.tolist(), expected[expected >= 0].tolist()


def _aligned(batch: Batch, lexicon: Lexicon) -> Tensor:
    assert batch.target is not None
    table = torch.zeros(*batch.target.shape, batch.source.shape[1], dtype=torch.bool)
    for row, (source, target) in enumerate(_sequences(batch)):
        table[row, : len(target), : len(source)] = torch.from_numpy(align(lexicon, source, target))
    return table


def summarise(
    sums: Sums, part: PartName, layer: int, head: int, loss_change: float | None = None, gradient: float | None = None
) -> HeadMetrics:
    """The metrics of one head from the sums of its layer."""
    means = {name: float(total[head] / count) for name, (total, count) in sums.items() if count}
    offsets = {at: means[name] for at in range(-REACH, REACH + 1) if (name := f"offset{at}") in means}
    fractions: dict[str, float] = {
        name: means[name] for name in ("first", "last", "punctuation", "alignment") if name in means
    }
    fractions |= {name: offsets[at] for name, at in (("previous", -1), ("self", 0), ("next", 1)) if at in offsets}
    enough = 0.5 * sums["entropy"][1]  # an offset that few queries have proves little
    far = {at: mean for at, mean in offsets.items() if abs(at) > 1 and sums[f"offset{at}"][1] >= enough}
    offset = max(far, key=far.__getitem__, default=None)
    if offset is not None:
        fractions["positional"] = far[offset]
    entropy, breadth = means.get("entropy", 0.0), means.get("breadth", 0.0)
    return HeadMetrics(
        part, layer, head, entropy, breadth, means.get("distance"), fractions, offset, loss_change, gradient
    )
