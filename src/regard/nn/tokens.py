"""The tokens of a batch as masks see them: position, padding and document of each.

A position is the number of real tokens before a token in its own text, so it does not depend on padding, on the other
texts of a packed row, or on what a KV cache has read before.

    padding on the left   [-, -, a, b]    pos  0 0 0 1    is_real  F F T T
    packed row            [a, b, x, y]    pos  0 1 0 1    document 0 0 1 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from regard.errors import UserError
from regard.nn.texts import Texts


@dataclass(frozen=True)
class Positions:
    """The positions of the tokens of a batch.

    pos       [B|1, N]  position of each token in its own text
    is_real   [B, N]    True for real tokens, False for padding; None: all are real
    document  [B, N]    number of the text that a token of a packed row belongs to; None: one text per row.
                        The tokens of a text follow each other, and no number occurs again in a row
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

    def text_numbers(self) -> tuple[Tensor, Tensor]:
        """[B, N] each: which tokens are real, and the number of the text that each belongs to in the batch."""
        is_real = torch.ones_like(self.pos, dtype=torch.bool) if self.is_real is None else self.is_real
        is_first = torch.zeros(self.rows, self.length, dtype=torch.bool, device=self.pos.device)
        is_first[:, :1] = True
        if self.document is not None:
            is_first[:, 1:] = self.document.diff(dim=1) != 0
        return is_real.expand(self.rows, -1), is_first.flatten().cumsum(dim=0).view_as(is_first) - 1

    @cached_property
    def texts(self) -> Texts:
        """The texts of packed rows as rows of their own."""
        return Texts(*self.text_numbers())

    def text_lengths(self) -> Tensor:
        """[B, N], the number of real tokens in the text that each token belongs to; 0 for padding."""
        real, number = self.text_numbers()
        counts = torch.zeros(number.numel(), dtype=torch.long, device=number.device)
        return real * counts.index_add(0, number.flatten(), real.flatten().long())[number]

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
    in_blocks: bool = False  # tokens may occur more than once
