"""Which blocks of the attention matrix a mask leaves visible, without looking at every pair of tokens.

Queries and keys are cut into blocks of, say, 128 tokens. A mask describes its blocks by two bounds for each pair of
a query block and a key block, from what is known of the tokens in them, such as the smallest and largest position:

    some    False: no query of the block attends to any key of the block, so it need not be computed
    every   True: every query attends to every key, so no mask is needed in it

    causal       some: max(q.pos) >= min(k.pos)             every: min(q.pos) >= max(k.pos)
    window(n)    some: smallest distance < n                every: largest distance < n
    a & b        both, for both bounds                      ~a: some = not every of a, every = not some of a

The bounds are safe, not tight: a block with `some` and without `every` is computed with the predicate itself. For N
tokens there are (N / 128)² pairs of blocks: a quarter of a million at 64k tokens, where there are 4 billion pairs of
tokens. The form is that of FlexAttention (Dong et al. 2024) and of block-sparse attention (Child et al. 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from regard.nn.tokens import Positions, Token

if TYPE_CHECKING:
    from regard.nn.mask import AttentionMask

BLOCK = 128  # tokens per block of FlexAttention
Bounds = tuple[Tensor, Tensor]  # some, every: bool, broadcast to [B|1, query blocks, key blocks]


@dataclass(frozen=True)
class Span:
    """The tokens of each block of queries or keys; every range broadcasts against the other side's.

    Each field is [B|1, blocks, size]; an incomplete last block repeats its last token.
    """

    pos: Tensor
    is_real: Tensor | None
    document: Tensor | None
    axis: int  # of the blocks in the bounds: 1 for queries, 2 for keys

    def range(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and largest of these values in each block, such as those of `pos`."""
        low, high = values.aminmax(dim=-1)
        return low.unsqueeze(3 - self.axis), high.unsqueeze(3 - self.axis)


def cut(x: Tensor, size: int) -> Tensor:
    """[B|1, N] -> [B|1, blocks, size]; an incomplete last block repeats its last token."""
    missing = -x.shape[1] % size
    if missing:
        x = torch.cat((x, x[:, -1:].expand(-1, missing)), dim=1)
    return x.reshape(x.shape[0], -1, size)


def unknown(q: Span, k: Span) -> Bounds:
    """Any block may be visible in part."""
    yes = torch.ones(1, 1, 1, dtype=torch.bool, device=q.pos.device)
    return yes, ~yes


def always(q: Span, k: Span) -> Bounds:
    yes = torch.ones(1, 1, 1, dtype=torch.bool, device=q.pos.device)
    return yes, yes


def not_later(q: Span, k: Span) -> Bounds:
    (q_low, q_high), (k_low, k_high) = q.range(q.pos), k.range(k.pos)
    return q_high >= k_low, q_low >= k_high


def near(size: int, dilation: int) -> Callable[[Span, Span], Bounds]:
    """Less than size · dilation positions apart, by a multiple of the dilation."""

    def bounds(q: Span, k: Span) -> Bounds:
        (q_low, q_high), (k_low, k_high) = q.range(q.pos), k.range(k.pos)
        least = torch.maximum(q_low - k_high, k_low - q_high)  # negative where the blocks overlap
        most = torch.maximum(q_high - k_low, k_high - q_low)
        if dilation == 1:
            return least < size, most < size
        rest = overlap(q.range(q.pos % dilation), k.range(k.pos % dilation))
        # equal remainders need distances that are a multiple of the dilation
        return (least < size * dilation) & rest[0], (most < size * dilation) & rest[1]

    return bounds


def overlap(q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor]) -> Bounds:
    """Bounds of `q.value == k.value` from the ranges of the values."""
    (q_low, q_high), (k_low, k_high) = q, k
    return (q_low <= k_high) & (k_low <= q_high), (q_low == q_high) & (k_low == k_high) & (q_low == k_low)


def real(q: Span, k: Span) -> Bounds:
    if k.is_real is None:
        return always(q, k)
    low, high = k.range(k.is_real.byte())
    return high > 0, low > 0


def one_document(q: Span, k: Span) -> Bounds:
    assert q.document is not None and k.document is not None  # the predicate has refused it
    return overlap(q.range(q.document), k.range(k.document))


def first_keys(count: int) -> Callable[[Span, Span], Bounds]:
    """k.pos < count"""

    def bounds(q: Span, k: Span) -> Bounds:
        low, high = k.range(k.pos)
        return low < count, high < count

    return bounds


def first_tokens(count: int) -> Callable[[Span, Span], Bounds]:
    """q.pos < count or k.pos < count"""

    def bounds(q: Span, k: Span) -> Bounds:
        (q_low, q_high), (k_low, k_high) = q.range(q.pos), k.range(k.pos)
        return (q_low < count) | (k_low < count), (q_high < count) | (k_high < count)

    return bounds


def block_mask(
    bounds: Bounds, lengths: tuple[int, int], size: int, mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> BlockMask:
    """The BlockMask of FlexAttention for [B|1, query blocks, key blocks] bounds."""
    some, every = bounds
    rows, columns = (-(-length // size) for length in lengths)
    shape = (max(some.shape[0], every.shape[0]), rows, columns)
    some, every = some.expand(shape), every.expand(shape)
    inside = torch.ones(rows, columns, dtype=torch.bool, device=some.device)
    if lengths[0] % size:
        inside[-1] = False  # an incomplete block is not full
    if lengths[1] % size:
        inside[:, -1] = False
    every = every & inside

    def listed(kept: Tensor) -> tuple[Tensor, Tensor]:
        """The number of blocks of each row, and their indices: these blocks first."""
        order = kept.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
        return kept.sum(dim=-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]

    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=lengths
    )


def flex_mask(own: AttentionMask, batch: int, queries: int) -> BlockMask:
    """The BlockMask of a mask for `batch` rows of `queries` queries, a multiple of those that it has positions of."""
    length, (some, every) = own.q.length, own.bounds(BLOCK, queries // own.q.length)
    if max(own.mask.rows, own.q.rows, own.k.rows) > 1:
        some = some.expand(batch, -1, -1)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        query = i if queries == length else i % length
        return own.mask.predicate(_token(own, own.q, b, query), _token(own, own.k, b, j))

    return block_mask((some, every), (queries, own.k.length), BLOCK, mask_mod)


def _token(own: AttentionMask, side: Positions, b: Tensor, i: Tensor) -> Token:
    """Token `i` of row `b`, as FlexAttention reads it; consecutive positions are computed, not read."""

    def read(x: Tensor) -> Tensor:
        return x[b, i] if x.shape[0] > 1 else x[0, i]

    index = i + (own.first if side is own.q else own.k_first) if own.order is None else own.order[i]
    is_real, document = (None if x is None else read(x) for x in (side.is_real, side.document))
    return Token(b, index, read(side.pos) if side.start is None else i + side.start, is_real, document)
