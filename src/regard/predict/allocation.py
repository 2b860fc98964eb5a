"""Required phrases: beam search whose outputs all contain them, by dynamic beam allocation.

Whether a phrase has occurred, and how much of it the last tokens are, is the state of a finite automaton (Knuth, Morris
& Pratt 1977), one for each phrase and hypothesis. From the states follows how many tokens suffice to complete all
phrases c that have not occurred: to continue the one that has advanced furthest, and then the others from their start.

    need = Σ_c length_c - max_c (length_c - left_c)                      [sentences, candidates]

The candidates of a step are the best extensions, and for each hypothesis those by a token of its phrases. Candidates
that need more tokens than the output may still have are dropped, and </s> is allowed only where need = 0. Each
hypothesis that is left has an extension that needs a token less, so every output contains all of its phrases.

A hypothesis with some of their tokens is less probable than one without, long before they pay off. So the beam is
divided equally among the values of need (the banks of Post & Vilar 2018, arXiv 1804.06609), and each keeps its most
probable hypotheses; what one cannot fill is left to the others. Hokamp & Liu 2017 (arXiv 1704.07138) keep a whole beam
for each number of tokens; here the cost does not grow with the constraints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.predict.constraints import START, Pattern, Phrase

OTHER = -2  # any token that is not in an alphabet


class Automata:
    """Those of the phrases of n sentences, C phrases at most in each, with K different tokens at most, as tables.

    alphabet  [n, K]              tokens of the phrases of each sentence; -1 where there are fewer
    moves     [n, C, Q, K + 1]    the state after each of these tokens, and after any other
    left      [n, C, Q]           tokens that complete the phrase from each state; 0: it has occurred
    first     [n, C]              the states at the start of an output
    """

    def __init__(self, sentences: Sequence[Sequence[Phrase]], device: torch.device) -> None:
        alphabets = [sorted({id for phrase in some for one in phrase for id in one} - {START}) for some in sentences]
        each = [[Automaton(phrase, own) for phrase in some] for some, own in zip(sentences, alphabets, strict=True)]
        shape = len(sentences), max(map(len, each)), max(len(one.left) for some in each for one in some)
        most = max(map(len, alphabets))
        self.alphabet = torch.full((len(sentences), most), -1)
        self.moves = torch.zeros(*shape, most + 1, dtype=torch.long)
        self.left = torch.zeros(shape, dtype=torch.long)  # where there is no phrase, nothing is left
        self.first = torch.zeros(shape[:2], dtype=torch.long)
        for at, (own, some) in enumerate(zip(alphabets, each, strict=True)):
            self.alphabet[at, : len(own)] = torch.tensor(own)
            for number, one in enumerate(some):
                moves = torch.tensor(one.moves)
                self.moves[at, number, : len(moves), : len(own)] = moves[:, :-1]
                self.moves[at, number, : len(moves), len(own) :] = moves[:, -1:]
                self.left[at, number, : len(moves)] = torch.tensor(one.left)
                self.first[at, number] = one.first
        self.banks = 1 + int(self.left[:, :, 0].sum(dim=1).max())  # values of need
        self._each(lambda table: table.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("alphabet", "moves", "left", "first"):
            setattr(self, name, change(getattr(self, name)))

    def keep(self, sentences: Tensor) -> None:
        """Continue with these sentences only."""
        self._each(lambda table: table.index_select(0, sentences))

    def reach(self, states: Tensor, sentences: Tensor) -> Tensor:
        """From states [rows, C] of rows of these sentences [rows] the next ones, [rows, C, K + 1]."""
        return self.moves[sentences[:, None], torch.arange(states.shape[1], device=states.device), states]

    def read(self, states: Tensor, tokens: Tensor, sentences: Tensor) -> Tensor:
        """The states [rows, C] after one more token [rows, 1]."""
        same = tokens == self.alphabet[sentences]  # [rows, K]
        symbol = torch.where(same.any(dim=1), same.int().argmax(dim=1), same.shape[1])
        return self.reach(states, sentences).gather(2, symbol[:, None, None].expand(-1, states.shape[1], 1))[..., 0]

    def need(self, states: Tensor, sentences: Tensor) -> Tensor:
        """Tokens that suffice to complete all phrases, [rows, K + 1], in states [rows, C, K + 1]."""
        left, length = self.left[sentences].gather(2, states), self.left[sentences, :, :1]
        gain = torch.where(left > 0, length - left, 0).amax(dim=1)
        return torch.where(left > 0, length, 0).sum(dim=1) - gain


def allocate(need: Tensor, alive: Tensor, ends: Tensor, full: Tensor, size: int, banks: int) -> Tensor:
    """Candidates [n, N], best first, as the `size` that end here and the `size` that continue: [n, 2 · size].

    Where there are fewer, their number is N. In a sentence that is `full` [n, 1], all end that need nothing.
    """
    places, complete = torch.arange(need.shape[1], device=need.device), alive & (need == 0)
    ending = complete & (complete.cumsum(dim=1) <= size) & (ends | full)
    ending = torch.where(ending, places, len(places)).sort(dim=1).values[:, :size]
    # Of those that continue, the first of every bank, then the second of every bank, and so on.
    bank = torch.where(alive & ~ends, need, banks)
    turn = torch.where(bank < banks, rank_within(bank) * banks + bank, banks * len(places))
    turn, going = turn.sort(dim=1, stable=True)
    going = torch.where(turn < banks * len(places), going, len(places))[:, :size].sort(dim=1).values
    return torch.cat([F.pad(x, (0, size - x.shape[1]), value=len(places)) for x in (ending, going)], dim=1)


def rank_within(banks: Tensor) -> Tensor:
    """How many before each place of a row [n, N] are in the same bank."""
    ordered, order = banks.sort(dim=1, stable=True)
    places = torch.arange(banks.shape[1], device=banks.device).expand_as(banks)
    begins = F.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return torch.empty_like(places).scatter(1, order, places - first)


class Automaton:
    """Reads an output token by token; its states are the beginnings of the patterns of a phrase, 0 is the empty one.

    `moves[state]` has the next state for each token of the alphabet and for any other, `left[state]` the fewest tokens
    to the last state, in which the phrase has occurred; `first` is the state at the start of an output.
    """

    def __init__(self, phrase: Phrase, alphabet: Sequence[int]) -> None:
        begun = {pattern[:size] for pattern in phrase for size in range(len(pattern))} | {()}
        states = {begin: number for number, begin in enumerate(sorted(begun, key=lambda one: (len(one), one)))}
        occurred = len(states)

        def move(begin: Pattern, token: int) -> int:
            read = (*begin, token)
            if any(read[-len(pattern) :] == pattern for pattern in phrase):
                return occurred
            return next(states[read[at:]] for at in range(len(read) + 1) if read[at:] in states)

        self.moves = [[move(begin, token) for token in (*alphabet, OTHER)] for begin in states]
        self.moves.append([occurred] * (len(alphabet) + 1))
        self.first = states.get((START,), 0)
        self.left = [0 if state == occurred else len(self.moves) ** 2 for state in range(len(self.moves))]
        for _ in states:  # the shortest ways grow by a token each time
            self.left = [
                min(own, 1 + min(self.left[state] for state in row))
                for own, row in zip(self.left, self.moves, strict=True)
            ]
