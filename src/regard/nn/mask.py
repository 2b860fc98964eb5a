"""Attention masks: which key each query may attend to.

A mask is a predicate over two tokens, the query and the key: True means that the query attends to the key.

    causal            q.pos >= k.pos                     no future tokens
    window(n)         |q.pos - k.pos| < n                only near tokens (Longformer, Beltagy et al. 2020)
    padding           k.is_real                          no padding
    same_document     q.document == k.document           packed texts stay separate
    everything        True

Predicates combine with `&`, `|` and `~`:

    mask = causal & (window(64) | Mask("first", lambda q, k: k.pos == 0))

They read explicit positions, not array indices, so the same mask serves a whole sequence, one new token with a
KV cache, left padding and packed rows. By broadcasting, one predicate gives three forms:

    AttentionMask.dense()   bool [B|1, 1, Nq|1, Nk]      for the reference implementation
    AttentionMask.fused()   (tensor or None, is_causal)  for scaled_dot_product_attention
    AttentionMask.blocks()  BlockMask                    for FlexAttention

A mask also knows its blocks (`regard.nn.blocks`), so that the last form, and the banded attention of
`regard.nn.banded`, never look at all pairs. `regard.nn.patterns` has prefixes, global tokens, random blocks
and the windows of images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from regard.errors import UserError
from regard.nn import blocks
from regard.nn.blocks import Bounds, Span
from regard.nn.tokens import Positions as Positions
from regard.nn.tokens import Token as Token

Predicate = Callable[[Token, Token], Tensor]


@dataclass(frozen=True, eq=False)
class Mask:
    """A named predicate; `parts` are the masks that `&` or `|` combined, so that one can be removed again.

    `rows` is the number of batch rows that the predicate distinguishes (1: the same for all). What follows it is for
    speed alone, and may be left out in a mask of your own:

    bounds     which blocks are visible
    reach      an estimate of how many keys a query attends to; None: any number
    band       (a, b): exactly the keys from q.pos - a to q.pos + b are visible; None: it is another pattern
    relative   whether the predicate depends on q.pos - k.pos alone
    dilation   > 1: tokens that are this far apart attend to each other, and their neighbours do not
    """

    name: str
    predicate: Predicate
    operator: str = ""
    parts: tuple[Mask, ...] = ()
    rows: int = 1
    bounds: Callable[[Span, Span], Bounds] = blocks.unknown
    reach: int | None = None
    relative: bool = False
    dilation: int = 1
    band: tuple[float, float] | None = None

    def _combine(self, operator: str, other: Mask, predicate: Predicate) -> Mask:
        name = f"({self.name} {operator} {other.name})"
        known = [reach for reach in (self.reach, other.reach) if reach is not None]
        reach = min(known, default=None) if operator == "&" else sum(known) if len(known) == 2 else None

        def bounds(q: Span, k: Span) -> Bounds:
            (some, every), (other_some, other_every) = self.bounds(q, k), other.bounds(q, k)
            if operator == "&":
                return some & other_some, every & other_every
            return some | other_some, every | other_every

        band = None
        if operator == "&" and self.band is not None and other.band is not None:
            band = min(self.band[0], other.band[0]), min(self.band[1], other.band[1])
        return Mask(
            name, predicate, operator, (self, other), max(self.rows, other.rows),
            bounds, reach, self.relative and other.relative, max(self.dilation, other.dilation), band,
        )  # fmt: skip

    def __and__(self, other: Mask) -> Mask:
        _check_mask(other)
        if self is everything or self is other:
            return other
        if other is everything:
            return self
        return self._combine("&", other, lambda q, k: self.predicate(q, k) & other.predicate(q, k))

    def __or__(self, other: Mask) -> Mask:
        _check_mask(other)
        if self is everything or other is everything:
            return everything
        return self._combine("|", other, lambda q, k: self.predicate(q, k) | other.predicate(q, k))

    def __invert__(self) -> Mask:
        def bounds(q: Span, k: Span) -> Bounds:
            some, every = self.bounds(q, k)
            return ~every, ~some

        return Mask(
            f"~{self.name}", lambda q, k: ~self.predicate(q, k), rows=self.rows, bounds=bounds, relative=self.relative
        )

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


def _check_mask(mask: object) -> None:
    if not isinstance(mask, Mask):
        raise UserError(f"the mask is a {type(mask).__name__}: pass a Mask; from_tensor makes one of a tensor")


def _padding(q: Token, k: Token) -> Tensor:
    return torch.ones_like(k.pos, dtype=torch.bool) if k.is_real is None else k.is_real


def _same_document(q: Token, k: Token) -> Tensor:
    if q.document is None or k.document is None:
        raise UserError("mask = 'same_document' needs the documents of queries and keys: pass `document` to Positions")
    return q.document == k.document


everything = Mask(
    "everything", lambda q, k: torch.ones_like(k.pos, dtype=torch.bool), bounds=blocks.always, relative=True,
    band=(math.inf, math.inf),
)  # fmt: skip
causal = Mask("causal", lambda q, k: q.pos >= k.pos, bounds=blocks.not_later, relative=True, band=(math.inf, 0))
padding = Mask("padding", _padding, bounds=blocks.real)
same_document = Mask("same_document", _same_document, bounds=blocks.one_document)


@cache
def window(size: int, dilation: int = 1) -> Mask:
    """Only tokens less than `size` away: with `causal`, the token itself and `size - 1` before it.

    With a dilation, as many tokens, but only every `dilation`-th: the window is `dilation` times as wide.
    """
    for name, value in (("window", size), ("dilation", dilation)):
        if value < 1:
            raise UserError(f"{name} = {value}: must be 1 or more, so that a token can attend to itself")
    bounds = blocks.near(size, dilation)
    if dilation == 1:
        band = size - 1.0, size - 1.0
        near_by = lambda q, k: (q.pos - k.pos).abs() < size  # noqa: E731
        return Mask(f"window({size})", near_by, bounds=bounds, reach=2 * size, relative=True, band=band)

    def near(q: Token, k: Token) -> Tensor:
        distance = q.pos - k.pos
        return (distance.abs() < size * dilation) & (distance % dilation == 0)

    name = f"window({size}, dilation {dilation})"
    return Mask(name, near, bounds=bounds, reach=2 * size, relative=True, dilation=dilation)


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
        # tokens of blocks may occur more than once, and planning them reads tensors anyway
        lengths = (int(one.index.max()) + 1 if one.in_blocks else one.index.numel() for one in (q, k))
        sizes = (1 if rows == 1 else q.batch.numel(), *lengths)
        if any(size > own for size, own in zip(sizes, values.shape, strict=True)):
            raise UserError(
                f"mask tensor has shape {tuple(mask.shape)}: too small for {sizes[1]} queries "
                f"and {sizes[2]} keys in {q.batch.numel()} rows"
            )
        return values[0 if rows == 1 else q.batch, q.index, k.index]

    return Mask("tensor", read, rows=rows)


class AttentionMask:
    """A mask for the positions of a batch; each form is computed once and shared by all layers of a forward pass."""

    def __init__(
        self, mask: Mask, q: Positions, k: Positions, first: int = 0, order: Tensor | None = None, k_first: int = 0
    ) -> None:
        """`first` is the index of the first query: the number of cached tokens before it; `k_first` of the first key.

        `order` are the indices of the tokens where they are not in the order of the text.
        """
        mask = everything & mask  # which refuses anything else
        for part, field in ((padding, k.is_real), (same_document, k.document)):
            if field is not None and not mask.implies(part):
                mask = mask & part
        self.mask, self.q, self.k, self.first, self.order, self.k_first = mask, q, k, first, order, k_first
        # a string, because torch.compile guards on its value, but not on which mask `mask` is
        self.kind = "everything" if mask is everything else "causal" if mask is causal else "other"
        self._dense: Tensor | None = None
        self._additive: Tensor | None = None
        self._blocks: BlockMask | None = None
        self.plan: Any = None  # of `regard.nn.banded`, once it is made
        self.plans_texts = q.document is not None  # False once a plan of its texts is found to be no faster
        self.bands: Any = None  # of `regard.nn.flash`, once they are found
        self.is_recorded = False  # in a step that is replayed, which must not depend on what tensors contain

    def with_mask(self, mask: Mask) -> AttentionMask:
        return self if mask is self.mask else AttentionMask(mask, self.q, self.k, self.first, self.order, self.k_first)

    def index(self, side: Positions) -> Tensor:
        """[N], the indices of the queries or keys."""
        if self.order is not None:
            return self.order
        start = self.first if side is self.q else self.k_first
        return torch.arange(start, start + side.length, device=side.pos.device)

    def rearranged(self) -> AttentionMask | None:
        """The same for tokens in an order in which those that attend to each other are neighbours; None: they are.

        A window with the dilation d consists of d plain windows: of the tokens 0, d, 2d …, of 1, d + 1 …
        """
        step, length = self.mask.dilation, self.q.length
        if step == 1 or self.q is not self.k or self.first or self.order is not None:
            return None
        order = torch.cat([torch.arange(at, length, step, device=self.q.pos.device) for at in range(min(step, length))])
        tokens = Positions(*self.q.apply(lambda x: x[:, order]))
        return AttentionMask(self.mask, tokens, tokens, order=order)

    def dense(self) -> Tensor:
        """bool [B|1, 1, Nq|1, Nk]: the predicate over all pairs at once, by broadcasting."""
        if self._dense is None:
            q = _spread(self.q, self.mask.rows, 2, self.index(self.q))  # [B|1, 1, Nq, 1]
            k = _spread(self.k, self.mask.rows, 3, self.index(self.k))  # [B|1, 1, 1, Nk]
            self._dense = self.mask.predicate(q, k)
        return self._dense

    def bounds(self, size: int, times: int = 1) -> Bounds:
        """Which blocks of `size` queries and keys are visible; the queries `times` times in a row."""
        q = self.q.apply(lambda x: blocks.cut(x.repeat(1, times), size))
        k = self.k.apply(lambda x: blocks.cut(x, size))
        return self.mask.bounds(Span(*q, axis=1), Span(*k, axis=2))

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
            self._blocks = blocks.flex_mask(self, batch, queries or self.q.length)
        return self._blocks


def _spread(positions: Positions, rows: int, axis: int, index: Tensor) -> Token:
    """All tokens at once, along `axis` of [B, H, Nq, Nk]."""

    def along(x: Tensor) -> Tensor:
        return x[:, None, :, None] if axis == 2 else x[:, None, None, :]

    device = positions.pos.device
    batch = torch.arange(max(rows, positions.rows), device=device).view(-1, 1, 1, 1)
    return Token(batch, along(index[None]), *positions.apply(along))
