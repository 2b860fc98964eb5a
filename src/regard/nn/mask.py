"""Attention masks: which key each query may attend to.

A mask is a predicate over two tokens, the query and the key: True means that the query attends to the key.

    causal            q.pos >= k.pos                     no future tokens
    window(n)         |q.pos - k.pos| < n                only near tokens (Longformer, Beltagy et al. 2020)
    padding           k.is_real                          no padding
    same_document     q.document == k.document           packed texts stay separate
    tiles(n, grid)    both in one window of n x n        image patches (Swin: Liu et al. 2021)
    everything        True

Predicates combine with `&`, `|` and `~`:

    mask = causal & (window(64) | Mask("first", lambda q, k: k.pos == 0))

They read explicit positions, not array indices, so the same mask serves a whole sequence, one new token with a
KV cache, left padding and packed rows. By broadcasting, one predicate gives three forms:

    AttentionMask.dense()   bool [B|1, 1, Nq|1, Nk]      for the reference implementation
    AttentionMask.fused()   (tensor or None, is_causal)  for scaled_dot_product_attention
    AttentionMask.blocks()  BlockMask                    for FlexAttention
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from regard.errors import UserError


@dataclass(frozen=True)
class Positions:
    """The positions of the tokens of a batch.

    pos       [B|1, N]  position of each token in its own text
    is_real   [B, N]    True for real tokens, False for padding; None: all are real
    document  [B, N]    number of the text that a token of a packed row belongs to; None: one text per row
    start               not None: pos is start, start + 1, … in every row, so that `fused` can omit the mask
                        without reading a tensor
    """

    pos: Tensor
    is_real: Tensor | None = None
    document: Tensor | None = None
    start: int | None = None

    @property
    def length(self) -> int:
        return self.pos.shape[-1]  # not `__len__`: torch.compile and torch.export keep this dynamic

    @property
    def rows(self) -> int:
        return max(x.shape[0] for x in (self.pos, self.is_real, self.document) if x is not None)

    def apply(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """`f` of pos, is_real and document."""
        is_real = None if self.is_real is None else f(self.is_real)
        return f(self.pos), is_real, None if self.document is None else f(self.document)

    def reorder(self, rows: Tensor) -> Positions:
        """Keep these rows in this order; a tensor with one row for the whole batch stays as it is."""
        return Positions(*self.apply(lambda x: x if x.shape[0] == 1 else x.index_select(0, rows)), self.start)

    @classmethod
    def of(
        cls,
        length: int,
        device: torch.device,
        is_real: Tensor | None = None,
        document: Tensor | None = None,
        start: int = 0,
    ) -> Positions:
        """Positions that count the real tokens (of each document) from `start`."""
        if is_real is None and document is None:
            return cls(torch.arange(start, start + length, device=device)[None], start=start)
        _check_shapes(length, is_real, document)
        real = torch.ones_like(document) if is_real is None else is_real.long()  # type: ignore[arg-type]
        before = real.cumsum(dim=1) - real  # [B, N] real tokens before each one
        if document is not None:
            is_first = torch.ones_like(document, dtype=torch.bool)
            is_first[:, 1:] = document[:, 1:] != document[:, :-1]
            before = before - torch.where(is_first, before, 0).cummax(dim=1).values
        return cls(before + start, is_real, document)


def _check_shapes(length: int, is_real: Tensor | None, document: Tensor | None) -> None:
    if is_real is not None and (is_real.dtype != torch.bool or is_real.dim() != 2 or is_real.shape[1] != length):
        raise UserError(
            f"is_real has dtype {is_real.dtype} and shape {tuple(is_real.shape)}: "
            f"pass booleans (True = real token) of shape [batch, {length}]"
        )
    if document is not None and (document.is_floating_point() or document.dim() != 2 or document.shape[1] != length):
        raise UserError(
            f"document has dtype {document.dtype} and shape {tuple(document.shape)}: "
            f"pass integers of shape [batch, {length}]"
        )


@dataclass(frozen=True)
class Token:
    """The query or the key of a predicate. Every field broadcasts against the other token's."""

    batch: Tensor
    index: Tensor
    pos: Tensor
    is_real: Tensor | None
    document: Tensor | None


Predicate = Callable[[Token, Token], Tensor]


@dataclass(frozen=True, eq=False)
class Mask:
    """A named predicate; `parts` are the masks that `&` or `|` combined, so that one can be removed again.

    `rows` is the number of batch rows that the predicate distinguishes (1: the same for all).
    """

    name: str
    predicate: Predicate
    operator: str = ""
    parts: tuple[Mask, ...] = ()
    rows: int = 1

    def _combine(self, operator: str, other: Mask, predicate: Predicate) -> Mask:
        name = f"({self.name} {operator} {other.name})"
        return Mask(name, predicate, operator, (self, other), max(self.rows, other.rows))

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise UserError(f"the mask is a {type(other).__name__}: pass a Mask; from_tensor makes one of a tensor")
        if self is everything or self is other:
            return other
        if other is everything:
            return self
        return self._combine("&", other, lambda q, k: self.predicate(q, k) & other.predicate(q, k))

    def __or__(self, other: Mask) -> Mask:
        if self is everything or other is everything:
            return everything
        return self._combine("|", other, lambda q, k: self.predicate(q, k) | other.predicate(q, k))

    def __invert__(self) -> Mask:
        return Mask(f"~{self.name}", lambda q, k: ~self.predicate(q, k), rows=self.rows)

    def __contains__(self, part: Mask) -> bool:
        return self is part or any(part in own for own in self.parts)

    def implies(self, part: Mask) -> bool:
        """Whether True here means True in `part`: it is this mask, or combined into it by `&` alone."""
        return self is part or (self.operator == "&" and any(own.implies(part) for own in self.parts))

    def without(self, part: Mask) -> Mask:
        """This mask with `part` replaced by `everything`: `(causal & padding).without(causal) is padding`."""
        if self is part:
            return everything
        if not self.parts:
            return self
        left, right = (own.without(part) for own in self.parts)
        return left & right if self.operator == "&" else left | right

    def __str__(self) -> str:
        return self.name

    def draw(self, queries: int, keys: int | None = None) -> str:
        """A text drawing, one line per query: ■ is True, · is False.

        >>> print(causal.draw(3))
        ■ · ·
        ■ ■ ·
        ■ ■ ■
        """
        device = torch.device("cpu")
        rows = AttentionMask(self, Positions.of(queries, device), Positions.of(keys or queries, device)).dense()
        grid = rows[0, 0].expand(queries, keys or queries).tolist()
        return "\n".join(" ".join("■" if cell else "·" for cell in row) for row in grid)


def _padding(q: Token, k: Token) -> Tensor:
    return torch.ones_like(k.pos, dtype=torch.bool) if k.is_real is None else k.is_real


def _same_document(q: Token, k: Token) -> Tensor:
    if q.document is None or k.document is None:
        raise UserError("mask = 'same_document' needs the documents of queries and keys: pass `document` to Positions")
    return q.document == k.document


everything = Mask("everything", lambda q, k: torch.ones_like(k.pos, dtype=torch.bool))
causal = Mask("causal", lambda q, k: q.pos >= k.pos)
padding = Mask("padding", _padding)
same_document = Mask("same_document", _same_document)


@cache
def window(size: int) -> Mask:
    """Only tokens less than `size` away: with `causal`, the token itself and `size - 1` before it."""
    if size < 1:
        raise UserError(f"window = {size}: must be 1 or more, so that a token can attend to itself")
    return Mask(f"window({size})", lambda q, k: (q.pos - k.pos).abs() < size)


def rows_and_columns(pos: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Row and column of each patch; grid: (patches per row, positions before them, such as [CLS])."""
    columns, first = grid
    patch = (pos - first).clamp_min(0)
    return patch // columns, patch % columns


@cache
def tiles(size: int, grid: tuple[int, int], shift: int = 0) -> Mask:
    """Only patches of the same window of `size` x `size`; the windows begin at row and column `shift`.

    Swin rolls the image by `shift`, partitions it, and masks what was rolled over the edge: the same windows, cut off
    at the edges. Positions before the patches, such as [CLS], are global: they attend to all patches, and all patches
    attend to them (as in Longformer).
    """

    def same_tile(q: Token, k: Token) -> Tensor:
        (q_row, q_column), (k_row, k_column) = rows_and_columns(q.pos, grid), rows_and_columns(k.pos, grid)
        offset = size - shift  # added rather than subtracted, so that no negative number is divided
        same_row = (q_row + offset) // size == (k_row + offset) // size
        same_column = (q_column + offset) // size == (k_column + offset) // size
        return (same_row & same_column) | (q.pos < grid[1]) | (k.pos < grid[1])

    return Mask(f"tiles({size}, shift {shift})", same_tile)


def from_tensor(mask: Tensor) -> Mask:
    """A mask from a boolean tensor [Nq, Nk] or [B, Nq, Nk], read by index."""
    if mask.dtype != torch.bool or mask.dim() not in (2, 3):
        raise UserError(
            f"mask tensor has dtype {mask.dtype} and shape {tuple(mask.shape)}: "
            "pass booleans (True = attend) of shape [queries, keys] or [batch, queries, keys]"
        )
    values = mask if mask.dim() == 3 else mask[None]
    rows = values.shape[0]

    def read(q: Token, k: Token) -> Tensor:
        sizes = (1 if rows == 1 else q.batch.numel(), q.index.numel(), k.index.numel())
        if any(size > own for size, own in zip(sizes, values.shape, strict=True)):
            raise UserError(
                f"mask tensor has shape {tuple(mask.shape)}: too small for {sizes[1]} queries "
                f"and {sizes[2]} keys in {q.batch.numel()} rows"
            )
        return values[0 if rows == 1 else q.batch, q.index, k.index]

    return Mask("tensor", read, rows=rows)


class AttentionMask:
    """A mask for the positions of a batch; each form is computed once and shared by all layers of a forward pass."""

    def __init__(self, mask: Mask, q: Positions, k: Positions, first: int = 0) -> None:
        """`first` is the index of the first query among the keys: the number of cached tokens before it."""
        mask = everything & mask  # which refuses anything else
        for part, field in ((padding, k.is_real), (same_document, k.document)):
            if field is not None and not mask.implies(part):
                mask = mask & part
        self.mask, self.q, self.k, self.first = mask, q, k, first
        # a string, because torch.compile guards on its value, but not on which mask `mask` is
        self.kind = "everything" if mask is everything else "causal" if mask is causal else "other"
        self._dense: Tensor | None = None
        self._additive: Tensor | None = None
        self._blocks: BlockMask | None = None

    def with_mask(self, mask: Mask) -> AttentionMask:
        return self if mask is self.mask else AttentionMask(mask, self.q, self.k, self.first)

    def dense(self) -> Tensor:
        """bool [B|1, 1, Nq|1, Nk]: the predicate over all pairs at once, by broadcasting."""
        if self._dense is None:
            q = _spread(self.q, self.mask.rows, 2, self.first)  # [B|1, 1, Nq, 1]
            k = _spread(self.k, self.mask.rows, 3)  # [B|1, 1, 1, Nk]
            self._dense = self.mask.predicate(q, k)
        return self._dense

    def additive(self, dtype: torch.dtype) -> Tensor:
        """0 where `dense` is True, -inf where it is False."""
        if self._additive is None or self._additive.dtype != dtype:
            mask = self.dense()
            self._additive = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))
        return self._additive

    def fused(self) -> tuple[Tensor | None, bool]:
        """(mask tensor or None, is_causal) for SDPA; None wherever omitting the mask is exact."""
        if self.kind == "everything":
            return None, False
        if self.kind == "causal" and self.q.start is not None and self.k.start is not None:
            if self.q.start == self.k.start and self.q.length == self.k.length:
                return None, True  # is_causal counts from the first key, so both must start at one position
            if self.q.start >= self.k.start + self.k.length - 1:
                return None, False  # no key is in the future, as for one token with a cache
        return self.dense(), False

    def blocks(self, batch: int, queries: int | None = None) -> BlockMask | None:
        """The block-sparse form for FlexAttention; None where nothing is masked.

        `queries` is a multiple of q's length where a cache joins the queries of rows that share their keys.
        """
        if self.kind == "everything":
            return None
        if self._blocks is None:
            rows, length = max(self.mask.rows, self.q.rows, self.k.rows), self.q.length
            self._blocks = create_block_mask(
                lambda b, h, i, j: self.mask.predicate(_pick(self.q, b, i % length, self.first), _pick(self.k, b, j)),
                B=None if rows == 1 else batch,
                H=None,
                Q_LEN=queries or length,
                KV_LEN=self.k.length,
                device=self.q.pos.device,
            )
        return self._blocks


def _spread(positions: Positions, rows: int, axis: int, first: int = 0) -> Token:
    """All tokens at once, along `axis` of [B, H, Nq, Nk]."""

    def along(x: Tensor) -> Tensor:
        return x[:, None, :, None] if axis == 2 else x[:, None, None, :]

    device = positions.pos.device
    batch = torch.arange(max(rows, positions.rows), device=device).view(-1, 1, 1, 1)
    index = along(torch.arange(first, first + positions.length, device=device)[None])
    return Token(batch, index, *positions.apply(along))


def _pick(positions: Positions, b: Tensor, i: Tensor, first: int = 0) -> Token:
    """Token `i` of row `b`, as FlexAttention reads it."""
    return Token(b, i + first, *positions.apply(lambda x: x[b, i] if x.shape[0] > 1 else x[0, i]))
