"""Blocks and stacks: norms, residual connections, and which token depends on which."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import regard.nn
from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.transformer import Decoder, Encoder, EncoderDecoder, build
from regard.nn.block import Block, Memory, Stack
from regard.nn.config import StackConfig
from regard.nn.mask import Positions
from regard.nn.norm import make_norm

pytestmark = pytest.mark.grid

CPU = torch.device("cpu")
KINDS = ("sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none")
SMALL = {"dim": 12, "layers": 2, "heads": 3, "ff_dim": 20, "dropout": 0.0, "embed_dropout": 0.0, "max_length": 32}


def config(**changes: object) -> StackConfig:
    return StackConfig(**{**SMALL, "position": "none", **changes})


def model(**changes: object) -> Encoder | Decoder | EncoderDecoder:
    torch.manual_seed(0)
    made = build(ModelConfig(**{**SMALL, "vocab_size": 13, **changes})).double().eval()
    return shaken(made)


def shaken(module: nn.Module) -> nn.Module:
    """Biases and norms away from 0 and 1, so that each of them matters."""
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


# Norms and residual connections


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


class Sine(nn.Module):
    """Stands in for a sub-layer; ignores the context."""

    def forward(self, x: Tensor, context: object = None) -> Tensor:
        return x.sin()


def sine_block(**changes: object) -> Block:
    block = Block(config(**changes))
    block.attention, block.feedforward = Sine(), Sine()
    return shaken(block).double()


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
@pytest.mark.parametrize("order", ["post", "pre"])
def test_residual_connections(order: str, norm: str, residual: bool) -> None:
    """post: Norm(x + f(x)); pre: x + f(Norm(x)); without the residual connection, x is not added."""
    block = sine_block(norm_order=order, norm=norm, residual=residual)
    x = given = torch.randn(2, 3, 12, dtype=torch.float64)
    for normalise in (block.attention_norm, block.feedforward_norm):
        added = x if residual else torch.zeros_like(x)
        x = normalise(added + x.sin()) if order == "post" else added + normalise(x).sin()
    torch.testing.assert_close(block(given, None), x)


def test_dropout_acts_in_training_only_and_keeps_the_mean() -> None:
    block = Block(config(dropout=0.5, norm="none", residual=False))
    block.attention, block.feedforward = nn.Identity(), nn.Identity()
    block.attention.forward = lambda x, context: x
    x = torch.ones(1, 1, 20000)
    out = block.train()(x, None)  # dropped out twice: a quarter is left, each 4 times as large
    assert set(out.unique().tolist()) == {0.0, 4.0} and out.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(block.eval()(x, None), x)


# The future never leaks


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("path", ["fused", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_future_never_leaks(kind: str, path: str, window: int | None) -> None:
    """d output[i] / d input[j] is exactly zero for j > i, and not for what i may see."""
    stack = shaken(Stack(config(position=kind, attention=path, window=window, dim=18), causal=True).double().eval())
    x = torch.randn(1, 7, 18, dtype=torch.float64, requires_grad=True)
    out = stack(x, Positions.of(7, CPU))
    reach = stack.config.layers * ((window or 7) - 1)  # each layer attends one window further back
    for i in range(7):
        (slope,) = torch.autograd.grad(out[0, i].sin().sum(), x, retain_graph=True)
        touched = slope[0].abs().amax(dim=-1) > 0
        assert touched.tolist() == [i - reach <= j <= i for j in range(7)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
def test_changing_a_token_changes_no_logits_before_it(architecture: str, kind: str) -> None:
    made = model(architecture=architecture, position=kind, heads=2)
    tokens = torch.randint(13, (2, 8))
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % 13
    given = () if architecture == "decoder" else (torch.randint(13, (2, 4)),)
    before, after = made(*given, tokens), made(*given, other)
    assert torch.equal(before[:, :5], after[:, :5])
    assert ((before[:, 5:] - after[:, 5:]).abs().amax(dim=-1) > 1e-6).all()


# Padding


def pad(rows: list[Tensor], side: str, padding_token: int) -> tuple[Tensor, Tensor]:
    """Rows of different length as one batch; `padding_token` may be any token."""
    length = max(map(len, rows)) + 2
    tokens = torch.full((len(rows), length), padding_token)
    is_real = torch.zeros(len(rows), length, dtype=torch.bool)
    for b, row in enumerate(rows):
        here = slice(0, len(row)) if side == "right" else slice(length - len(row), None)
        tokens[b, here], is_real[b, here] = row, True
    return tokens, is_real


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["encoder", "decoder", "encoder-decoder"])
def test_padding_changes_nothing_for_real_tokens(architecture: str, kind: str, window: int | None, side: str) -> None:
    made = model(architecture=architecture, position=kind, heads=2, window=window)
    rows = [torch.randint(13, (n,)) for n in (5, 1, 7)]
    alone = [made(row[None], row[None])[0] if architecture == "encoder-decoder" else made(row[None])[0] for row in rows]
    for padding_token in (0, 7):
        tokens, is_real = pad(rows, side, padding_token)
        out = made(tokens, tokens, is_real, is_real) if architecture == "encoder-decoder" else made(tokens, is_real)
        for b, single in enumerate(alone):
            torch.testing.assert_close(out[b][is_real[b]], single, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_class(side: str, pooling: str) -> None:
    made = model(architecture="encoder", output_head="classes", classes=3, pooling=pooling, pooler=True)
    rows = [torch.randint(13, (n,)) for n in (5, 1, 7)]
    alone = torch.cat([made(row[None]) for row in rows])
    torch.testing.assert_close(made(*pad(rows, side, 4)), alone, atol=1e-10, rtol=1e-10)


# Packing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["fused", "reference"])
def test_packed_documents_are_separate_sequences(kind: str, path: str) -> None:
    made = model(architecture="decoder", position=kind, heads=2, attention=path)
    texts = [torch.randint(13, (n,)) for n in (4, 1, 5)]
    document = torch.cat([torch.full((len(text),), number) for number, text in enumerate(texts)])[None]
    packed = made(torch.cat(texts)[None], document=document)[0]
    torch.testing.assert_close(packed, torch.cat([made(text[None])[0] for text in texts]), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_translations_look_only_at_their_own_source(kind: str) -> None:
    made = model(architecture="encoder-decoder", position=kind, heads=2)
    assert isinstance(made, EncoderDecoder)
    sources = [torch.randint(13, (n,)) for n in (3, 6, 2)]
    targets = [torch.randint(13, (n,)) for n in (5, 1, 4)]
    numbers = [torch.cat([torch.full((len(t),), i) for i, t in enumerate(texts)])[None] for texts in (sources, targets)]
    memory = made.encode(torch.cat(sources)[None], document=numbers[0])
    packed = made.output_head(made.states(torch.cat(targets)[None], memory, document=numbers[1]))[0]
    alone = [made(s[None], t[None])[0] for s, t in zip(sources, targets, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-10, rtol=1e-10)


def pack(texts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens and document numbers of one row, [1, N] each."""
    numbers = [torch.full((len(text),), number) for number, text in enumerate(texts, 1)]
    return torch.cat(texts)[None], torch.cat(numbers)[None]


def test_documents_shorter_than_the_learned_table_fill_a_longer_row() -> None:
    """Positions restart with each document, so only the longest one has to fit, here exactly."""
    made = model(architecture="decoder", position="learned", max_length=6)
    texts = [torch.randint(13, (n,)) for n in (5, 6, 1, 4)]
    tokens, document = pack(texts)
    alone = torch.cat([made(text[None])[0] for text in texts])
    torch.testing.assert_close(made(tokens, document=document)[0], alone, atol=1e-10, rtol=1e-10)
    is_real = torch.ones(1, 20, dtype=torch.bool)
    is_real[:, 16:] = False  # padding at the end of the row
    padded, numbers = (torch.cat((x, torch.zeros(1, 4, dtype=torch.long)), dim=1) for x in (tokens, document))
    torch.testing.assert_close(made(padded, is_real, numbers)[0, :16], alone, atol=1e-10, rtol=1e-10)


def test_padding_of_a_full_document_needs_no_learned_position() -> None:
    """MaskPredictor that bears the number of the last document stands after it, where the table has ended."""
    made = model(architecture="decoder", position="learned", max_length=6)
    texts = [torch.randint(13, (n,)) for n in (3, 6)]
    tokens, document = pack([texts[0], torch.cat((texts[1], torch.zeros(2, dtype=torch.long)))])
    is_real = torch.arange(11)[None] < 9
    alone = torch.cat([made(text[None])[0] for text in texts])
    torch.testing.assert_close(made(tokens, is_real, document)[0, :9], alone, atol=1e-10, rtol=1e-10)


def test_packed_translations_fit_the_learned_table_one_by_one() -> None:
    made = model(architecture="encoder-decoder", position="learned", max_length=6)
    assert isinstance(made, EncoderDecoder)
    sources, targets = ([torch.randint(13, (n,)) for n in sizes] for sizes in ((3, 6, 2), (5, 1, 6)))
    (source, source_document), (target, target_document) = pack(sources), pack(targets)
    memory = made.encode(source, document=source_document)
    packed = made.output_head(made.states(target, memory, document=target_document))[0]
    alone = [made(s[None], t[None])[0] for s, t in zip(sources, targets, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("lengths", [(7,), (3, 7), (7, 1, 2)])
def test_a_document_longer_than_the_learned_table_is_refused(lengths: tuple[int, ...]) -> None:
    made = model(architecture="decoder", position="learned", max_length=6)
    tokens, document = pack([torch.randint(13, (n,)) for n in lengths])
    with pytest.raises(UserError, match="max_length = 6"):
        made(tokens, document=document)
    with pytest.raises(UserError, match="max_length = 6"):
        made(torch.cat((tokens, tokens)), document=torch.cat((torch.arange(sum(lengths))[None], document)))


@pytest.mark.parametrize("memory", [True, False])
def test_block_reaches_scaled_dot_product_attention_in_few_frames(
    memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reading path is short: at most 5 functions of regard, Block.forward included, call one another."""
    depths = []
    original, package = torch.nn.functional.scaled_dot_product_attention, str(Path(regard.__file__).parent)

    def counted(*args: object, **kwargs: object) -> Tensor:
        names = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(package)]
        depths.append(len(names) - names.index("_add"))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    stack = Stack(config(position="rope", dim=18), causal=True, memory=memory)
    known = Memory(torch.randn(2, 3, 18), Positions.of(3, CPU)) if memory else None
    stack(torch.randn(2, 4, 18), Positions.of(4, CPU), memory=known)
    assert len(depths) == stack.config.layers * (2 if memory else 1) and max(depths) <= 5


def test_reading_path_is_short() -> None:
    """Attention, masks, positions, norm, feed-forward, multi-head, block, embedding: at most 1,320 lines together."""
    names = ("attention", "mask", "position", "norm", "feedforward", "multihead", "block", "embedding")
    folder = Path(regard.nn.__file__).parent
    assert sum(len((folder / f"{name}.py").read_text().splitlines()) for name in names) <= 1320
