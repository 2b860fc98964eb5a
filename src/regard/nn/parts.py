"""One sequence on several processes: each has a part of its tokens, and attends to those of all.

The activations of a long sequence do not fit on one device. All of a Transformer except attention treats each token by
itself, so each of W processes takes N / W tokens of every sequence; before attention, the keys and values of a layer
are gathered from all of them (context parallelism, as in Llama 3: Dubey et al. 2024, section 3.3.2):

    q  [B, H, N / W, D]  own tokens          k, v  [B, Hkv, N / W, D]  ->  [B, Hkv, N, D]  all tokens

A mask is defined on positions, and so are position encodings; the queries keep theirs, so nothing else changes, and the
result is that of one process. In the backward pass, the gradients of keys and values are summed over the processes and
each takes those of its own tokens.

With a causal mask, later tokens attend to more keys. So the sequence is cut into 2 W pieces, and process r takes the
pieces r and 2 W - 1 - r, one from each end: all processes have the same work.

    W = 2        tokens   0 1 | 2 3 | 4 5 | 6 7        process 0: 0 1 6 7        process 1: 2 3 4 5
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import UserError
from regard.nn.config import SOFTMAX, StackConfig
from regard.nn.mask import Mask, Positions, everything


class Part:
    """The tokens of process `rank` of `world`; `compiled`: of layers that are, communication being left out of it."""

    def __init__(self, rank: int, world: int, compiled: bool = False) -> None:
        self.rank, self.world = rank, world
        self._all = torch.compiler.disable(Gather.apply) if compiled else Gather.apply  # type: ignore[no-untyped-call]

    def take(self, x: Tensor, dim: int) -> Tensor:
        """The own part of all tokens, along `dim`."""
        self.check_length(x.shape[dim])
        pieces = x.chunk(2 * self.world, dim)
        return torch.cat((pieces[self.rank], pieces[-1 - self.rank]), dim)

    def check_length(self, length: int) -> None:
        pieces = 2 * self.world
        if length % pieces:
            raise UserError(
                f"train.pack = {length}: {self.world} processes divide a sequence into {pieces} pieces, two for each; "
                f"use a multiple of {pieces}, such as {-(-length // pieces) * pieces}"
            )

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All tokens in the order of the text, from the parts of all processes; with gradients."""
        parts: Tensor = self._all(x, self.world)
        first, last = zip(*(part.chunk(2, dim) for part in parts.unbind(0)), strict=True)
        return torch.cat((*first, *reversed(last)), dim)

    def gather_pair(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens, from the own ones: [B, Hkv, N / W, D] -> [B, Hkv, N, D]."""
        both = self.gather(torch.cat((k, v), dim=-1), 2)
        return both[..., : k.shape[-1]], both[..., k.shape[-1] :]

    def positions(
        self, length: int, device: torch.device, is_real: Tensor | None = None, document: Tensor | None = None
    ) -> Positions:
        """The positions of the own `length` tokens; `is_real` and `document` are theirs, too."""
        is_real, document = (None if one is None else self.gather(one.int(), 1) for one in (is_real, document))
        whole = Positions.of(length * self.world, device, None if is_real is None else is_real > 0, document)
        return Positions(*whole.apply(lambda x: self.take(x, 1)))

    def keys(self, own: Positions, mask: Mask) -> Positions:
        """The positions of all tokens; `mask` is that of a caller, who has a part of them."""
        if mask is not everything:
            raise UserError(f"mask = {mask}: is for whole sequences, and each process has a part of them; remove it")
        pos, is_real, document = own.apply(lambda x: self.gather(x.int(), 1))
        return Positions(pos, None if is_real is None else is_real > 0, document)


class Gather(torch.autograd.Function):
    """x of all processes: […] -> [world, …]; the gradient of x is the sum over their gradients for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        out = x.new_empty(world, *x.shape)
        dist.all_gather(list(out.unbind(0)), x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = gradients[0].contiguous()
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, list(parts.unbind(0)))
        return own, None


def check_split(config: StackConfig) -> None:
    """Raise a UserError for what needs all tokens of a sequence in one place."""
    reason, kinds = "", {config.mixer_of(layer) for layer in range(config.layers)}
    if other := sorted(kinds - {*SOFTMAX}):
        reason = f"mixer = '{other[0]}' has no keys that could be gathered from other processes"
    elif config.global_projections:
        reason = "global_projections = true needs the global tokens on every process"
    elif config.experts:
        reason = f"experts = {config.experts} are balanced over all tokens of a batch"
    if reason:
        raise UserError(f"train.parallel = 'context': {reason}; change it, or use parallel = 'ddp'")
