"""Word boundaries from token ids, for whole-word masking (Cui et al. 2019, arXiv 1906.08101).

A token may be part of a word, and a masked half of a word is often easy to predict from the other half. Whole-word
masking needs to know where words begin. A token begins a word if

    it starts with a space ("▁영화" in GPT-2 and SentencePiece), or, in a WordPiece vocabulary, not with ##
    the previous token ends with a space, or is special
    exactly one of the two has letters or digits: punctuation is a word of its own

If no token of a vocabulary has a space, every token is a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.text.tokenizer import Tokenizer


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
