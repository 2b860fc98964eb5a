"""Fourier mixing, Linformer and BigBird against other implementations; padding, lengths and documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.nn.block import Stack
from regard.nn.config import BY_TEXT, StackConfig
from regard.nn.fourier import fourier
from regard.nn.linformer import LinformerAttention
from regard.nn.mask import AttentionMask, Positions, everything, from_tensor
from regard.nn.multihead import Context, MultiHead
from regard.nn.trace import trace

CPU = torch.device("cpu")
KINDS = ("linformer", "fourier")
SMALL: dict[str, Any] = {"dim": 16, "heads": 4, "ff_dim": 16, "layers": 2, "dropout": 0.0, "embed_dropout": 0.0}


def stack_of(kind: str, **fields: Any) -> Stack:
    torch.manual_seed(0)
    own = {"max_length": 30, "projected_length": 5} if kind == "linformer" else {}
    return Stack(StackConfig(**(SMALL | own | fields), mixer=kind), causal=False).double().eval()


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_fourier_is_the_formula() -> None:
    """Re(F_N x F_dim) with the matrices of the transform written out."""
    x = inputs(2, 7, 6)

    def matrix(n: int) -> Tensor:
        index = torch.arange(n, dtype=torch.float64)
        return torch.exp(-2j * torch.pi * torch.outer(index, index) / n)

    torch.testing.assert_close(fourier(x), (matrix(7) @ x.to(torch.complex128) @ matrix(6)).real)
    assert torch.autograd.gradcheck(fourier, x.requires_grad_())
    assert fourier(x.bfloat16()).dtype == torch.bfloat16


def test_fourier_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.fnet.modeling_fnet import FNetBasicFourierTransform

    theirs = FNetBasicFourierTransform(transformers.FNetConfig(hidden_size=16))
    x = inputs(2, 9, 16).float().requires_grad_()
    outputs = fourier(x), theirs(x)[0]
    torch.testing.assert_close(*outputs)
    weight = inputs(2, 9, 16).float()
    torch.testing.assert_close(*(torch.autograd.grad((out * weight).sum(), x)[0] for out in outputs))


@pytest.mark.parametrize("path", ["fused", "reference"])
def test_bigbird_agrees_with_the_block_sparse_attention_of_transformers(path: Any) -> None:
    """The same random blocks, which it has in training mode alone; its first and last blocks are global."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    size, blocks, dim = 4, 12, 8
    length = size * blocks
    config = transformers.BigBirdConfig(
        hidden_size=dim, num_attention_heads=1, block_size=size, num_random_blocks=2, max_position_embeddings=length
    )
    theirs, chosen = BigBirdBlockSparseAttention(config, seed=3).train(), list[Any]()
    choose = theirs._bigbird_block_rand_mask_with_head
    theirs._bigbird_block_rand_mask_with_head = lambda **given: chosen.append(choose(**given)) or chosen[-1]
    is_real = torch.arange(length) < torch.tensor([[length], [length - 6]])
    masks = BigBirdModel.create_masks_for_block_sparse_attn(is_real.float(), size)
    names = ("to_blocked_mask", "band_mask", "from_mask", "to_mask")
    given = dict(zip(names, masks, strict=True))
    x = torch.randn(2, length, dim, requires_grad=True)
    expected = theirs(x, **given, from_blocked_mask=given["to_blocked_mask"])[0]

    visible = torch.zeros(blocks, blocks, dtype=torch.bool)
    visible[[0, -1]] = visible[:, [0, -1]] = True
    for block in range(1, blocks - 1):
        visible[block, [block - 1, block, block + 1, *chosen[0][0][block - 1].tolist()]] = True
    assert visible[1:-1].sum(dim=1).max() == 7 and len(chosen) == 1  # 3 + 2 global + 2 random ones
    ours = MultiHead(StackConfig(dim=dim, heads=1, attention=path))
    parts = (theirs.query, theirs.key, theirs.value)
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
        ours.qkv.bias.copy_(torch.cat([part.bias for part in parts]))
        ours.out.weight.copy_(torch.eye(dim))
        ours.out.bias.zero_()
    mask = from_tensor(visible.repeat_interleave(size, 0).repeat_interleave(size, 1))
    positions = Positions.of(length, CPU, is_real)
    found = ours(x, Context(AttentionMask(mask, positions, positions)))
    torch.testing.assert_close(found[is_real], expected.reshape(found.shape)[is_real], rtol=1e-4, atol=1e-5)
    weight = torch.randn(int(is_real.sum()), dim)
    own = torch.autograd.grad((found[is_real] * weight).sum(), [x, ours.qkv.weight, ours.qkv.bias])
    out = (expected.reshape(found.shape)[is_real] * weight).sum()
    other = torch.autograd.grad(out, [x, *(part.weight for part in parts), *(part.bias for part in parts)])
    for one, peer in zip(own, (other[0], torch.cat(other[1:4]), torch.cat(other[4:])), strict=True):
        torch.testing.assert_close(one, peer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [12, 30])
def test_linformer_agrees_with_the_package(length: int) -> None:
    package = pytest.importorskip("linformer")
    theirs = package.LinformerSelfAttention(16, seq_len=30, k=5, heads=4)
    ours = LinformerAttention(StackConfig(dim=16, heads=4, mixer="linformer", max_length=30, projected_length=5))
    with torch.no_grad():
        ours.qkv.weight.copy_(torch.cat([layer.weight for layer in (theirs.to_q, theirs.to_k, theirs.to_v)]))
        ours.qkv.bias.zero_()
        ours.key_projection.copy_(theirs.proj_k)
        ours.value_projection.copy_(theirs.proj_v)
    ours.out.load_state_dict(theirs.to_out.state_dict())
    x, positions = torch.randn(2, length, 16, requires_grad=True), Positions.of(length, CPU)
    one, other = ours(x, Context(AttentionMask(everything, positions, positions))), theirs(x)
    torch.testing.assert_close(one, other)
    first = torch.autograd.grad(one.square().sum(), [ours.key_projection, ours.value_projection, ours.out.weight, x])
    second = torch.autograd.grad(other.square().sum(), [theirs.proj_k, theirs.proj_v, theirs.to_out.weight, x])
    for gradient, expected in zip(first, second, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [False, True])
def test_padding_changes_nothing(kind: str, left: bool) -> None:
    stack, x = stack_of(kind), inputs(3, 20, 16)
    is_real = torch.ones(3, 20, dtype=torch.bool)
    is_real[1, slice(0, 13) if left else slice(7, 20)] = False
    is_real[2] = False
    out = stack(x, Positions.of(20, CPU, is_real))
    torch.testing.assert_close(out[1, is_real[1]], stack(x[1:2, is_real[1]], Positions.of(7, CPU))[0])
    torch.testing.assert_close(out[:1], stack(x[:1], Positions.of(20, CPU)))
    assert out.isfinite().all()


def test_padding_may_be_longer_than_linformer_and_texts_may_not() -> None:
    stack, x = stack_of("linformer"), inputs(1, 40, 16)
    is_real = (torch.arange(40) < 30)[None]
    out = stack(x, Positions.of(40, CPU, is_real))
    torch.testing.assert_close(out[:, :30], stack(x[:, :30], Positions.of(30, CPU)))
    for positions in (Positions.of(40, CPU), Positions.of(40, CPU, (torch.arange(40) < 31)[None])):
        with pytest.raises(UserError, match=r"max_length = 30 of mixer = 'linformer'.*raise max_length"):
            stack(x, positions)


@pytest.mark.parametrize("path", ["fused", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_computed_as_alone(kind: str, path: Any) -> None:
    """Rows may have documents of several lengths and padding, and be longer than a document of a Linformer may be."""
    stack = stack_of(kind, attention=path, **({"kv_heads": 2, "value_dim": 6} if kind == "linformer" else {}))
    x = inputs(2, 40, 16).requires_grad_()
    lengths = ((5, 12, 5, 11), (30, 4, 1))
    document = torch.zeros(2, 40, dtype=torch.long)  # 0: padding
    parts = []
    for row, sizes in enumerate(lengths):
        for number, own in enumerate(torch.arange(sum(sizes)).split(sizes), 1):
            document[row, own] = number
            parts.append((row, own))
    out = stack(x, Positions.of(40, CPU, document > 0, document))
    alone = [stack(x[row : row + 1, own], Positions.of(len(own), CPU)) for row, own in parts]
    for (row, own), expected in zip(parts, alone, strict=True):
        torch.testing.assert_close(out[row, own], expected[0])
    (gradient,) = torch.autograd.grad(out[document > 0].square().sum(), x)
    (expected,) = torch.autograd.grad(sum(one.square().sum() for one in alone), x)
    torch.testing.assert_close(gradient, expected)


def test_a_trace_of_packed_documents_has_the_mixtures_of_each() -> None:
    stack, x = stack_of("linformer"), inputs(1, 12, 16)
    positions = Positions.of(12, CPU, document=torch.tensor([[1] * 5 + [2] * 7]))
    with trace(stack) as t:
        out = stack(x, positions)
    assert t["0.attention.k"].shape == (2, 4, 5, 4) and t["0.attention.heads"].shape == (1, 4, 12, 4)
    torch.testing.assert_close(out, stack(x, positions))


@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
@pytest.mark.parametrize("kind", [*KINDS, "full", "linear", "performer", "gated-linear"])
def test_no_tokens_give_no_states(kind: str, shape: tuple[int, int]) -> None:
    assert stack_of(kind)(inputs(*shape, 16), Positions.of(shape[1], CPU)).shape == (*shape, 16)


def test_linformer_with_shared_keys_and_normalised_queries() -> None:
    stack, x = stack_of("linformer", kv_heads=2, qk_norm=True, value_dim=6), inputs(2, 9, 16)
    assert stack(x, Positions.of(9, CPU)).shape == x.shape


def record_compiled(stack: Stack) -> list[nn.Module]:
    """The blocks that training would run compiled."""
    compiled: list[nn.Module] = []

    def compute(block: nn.Module, x: Tensor, context: Context) -> Tensor:
        compiled.append(block)
        return block(x, context)  # type: ignore[no-any-return]

    stack.compute = compute
    return compiled


GLOBAL = {"global_tokens": 1, "global_projections": True}


@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in BY_TEXT), ("window(3)", GLOBAL)])
def test_layers_whose_shapes_depend_on_the_packed_texts_are_not_compiled(kind: str, settings: dict[str, Any]) -> None:
    stack = stack_of(f"full, {kind}", position="none", max_length=30, **settings).train()
    compiled = record_compiled(stack)
    for document, expected in ((None, list(stack.blocks)), (torch.tensor([[1, 1, 2, 2, 2]]), [stack.blocks[0]])):
        compiled.clear()
        stack(inputs(1, 5, 16), Positions.of(5, CPU, document=document))
        assert compiled == expected


@pytest.mark.parametrize(("kind", "is_causal"), [("full", False), ("full", True), ("window(8)", False)])
def test_attention_whose_blocks_depend_on_the_texts_is_not_compiled(kind: str, is_causal: bool) -> None:
    """From 512 tokens on it has other blocks in every batch of padded or packed texts."""
    sizes = {"dim": 8, "heads": 2, "ff_dim": 8, "layers": 2, "position": "none", "bias": False}
    stack = Stack(StackConfig(**sizes, mixer=f"{kind}, gated-linear"), causal=is_causal).train()  # type: ignore[arg-type]
    compiled = record_compiled(stack)
    for length in (100, 600):
        document = (torch.arange(length) // 50)[None]
        padded = {"is_real": document > 1}
        for texts, has_own_blocks in (({}, False), ({"document": document}, True), (padded, "window" in kind)):
            compiled.clear()
            stack(torch.randn(1, length, 8), Positions.of(length, CPU, **texts))
            assert compiled == list(stack.blocks)[has_own_blocks and length >= 512 :], (length, [*texts])
