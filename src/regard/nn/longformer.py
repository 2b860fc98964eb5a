"""Global attention with projections of its own (Longformer, Beltagy et al. 2020, section 3.1).

Most tokens of a long text attend to a window; a few global tokens, such as [CLS], attend to all tokens, and all tokens
to them. What a global token asks about a whole text differs from what a word asks about its neighbours, so it has
queries, keys and values of its own:

    other tokens   softmax(q kᵀ / √d) v            over the window and the global tokens
    global tokens  softmax(q_g k_gᵀ / √d) v_g      over all tokens

    x [B, N, dim] -> [B, N, dim]

The first `global_tokens` tokens of a text are global. Only an encoder has them: a later token cannot be seen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.nn.attention import Mark, attend, dot
from regard.nn.config import Path, StackConfig
from regard.nn.mask import AttentionMask, Positions, everything
from regard.nn.multihead import Context, MultiHead


class GlobalMultiHead(MultiHead):
    """Self-attention whose global tokens have the projections `global_qkv`."""

    def __init__(self, config: StackConfig, *, layer: int = 0) -> None:
        super().__init__(config, layer=layer)
        self.global_qkv = nn.Linear(config.dim, sum(self.sizes), bias=config.bias)

    def _heads(
        self,
        x: Tensor,
        parts: tuple[Tensor, Tensor, Tensor],
        attention_mask: AttentionMask,
        context: Context,
        mark: Mark | None = None,
    ) -> Tensor:
        positions, (q, k, v) = context.attention_mask.q, self._project(self.global_qkv, x, context)
        index, is_global = global_rows(positions, self.config.global_tokens)
        q = take(q, index)
        path: Path = "reference" if self.tap is not None else self.config.attention
        if path == "reference":  # every stage is that of all tokens, so that a trace sees and changes each
            return super()._heads(x, parts, attention_mask, context, mark=self._mark_rows(index, is_global, q, k, v))
        heads = super()._heads(x, parts, attention_mask, context)
        rows = Positions(*positions.apply(lambda one: one.gather(1, index.expand(one.shape[0], -1))))
        mask, dropout = AttentionMask(everything, rows, positions), self.config.attention_dropout * self.training
        return put(heads, index, is_global, attend(q, k, v, mask, scale=self.config.scale, dropout=dropout))

    def _mark_rows(self, index: Tensor, is_global: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Mark:
        """Gives the global tokens their rows: the scores of their queries and keys, and the sum of their values."""
        group, weights = self.heads // self.key_heads, list[Tensor]()
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

        def mark(stage: str, value: Tensor) -> Tensor:
            if stage == "scores":
                value = put(value, index, is_global, dot(q, k))
            elif stage == "heads":
                value = put(value, index, is_global, take(weights.pop(), index) @ v)
            value = self.mark(stage, value)
            if stage == "weights":
                weights.append(value)
            return value

        return mark


def global_rows(positions: Positions, count: int) -> tuple[Tensor, Tensor]:
    """Indices [B|1, G] of the global tokens of each row, and whether each is one: a row may have fewer than others."""
    is_global = positions.pos < count
    if positions.is_real is not None:
        is_global = is_global & positions.is_real
    most = min(count, positions.length) if positions.document is None else int(is_global.sum(dim=1).max())
    index = (~is_global).long().argsort(dim=1, stable=True)[:, :most]
    return index, is_global.gather(1, index)


def take(x: Tensor, index: Tensor) -> Tensor:
    """The rows `index` [B|1, G] of x [B, H, N, D]: [B, H, G, D]."""
    return x.gather(2, index[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3]))


def put(x: Tensor, index: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
    """x [B, H, N, D] with `rows` [B, H, G, D] at `index`, where they are `chosen` [B|1, G]."""
    places = index[:, None, :, None].expand(rows.shape)
    return x.scatter(2, places, torch.where(chosen[:, None, :, None], rows.to(x.dtype), x.gather(2, places)))
