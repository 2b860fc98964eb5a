"""Word dropout: a share of the words that a model reads in training says nothing, others in every reading.

    read       <s> a large bag above two coats </s>
    hidden     <s> a <unk> bag above <unk> coats </s>

A classifier must then not hang on single words (Iyyer et al. 2015), a decoder not on what it has just said: to go on
it has to look at its source (Bowman et al. 2016). Chance is drawn where the tokens are, from torch's generator, and
nothing has to be fetched: a recorded step draws anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import UserError
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class WordDropout:
    """A share of the tokens, the two ends apart, becomes one that says nothing."""

    share: float
    by: int
    ends: tuple[int, int]

    def __call__(self, ids: Tensor) -> Tensor:
        first, last = self.ends
        hidden = (torch.rand(ids.shape, device=ids.device) < self.share) & (ids != first) & (ids != last)
        return torch.where(hidden, self.by, ids)

    @classmethod
    def of(cls, share: float, tokenizer: Tokenizer) -> WordDropout | None:
        """That of `data.word_dropout`. <mask> is what a masked language model knows for it; others have <unk>."""
        if not share:
            return None
        by = tokenizer.unk if tokenizer.mask is None else tokenizer.mask
        if by is None:
            raise UserError(f"data.word_dropout = {share}: the tokenizer has neither <mask> nor <unk>; remove it")
        return cls(share, by, (tokenizer.special_id("bos"), tokenizer.special_id("eos")))
