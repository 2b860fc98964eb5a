"""Subword regularisation: the same text cut in many ways, so that a model learns what its pieces are made of.

BPE always cuts "unrelated" alike. BPE-dropout (Provilkov et al. 2020, arXiv 1910.13267) leaves out each possible
merge with probability p, anew at every step, and applies the best one left, until none is:

    p = 0    un related          p = 0.1    un re lated,  un related,  u n relate d,  …          p -> 1    letters

Order the n possible merges of a word by rank. The first j are left out and the next one is not with probability
p^j (1 - p), and all of them with p^n, which ends the word. So a segmentation is a walk through a graph: a node is a
word cut in some way, its edges are the merges, and one random number u chooses an edge,  j = #{i >= 1 : u < p^i}.
Nodes are made when a walk first comes by and kept, so all words of a text walk at once by array look-ups.

Since each step draws anew, the more merges a word has the less of them are lost in the end: of a Japanese sentence
without spaces, one single word, next to none. So a long word is first cut plainly, and merges are left out within
its pieces.

The generator is ours, since that of the `tokenizers` library takes no seed: the same seed gives the same text
everywhere, whatever nodes are there already. Only training text is cut this way; a trained model reads the plain one.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from regard.errors import UserError
from regard.text.tokenizer import Tokenizer

LONG = 48  # symbols: 16 Korean or Japanese characters in bytes
NODES = 2_000_000  # kept at once, some 300 MB at most; then they are made anew


class Words(NamedTuple):
    """Lines cut into words: line i has the next counts[i] entries of `which`, each an index into `kinds`."""

    kinds: list[str]
    which: np.ndarray
    counts: np.ndarray


class Column:
    """Numbers that grow at the end, in amortised time."""

    def __init__(self, kind: type[np.generic] = np.int32) -> None:
        self.values, self.used = np.empty(1024, kind), 0

    @property
    def used_values(self) -> np.ndarray:
        return self.values[: self.used]

    def __len__(self) -> int:
        return self.used

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        return self.values[places]

    def __setitem__(self, places: np.ndarray, values: np.ndarray) -> None:
        self.values[places] = values

    def extend(self, values: np.ndarray) -> None:
        if self.used + len(values) > len(self.values):
            larger = np.empty(2 * (self.used + len(values)), self.values.dtype)
            larger[: self.used] = self.used_values
            self.values = larger
        self.values[self.used : self.used + len(values)] = values
        self.used += len(values)


class Segmenter(ABC):
    """Cuts lines at random, in two steps: into words, once, and each word into pieces, as often as wanted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def cut(self, lines: Sequence[str]) -> Words:
        """The words of each line, within which pieces stay."""
        kinds: dict[str, int] = {}
        which: list[int] = []
        counts = []
        for line in lines:
            words = [part for word in self.tokenizer.words(line) for part in self.parts(word)]
            which += [kinds.setdefault(word, len(kinds)) for word in words]
            counts.append(len(words))
        return Words(list(kinds), np.array(which, np.int64), np.array(counts, np.int64))

    def parts(self, word: str) -> list[str]:
        """A word, or what it is cut into beforehand."""
        return [word]

    @abstractmethod
    def draw(self, words: Words, bits: np.random.PCG64) -> list[list[int]]:
        """The ids of each line, cut at random."""


class MergeDropout(Segmenter):
    """Random segmentations by a BPE tokenizer that leaves out each merge with probability `dropout`."""

    def __init__(self, tokenizer: Tokenizer, dropout: float) -> None:
        if not 0 <= dropout < 1:
            raise UserError(f"dropout = {dropout}: must be a probability from 0 to below 1, such as 0.1")
        super().__init__(tokenizer)
        content = json.loads(tokenizer.json)
        model = content["model"]
        _check_model(model, content["added_tokens"])
        self.vocab: dict[str, int] = model["vocab"]
        self.merges: dict[tuple[int, int], tuple[int, int]] = {}  # (left, right): (rank, the piece they make)
        for rank, merge in enumerate(model["merges"]):
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            self.merges[self.vocab[left], self.vocab[right]] = rank, self.vocab[left + right]
        # The same as arrays, to look up many pairs at once: left << 32 | right, in ascending order.
        table = np.array(sorted((left << 32 | right, *merge) for (left, right), merge in self.merges.items()), np.int64)
        self.pairs, self.ranks, self.pieces = table.reshape(-1, 3).T
        levels = [dropout]
        while levels[-1] > 2**-53:
            levels.append(levels[-1] * dropout)
        self.levels = np.array(levels[::-1])  # … p³, p², p
        self._forget()

    def parts(self, word: str) -> list[str]:
        """A long word comes in the pieces of its plain cut."""
        if len(word) <= LONG or word in self.tokenizer.symbols:
            return [word]
        pieces = self.tokenizer.word_pieces(word)
        return pieces if "".join(pieces) == word else [word]  # else it holds something unknown

    def draw(self, words: Words, bits: np.random.PCG64) -> list[list[int]]:
        """The ids of each line, cut at random."""
        ends = self._starts_of(words.kinds)[words.which]
        self._walk(ends, bits)
        lengths = self._length[ends]
        return lines_of(self._ids[spread(self._start[ends], lengths)], lengths, words.counts)

    def _forget(self) -> None:
        self._nodes: dict[str, int] = {}  # words not cut yet
        # A node has ids[start : start + length], and the edges first … first + count - 1, the best merge first.
        self._ids, self._start, self._length, self._first, self._count = (Column() for _ in range(5))
        # An edge: from a node, the piece that replaces the two at this place, and the node it leads to or -1.
        self._node, self._place, self._piece, self._next = (Column() for _ in range(4))

    def _starts_of(self, words: Sequence[str]) -> np.ndarray:
        """The node of each word before its first merge."""
        if len(self._start) > NODES:
            self._forget()
        fresh = [word for word in words if word not in self._nodes]
        symbols = [self._symbols(word) for word in fresh]
        for settled in (False, True):
            chosen = [i for i, ids in enumerate(symbols) if (ids is None) == settled]
            ids = [symbols[i] or self.tokenizer.encode_word(fresh[i]) for i in chosen]
            nodes = self._add(*flat(ids), settled=settled).tolist()
            self._nodes.update(zip((fresh[i] for i in chosen), nodes, strict=True))
        return np.array([self._nodes[word] for word in words], np.int64)

    def _symbols(self, word: str) -> list[int] | None:
        """The pieces that merging starts from; None where the model has other means for one of the letters."""
        ids = [self.vocab.get(letter, -1) for letter in word]
        return None if -1 in ids or word in self.tokenizer.symbols else ids

    def _add(self, ids: np.ndarray, lengths: np.ndarray, settled: bool = False) -> np.ndarray:
        """New nodes, their ids end to end; those that are `settled` get no edges."""
        nodes = len(self._start) + np.arange(len(lengths))
        self._start.extend(len(self._ids) + lengths.cumsum() - lengths)
        self._length.extend(lengths)
        row = np.arange(len(lengths)).repeat(lengths)
        self._ids.extend(ids)
        left = np.flatnonzero(row[1:] == row[:-1]) if not settled else np.empty(0, np.int64)
        pair = ids[left].astype(np.int64) << 32 | ids[left + 1]
        found = np.searchsorted(self.pairs, pair)
        hit = self.pairs[np.minimum(found, len(self.pairs) - 1)] == pair if len(self.pairs) else np.zeros(0, bool)
        left, found = left[hit], found[hit]
        order = np.lexsort((self.ranks[found], row[left]))  # by node, then by rank; of equal ones the left first
        left, found = left[order], found[order]
        count = np.bincount(row[left], minlength=len(lengths))
        self._first.extend(len(self._node) + count.cumsum() - count)
        self._count.extend(count)
        self._node.extend(nodes[row[left]])
        self._place.extend(left - (lengths.cumsum() - lengths)[row[left]])
        self._piece.extend(self.pieces[found])
        self._next.extend(np.full(len(left), -1))
        return nodes

    def _dropped(self, bits: np.random.PCG64, count: int) -> np.ndarray:
        """`count` draws of how many merges are left out before one is not."""
        return len(self.levels) - np.searchsorted(self.levels, uniform(bits, count), side="right")

    def _walk(self, nodes: np.ndarray, bits: np.random.PCG64) -> None:
        """Each node goes along edges until it has none or all are left out; in place."""
        active = np.arange(len(nodes))
        while True:
            active = active[self._count[nodes[active]] > 0]
            if not len(active):
                return
            dropped = self._dropped(bits, len(active))
            going = dropped < self._count[nodes[active]]
            active = active[going]
            edges = self._first[nodes[active]] + dropped[going]
            self._build(np.unique(edges[self._next[edges] < 0]))
            nodes[active] = self._next[edges]

    def _build(self, edges: np.ndarray) -> None:
        """The nodes that these edges lead to."""
        node, place = self._node[edges], self._place[edges]
        lengths = self._length[node]
        ids = self._ids[spread(self._start[node], lengths)]
        at = lengths.cumsum() - lengths + place
        ids[at] = self._piece[edges]
        self._next[edges] = self._add(np.delete(ids, at + 1), lengths - 1)


def uniform(bits: np.random.PCG64, count: int) -> np.ndarray:
    """Numbers from 0 to below 1, made of raw bits, which are the same in every version of numpy."""
    return (bits.random_raw(count) >> np.uint64(11)) * 2.0**-53


def lines_of(ids: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    """The ids of all words end to end, `lengths` of each word, as lists for lines of `counts` words."""
    bounds = np.concatenate([[0], lengths.cumsum()])[np.concatenate([[0], counts.cumsum()])].tolist()
    whole = ids.tolist()
    return [whole[start:end] for start, end in pairwise(bounds)]


def flat(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All ids end to end, and how many each has."""
    lengths = np.array([len(ids) for ids in sequences], np.int64)
    return np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum())), lengths


def spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, … start + length - 1 of each, end to end."""
    return np.arange(lengths.sum()) + (starts - lengths.cumsum() + lengths).repeat(lengths)


def _check_model(model: dict[str, Any], added: Sequence[dict[str, Any]]) -> None:
    if model["type"] != "BPE":
        raise UserError(f"text.dropout leaves out merges, which only kind = 'bpe' has; this is {model['type']}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(name):
            raise UserError(
                f"text.dropout: a BPE tokenizer with {name} = {model[name]!r} is not supported; set it to 0"
            )
    for token in added:
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            raise UserError(f"text.dropout: the token {token['content']!r} takes in its neighbours; set dropout to 0")
