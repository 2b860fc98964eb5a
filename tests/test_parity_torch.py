"""Blocks and stacks are those of torch.nn with our weights: values, and gradients of inputs and every parameter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from odd_shapes import (
    DTYPES,
    HIDDEN,
    Pair,
    Shape,
    assert_same,
    attention_pairs,
    copy_pairs,
    hide,
    keep_real,
    key_padding_mask,
    random_is_real,
    shapes,
)
from regard.nn.block import Block, Memory, Stack
from regard.nn.config import StackConfig
from regard.nn.mask import AttentionMask, Positions
from regard.nn.multihead import Context

pytestmark = pytest.mark.grid

CPU = torch.device("cpu")
SHAPES = shapes(24, seed=1)


def config(shape: Shape, order: str, **changes: object) -> StackConfig:
    return StackConfig(
        dim=shape.dim,
        heads=shape.heads,
        layers=shape.layers,
        ff_dim=shape.ff_dim,
        activation="gelu" if shape.ff_dim % 4 == 1 else "relu",
        norm_order=order,
        position="none",
        dropout=0.0,
        embed_dropout=0.0,
        **changes,
    )


def shaken(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Biases and norms away from 0 and 1, so that each of them matters."""
    module.to(dtype)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def block_pairs(ours: Block, theirs: nn.Module) -> list[Pair]:
    """Our parameters beside those of torch that hold the same numbers."""
    same = [(ours.feedforward.up, theirs.linear1), (ours.feedforward.down, theirs.linear2)]
    norms = [ours.attention_norm, ours.feedforward_norm]
    pairs = attention_pairs(ours.attention, theirs.self_attn)
    if ours.cross is not None:
        norms.insert(1, ours.cross_norm)
        pairs += attention_pairs(ours.cross, theirs.multihead_attn)
    same += zip(norms, (theirs.norm1, theirs.norm2, getattr(theirs, "norm3", None)), strict=False)
    return pairs + [([a.get_parameter(n)], b.get_parameter(n)) for a, b in same for n in ("weight", "bias")]


def stack_pairs(ours: Stack, theirs: nn.TransformerEncoder | nn.TransformerDecoder) -> list[Pair]:
    pairs = [pair for a, b in zip(ours.blocks, theirs.layers, strict=True) for pair in block_pairs(a, b)]
    if theirs.norm is not None:
        pairs += [([ours.norm.weight], theirs.norm.weight), ([ours.norm.bias], theirs.norm.bias)]
    assert sum(part.numel() for parts, _ in pairs for part in parts) == sum(p.numel() for p in ours.parameters())
    return pairs


def sizes(c: StackConfig, dtype: torch.dtype) -> dict:
    """What torch's layers and models are all told."""
    return {
        "d_model": c.dim,
        "nhead": c.heads,
        "dim_feedforward": c.ff_dim,
        "dropout": 0.0,
        "activation": c.activation,
        "batch_first": True,
        "norm_first": c.norm_order == "pre",
        "dtype": dtype,
    }


def final_norm(c: StackConfig, dtype: torch.dtype) -> nn.LayerNorm | None:
    return nn.LayerNorm(c.dim, dtype=dtype) if c.ends_with_norm else None


def random_states(shape: Shape, length: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape.batch, length, shape.dim, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_layer_is_torch(shape: Shape, dtype: torch.dtype, order: str) -> None:
    c = config(shape, order)
    ours, theirs = shaken(Block(c), dtype), nn.TransformerEncoderLayer(**sizes(c, dtype))
    pairs = block_pairs(ours, theirs)
    copy_pairs(pairs)
    x = random_states(shape, shape.length, dtype)
    for kind in HIDDEN:
        mask, is_real, hidden = hide(kind, shape.batch, shape.length)
        positions = Positions.of(shape.length, CPU, is_real)
        one = ours(x, Context(AttentionMask(mask, positions, positions)))
        other = theirs(x, src_mask=hidden, src_key_padding_mask=key_padding_mask(is_real))
        assert_same(keep_real(one, is_real), keep_real(other, is_real), [x], pairs)


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stack_is_the_encoder_of_torch(shape: Shape, dtype: torch.dtype, order: str) -> None:
    """nn.TransformerEncoder; with a causal mask it is a decoder-only stack. Odd layers: without a final norm."""
    c = config(shape, order, final_norm=shape.layers % 2 == 0)
    layer = nn.TransformerEncoderLayer(**sizes(c, dtype))
    theirs = nn.TransformerEncoder(layer, c.layers, final_norm(c, dtype), enable_nested_tensor=False)
    x = random_states(shape, shape.length, dtype)
    for kind in HIDDEN:
        _, is_real, hidden = hide(kind, shape.batch, shape.length)
        ours = shaken(Stack(c, causal=hidden is not None), dtype)
        pairs = stack_pairs(ours, theirs)
        copy_pairs(pairs)
        one = ours(x, Positions.of(shape.length, CPU, is_real))
        other = theirs(x, mask=hidden, src_key_padding_mask=key_padding_mask(is_real))
        assert_same(keep_real(one, is_real), keep_real(other, is_real), [x], pairs)


@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stack_is_the_decoder_of_torch(shape: Shape, dtype: torch.dtype, order: str) -> None:
    """nn.TransformerDecoder over a memory, which may be padded as well."""
    c = config(shape, order)
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes(c, dtype)), c.layers, final_norm(c, dtype))
    x, memory = random_states(shape, shape.length, dtype), random_states(shape, shape.memory, dtype)
    for kind in HIDDEN:
        _, is_real, hidden = hide(kind, shape.batch, shape.length)
        memory_is_real = None if is_real is None else random_is_real(shape.batch, shape.memory)
        ours = shaken(Stack(c, causal=hidden is not None, memory=True), dtype)
        pairs = stack_pairs(ours, theirs)
        copy_pairs(pairs)
        known = Memory(memory, Positions.of(shape.memory, CPU, memory_is_real))
        one = ours(x, Positions.of(shape.length, CPU, is_real), memory=known)
        other = theirs(
            x,
            memory,
            tgt_mask=hidden,
            tgt_key_padding_mask=key_padding_mask(is_real),
            memory_key_padding_mask=key_padding_mask(memory_is_real),
        )
        assert_same(keep_real(one, is_real), keep_real(other, is_real), [x, memory], pairs)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_stacks_are_the_transformer_of_torch(shape: Shape, dtype: torch.dtype, order: str) -> None:
    """nn.Transformer ends both stacks with a norm, also after post-LN: our final_norm = True."""
    c = config(shape, order, final_norm=True)
    theirs = nn.Transformer(num_encoder_layers=c.layers, num_decoder_layers=c.layers, **sizes(c, dtype))
    encoder = shaken(Stack(c, causal=False), dtype)
    decoder = shaken(Stack(c, causal=True, memory=True), dtype)
    pairs = stack_pairs(encoder, theirs.encoder) + stack_pairs(decoder, theirs.decoder)
    copy_pairs(pairs)
    source, target = random_states(shape, shape.memory, dtype), random_states(shape, shape.length, dtype)
    for kind in ("causal", "both"):
        _, is_real, hidden = hide(kind, shape.batch, shape.length)
        source_is_real = None if is_real is None else random_is_real(shape.batch, shape.memory)
        positions = Positions.of(shape.memory, CPU, source_is_real)
        known = Memory(encoder(source, positions), positions)
        one = decoder(target, Positions.of(shape.length, CPU, is_real), memory=known)
        other = theirs(
            source,
            target,
            tgt_mask=hidden,
            src_key_padding_mask=key_padding_mask(source_is_real),
            memory_key_padding_mask=key_padding_mask(source_is_real),
            tgt_key_padding_mask=key_padding_mask(is_real),
        )
        assert_same(keep_real(one, is_real), keep_real(other, is_real), [source, target], pairs)
