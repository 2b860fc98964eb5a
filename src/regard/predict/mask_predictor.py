"""Filling gaps: what may stand where a text says <mask>, by a masked language model.

p = softmax(head(encoder(<s> … <mask> … </s>)))[place of the mask]         over the vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from regard.errors import UserError
from regard.models import Encoder
from regard.models.folder import load, load_recipe, load_tokenizers
from regard.text.tokenizer import MASK_NAMES, Tokenizer


@dataclass(frozen=True)
class Guess:
    """A token that may stand there."""

    token: str
    probability: float


class MaskPredictor:
    """An encoder with a head over tokens, and its tokenizer, which knows <mask>."""

    def __init__(self, model: Encoder, tokenizer: Tokenizer, longest: int) -> None:
        if model.output_head is None or tokenizer.mask is None:
            raise UserError(
                f"output_head = {model.config.output_head!r}, with "
                f"{'a' if tokenizer.mask is not None else 'no'} <mask> token: "
                'is no masked language model; train one with  task = "masked"'
            )
        self.model, self.tokenizer, self.longest = model.eval(), tokenizer, longest
        self.mask = tokenizer.mask
        self.device = next(model.parameters()).device
        pieces = (tokenizer.token(id) for id in range(len(tokenizer)))
        self.spaced = any(piece.startswith("▁") and len(piece) > 1 for piece in pieces)  # words bring their space

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> MaskPredictor:
        model, tokenizers = load(folder, device), load_tokenizers(folder)
        if not isinstance(model, Encoder) or "tokenizer" not in tokenizers:
            raise UserError(
                f"{folder}: architecture = {model.config.architecture!r}: is no masked language model; train one with  "
                'task = "masked"'
            )
        train = load_recipe(folder).get("train")
        longest = train.get("pack") if isinstance(train, dict) else None
        try:
            return cls(model, tokenizers["tokenizer"], longest or model.config.max_length)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """<s> … </s> with the gaps of a text as masks."""
        for name in MASK_NAMES:
            text = text.replace(name, MASK_NAMES[0])
        parts = text.split(MASK_NAMES[0])
        if len(parts) < 2:
            raise UserError(f"{text!r}: has no gap; write {MASK_NAMES[0]} where a word is to be found")
        if self.spaced:
            parts = [part.removesuffix(" ") for part in parts[:-1]] + parts[-1:]
        ids = [self.tokenizer.special_id("bos")]
        for number, part in enumerate(self.tokenizer.encode_batch(parts)):
            ids += [self.mask, *part] if number else part
        ids.append(self.tokenizer.special_id("eos"))
        if len(ids) > self.longest:
            raise UserError(f"{text[:40]!r} …: has {len(ids)} tokens, and the model reads {self.longest}; shorten it")
        return ids

    @torch.inference_mode()
    def guess(self, ids: Sequence[int], count: int = 5) -> list[list[Guess]]:
        """For each mask of one text the likeliest tokens."""
        row = torch.tensor([list(ids)], device=self.device)
        chance = self.model(row)[0][row[0] == self.mask].float().softmax(dim=-1)
        chance[:, sorted(self.tokenizer.specials)] = 0.0
        best = chance.topk(min(count, len(self.tokenizer) - len(self.tokenizer.specials)))
        return [
            [Guess(self.tokenizer.token(id), p) for id, p in zip(*pair, strict=True)]
            for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def fill(self, text: str, count: int = 5) -> list[list[Guess]]:
        return self.guess(self.encode(text), count)
