"""ListOps: nested operations on digits, whose result is the class; long sequences with an exact answer, by a rule.

    MAX 4 3 MIN 2 3 ] 1 0 MED 1 5 8 9 2 ] ]   ->   5

    MIN, MAX    the smallest, the largest argument
    MED         the median, rounded down: of 1 4 it is 2
    SM          the sum modulo 10

An expression is a random tree. A node above the greatest depth is an operator with probability 1/4, each of the four as
often, with 2 to 10 arguments; any other node is a digit. The token of an operator opens its bracket and "]" closes it;
parentheses around every pair, which the published files have, say nothing more and are left out. Trees are sampled
until their number of tokens is within the limits. The task is of Nangia & Bowman (2018, arXiv 1804.06028); the defaults
here are those of Long Range Arena (Tay et al. 2021, arXiv 2011.04006): more than 500 and less than 2,000 tokens.

The long expressions teach one digit for a thousand tokens. `shorter` adds others of 4 tokens and more, from which the
rules are learned much sooner; they are no part of the benchmark. Most random trees are either a few tokens or hundreds
long, so the lengths are sampled by octaves, 4 to 7 tokens, 8 to 15, …, about as many tokens of each.

Much of the accuracy needs no nesting at all: MIN is mostly 0 and MAX mostly 9. `root_baseline` predicts the most
frequent class of the first operator, which is about as good as the models of that paper are.

All trees of a batch grow at once, level by level. Lengths and values of a level are reductions over the segments of
their children in the next one:

    length(digit) = 1        length(operator) = 2 + Σ length(children)
    position(child k) = position(parent) + 1 + Σ_{i<k} length(child i)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np

from regard.errors import UserError
from regard.settings import check_fields

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
DIGITS = 10
OPERATORS = ("MIN", "MAX", "MED", "SM")
WORDS = (*map(str, range(DIGITS)), *OPERATORS, "]")  # by token
END = len(WORDS) - 1
PROBABILITY = 0.25  # of an operator
TREES = 1024  # that grow at once; a part of the data's definition: another number gives other expressions
SHORTEST = 4  # tokens of an expression: an operator, two digits and the bracket
HOPELESS = 200  # batches without one expression, after which the limits are refused


@dataclass(frozen=True, kw_only=True)
class ListOps:
    """Generated expressions; every set has its own."""

    train: int = 96_000  # number of expressions for training
    valid: int = 2_000  # number of expressions for evaluation during training
    test: int = 2_000  # number of expressions for the test
    shorter: int = 0  # number of other expressions for training, of at most `above` tokens, to learn the rules from
    above: int = 500  # an expression has more tokens than this
    below: int = 2_000  # an expression has fewer tokens than this
    depth: int = 10  # maximum number of levels of an expression; the last consists of digits
    arguments: int = 10  # maximum number of arguments of an operator
    seed: int = 1  # seed of the data; it does not depend on train.seed

    def __post_init__(self) -> None:
        check_fields(self, train=1, valid=1, test=1, shorter=0, above=0, depth=2, arguments=2, seed=0)
        for name, most in (("depth", 1000), ("arguments", 2**31 - 1)):
            if getattr(self, name) > most:
                raise UserError(f"{name} = {getattr(self, name)}: must be {most} or less")
        if self.below < self.above + 2 or self.below < 5:
            raise UserError(
                f"above = {self.above}, below = {self.below}: no number of tokens is between them; raise below"
            )
        if self.shorter and self.above < SHORTEST:
            raise UserError(
                f"shorter = {self.shorter}: no expression has at most above = {self.above} tokens; raise above, or set "
                "shorter = 0"
            )

    def expressions(self, split: Split) -> Iterator[Expression]:
        """Those of a set, the same each time."""
        yield from self._sampled(getattr(self, split), SPLITS.index(split))
        if split == "train":
            for octave, (least, beyond, count) in enumerate(self._octaves()):
                limits = replace(self, shorter=0, above=least - 1, below=beyond)
                yield from limits._sampled(count, len(SPLITS) + octave)

    def _octaves(self) -> list[tuple[int, int, int]]:
        """Limits of the lengths of `shorter` expressions, from and below, and how many there are between them."""
        limits = [SHORTEST]
        while 3 * limits[-1] <= self.above + 1:  # the last is at least half an octave: a smaller part may have no tree
            limits.append(2 * limits[-1])
        limits.append(self.above + 1)
        shares = list(accumulate(1 / (least + beyond) for least, beyond in pairwise(limits)))
        ends = [round(self.shorter * share / shares[-1]) for share in shares]
        return [(*pair, end - begin) for pair, begin, end in zip(pairwise(limits), [0, *ends], ends, strict=False)]

    def _sampled(self, left: int, stream: int) -> Iterator[Expression]:
        random, without = np.random.default_rng((self.seed, stream)), 0
        while left:
            found = _sample(self, random)
            without = 0 if len(found.values) else without + 1
            if without == HOPELESS:
                raise UserError(
                    f"data.listops.above = {self.above}, below = {self.below}: of {HOPELESS * TREES:,} trees with "
                    f"depth = {self.depth} and arguments = {self.arguments}, none has such a length; raise depth or "
                    "arguments, or lower above"
                )
            ends = accumulate(found.lengths.tolist())
            tokens, values, begin = found.tokens.tolist(), found.values.tolist(), 0
            for value, end in zip(values[:left], ends, strict=False):
                yield Expression(" ".join([WORDS[token] for token in tokens[begin:end]]), str(value))
                begin = end
            left -= min(left, len(values))


class Expression(NamedTuple):
    """The tokens with spaces between them, and the value, a digit."""

    text: str
    value: str


def root_baseline(known: Iterable[tuple[str, str]], asked: Iterable[tuple[str, str]]) -> float:
    """The accuracy on `asked` of the class that is the most frequent in `known` after the same first word."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for text, value in known:
        counts[text.partition(" ")[0]][value] += 1
    best = {root: values.most_common(1)[0][0] for root, values in counts.items()}
    hits = [best.get(text.partition(" ")[0]) == value for text, value in asked]
    return sum(hits) / len(hits)


class _Level(NamedTuple):
    """The nodes of one depth in all trees, from left to right: the children of a node are neighbours."""

    size: int
    at: np.ndarray  # [operators]: which nodes are operators
    children: np.ndarray  # [operators]: their number

    @property
    def starts(self) -> np.ndarray:
        """Where the children of each operator begin in the next level. [operators]"""
        return np.cumsum(self.children) - self.children


class _Found(NamedTuple):
    tokens: np.ndarray  # of all expressions, one after another
    lengths: np.ndarray  # [expressions]
    values: np.ndarray  # [expressions]


def _sample(config: ListOps, random: np.random.Generator) -> _Found:
    """The expressions of a fitting length among TREES new ones."""
    levels: list[_Level] = []
    size = TREES
    for depth in range(1, config.depth):
        part = PROBABILITY if depth > 1 else 1.0  # a digit alone would be too short
        uniform = random.random(size, np.float32)
        at = np.flatnonzero(uniform < part)
        children = 2 + (uniform[at] * ((config.arguments - 1) / part)).astype(np.int64)  # uniform < part is uniform
        levels.append(_Level(size, at, np.minimum(children, config.arguments)))  # float32 may round up
        size = int(levels[-1].children.sum())
    levels.append(_Level(size, np.zeros(0, np.int64), np.zeros(0, np.int64)))  # only digits
    lengths = _lengths(levels)[0]
    return _write(_only(levels, (lengths > config.above) & (lengths < config.below)), random)


def _only(levels: list[_Level], kept: np.ndarray) -> list[_Level]:
    """The levels of the trees that are kept [trees]."""
    chosen = []
    for level in levels:
        number = np.cumsum(kept) - 1  # of a node among those that are kept
        inside = kept[level.at]
        chosen.append(_Level(int(kept.sum()), number[level.at[inside]], level.children[inside]))
        kept = np.repeat(inside, level.children)
    return chosen


def _lengths(levels: list[_Level]) -> list[np.ndarray]:
    """The tokens of every node with all below it, by level."""
    found: list[np.ndarray] = []
    for level in reversed(levels):
        length = np.ones(level.size, np.int32)
        if len(level.at):
            length[level.at] = 2 + np.add.reduceat(found[-1], level.starts)
        found.append(length)
    return found[::-1]


def _write(levels: list[_Level], random: np.random.Generator) -> _Found:
    """Choose digits and operators; compute the values from below and the positions from above."""
    symbols, lengths = [], _lengths(levels)
    for level in levels:
        symbol = random.integers(DIGITS, size=level.size, dtype=np.uint8)
        symbol[level.at] = DIGITS + random.integers(len(OPERATORS), size=len(level.at), dtype=np.uint8)
        symbols.append(symbol)
    tokens = np.full(int(lengths[0].sum()), END, np.uint8)  # a token that no node begins with is a bracket
    position = np.cumsum(lengths[0], dtype=np.int64) - lengths[0]
    for number, level in enumerate(levels):
        tokens[position] = symbols[number]
        if len(level.at):
            before = np.cumsum(lengths[number + 1], dtype=np.int64) - lengths[number + 1]
            position = before + np.repeat(position[level.at] + 1 - before[level.starts], level.children)
        else:
            position = position[:0]
    value = symbols[-1]
    for level, symbol in zip(levels[-2::-1], symbols[-2::-1], strict=True):
        value = _values(level, symbol, value)
    return _Found(tokens, lengths[0], value)


def _values(level: _Level, symbol: np.ndarray, below: np.ndarray) -> np.ndarray:
    """The values of a level; `below` are those of the next."""
    value, starts, count = symbol.copy(), level.starts, level.children
    if not len(starts):
        return value
    ordered = np.sort(np.repeat(np.arange(len(starts)) * DIGITS, count) + below) % DIGITS  # within each operator
    median = (ordered[starts + (count - 1) // 2] + ordered[starts + count // 2]) // 2
    total = np.add.reduceat(below, starts, dtype=np.int64) % DIGITS
    value[level.at] = np.choose(
        symbol[level.at] - DIGITS, (ordered[starts], ordered[starts + count - 1], median, total)
    )
    return value
