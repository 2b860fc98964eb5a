"""Sampling from a unigram model: any cut of a word, the likelier the more often (Kudo 2018, arXiv 1804.10959).

A unigram tokenizer takes the cut x₁ … xₙ with the largest  P(x) = Π p(xᵢ).  For training, one is drawn from

    P(x)^α / Σ_x' P(x')^α     α -> 0: all cuts alike,  α = 1: as likely as the model finds them,  α -> ∞: the plain one

Forward, f(e) = log Σ over pieces s…e of exp(f(s) + α log p) is computed for each end e within a word. Backward, from
the end of the word, the piece that ends at e is drawn with probability exp(f(s) + α log p - f(e)), then the one before
it. All words of a text go back at once: one array holds the running sums of these probabilities for all places in
all words, and one search in it draws the next piece of every word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from regard.errors import UserError
from regard.text.regularise import Column, Segmenter, Words, flat, lines_of, spread, uniform
from regard.text.tokenizer import Tokenizer

PLACES = 4_000_000  # in words, remembered at once, some 300 MB at most; then they are forgotten
Ids = list[int]


class LatticeSampling(Segmenter):
    """Random segmentations by a unigram tokenizer, with probability proportional to P^alpha."""

    def __init__(self, tokenizer: Tokenizer, alpha: float) -> None:
        super().__init__(tokenizer)
        content = json.loads(tokenizer.json)
        model = content["model"]
        if model["type"] != "Unigram":
            raise UserError(f"text.alpha is for unigram tokenizers; this is {model['type']}: leave it out")
        if not 0 < alpha < math.inf:
            raise UserError(f"text.alpha = {alpha}: must be above 0, such as 0.2; the higher, the plainer the text")
        self.alpha = alpha
        vocab = {piece: id for id, (piece, _) in enumerate(model["vocab"])}
        self.bytes = [vocab[f"<0x{byte:02X}>"] for byte in range(256)] if model.get("byte_fallback") else None
        apart = {token["content"] for token in content["added_tokens"]} | {f"<0x{byte:02X}>" for byte in range(256)}
        self.pieces = {piece: (vocab[piece], score) for piece, score in model["vocab"] if piece not in apart}
        self.longest = max(map(len, self.pieces), default=1)
        self._forget()

    def _forget(self) -> None:
        self._ends: dict[str, int] = {}  # the last place of each word; places are numbered through all words
        self._last = Column()  # of each place: the last of the pieces that end there
        # Of each piece: its place + the share of it and those before it in the place; the place it starts at, or -1
        # for the beginning of the word; where its ids are.
        self._sums = Column(np.float64)
        self._before, self._start, self._length, self._ids = (Column() for _ in range(4))

    def draw(self, words: Words, bits: np.random.PCG64) -> list[list[int]]:
        """The ids of each line, cut at random."""
        self._learn(words.kinds)
        place = np.array([self._ends[kind] for kind in words.kinds], np.int64)[words.which]  # where each word stands
        word = np.arange(len(place))
        steps = [(word[:0], word[:0])]  # the words that are still on the way back, and the piece that each takes
        while len(word := word[place[word] >= 0]):
            drawn = np.searchsorted(self._sums.used_values, place[word] + uniform(bits, len(word)), side="right")
            drawn = np.minimum(drawn, self._last[place[word]])  # rounding must not lead into the next place
            steps.append((word, drawn))
            place[word] = self._before[drawn]
        owner, piece = (np.concatenate(parts) for parts in zip(*steps, strict=True))
        order = np.lexsort((-np.arange(len(owner)), owner))  # by word, the last one drawn first
        owner, piece = owner[order], piece[order]
        lengths = self._length[piece]
        ids = self._ids[spread(self._start[piece], lengths)]
        return lines_of(ids, np.bincount(owner.repeat(lengths), minlength=len(place)), words.counts)

    def _learn(self, words: Sequence[str]) -> None:
        """The places and pieces of words that are not known yet."""
        if len(self._last) > PLACES:
            self._forget()
        last, before, sums, ids = list[int](), list[int](), list[float](), list[Ids]()
        places, pieces = len(self._last), len(self._sums)
        for word in words:
            if word in self._ends:
                continue
            first = places + len(last) - 1  # the place before the word's first one
            for found in self._places(word):
                for start, share, content in found:
                    sums.append(places + len(last) + share)
                    before.append(first + start if start else -1)
                    ids.append(content)
                last.append(pieces + len(sums) - 1)
            self._ends[word] = places + len(last) - 1
        numbers, lengths = flat(ids)
        self._last.extend(np.array(last, np.int64))
        self._sums.extend(np.array(sums))
        self._before.extend(np.array(before, np.int64))
        self._start.extend(len(self._ids) + lengths.cumsum() - lengths)
        self._length.extend(lengths)
        self._ids.extend(numbers)

    def _places(self, word: str) -> list[list[tuple[int, float, Ids]]]:
        """The pieces that end after each letter of the word: where they start, their running share, their ids."""
        if word in self.tokenizer.symbols:
            return [*([] for _ in word[1:]), [(0, 1.0, [self.tokenizer.symbols[word]])]]
        forward = [0.0] + [-math.inf] * len(word)
        places = []
        start = 0  # of a run of letters without a piece
        for end in range(1, len(word) + 1):
            found: list[tuple[int, float, Ids]] = []
            for begin in range(max(0, end - self.longest), end):
                if (piece := self.pieces.get(word[begin:end])) is not None and forward[begin] > -math.inf:
                    found.append((begin, forward[begin] + self.alpha * piece[1], [piece[0]]))
            if word[end - 1] in self.pieces:
                start = end
            elif end == len(word) or word[end] in self.pieces:  # the run is over: one unknown token, or its bytes
                found.append((start, forward[start], self._unknown(word[start:end])))
            if found:
                best = max(weight for _, weight, _ in found)
                forward[end] = best + math.log(sum(math.exp(weight - best) for _, weight, _ in found))
            shares = accumulate(math.exp(weight - forward[end]) for _, weight, _ in found)
            places.append([(begin, min(share, 1.0), ids) for (begin, _, ids), share in zip(found, shares, strict=True)])
        return places

    def _unknown(self, letters: str) -> Ids:
        if self.bytes is not None:
            return [self.bytes[byte] for byte in letters.encode()]
        return [self.tokenizer.unk or 0]
