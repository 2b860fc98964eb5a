"""Word dropout: in training, a random fraction of the tokens is replaced by a token without meaning.

    input      <s> a large bag above two coats </s>
    replaced   <s> a <unk> bag above <unk> coats </s>

A classifier then cannot rely on single words (Iyyer et al. 2015), and a decoder cannot rely on the previous tokens
alone: it has to attend to its source (Bowman et al. 2016). The random numbers come from torch's generator on the device
of the tokens, so a recorded step (`train.cuda_graph`) samples new ones each time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import UserError
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class WordDropout:
    """Replaces a fraction of the tokens, except <s> and </s>, by `replacement`."""

    fraction: float
    replacement: int
    kept: tuple[int, int]

    def __call__(self, ids: Tensor) -> Tensor:
        bos, eos = self.kept
        dropped = (torch.rand(ids.shape, device=ids.device) < self.fraction) & (ids != bos) & (ids != eos)
        return torch.where(dropped, self.replacement, ids)

    @classmethod
    def of(cls, fraction: float, tokenizer: Tokenizer) -> WordDropout | None:
        """For `data.word_dropout`: by <mask> where the tokenizer has it (a pretrained encoder knows it), else <unk>."""
        if not fraction:
            return None
        replacement = tokenizer.unk if tokenizer.mask is None else tokenizer.mask
        if replacement is None:
            raise UserError(f"data.word_dropout = {fraction}: the tokenizer has neither <mask> nor <unk>; remove it")
        return cls(fraction, replacement, (tokenizer.special_id("bos"), tokenizer.special_id("eos")))
