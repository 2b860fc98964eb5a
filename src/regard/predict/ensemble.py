"""Ensembles: several models predict every token together.

    log p(y_t | y_<t, x) = log (1/M) Σ_m p_m(y_t | y_<t, x)          [rows, vocab_size], M models

The mean is that of the probabilities, not of their logarithms: a token that one model considers probable remains
possible. Models that differ only in their random seed make different mistakes, so their mean is usually better than
each of them (Hansen & Salamon 1990; for translation Sutskever et al. 2014). Every member has its own encoder, cache and
steps, so an ensemble costs as much as its members together; they may have different architectures. It is an `Engine`:
greedy search, beam search and sampling use it as they use a model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.predict.engine import lean
from regard.text.tokenizer import Tokenizer


@dataclass
class EnsembleState:
    """The engine of each member, and its state."""

    members: list[tuple[Any, Any]]

    def reorder(self, rows: Tensor, sources: Tensor | None = None) -> None:
        for _, state in self.members:
            state.reorder(rows, sources)


class Ensemble:
    """An engine whose probabilities are the mean of those of its models, which share their vocabularies."""

    def __init__(self, models: Sequence[Any]) -> None:
        self.models = list(models)

    def start(self, source: Tensor, is_real: Tensor | None = None) -> EnsembleState:
        engines = [lean(model) for model in self.models]
        return EnsembleState([(engine, engine.start(source, is_real)) for engine in engines])

    def step(self, tokens: Tensor, state: EnsembleState) -> Tensor:
        """log p [rows, n, vocab_size] of the token after each, which a softmax leaves as they are."""
        logits = [engine.step(tokens, own) for engine, own in state.members]
        dtype = torch.promote_types(logits[0].dtype, torch.float32)
        scores = torch.stack([one.log_softmax(dim=-1, dtype=dtype) for one in logits])
        return scores.logsumexp(dim=0) - math.log(len(logits))


def difference(a: Tokenizer, b: Tokenizer) -> str | None:
    """What distinguishes the tokenizer `b` from `a`, as the end of a message; None if nothing does."""
    if len(a) != len(b):
        return f"{len(b):,} tokens instead of {len(a):,}"
    one, other = json.loads(a.json), json.loads(b.json)
    parts = {"model": "vocabulary", "added_tokens": "special tokens", "normalizer": "normalizer",
             "pre_tokenizer": "pre-tokenizer"}  # fmt: skip
    return next((f"another {word}" for part, word in parts.items() if one.get(part) != other.get(part)), None)
