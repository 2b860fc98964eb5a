"""A language model's step for a processor: the model's own formulas and weights, and nothing beside them.

On a CPU the products of a small model take a few 10 µs each; then modules that can be traced, trained and fed any mask
cost as much again. `lean_decoder` gives the same numbers, up to rounding, from tensors alone: x is [rows, dim], one
token a row, every key in the cache is visible, and nothing is asked that a single token has answered already.

As in `regard.predict.lean`, what is off the beaten path (biases, windows, experts, learned scores, pruned groups,
tracing, autocast, another device than a CPU) is left to the model itself.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.models.prune import PrunedMultiHead
from regard.models.transformer import Decoder, State
from regard.nn.block import Block
from regard.nn.cache import Cache
from regard.nn.feedforward import FeedForward
from regard.nn.position import Rotation, rotate
from regard.predict.lean import norm_of, residual, traced, work


def lean_decoder(model: Decoder) -> Decoder | LeanDecoder:
    """The model in its lean form, or as it is where that does not serve."""
    return LeanDecoder(model) if serves(model) else model


def serves(model: Decoder) -> bool:
    config, stack = model.decoder.config, model.decoder
    usual = (
        config.attention_score == "dot"
        and config.window is None
        and config.experts == 0
        and config.attention == "fused"
    )
    plain = next(model.parameters()).device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return (
        (usual and plain and not model.training and config.position in ("learned", "sinusoidal", "rope", "none"))
        and not any(part.uneven for part in stack.modules() if isinstance(part, PrunedMultiHead))
        and not traced(model)
    )


class LeanDecoder:
    """A decoder whose step for one token is lean; a longer text is read by the model."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.start = model, model.start
        self.layers = [Layer(block) for block in model.decoder.blocks]  # type: ignore[arg-type]
        self.first, self.final = norm_of(model.decoder.embed_norm), norm_of(model.decoder.norm)

    def step(self, tokens: Tensor, state: State, *, last: bool) -> Tensor:
        """As that of the model."""
        if tokens.shape[1] > 1:
            return self.model.step(tokens, state, last=last)
        stack, cache = self.model.decoder, state.cache
        positions = cache.next_positions(1, tokens.device)
        stack.position.check_length(positions, len(cache))
        cache.add(positions)
        x = self.model.embedding(tokens)[:, 0]
        embedded, rotation = stack.position.embed(positions.pos), stack.position.rotation(positions.pos)  # type: ignore[operator]
        if embedded is not None:
            x = x + embedded[0].to(x.dtype)
        x = self.first(x)
        for layer in self.layers:
            x = layer.step(x, cache, rotation)
        logits: Tensor = self.model.output_head(self.final(x))
        return logits[:, None]


class Layer:
    """One block: attention to all that was read, and the feed-forward layer."""

    def __init__(self, block: Block) -> None:
        assert isinstance(block.feedforward, FeedForward)
        self.attention, self.work = block.attention, partial(work, block.feedforward)
        self.add_attention = residual(block, block.attention_norm)
        self.add_feedforward = residual(block, block.feedforward_norm)

    def step(self, x: Tensor, cache: Cache, rotation: Rotation | None) -> Tensor:
        x = self.add_attention(x, lambda h: self._attend(h, cache, rotation))
        return self.add_feedforward(x, self.work)

    def _attend(self, x: Tensor, cache: Cache, rotation: Rotation | None) -> Tensor:
        part = self.attention
        config, rows = part.config, len(x)
        q, k, v = F.linear(x, part.qkv.weight, part.qkv.bias).split(part.sizes, dim=-1)
        q, k = q.view(rows, part.heads, 1, -1), k.view(rows, part.key_heads, 1, -1)
        if part.q_norm is not None and part.k_norm is not None:
            q, k = part.q_norm(q), part.k_norm(k)
        if rotation is not None:
            q, k = (rotate(one, rotation, config.pairs) for one in (q, k))
        keys, values = cache.extend(part.layer, k, v.view(rows, part.key_heads, 1, -1))
        grouped = part.heads != part.key_heads
        heads = F.scaled_dot_product_attention(q, keys, values, scale=config.scale, enable_gqa=grouped)
        return F.linear(heads.view(rows, -1), part.out.weight, part.out.bias)
