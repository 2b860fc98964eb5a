"""Masked texts: some tokens are masked, and the model predicts them from both sides.

    text       <s> 이 영화 정말 재밌다 </s>
    read       <s> 이 영화 <mask> 재밌다 </s>
    labels               정말

A `fraction` of the tokens of a row is chosen (or whole words up to as many); of these 80 % become <mask>, 10 % a random
token and 10 % stay as they are, so the model must encode every position well (Devlin et al. 2018, section 3.1). Each
epoch samples another choice (Liu et al. 2019), which follows from the seed and the epoch, so a resumed run is exact.

Documents longer than a row are split; each part is  <s> … </s>,  and several share a row (`regard.data.pack`).
Only the chosen positions are scored: at most M = fraction · L per row, so the output matmul over the vocabulary is 1/7
of what all positions would take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.data.batch import Labels, Ragged
from regard.data.pack import Plan, TextPacks, TextRows
from regard.errors import UserError
from regard.settings import check_types
from regard.text.tokenizer import Tokenizer
from regard.text.words import WordBoundaries


@dataclass(frozen=True)
class MaskConfig:
    """The [mask] table of a recipe."""

    fraction: float = 0.15  # of the tokens
    whole_words: bool = False  # all tokens of a word or none
    mask: float = 0.8  # of these: replaced by <mask>
    random: float = 0.1  # replaced by another token; the rest stays

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.fraction < 1:
            raise UserError(f"fraction = {self.fraction}: must be above 0 and below 1, such as 0.15")
        if self.mask < 0 or self.random < 0 or self.mask + self.random > 1:
            raise UserError(f"mask = {self.mask}, random = {self.random}: are fractions, together at most 1")

    def most(self, length: int) -> int:
        """The most positions of a row that are chosen."""
        return max(1, round(self.fraction * length))


@dataclass(frozen=True)
class MaskedBatch(Labels):
    """Packed rows with masked tokens."""

    ids: Tensor  # [R, L]
    document: Tensor  # [R, L], from 1; 0: padding
    positions: Tensor  # [R, M] of the masked tokens
    labels: Tensor  # [R, M] the original tokens; IGNORE where fewer were chosen


class MaskedPacks(TextPacks):
    """Packed batches of masked texts."""

    def __init__(
        self,
        texts: Ragged,
        tokenizer: Tokenizer,
        config: MaskConfig,
        rows: int,
        length: int,
        seed: int,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(texts, rows, length, seed, device)
        assert tokenizer.mask is not None
        self.mask, self.config, self.words = tokenizer.mask, config, WordBoundaries(tokenizer).to(self.device)
        self.ordinary = (~self.words.special).nonzero()[:, 0]  # what a random token may be

    def label(self, rows: TextRows, plan: Plan, generator: torch.Generator) -> MaskedBatch:
        ids, document = rows.ids, rows.document
        alone = torch.arange(1, ids.shape[1] + 1, device=ids.device).expand_as(ids)
        words = self.words.word_ids(ids) if self.config.whole_words else alone
        words = torch.where((document > 0) & ~self.words.special[ids], words, 0)
        chosen = choose(words, self.config.fraction, generator)
        most = self.config.most(self.length)
        positions = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        labels = torch.where(chosen, ids, Labels.IGNORE).gather(1, positions)
        return MaskedBatch(self._replace(ids, chosen, generator), document, positions, labels)

    def _replace(self, ids: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
        lot = torch.rand(ids.shape, generator=generator, device=ids.device)
        other = torch.randint(len(self.ordinary), ids.shape, generator=generator, device=ids.device)
        other = self.ordinary[other]
        masked, moved = lot < self.config.mask, lot < self.config.mask + self.config.random
        return torch.where(chosen, torch.where(masked, self.mask, torch.where(moved, other, ids)), ids)


def choose(words: Tensor, fraction: float, generator: torch.Generator) -> Tensor:
    """Which tokens are chosen, of rows [n, L] that say to which word a token belongs, 0: to none.

    Words come in random order until the next would exceed round(fraction · tokens), at least 1.
    """
    n, length = words.shape
    lot = torch.rand(n, length + 1, generator=generator, device=words.device).gather(1, words)  # one for each word
    rank = torch.where(words > 0, lot, torch.inf).argsort(dim=1, stable=True).argsort(dim=1)
    last = words.new_zeros(n, length + 1).scatter_reduce_(1, words, rank, "amax").gather(1, words)
    quota = ((words > 0).sum(dim=1, keepdim=True) * fraction).round().clamp_min(1)
    return (words > 0) & (last < quota)
