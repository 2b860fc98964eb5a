"""Masks: who may look at whom.

A mask is a predicate over two positions, the query's and the key's: True means *visible*.

    causal            q.pos >= k.pos                     the future stays hidden
    window(n)         |q.pos - k.pos| < n                only near tokens (Longformer, 2020)
    padding           k.is_real                          filler is never looked at
    same_document     q.document == k.document           packed texts stay apart
    tiles(n, grid)    both in one square of n x n        patches of a picture (Swin: Liu et al. 2021)
    everything        True

Predicates combine with `&`, `|` and `~`:

    mask = causal & (window(64) | Mask("first", lambda q, k: k.pos == 0))

and see explicit positions, never array indices, so that the same mask serves a whole sequence, one new
token beside a cache, left padding and packed rows. One predicate renders itself three ways by broadcasting:

    AttentionMask.dense()   bool [B|1, 1, Nq|1, Nk]      for the written-out formula
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
    """Where the tokens of a sequence stand.

    pos       [B|1, N]  position of each token in its own text
    is_real   [B, N]    True for real tokens; None: all are
    document  [B, N]    number of the text a token belongs to in a packed row; None: one text a row
    start               not None promises pos == start, start+1, … in every row, so that exact shortcuts
                        can be chosen without reading a tensor
    """

    pos: Tensor
    is_real: Tensor | None = None
    document: Tensor | None = None
    start: int | None = None

    def __len__(self) -> int:
        return self.length

    @property
    def length(self) -> int:
        """As `len`, which would freeze the length when torch.compile or torch.export leaves it open."""
        return self.pos.shape[-1]

    @property
    def rows(self) -> int:
        return max(x.shape[0] for x in (self.pos, self.is_real, self.document) if x is not None)

    def reorder(self, rows: Tensor) -> Positions:
        """Keep these rows in this order; what all rows share stays shared."""

        def pick(x: Tensor) -> Tensor:
            return x if x.shape[0] == 1 else x.index_select(0, rows)

        is_real = None if self.is_real is None else pick(self.is_real)
        document = None if self.document is None else pick(self.document)
        return Positions(pick(self.pos), is_real, document, self.start)

    @classmethod
    def of(
        cls,
        length: int,
        device: torch.device,
        is_real: Tensor | None = None,
        document: Tensor | None = None,
        start: int = 0,
    ) -> Positions:
        """Positions of a sequence; positions count the real tokens (per document) from `start`."""
        if is_real is None and document is None:
            return cls(torch.arange(start, start + length, device=device)[None], start=start)
        _check_marks(length, is_real, document)
        real = torch.ones_like(document) if is_real is None else is_real.long()  # type: ignore[arg-type]
        before = real.cumsum(dim=1) - real  # [B, N] real tokens in front of each one
        if document is not None:
            fresh = torch.ones_like(document, dtype=torch.bool)
            fresh[:, 1:] = document[:, 1:] != document[:, :-1]
            before = before - torch.where(fresh, before, 0).cummax(dim=1).values
        return cls(before + start, is_real, document)


def _check_marks(length: int, is_real: Tensor | None, document: Tensor | None) -> None:
    if is_real is not None and (is_real.dtype != torch.bool or is_real.dim() != 2 or is_real.shape[1] != length):
        raise UserError(
            f"is_real has dtype {is_real.dtype} and shape {tuple(is_real.shape)}: "
            f"give booleans (True = real token) of shape [batch, {length}]"
        )
    if document is not None and (document.is_floating_point() or document.dim() != 2 or document.shape[1] != length):
        raise UserError(
            f"document has dtype {document.dtype} and shape {tuple(document.shape)}: "
            f"give whole numbers of shape [batch, {length}]"
        )


@dataclass(frozen=True)
class Token:
    """One side of a predicate. Every field broadcasts against the other side's."""

    batch: Tensor
    index: Tensor
    pos: Tensor
    is_real: Tensor | None
    document: Tensor | None


Predicate = Callable[[Token, Token], Tensor]


@dataclass(frozen=True, eq=False)
class Mask:
    """A named predicate; `parts` remembers what `&` and `|` combined, so that a part can be taken out again.

    `rows` is the number of batch rows the predicate itself knows about (1: the same for all).
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

    def demands(self, part: Mask) -> bool:
        """Whether nothing is visible that `part` hides: it is this mask, or joined to it by `&` alone."""
        return self is part or (self.operator == "&" and any(own.demands(part) for own in self.parts))

    def without(self, part: Mask) -> Mask:
        """This mask as if `part` let everything through: `(causal & padding).without(causal) is padding`."""
        if self is part:
            return everything
        if not self.parts:
            return self
        left, right = (own.without(part) for own in self.parts)
        return left & right if self.operator == "&" else left | right

    def __repr__(self) -> str:
        return f"Mask({self.name})"

    def __str__(self) -> str:
        return self.name

    def draw(self, queries: int, keys: int | None = None) -> str:
        """A picture for people: ■ is visible, · is hidden.

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
        raise UserError("mask = 'same_document' needs document numbers on both sides: give `document` to the positions")
    return q.document == k.document


everything = Mask("everything", lambda q, k: torch.ones_like(k.pos, dtype=torch.bool))
causal = Mask("causal", lambda q, k: q.pos >= k.pos)
padding = Mask("padding", _padding)
same_document = Mask("same_document", _same_document)


@cache
def window(size: int) -> Mask:
    """Only tokens less than `size` away: with `causal`, the query itself and `size - 1` before it."""
    if size < 1:
        raise UserError(f"window = {size}: must be 1 or more, so that a token can see at least itself")
    return Mask(f"window({size})", lambda q, k: (q.pos - k.pos).abs() < size)


def rows_and_columns(pos: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Row and column of each patch; grid: (patches per row, positions before them, such as [CLS])."""
    across, first = grid
    place = (pos - first).clamp_min(0)
    return place // across, place % across


@cache
def tiles(size: int, grid: tuple[int, int], shift: int = 0) -> Mask:
    """Only patches of the same square of `size` x `size`; the squares begin at row and column `shift`.

    Swin rolls the picture by `shift`, cuts it, and masks what came round the edge: the same squares, cut off at the
    edges. Positions before the patches, such as [CLS], see everything and are seen by all (Longformer's global tokens).
    """

    def look(q: Token, k: Token) -> Tensor:
        (q_row, q_column), (k_row, k_column) = rows_and_columns(q.pos, grid), rows_and_columns(k.pos, grid)
        move = size - shift  # added, so that nothing below 0 is divided
        same = ((q_row + move) // size == (k_row + move) // size) & (
            (q_column + move) // size == (k_column + move) // size
        )
        return same | (q.pos < grid[1]) | (k.pos < grid[1])

    return Mask(f"tiles({size}, shift {shift})", look)


def from_tensor(visible: Tensor) -> Mask:
    """A mask from a ready boolean table [Nq, Nk] or [B, Nq, Nk], read by index."""
    if visible.dtype != torch.bool or visible.dim() not in (2, 3):
        raise UserError(
            f"mask tensor has dtype {visible.dtype} and shape {tuple(visible.shape)}: "
            "give booleans (True = visible) of shape [queries, keys] or [batch, queries, keys]"
        )
    table = visible if visible.dim() == 3 else visible[None]
    rows = table.shape[0]

    def look(q: Token, k: Token) -> Tensor:
        sizes = (1 if rows == 1 else q.batch.numel(), q.index.numel(), k.index.numel())
        if any(size > own for size, own in zip(sizes, table.shape, strict=True)):
            raise UserError(
                f"mask tensor has shape {tuple(visible.shape)}: too small for {sizes[1]} queries "
                f"and {sizes[2]} keys in {q.batch.numel()} rows"
            )
        return table[0 if rows == 1 else q.batch, q.index, k.index]

    return Mask("tensor", look, rows=rows)


class AttentionMask:
    """A mask over given positions; each rendering is made once and shared by all layers of a forward pass."""

    def __init__(self, mask: Mask, q: Positions, k: Positions, first: int = 0) -> None:
        """`first` is the index of the first query among the keys, where a cache holds those before it."""
        for part, given in ((padding, k.is_real), (same_document, k.document)):
            if given is not None and not mask.demands(part):
                mask = mask & part
        self.mask, self.q, self.k, self.first = mask, q, k, first
        # a word, because torch.compile watches what it is, but not which mask stands in `mask`
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
        """0 where visible, -inf where hidden, in the shape of `dense`."""
        if self._additive is None or self._additive.dtype != dtype:
            visible = self.dense()
            self._additive = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, float("-inf"))
        return self._additive

    def fused(self) -> tuple[Tensor | None, bool]:
        """(mask tensor or None, is_causal) for SDPA; no tensor wherever leaving it out is exact."""
        if self.kind == "everything":
            return None, False
        if self.kind == "causal" and self.q.start is not None and self.k.start is not None:
            if self.q.start == self.k.start and self.q.length == self.k.length:
                return None, True  # is_causal counts from the first key, so both must start together
            if self.q.start >= self.k.start + self.k.length - 1:
                return None, False  # every key is already in the past, as for one token beside a cache
        return self.dense(), False

    def blocks(self, batch: int) -> BlockMask | None:
        """The sparse form of FlexAttention; None where everything is visible."""
        if self.kind == "everything":
            return None
        if self._blocks is None:
            rows = max(self.mask.rows, self.q.rows, self.k.rows)
            self._blocks = create_block_mask(
                lambda b, h, i, j: self.mask.predicate(_pick(self.q, b, i, self.first), _pick(self.k, b, j)),
                B=None if rows == 1 else batch,
                H=None,
                Q_LEN=self.q.length,
                KV_LEN=self.k.length,
                device=self.q.pos.device,
            )
        return self._blocks


def _spread(positions: Positions, rows: int, axis: int, first: int = 0) -> Token:
    """All positions at once, laid along `axis` of [B, H, Nq, Nk]."""

    def lay(x: Tensor) -> Tensor:
        return x[:, None, :, None] if axis == 2 else x[:, None, None, :]

    device = positions.pos.device
    batch = torch.arange(max(rows, positions.rows), device=device).view(-1, 1, 1, 1)
    index = lay(torch.arange(first, first + positions.length, device=device)[None])
    is_real = None if positions.is_real is None else lay(positions.is_real)
    document = None if positions.document is None else lay(positions.document)
    return Token(batch, index, lay(positions.pos), is_real, document)


def _pick(positions: Positions, b: Tensor, i: Tensor, first: int = 0) -> Token:
    """One place: token `i` of row `b`, as FlexAttention asks for it."""

    def at(x: Tensor) -> Tensor:
        return x[b, i] if x.shape[0] > 1 else x[0, i]

    is_real = None if positions.is_real is None else at(positions.is_real)
    document = None if positions.document is None else at(positions.document)
    return Token(b, i + first, at(positions.pos), is_real, document)
