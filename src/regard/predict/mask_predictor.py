"""Masked tokens: which tokens fit where a text has <mask>, by a masked language model.

p = softmax(head(encoder(<s> … <mask> … </s>)))[position of the mask]         over the vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from regard.data.batch import Labels
from regard.errors import UserError
from regard.models.transformer import Encoder
from regard.predict.bundle import Bundle, Prediction, Predictor
from regard.predict.scoring import TOKENS, SequenceScore, label_scores
from regard.text.tokenizer import MASK_NAMES


@dataclass(frozen=True)
class Candidate:
    """A token for a masked position."""

    token: str
    probability: float


@dataclass(frozen=True)
class MaskPrediction(Prediction):
    """For each mask of a text the most probable tokens, best first."""

    masks: tuple[tuple[Candidate, ...], ...]


class MaskPredictor(Predictor[str, MaskPrediction]):
    """An encoder with an output head over tokens, and its tokenizer, which has a <mask> token."""

    NEEDS = "a masked language model (an encoder with output_head = 'tokens' and a tokenizer with <mask>)"
    MODEL: ClassVar = {"architecture": ("encoder",), "input": ("tokens",), "output_head": ("tokens",)}
    model: Encoder
    COMMAND = "fill"

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.tokenizer, self.max_length = bundle.tokenizer, bundle.limits.context
        self.mask = self.tokenizer.special_id("mask")

    def predict(self, inputs: Sequence[str], *, top: int = 5, **options: Any) -> list[MaskPrediction]:
        """The `top` most probable tokens for each <mask> of each text; each is predicted on its own."""
        return [MaskPrediction(self.candidates(self.encode(text), top)) for text in inputs]

    def encode(self, text: str) -> list[int]:
        """<s> … </s> of a text with masks."""
        for name in MASK_NAMES:
            text = text.replace(name, MASK_NAMES[0])
        parts = text.split(MASK_NAMES[0])
        if len(parts) < 2:
            raise UserError(f"{text!r}: has no mask; write {MASK_NAMES[0]} where a token is to be predicted")
        if self.tokenizer.has_spaces:  # a token includes the space before its word
            parts = [part.removesuffix(" ") for part in parts[:-1]] + parts[-1:]
        ids = [self.tokenizer.special_id("bos")]
        for number, part in enumerate(self.tokenizer.encode_batch(parts)):
            ids += [self.mask, *part] if number else part
        ids.append(self.tokenizer.special_id("eos"))
        return self._checked(text, ids)

    def _checked(self, text: str, ids: list[int]) -> list[int]:
        if len(ids) > self.max_length:
            raise UserError(f"{text[:40]!r} …: {len(ids)} tokens, but the model reads {self.max_length}; shorten it")
        return ids

    @torch.inference_mode()
    def score(self, texts: Sequence[str]) -> list[SequenceScore]:
        """Pseudo-log-likelihood of each text: log p of every token given all others, each masked in turn."""
        encoded = self.tokenizer.encode_batch(texts, add_bos=True, add_eos=True)
        return [self._score(self._checked(text, ids)) for text, ids in zip(texts, encoded, strict=True)]

    def _score(self, ids: list[int]) -> SequenceScore:
        row, values = torch.tensor(ids, device=self.device), list[float]()
        for positions in torch.arange(1, len(ids) - 1, device=self.device).split(max(1, TOKENS // len(ids))):
            chosen = positions[:, None] == torch.arange(len(ids), device=self.device)  # [B, N]: one of each row
            states = self.model.encode(torch.where(chosen, self.mask, row))
            labels = torch.where(chosen, row, Labels.IGNORE)
            values += [value for part in label_scores(self.model, states, labels) for value in part]
        return SequenceScore.of(self.tokenizer, ids[1:-1], values)

    @torch.inference_mode()
    def candidates(self, ids: Sequence[int], count: int = 5) -> tuple[tuple[Candidate, ...], ...]:
        """For each mask of one text the most probable tokens."""
        row = torch.tensor([list(ids)], device=self.device)
        probabilities = self.model(row)[0][row[0] == self.mask].float().softmax(dim=-1)
        probabilities[:, sorted(self.tokenizer.specials)] = 0.0
        best = probabilities.topk(min(count, len(self.tokenizer) - len(self.tokenizer.specials)))
        return tuple(
            tuple(Candidate(self.tokenizer.token(id), p) for id, p in zip(*pair, strict=True))
            for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )
