"""Search: from next-token scores to a sequence.

    greedy   y_t = argmax_y p(y | y_<t, x)

Any model with `start` and `step` can be searched. The cache makes a step cost one token, whatever came
before it; rows that have ended are carried along but no longer matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.models import EncoderDecoder


@torch.inference_mode()
def greedy(
    model: EncoderDecoder, source: Tensor, valid: Tensor | None, *, bos: int, eos: int, limit: int
) -> list[list[int]]:
    """The most probable token at each step, until </s> or `limit` tokens; without <s> and </s>."""
    state = model.start(source, valid, capacity=limit)
    rows = source.shape[0]
    token = torch.full((rows, 1), bos, device=source.device)
    ended = torch.zeros(rows, dtype=torch.bool, device=source.device)
    written = []
    for _ in range(limit):
        token = model.step(token, state)[:, -1].argmax(dim=-1, keepdim=True)  # [B, 1]
        written.append(token)
        ended |= token[:, 0] == eos
        if bool(ended.all()):
            break
    sequences = torch.cat(written, dim=1).tolist() if written else [[] for _ in range(rows)]
    return [sequence[: sequence.index(eos)] if eos in sequence else sequence for sequence in sequences]
