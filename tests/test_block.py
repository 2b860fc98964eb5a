"""Blocks and stacks: torch.nn's layers with our weights; and who may learn of whom."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regard.models.config import ModelConfig
from regard.models.transformer import Decoder, Encoder, EncoderDecoder, build
from regard.nn.block import Block, Memory, Residual, Stack, make_norm
from regard.nn.config import StackConfig
from regard.nn.mask import Places, Visibility, everything
from regard.nn.multihead import Context

CPU = torch.device("cpu")
KINDS = ("sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none")
SMALL = {"dim": 12, "layers": 2, "heads": 3, "ff_dim": 20, "dropout": 0.0, "embed_dropout": 0.0, "max_length": 32}


def config(**changes: object) -> StackConfig:
    return StackConfig(**{**SMALL, "position": "none", **changes})


def model(**changes: object) -> Encoder | Decoder | EncoderDecoder:
    torch.manual_seed(0)
    made = build(ModelConfig(**{**SMALL, "vocab": 13, **changes})).double().eval()
    return shaken(made)


def shaken(module: nn.Module) -> nn.Module:
    """Biases and norms away from 0 and 1, so that each of them matters."""
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


# Against torch.nn


def attention_pairs(ours: nn.Module, theirs: nn.Module) -> list[tuple[list[Tensor], Tensor]]:
    parts = [ours.q, ours.kv] if ours.cross else [ours.qkv]
    return [
        ([part.weight for part in parts], theirs.in_proj_weight),
        ([part.bias for part in parts], theirs.in_proj_bias),
        ([ours.out.weight], theirs.out_proj.weight),
        ([ours.out.bias], theirs.out_proj.bias),
    ]


def block_pairs(ours: Block, theirs: nn.Module) -> list[tuple[list[Tensor], Tensor]]:
    """Our parameters beside those of torch that hold the same numbers."""
    same = [(ours.feedforward.up, theirs.linear1), (ours.feedforward.down, theirs.linear2)]
    norms = [ours.around_attention.norm, ours.around_feedforward.norm]
    pairs = attention_pairs(ours.attention, theirs.self_attn)
    if ours.cross is not None:
        norms.insert(1, ours.around_cross.norm)
        pairs += attention_pairs(ours.cross, theirs.multihead_attn)
    same += zip(norms, (theirs.norm1, theirs.norm2, getattr(theirs, "norm3", None)), strict=False)
    return pairs + [([a.get_parameter(n)], b.get_parameter(n)) for a, b in same for n in ("weight", "bias")]


def stack_pairs(ours: Stack, theirs: nn.Module) -> list[tuple[list[Tensor], Tensor]]:
    pairs = [pair for a, b in zip(ours.blocks, theirs.layers, strict=True) for pair in block_pairs(a, b)]
    return [*pairs, ([ours.norm.weight], theirs.norm.weight), ([ours.norm.bias], theirs.norm.bias)]


def assert_same(ours: Tensor, theirs: Tensor, inputs: list[Tensor], pairs: list[tuple[list[Tensor], Tensor]]) -> None:
    """Values, and the gradients of inputs and of every parameter."""
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
    weight = torch.arange(ours.numel(), dtype=ours.dtype).view_as(ours).sin()
    own = torch.autograd.grad((ours * weight).sum(), inputs + [x for parts, _ in pairs for x in parts])
    other = torch.autograd.grad((theirs * weight).sum(), inputs + [x for _, x in pairs])
    grads = iter(own)
    joined = [next(grads) for _ in inputs] + [torch.cat([next(grads) for _ in parts]) for parts, _ in pairs]
    for a, b in zip(joined, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def torch_transformer(ours: EncoderDecoder) -> nn.Transformer:
    c = ours.config
    theirs = nn.Transformer(
        c.dim,
        c.heads,
        c.layers,
        c.decoder_layers or c.layers,
        c.ff_dim,
        dropout=0.0,
        activation=c.activation,
        batch_first=True,
        norm_first=c.norm_order == "pre",
    ).double()
    for parts, target in stack_pairs(ours.encoder, theirs.encoder) + stack_pairs(ours.decoder, theirs.decoder):
        target.data.copy_(torch.cat([part.data for part in parts]))
    return theirs


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("order", ["post", "pre"])
@pytest.mark.parametrize("padded", [False, True])
def test_both_stacks_are_torch(order: str, activation: str, padded: bool) -> None:
    """nn.Transformer ends both stacks with a norm, also after post-LN: our final_norm = True."""
    made = model(norm_order=order, activation=activation, final_norm=True, position="none", decoder_layers=1)
    assert isinstance(made, EncoderDecoder)
    theirs = torch_transformer(made)
    source = torch.randn(2, 6, 12, dtype=torch.float64, requires_grad=True)
    target = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    source_valid, target_valid = torch.ones(2, 6).bool(), torch.ones(2, 5).bool()
    if padded:
        source_valid[0, 4:], source_valid[1, :2], target_valid[1, 3:] = False, False, False
    places = Places.of(6, CPU, source_valid if padded else None)
    memory = Memory(made.encoder(source, places), places)
    ours = made.decoder(target, Places.of(5, CPU, target_valid if padded else None), memory=memory)
    other = theirs(
        source,
        target,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
        src_key_padding_mask=torch.zeros(2, 6, dtype=torch.float64).masked_fill(~source_valid, float("-inf")),
        memory_key_padding_mask=torch.zeros(2, 6, dtype=torch.float64).masked_fill(~source_valid, float("-inf")),
        tgt_key_padding_mask=torch.zeros(2, 5, dtype=torch.float64).masked_fill(~target_valid, float("-inf")),
    )
    pairs = stack_pairs(made.encoder, theirs.encoder) + stack_pairs(made.decoder, theirs.decoder)
    real = target_valid[..., None]
    assert_same(ours * real, other * real, [source, target], pairs)


@pytest.mark.parametrize("order", ["post", "pre"])
def test_one_encoder_layer_is_torch(order: str) -> None:
    ours = shaken(Block(config(norm_order=order)).double())
    theirs = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True, norm_first=order == "pre").double()
    pairs = block_pairs(ours, theirs)
    for parts, target in pairs:
        target.data.copy_(torch.cat([part.data for part in parts]))
    x, places = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True), Places.of(5, CPU)
    assert_same(ours(x, Context(Visibility(everything, places, places))), theirs(x), [x], pairs)


# Norms and the way around


@pytest.mark.parametrize("eps", [1e-5, 1e-2])
def test_norms_are_their_formulas(eps: float) -> None:
    x = torch.randn(2, 3, 12, dtype=torch.float64) * 5 + 2
    layer, rms = (shaken(make_norm(config(norm=kind, norm_eps=eps)).double()) for kind in ("layer", "rms"))
    spread = ((x - x.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
    torch.testing.assert_close(
        layer(x), (x - x.mean(-1, keepdim=True)) / (spread + eps).sqrt() * layer.weight + layer.bias
    )
    torch.testing.assert_close(rms(x), x / ((x**2).mean(-1, keepdim=True) + eps).sqrt() * rms.weight)
    assert make_norm(config(norm="none"))(x) is x


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("order", ["post", "pre"])
def test_around_a_layer(order: str, norm: str, residual: bool) -> None:
    """post: Norm(x + f(x)); pre: x + f(Norm(x)); without the way around, x falls away."""
    around = shaken(Residual(config(norm_order=order, norm=norm, residual=residual)).double())
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    way = x if residual else torch.zeros_like(x)
    expected = around.norm(way + x.sin()) if order == "post" else way + around.norm(x).sin()
    torch.testing.assert_close(around(x, torch.sin), expected)


def test_dropout_acts_in_training_only_and_keeps_the_mean() -> None:
    around = Residual(config(dropout=0.5, norm="none", residual=False))
    x = torch.ones(1, 1, 20000)
    around.train()
    out = around(x, lambda h: h)
    assert set(out.unique().tolist()) == {0.0, 2.0} and out.mean().item() == pytest.approx(1, abs=0.05)
    around.eval()
    assert torch.equal(around(x, lambda h: h), x)


# The future never leaks


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("path", ["fused", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_future_never_leaks(kind: str, path: str, window: int | None) -> None:
    """d output[i] / d input[j] is exactly zero for j > i, and not for what i may see."""
    stack = shaken(Stack(config(position=kind, attention=path, window=window, dim=18), causal=True).double().eval())
    x = torch.randn(1, 7, 18, dtype=torch.float64, requires_grad=True)
    out = stack(x, Places.of(7, CPU))
    reach = stack.config.layers * ((window or 7) - 1)  # each layer looks one window further back
    for i in range(7):
        (slope,) = torch.autograd.grad(out[0, i].sin().sum(), x, retain_graph=True)
        touched = slope[0].abs().amax(dim=-1) > 0
        assert touched.tolist() == [i - reach <= j <= i for j in range(7)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
def test_changing_a_token_changes_no_logits_before_it(shape: str, kind: str) -> None:
    made = model(shape=shape, position=kind, heads=2)
    tokens = torch.randint(13, (2, 8))
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % 13
    given = () if shape == "decoder" else (torch.randint(13, (2, 4)),)
    before, after = made(*given, tokens), made(*given, other)
    assert torch.equal(before[:, :5], after[:, :5])
    assert ((before[:, 5:] - after[:, 5:]).abs().amax(dim=-1) > 1e-6).all()


# Padding


def pad(rows: list[Tensor], side: str, filler: int) -> tuple[Tensor, Tensor]:
    """Rows of different length as one batch; `filler` may be any token."""
    length = max(map(len, rows)) + 2
    tokens = torch.full((len(rows), length), filler)
    valid = torch.zeros(len(rows), length, dtype=torch.bool)
    for b, row in enumerate(rows):
        here = slice(0, len(row)) if side == "right" else slice(length - len(row), None)
        tokens[b, here], valid[b, here] = row, True
    return tokens, valid


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["encoder", "decoder", "encoder-decoder"])
def test_padding_changes_nothing_for_real_tokens(shape: str, kind: str, window: int | None, side: str) -> None:
    made = model(shape=shape, position=kind, heads=2, window=window)
    rows = [torch.randint(13, (n,)) for n in (5, 1, 7)]
    alone = [made(row[None], row[None])[0] if shape == "encoder-decoder" else made(row[None])[0] for row in rows]
    for filler in (0, 7):
        tokens, valid = pad(rows, side, filler)
        out = made(tokens, tokens, valid, valid) if shape == "encoder-decoder" else made(tokens, valid)
        for b, single in enumerate(alone):
            torch.testing.assert_close(out[b][valid[b]], single, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_class(side: str, pool: str) -> None:
    made = model(shape="encoder", head="classes", classes=3, pool=pool, pooler=True)
    rows = [torch.randint(13, (n,)) for n in (5, 1, 7)]
    alone = torch.cat([made(row[None]) for row in rows])
    torch.testing.assert_close(made(*pad(rows, side, 4)), alone, atol=1e-10, rtol=1e-10)


# Packing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["fused", "reference"])
def test_packed_documents_are_separate_sequences(kind: str, path: str) -> None:
    made = model(shape="decoder", position=kind, heads=2, attention=path)
    texts = [torch.randint(13, (n,)) for n in (4, 1, 5)]
    document = torch.cat([torch.full((len(text),), number) for number, text in enumerate(texts)])[None]
    packed = made(torch.cat(texts)[None], document=document)[0]
    torch.testing.assert_close(packed, torch.cat([made(text[None])[0] for text in texts]), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_translations_look_only_at_their_own_source(kind: str) -> None:
    made = model(shape="encoder-decoder", position=kind, heads=2)
    assert isinstance(made, EncoderDecoder)
    sources = [torch.randint(13, (n,)) for n in (3, 6, 2)]
    targets = [torch.randint(13, (n,)) for n in (5, 1, 4)]
    numbers = [torch.cat([torch.full((len(t),), i) for i, t in enumerate(texts)])[None] for texts in (sources, targets)]
    memory = made.encode(torch.cat(sources)[None], document=numbers[0])
    packed = made.decode(torch.cat(targets)[None], memory, document=numbers[1])[0]
    alone = [made(s[None], t[None])[0] for s, t in zip(sources, targets, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-10, rtol=1e-10)
