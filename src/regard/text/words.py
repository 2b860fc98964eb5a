"""Words and tokens: which tokens belong to a word, from either side.

`encode_words` turns words into tokens and says where each begins, for tags: a tag belongs to the first token of its
word, and the others have none (Devlin et al. 2018, section 5.4):

    words      Seoul      is    rainy
    tokens  <s> Se oul ▁is ▁rain y </s>
    tags       B-LOC  –   O     O  –

`WordBoundaries` finds words from token ids, for whole-word masking (Cui et al. 2019, arXiv 1906.08101). A token may be
part of a word, and a masked half of a word is often easy to predict from the other half. Whole-word masking needs to
know where words begin. A token begins a word if

    it starts with a space ("▁영화" in GPT-2 and SentencePiece), or, in a WordPiece vocabulary, not with ##
    the previous token ends with a space, or is special
    exactly one of the two has letters or digits: punctuation is a word of its own

If no token of a vocabulary has a space, every token is a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.text.tokenizer import Tokenizer


class EncodedWords(NamedTuple):
    """Words of a sentence, from number `begin` on, as  <s> … </s>; `first` is the position of each word's first token.

    A word without tokens (only of characters that the tokenizer removes) has the position of the next one.
    """

    sentence: int
    begin: int
    ids: list[int]
    first: list[int]


def encode_words(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], longest: int) -> Iterator[EncodedWords]:
    """The tokens of each sentence, as those of its words with spaces between them.

    A sentence of more than `longest` tokens is split between words, a longer word is truncated. Where a space is a
    token of its own, a word begins after it.
    """
    bos, eos, space = tokenizer.special_id("bos"), tokenizer.special_id("eos"), tokenizer.encode(" ")
    different = [*{" " * (at > 0) + word: None for words in sentences for at, word in enumerate(words)}]
    encoded = dict(zip(different, tokenizer.encode_batch(different), strict=True))
    for number, words in enumerate(sentences):
        begin, ids, first = 0, [bos], list[int]()
        for at, word in enumerate(words):
            own = encoded[" " * (at > 0) + word][: longest - 2]
            if len(ids) + len(own) + 1 > longest:
                yield EncodedWords(number, begin, [*ids, eos], first)
                begin, ids, first = at, [bos], []
            spaced = at > 0 and len(own) > len(space) and own[: len(space)] == space
            first.append(len(ids) + len(space) * spaced)
            ids += own
        if first:
            yield EncodedWords(number, begin, [*ids, eos], first)


class WordBoundaries:
    """Properties of every token of a vocabulary, each a tensor [V]."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = [tokenizer.token(id) for id in range(len(tokenizer))]
        specials = tokenizer.specials
        wordpiece = any(token.startswith("##") and len(token) > 2 for token in tokens)
        spaced = any(token.startswith("▁") for token in tokens)
        self.begins = torch.tensor(
            [not token.startswith("##") if wordpiece else token.startswith("▁") or not spaced for token in tokens]
        )
        self.special = torch.tensor([id in specials for id in range(len(tokens))])
        self.ends = torch.tensor([token.endswith("▁") for token in tokens]) | self.special
        self.alphanumeric = torch.tensor([_is_alphanumeric(tokenizer, id, token) for id, token in enumerate(tokens)])

    def to(self, device: torch.device) -> WordBoundaries:
        self.begins, self.ends = self.begins.to(device), self.ends.to(device)
        self.special, self.alphanumeric = self.special.to(device), self.alphanumeric.to(device)
        return self

    def word_ids(self, ids: Tensor) -> Tensor:
        """The index of each token's word in its row, from 1; 0 for special tokens. ids [R, L]"""
        previous, current = ids[:, :-1], ids[:, 1:]
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = self.begins[current] | self.ends[previous]
        begins[:, 1:] |= self.alphanumeric[current] != self.alphanumeric[previous]
        return torch.where(self.special[ids], 0, begins.cumsum(dim=1))


def _is_alphanumeric(tokenizer: Tokenizer, id: int, token: str) -> bool:
    """Whether a token has letters or digits; the bytes of an incomplete character count as such."""
    if not tokenizer.byte_level:
        return any(map(str.isalnum, token))
    raw = tokenizer.token_bytes(id)
    text = raw.decode("utf-8", errors="ignore")
    return len(text.encode()) < len(raw) or any(map(str.isalnum, text))
