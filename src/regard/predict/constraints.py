"""Constraints on an output: a prefix that it begins with, phrases that it contains, and phrases that it must not.

    prefix      the first tokens are given; their log-probabilities count as those of any other token
    forbidden   log p = -inf for a token that would complete a forbidden phrase
    required    beam search by dynamic beam allocation     `regard.predict.allocation`

A phrase is a sequence of tokens. In most vocabularies a word has other tokens after a space than at the start of a
text, so it has two patterns: its tokens at the start (-1 stands for the start), and anywhere else those with the space
before it. A phrase that begins with a punctuation mark, or in a script without spaces between words, may follow
anything. What follows is not restricted: a further token may continue the last word.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import UserError
from regard.text.tokenizer import Tokenizer

START = -1  # in a pattern: before the first token of an output
UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")  # scripts without spaces between words

Pattern = tuple[int, ...]
Phrase = tuple[Pattern, ...]  # it occurs where one of its patterns does


@dataclass(frozen=True)
class Constraints:
    """Those of some outputs, as token ids: of each its prefix and its phrases, and what is forbidden in all."""

    prefixes: list[list[int]]
    required: list[list[Phrase]]
    forbidden: Sequence[Pattern] = ()

    def of(self, rows: Sequence[int]) -> Constraints:
        """Those of some of the outputs."""
        return Constraints([self.prefixes[row] for row in rows], [self.required[row] for row in rows], self.forbidden)

    def needed(self, row: int) -> int:
        """Tokens that complete all phrases of an output, one after the other."""
        return sum(min(len(pattern) for pattern in phrase if pattern[0] != START) for phrase in self.required[row])

    def prefix_table(self, device: torch.device) -> Tensor | None:
        """The prefixes [outputs, longest], -1 after their ends; None if all are empty."""
        longest = max(map(len, self.prefixes), default=0)
        rows = [[*prefix, *[-1] * (longest - len(prefix))] for prefix in self.prefixes]
        return torch.tensor(rows, device=device) if longest else None


def read_prefix(tokenizer: Tokenizer, text: str, forbidden: Sequence[Pattern] = ()) -> list[int]:
    """The tokens of a prefix; spaces at its ends do not count."""
    if not isinstance(text, str):
        raise UserError(f"prefix {text!r}: must be a text; an empty one is no prefix")
    ids = _ids(tokenizer, text.strip(), "prefix")
    _check(f"prefix {text!r}", (START, *ids), forbidden)
    return ids


def read_phrases(
    tokenizer: Tokenizer, words: Sequence[str], forbidden: Sequence[Pattern] = (), name: str = "constraint"
) -> list[Phrase]:
    """The patterns of words or phrases, each once; `name` is what a message calls one."""
    if isinstance(words, str):
        raise UserError(f"{name} {words!r}: pass a list of words or phrases")
    phrases = {read_phrase(tokenizer, word, name): word for word in words}
    for phrase, word in phrases.items():
        _check(f"{name} {word!r}", max(phrase, key=len), forbidden)
    return list(phrases)


def _check(name: str, tokens: Sequence[int], forbidden: Sequence[Pattern]) -> None:
    if any(occurs(pattern, tokens) for pattern in forbidden):
        raise UserError(f"{name}: contains a phrase that is forbidden; remove one of them")


def read_phrase(tokenizer: Tokenizer, word: str, name: str = "constraint") -> Phrase:
    """The patterns of one word or phrase."""
    if not isinstance(word, str) or not (word := word.strip()):
        raise UserError(f"{name} {word!r}: is empty or not a text; pass a word or a phrase")
    alone, before = tuple(_ids(tokenizer, word, name)), tuple(tokenizer.encode("x"))
    both = tuple(tokenizer.encode(f"x {word}"))
    after = both[len(before) :] if both[: len(before)] == before else alone
    first = word[0]
    if after == alone or not first.isalnum() or unicodedata.name(first, "").startswith(UNSPACED):
        return tuple(dict.fromkeys((alone, after)))
    return ((START, *alone), after)


def _ids(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    ids = tokenizer.encode(text)
    if tokenizer.unk is not None and tokenizer.unk in ids:
        raise UserError(
            f"{name} {text!r}: contains a word or character that is not in the target vocabulary, so the model cannot "
            "generate it"
        )
    return ids


def occurs(pattern: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether the pattern is a contiguous part of the tokens."""
    size = len(pattern)
    return any(tuple(tokens[at : at + size]) == tuple(pattern) for at in range(len(tokens) - size + 1))


def completed(patterns: Sequence[Pattern], written: Tensor) -> list[tuple[int, Tensor]]:
    """For each pattern its last token, and the rows of `written` [R, t] in which that token would complete it [R]."""
    read = F.pad(written, (1, 0), value=START)
    result = []
    for *before, last in patterns:
        if len(before) <= read.shape[1]:
            tail = read[:, read.shape[1] - len(before) :]
            result.append((last, (tail == torch.tensor(before, dtype=torch.long, device=read.device)).all(dim=1)))
    return result


def forced(prefixes: Tensor, step: int, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows of the logits [R, vocab_size] have a given token [R, 1], that token, and its log p.

    `prefixes` [n, longest] are those of n outputs with R / n rows each.
    """
    token = prefixes[:, step].repeat_interleave(len(logits) // len(prefixes))[:, None]
    log_p = logits.log_softmax(dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return token >= 0, token.clamp_min(0), log_p.gather(1, token.clamp_min(0))
