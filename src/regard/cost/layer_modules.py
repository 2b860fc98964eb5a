"""The layers of the comparison as PyTorch modules, [B, N, dim] -> [B, N, dim].

`torch.nn` has the recurrent layers and convolutions; attention is that of `regard.nn`. Restricted attention computes
only the blocks around the diagonal: a block of c queries needs the c + 2·w keys around it, where w is how far the
neighbourhood extends to each side. With one mask for the full matrix it would take n² operations all the same.

    keys    · · [ w | c | w ] · ·      block b: positions b·c - w … (b + 1)·c + w - 1
    queries · ·     [ c ]     · ·      block b: positions b·c … (b + 1)·c - 1
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.cost.layers import DILATED, GRU, LSTM, RESTRICTED, LayerSizes, reach
from regard.nn.attention import attend
from regard.nn.config import Path, StackConfig
from regard.nn.mask import AttentionMask, Positions, everything, window
from regard.nn.multihead import Context, MultiHead


def build_layer(kind: str, sizes: LayerSizes, attention: Path = "fused", dilation: int | None = None) -> nn.Module:
    """One layer; `dilation` of a dilated convolution: by default that of the second one of a stack."""
    match kind:
        case "self-attention" | "restricted attention":
            config = StackConfig(dim=sizes.dim, heads=sizes.heads, attention=attention)
            return BlockAttention(config, sizes.window) if kind == RESTRICTED else FullAttention(config)
        case "LSTM" | "GRU":
            return Recurrent(kind, sizes.dim)
        case _:
            step = sizes.kernel if dilation is None else dilation
            return Convolution(sizes.dim, sizes.kernel, step if kind == DILATED else 1)


class FullAttention(MultiHead):
    """Self-attention over the whole sequence."""

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        positions = Positions.of(x.shape[1], x.device)
        return super().forward(x, Context(AttentionMask(everything, positions, positions)))


class BlockAttention(MultiHead):
    """Self-attention to the `width` positions around each one."""

    def __init__(self, config: StackConfig, width: int) -> None:
        super().__init__(config)
        self.width = width

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        rows, n, _ = x.shape
        side, queries = reach(self.width, n), min(n, self.width)
        blocks = -(-n // queries)
        keys = queries + 2 * side
        end = blocks * queries - n  # padding of the last block
        q, k, v = (self._split(part, self.heads) for part in self.qkv(x).split(self.sizes, dim=-1))
        q = F.pad(q, (0, 0, 0, end)).unflatten(2, (blocks, queries)).transpose(1, 2)  # [B, blocks, H, c, D]
        near = [
            F.pad(part, (0, 0, side, side + end)).unfold(2, keys, queries) for part in (k, v)
        ]  # [B, H, blocks, D, ·]
        k, v = (part.permute(0, 2, 1, 4, 3).flatten(0, 1) for part in near)  # [B · blocks, H, keys, D]
        first = torch.arange(blocks, device=x.device)[:, None] * queries
        q_pos = (first + torch.arange(queries, device=x.device)).repeat(rows, 1)
        k_pos = (first - side + torch.arange(keys, device=x.device)).repeat(rows, 1)
        mask = AttentionMask(window(side + 1), Positions(q_pos), Positions(k_pos, (k_pos >= 0) & (k_pos < n)))
        heads = attend(q.flatten(0, 1), k, v, mask, scale=self.config.scale, path=self.config.attention)
        heads = heads.unflatten(0, (rows, blocks)).transpose(2, 3).flatten(1, 2)[:, :n]  # [B, N, H, D]
        output: Tensor = self.out(heads.flatten(2))
        return output


class Recurrent(nn.Module):
    """A recurrent layer without its final state."""

    def __init__(self, kind: str, dim: int) -> None:
        super().__init__()
        self.cells: nn.RNNBase = {LSTM: nn.LSTM, GRU: nn.GRU}[kind](dim, dim, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.cells(x)[0]
        return output


class Convolution(nn.Module):
    """A causal convolution over the positions: of each one and of those before it."""

    def __init__(self, dim: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.convolution, self.before = nn.Conv1d(dim, dim, kernel, dilation=dilation), (kernel - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.convolution(F.pad(x.transpose(1, 2), (self.before, 0))).transpose(1, 2)
        return output
