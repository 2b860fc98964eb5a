"""What a model costs, by formula: parameters, operations, memory. No tensor is made.

    cost(preset("gpt2"), seq=1024, batch=8).training_memory

The lessons are in the order in which the numbers build on each other: `sequences` (which tokens pass through
which stack), `parameters`, `operations`, `activations` (what training keeps), and `total`, where it comes
together with the optimizer's state and the key/value cache.
"""

from regard.cost.total import BYTES, Cost, Dtype, cost

__all__ = ["BYTES", "Cost", "Dtype", "cost"]
