"""The cost of a model by formula: parameters, FLOPs, memory. Only `measure` creates tensors.

    cost(preset("gpt2"), seq=1024, batch=8).training_memory

Read the modules in this order: `shapes` (tokens per stack), `operations` (parameters and FLOPs), `activations` (what
training stores), and `total`, which adds the state of the optimizer and the KV cache. `sweep` changes one size,
`layers` compares kinds of layers (Table 1 of the paper), `measure` runs both on this machine.
`smaller` finds a preset that trains in less time.
"""

from regard.cost.total import BYTES, Cost, cost

__all__ = ["BYTES", "Cost", "cost"]
