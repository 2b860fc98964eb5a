"""Where the time of a training step goes on a CPU, by torch.profiler.

Each operation counts with its self time in the first matching part:

    optimizer     Adam and the norm of the gradient
    vocabulary    operations on a tensor with an axis as long as the vocabulary: the output layer, softmax and
                  loss, and their gradients (without embedding lookups)
    attention     fused attention, batched matmuls, softmax
    matmul        the other matmuls: projections and feed-forward
    rest          norms, dropout, activations, residual sums, embeddings, copies
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

PARTS = ("matmul", "vocabulary", "attention", "optimizer", "rest")
OPTIMIZER = ("fused_adam", "foreach", "optimizer.", "linalg_vector_norm", "zero_grad")
LOSS = ("log_softmax", "logsoftmax", "nll_loss", "nllloss", "cross_entropy")
ATTENTION = ("scaled_dot_product", "flash_attention", "bmm", "softmax")
MATMUL = ("::mm", "::addmm", "::linear", "::matmul", "::_linear_pointwise")


def part_of(name: str, shapes: Sequence[Sequence[Any]], vocab_size: int) -> str:
    """The part of an operation with this name and input shapes."""
    low = name.lower()
    if any(word in low for word in OPTIMIZER):
        return "optimizer"
    long = any(vocab_size in shape for shape in shapes if isinstance(shape, list | tuple))
    if any(word in low for word in LOSS) or (long and "embedding" not in low):
        return "vocabulary"
    if any(word in low for word in ATTENTION):
        return "attention"
    return "matmul" if any(word in low for word in MATMUL) else "rest"


def shares(step: Callable[[], Any], vocab_size: int, steps: int = 2) -> dict[str, float]:
    """The fraction of each part in `steps` steps; they sum to 1."""
    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        for _ in range(steps):
            step()
    times: Counter[str] = Counter()
    for event in seen.key_averages(group_by_input_shape=True):
        times[part_of(event.key, event.input_shapes or [], vocab_size)] += event.self_cpu_time_total
    return {part: round(times[part] / max(times.total(), 1e-9), 3) for part in PARTS}
