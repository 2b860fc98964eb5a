"""`torch.compile` for a function that serves layers of many kinds.

PyTorch compiles a function again for another kind of input: another mask, a constant where a size varied, no gradients.
After 8 versions (its default) it runs the function without compiling it, and FlexAttention then computes all N² pairs.
A model whose layers have several masks needs more, such as (masks) x (training, evaluation) x (one row, several).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VERSIONS = 64  # of one function


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiler = torch._dynamo.config
    compiler.recompile_limit = max(compiler.recompile_limit, VERSIONS)
    return torch.compile(function)
