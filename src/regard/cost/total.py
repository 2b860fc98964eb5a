"""The total cost of a model on a batch.

    weights         parameters · s                        s bytes per element: bf16 and fp16 2, fp32 4, fp64 8
    training state  4 · parameters · max(4, s)            weights, gradients and Adam's two moments, in fp32
    activations     see `activations`; and at the peak, the start of the backward pass, the gradients of the loss
    KV cache        layers · B · G · N · (D + Dv) · s     self-attention (Shazeer 2019); N: tokens so far
                    layers · B · G · M · (D + Dv) · s     cross-attention over M source tokens
                    layers · B · G · (F·E + 1) · s        linear attention: a state, whatever N (`mixers`)

With two sequences, "per token" means per target token; the cost of the source is included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from regard.cost import mixers, operations, recurrent
from regard.cost.activations import activation_bytes, loss_gradient_bytes
from regard.cost.shapes import StackShape, lengths, stack_shapes
from regard.errors import UserError, suggest
from regard.models.config import ModelConfig

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
LIMIT = 10**60  # larger than any machine, and still a float


@dataclass(frozen=True)
class Cost:
    """The cost of one model on one batch, in parameters, FLOPs and bytes."""

    seq: int  # source tokens per row with two sequences, else tokens per row
    target_seq: int  # 0: there is no second sequence
    batch: int
    dtype: str
    parameters: dict[str, int]
    active_parameters: int  # used by one token: fewer with experts
    table_parameters: int  # embeddings of tokens and positions
    multiplied_parameters: int  # the N of 6·N: active, without embeddings, with the output layer even if it is tied
    forward: dict[str, int]
    backward: int  # matmuls of the gradients
    recomputed: int  # in addition, in the backward pass of fused and flex attention
    masked: int  # the part of `forward` for masked pairs
    step: int  # one more token per row with a full cache; 0: the model does not generate
    weights: int
    training_state: int
    activations: dict[str, int]
    reference_activations: int  # the sum with attention = "reference"
    loss_gradients: int  # the addition at the start of the backward pass
    kv_cache: dict[str, int]  # "self", "cross"

    @property
    def tokens(self) -> int:
        return self.batch * (self.target_seq or self.seq)

    @property
    def train(self) -> int:
        """FLOPs of forward and backward pass."""
        return sum(self.forward.values()) + self.backward

    @property
    def training_memory(self) -> int:
        """The peak, at the start of the backward pass."""
        return self.training_state + sum(self.activations.values()) + self.loss_gradients

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values under stable names, for JSON."""
        total, forward = sum(self.parameters.values()), sum(self.forward.values())

        def values(*names: str) -> dict[str, Any]:
            return {name: getattr(self, name) for name in names}

        return {
            "workload": values("seq", "target_seq", "batch", "dtype"),
            "tokens": self.tokens,
            "parameters": {
                "total": total,
                "active": self.active_parameters,
                "non_embedding": total - self.table_parameters,
                "parts": self.parameters,
            },
            "operations": {
                "forward": forward,
                "forward_per_token": forward / self.tokens,
                **values("masked", "backward", "recomputed", "train", "step"),
                "train_per_token": self.train / self.tokens,
                "rule_6n_per_token": 6 * self.multiplied_parameters,
                "parts": self.forward,
            },
            "memory": {
                **values("weights", "training_state", "loss_gradients"),
                "activations": sum(self.activations.values()),
                "activations_reference": self.reference_activations,
                "activation_parts": self.activations,
                "training": self.training_memory,
                "kv_cache": sum(self.kv_cache.values()),
                "kv_cache_parts": self.kv_cache,
            },
        }


def cost(
    config: ModelConfig, *, seq: int | None = None, batch: int = 1, target_seq: int | None = None, dtype: str = "bf16"
) -> Cost:
    """The cost of `batch` rows of `seq` tokens (None: max_length, or the patches of an image)."""
    if dtype not in BYTES:
        raise UserError(f"dtype = {dtype!r}: unknown dtype; {suggest(str(dtype), BYTES)}")
    if batch < 1:
        raise UserError(f"batch = {batch}: must be 1 or more")
    source, target = lengths(config, seq, target_seq)
    stacks, size = stack_shapes(config, source, target), BYTES[dtype]
    parameters, forward = operations.count_parameters(config), operations.forward_operations(config, stacks, batch)
    total = sum(parameters.values())
    if config.pruned:
        raise UserError(
            f"pruned: FLOPs and memory are computed for models with all heads only; remove pruned from [model]. "
            f"This model has {total:,} parameters"
        )
    if max(total, sum(forward.values())) > LIMIT:
        raise UserError(f"seq = {source}, batch = {batch}: the counts exceed 1e60; use smaller sizes")
    idle = max(0, config.experts - config.experts_per_token) * operations.feedforward_parameters(config)
    active = total if config.architecture == "recurrent" else total - idle * sum(stack.layers for stack in stacks)
    tables = parameters.get("embedding", 0) + parameters.get("positions", 0)
    ties = config.tie_embeddings and config.output_head == "tokens"
    tied = config.token_dim * operations.output_size(config) if ties else 0
    half = {"half_weights": size * (total - tables + tied)} if size < 4 else {}
    # matmuls whose input needs no gradient
    constant = operations.source_operations(config, batch, source)[0] + forward.get("target", 0)
    constant += operations.constant_operations(config, stacks, batch)
    if config.architecture == "recurrent":
        constant = recurrent.constant_operations(config, stacks, batch)
    written_out = replace(config, attention="reference")
    return Cost(
        seq=source,
        target_seq=target,
        batch=batch,
        dtype=dtype,
        parameters=parameters,
        active_parameters=active,
        table_parameters=tables,
        multiplied_parameters=active - tables + tied,
        forward=forward,
        backward=2 * sum(forward.values()) - constant,
        recomputed=operations.recomputed_operations(config, stacks, batch),
        masked=operations.masked_operations(config, stacks, batch),
        step=operations.step_operations(config, stacks[-1], batch),
        weights=size * total,
        training_state=4 * max(4, size) * total,
        activations=activation_bytes(config, stacks, batch, size) | half,
        reference_activations=sum((activation_bytes(written_out, stacks, batch, size) | half).values()),
        loss_gradients=loss_gradient_bytes(config, stacks, batch, size),
        kv_cache=_kv_cache(config, stacks[-1], batch, size),
    )


def _kv_cache(config: ModelConfig, stack: StackShape, batch: int, size: int) -> dict[str, int]:
    if config.architecture == "recurrent":
        return recurrent.state_bytes(config, stack, batch, size)
    token = batch * config.key_heads * (config.key_dim + config.val_dim) * size
    reaches = [config.reach_of(layer) for layer in mixers.softmax_layers(config, stack.layers)]
    # the buffer of a window rolls when it has twice the tokens that are needed
    own = token * sum(stack.length if reach is None else min(stack.length, 2 * reach) for reach in reaches)
    own += sum(mixers.state_bytes(config, kind, batch, size) for kind in mixers.other_layers(config, stack.layers))
    return {"self": own * stack.causal, "cross": stack.layers * token * stack.memory}
