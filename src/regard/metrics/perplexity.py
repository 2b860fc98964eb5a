"""Perplexity: how well a language model predicts a text, over every token of it.

    loss               L = -1/N Σ_t log p(x_t | x_<t)           nats per token; N = all tokens but the first
    perplexity         e^L                                      as uncertain as among this many equally likely tokens
    bits per byte      N · L / (ln 2 · bytes)                   the size of the text, compressed with this model
    bits per character the same over characters

Losses per token can be compared only between models with the same tokenizer; bits per byte always. The context is
limited: token t is predicted from at most `context` tokens before it, and with a `stride` below the context at least
context - stride of them (see `regard.data.streams.windows`), which costs context / stride times the work.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from regard.data.columns import Store
from regard.data.streams import windows
from regard.errors import UserError

LOGITS = 1 << 26  # scores computed at once, 4 bytes each


@torch.inference_mode()
def perplexity(model: Any, text: Store, context: int, stride: int | None = None) -> dict[str, Any]:
    """All metrics of a decoder in eval mode, as plain values."""
    if len(text) < 2:
        raise UserError(f"the text has {len(text)} token: at least 2 are needed, because the first is not predicted")
    stride, device = context if stride is None else stride, next(model.parameters()).device
    rows = max(1, LOGITS // (context * model.config.vocab_size))
    sums = torch.zeros(context, dtype=torch.float64, device=device)
    counts = torch.zeros(context, dtype=torch.int64, device=device)
    for batch, counted in windows(text.columns["ids"], context, stride, rows):
        batch, counted = batch.to(device), counted.to(device)
        logits = model(batch.read)
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), reduction="none")
        sums += torch.where(counted, losses.view_as(counted).double(), 0.0).sum(dim=0)
        counts += counted.sum(dim=0)
    total, tokens = sums.sum().item(), int(counts.sum())
    index = text.index
    characters, size = index["characters"] - index["first"][0], index["bytes"] - index["first"][1]
    means = [value / count if count else None for value, count in zip(sums.tolist(), counts.tolist(), strict=True)]
    loss, bits = total / tokens, total / math.log(2)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_character": bits / max(characters, 1),
        "bits_per_byte": bits / max(size, 1),
        "tokens": tokens,  # that count: all but the first
        "characters": characters,
        "bytes": size,
        "documents": index["documents"],
        "unknown": index["unknown"],  # <unk> tokens; if there are any, the bits are those of a coarser text
        "context": context,
        "stride": stride,
        "loss_per_position": means,  # by number of previous tokens; None: none counted
    }
