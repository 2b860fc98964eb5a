"""Embeddings: a text in, a unit vector out, so that the cosine of two vectors is their dot product.

    e = m / |m|,     m = mean of the encoder's states of <s> text </s>          [N, dim]

The mean over tokens is what sentence embeddings are trained with (Reimers & Gurevych 2019, Sentence-BERT); an encoder
that was trained for something else gives vectors too, of unknown use. A text that is too long is truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from regard.models.transformer import Encoder
from regard.predict.bundle import Bundle, Prediction, Predictor

TOKENS = 2**14  # of a batch, padding included


@dataclass(frozen=True)
class Embedding(Prediction):
    """A unit vector, and the number of tokens that it was computed from."""

    values: list[float]
    tokens: int


class Embedder(Predictor[str | Sequence[int], Embedding]):
    """An encoder of text with its tokenizer; its output head, if it has one, is not used."""

    NEEDS = "an encoder of text with its tokenizer"
    MODEL: ClassVar = {"architecture": ("encoder",), "input": ("tokens",)}
    model: Encoder
    COMMAND = "embed"

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self.tokenizer, self.max_length = bundle.tokenizer, bundle.limits.source or bundle.limits.context

    @torch.inference_mode()
    def predict(
        self, inputs: Sequence[str | Sequence[int]], *, tokens: int = TOKENS, **options: Any
    ) -> list[Embedding]:
        """The embedding of each text, or of its ids without <s> and </s>; batches have about `tokens` tokens."""
        texts = [one for one in inputs if isinstance(one, str)]
        encoded, most = iter(self.tokenizer.encode_batch(texts, add_bos=True, add_eos=True)), self.max_length
        bos, eos = self.tokenizer.special_id("bos"), self.tokenizer.special_id("eos")
        ids = [next(encoded) if isinstance(one, str) else [bos, *one, eos] for one in inputs]
        ids = [text if len(text) <= most else [*text[: most - 1], text[-1]] for text in ids]
        results = torch.empty(len(ids), self.model.config.dim)
        for rows, source, is_real in self.batches(ids, range(len(ids)), tokens):
            real = None if is_real is None else is_real.to(self.device)
            states = self.model.encode(source.to(self.device), real).float()
            weights = torch.ones(states.shape[:2], device=self.device) if real is None else real.float()
            results[rows] = F.normalize(torch.einsum("bn,bnd->bd", weights, states), dim=-1).cpu()
        return [Embedding(vector, len(text)) for vector, text in zip(results.tolist(), ids, strict=True)]
