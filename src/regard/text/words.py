"""Which tokens make up a word, by their ids alone.

A piece may be a part of a word, and a model that shall guess half a word can often tell it from the other half. To hide
whole words (Cui et al. 2019, arXiv 1906.08101) one must know where they begin. A token begins a word if

    it starts with a space ("▁영화", GPT-2 and SentencePiece), or, of a WordPiece vocabulary, not with ##
    what stands before it ends with a space, or is special
    one of the two has letters or digits and the other has not: punctuation is a word of its own

Where no piece of a vocabulary has a space, every token is a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.text.tokenizer import Tokenizer


class WordTable:
    """What is known of each id of a vocabulary; all [V]."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.token(id) for id in range(len(tokenizer))]
        special = [id in tokenizer.specials for id in range(len(pieces))]
        continued = any(piece.startswith("##") and len(piece) > 2 for piece in pieces)
        spaced = any(piece.startswith("▁") for piece in pieces)
        self.begins = torch.tensor(
            [not piece.startswith("##") if continued else piece.startswith("▁") or not spaced for piece in pieces]
        )
        self.ends = torch.tensor([piece.endswith("▁") for piece in pieces]) | torch.tensor(special)
        self.special = torch.tensor(special)
        self.letters = torch.tensor([_has_letters(tokenizer, id, piece) for id, piece in enumerate(pieces)])

    def to(self, device: torch.device) -> WordTable:
        self.begins, self.ends = self.begins.to(device), self.ends.to(device)
        self.special, self.letters = self.special.to(device), self.letters.to(device)
        return self

    def number(self, ids: Tensor) -> Tensor:
        """The number of the word of each token in its row, from 1; 0 for special tokens. ids [R, L]"""
        before = ids[:, :-1]
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = self.begins[ids[:, 1:]] | self.ends[before] | (self.letters[ids[:, 1:]] != self.letters[before])
        return torch.where(self.special[ids], 0, begins.cumsum(dim=1))


def _has_letters(tokenizer: Tokenizer, id: int, piece: str) -> bool:
    """Whether a piece is part of a word rather than a sign; bytes of a character that others complete are."""
    if not tokenizer.byte_level:
        return any(map(str.isalnum, piece))
    raw = tokenizer.token_bytes(id)
    text = raw.decode("utf-8", errors="ignore")
    return len(text.encode()) < len(raw) or any(map(str.isalnum, text))
