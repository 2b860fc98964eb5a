"""Global tokens with projections of their own: values and gradients of transformers; padding, packing, traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.prune import prune
from regard.models.transformer import build
from regard.nn.block import Stack
from regard.nn.config import StackConfig
from regard.nn.longformer import GlobalMultiHead
from regard.nn.mask import Positions
from regard.nn.trace import trace, zero_heads

CPU = torch.device("cpu")
DIM, HEADS, GLOBAL = 16, 4, 3
FIELDS: dict[str, Any] = {
    "dim": DIM, "heads": HEADS, "layers": 1, "ff_dim": 16, "window": 5, "global_tokens": GLOBAL,
    "global_projections": True, "dropout": 0.0, "embed_dropout": 0.0,
}  # fmt: skip


def make(**fields: Any) -> Stack:
    torch.manual_seed(0)
    return Stack(StackConfig(**{**FIELDS, "position": "none", **fields}), causal=False).eval()


def is_real(length: int, *lengths: int) -> Tensor:
    return torch.arange(length) < torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("path", ["fused", "reference"])
@pytest.mark.parametrize("padded", [False, True])
def test_the_layer_of_transformers(path: str, padded: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = transformers.LongformerConfig(
        hidden_size=DIM, num_attention_heads=HEADS, attention_window=[8], num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    stack, peer = make(attention=path), LongformerSelfAttention(config, 0).eval()
    layer: Any = stack.blocks[0].attention
    for joint, parts in ((layer.qkv, "query key value"), (layer.global_qkv, "query_global key_global value_global")):
        chosen = [getattr(peer, name) for name in parts.split()]
        joint.weight.data = torch.cat([part.weight for part in chosen]).detach()
        joint.bias.data = torch.randn(3 * DIM)
        for part, bias in zip(chosen, joint.bias.data.chunk(3), strict=True):
            part.bias.data = bias
    layer.out.weight.data, layer.out.bias.data = torch.eye(DIM), torch.zeros(DIM)
    x = torch.randn(2, 48, DIM, requires_grad=True)
    real = is_real(48, 48, 30 if padded else 48)
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda module, given: seen.append(given[1]))
    stack(x, Positions.of(48, CPU, real if padded else None))
    kind = torch.where(real, 0.0, -10000.0)
    kind[:, :GLOBAL] = 10000.0
    theirs = peer(x, attention_mask=kind, is_index_masked=kind < 0, is_index_global_attn=kind > 0, is_global_attn=True)[
        0
    ]
    layer._forward_pre_hooks.clear()
    ours = layer(x, seen[0])
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-5, atol=1e-6)
    weight = torch.randn(int(real.sum()), DIM)
    gradients = [torch.autograd.grad((out[real] * weight).sum(), x)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("position", ["none", "learned", "rope"])
def test_padding_on_either_side_and_packing_change_nothing(position: str) -> None:
    stack = make(position=position, kv_heads=2)
    x = torch.randn(1, 20, DIM)
    alone = stack(x, Positions.of(20, CPU))
    other = torch.randn(1, 7, DIM)
    left = stack(torch.cat((other, x), 1), Positions.of(27, CPU, torch.arange(27)[None] >= 7))[:, 7:]
    right = stack(torch.cat((x, other), 1), Positions.of(27, CPU, torch.arange(27)[None] < 20))[:, :20]
    document = (torch.arange(27)[None] >= 7).long()
    packed = stack(torch.cat((other, x), 1), Positions.of(27, CPU, document=document))
    for same in (left, right, packed[:, 7:]):
        torch.testing.assert_close(same, alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(packed[:, :7], stack(other, Positions.of(7, CPU)), rtol=1e-5, atol=1e-6)


def test_fewer_tokens_than_global_ones() -> None:
    stack, reference = make(), make(attention="reference")
    x = torch.randn(3, 5, DIM)
    positions = Positions.of(5, CPU, is_real(5, 5, 2, 0))
    torch.testing.assert_close(stack(x, positions), reference(x, positions), rtol=1e-5, atol=1e-6)
    assert stack(x[:, :1], Positions.of(1, CPU)).isfinite().all()


def test_a_trace_shows_and_changes_what_is_computed() -> None:
    stack, x = make(), torch.randn(2, 20, DIM)
    positions = Positions.of(20, CPU)
    with trace(stack) as seen:
        traced = stack(x, positions)
    torch.testing.assert_close(traced, stack(x, positions), rtol=1e-5, atol=1e-6)
    weights = seen["0.attention.weights"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 20))
    assert bool((weights[:, :, :GLOBAL] > 0).all()) and not bool(weights[:, :, 10, GLOBAL:6].any())
    with trace(stack, {"0.attention.weights": lambda one: torch.zeros_like(one)}) as none:
        stack(x, positions)
    with trace(stack, {"0.attention.heads": zero_heads(*range(HEADS))}) as off:
        stack(x, positions)
    assert torch.equal(none["0.attention.output"], off["0.attention.output"])  # the bias of the output projection


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(UserError, match="later tokens"):
        Stack(StackConfig(**FIELDS), causal=True)
    model = build(ModelConfig(**FIELDS, architecture="encoder", vocab_size=9, output_head="none"))
    assert isinstance(model.encoder.blocks[0].attention, GlobalMultiHead)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="not pruned"):
        prune(model, {"encoder.0.attention": [1]})
