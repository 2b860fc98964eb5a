"""Whole models: published sizes, shared tables, every wiring, training's first step, and hard input."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from regard.errors import UserError
from regard.models.config import ModelConfig
from regard.models.recipe import preset
from regard.models.transformer import Decoder, Encoder, EncoderDecoder, build
from regard.nn.mask import from_tensor
from regard.nn.trace import trace
from variants import slow

KINDS = ("sinusoidal", "learned", "relative", "t5", "rope", "alibi", "none")
VOCAB = 13


def config(**changes: object) -> ModelConfig:
    values = {
        "dim": 12, "layers": 2, "heads": 2, "ff_dim": 20, "vocab_size": VOCAB, "architecture": "decoder",
        "max_length": 32,
        "dropout": 0.0, "embed_dropout": 0.0, "image_size": 6, "patch_size": 2, "feature_dim": 7,
    }  # fmt: skip
    return ModelConfig(**{**values, **changes})


def make(seed: int = 0, **changes: object) -> Decoder | Encoder | EncoderDecoder:
    torch.manual_seed(seed)
    return build(config(**changes))


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape or (2, 5))


def inputs(model: Decoder | Encoder | EncoderDecoder, batch: int = 2, length: int = 5) -> tuple[Tensor, ...]:
    sources = {
        "tokens": lambda: tokens(batch, length),
        "patches": lambda: torch.randn(batch, 3, 6, 6),
        "features": lambda: torch.randn(batch, length, 7),
    }
    given = (sources[model.config.input](),)
    return (*given, tokens(batch, length + 2)) if isinstance(model, EncoderDecoder) else given


# Sizes


SIZES = {
    "base": 63_082_496, "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200, "bert-base": 109_482_240, "vit-tiny": 5_717_416, "vit-base": 86_567_656,
    "t5-small": 60_506_624,
}  # fmt: skip


@pytest.mark.parametrize(("name", "count"), SIZES.items())
def test_published_models_have_their_published_size(name: str, count: int) -> None:
    with torch.device("meta"):
        model = build(preset(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tie", [True, False])
def test_shared_tables_are_one_tensor(share: bool, tie: bool) -> None:
    model = make(architecture="encoder-decoder", share_embeddings=share, tie_embeddings=tie)
    assert isinstance(model, EncoderDecoder)
    source, target, output = (
        model.source_embedding.tokens.weight,
        model.target_embedding.tokens.weight,
        model.output_head.project.weight,
    )
    assert (source is target) == share and (target is output) == tie
    assert (source.data_ptr() == output.data_ptr()) == (share and tie)
    decoder = make(tie_embeddings=tie)
    assert (decoder.embedding.tokens.weight is decoder.output_head.project.weight) == tie
    apart = make(architecture="encoder-decoder", share_embeddings=False, target_vocab_size=9, tie_embeddings=tie)
    assert apart(tokens(2, 4), torch.randint(9, (2, 3))).shape == (2, 3, 9)


# Sources and wirings


def test_sources_are_their_formulas() -> None:
    """E[id] · sqrt(dim); the pixels of each patch, row by row, times one matrix; W · vector + b."""
    reader = make().embedding
    given = tokens()
    torch.testing.assert_close(reader(given), reader.tokens.weight[given] * math.sqrt(12))
    image, eye = torch.randn(2, 3, 6, 6), make(architecture="encoder-decoder", input="patches").source_embedding
    patches = torch.stack(
        [image[:, :, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].flatten(1) for y in range(3) for x in range(3)], dim=1
    )
    torch.testing.assert_close(eye(image), patches @ eye.project.weight.flatten(1).T + eye.project.bias)
    with_cls = make(architecture="encoder", input="patches", output_head="none").embedding
    torch.testing.assert_close(with_cls(image)[:, :1], with_cls.cls.expand(2, 1, 12))


WIRINGS = [
    ("decoder", "tokens", "tokens", (2, 5, VOCAB)), ("encoder", "tokens", "tokens", (2, 5, VOCAB)),
    ("encoder", "tokens", "none", (2, 5, 12)), ("encoder", "tokens", "pooled", (2, 12)),
    ("encoder", "tokens", "classes", (2, 3)), ("encoder", "patches", "classes", (2, 3)),
    ("encoder", "patches", "none", (2, 10, 12)), ("encoder", "features", "pooled", (2, 12)),
    ("encoder-decoder", "tokens", "tokens", (2, 7, VOCAB)), ("encoder-decoder", "patches", "tokens", (2, 7, VOCAB)),
    ("encoder-decoder", "features", "tokens", (2, 7, VOCAB)),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("architecture", "source", "head", "size"), WIRINGS)
def test_every_wiring_runs_and_trains(
    kind: str, architecture: str, source: str, head: str, size: tuple[int, ...]
) -> None:
    """Logits of the right shape; every parameter gets a gradient."""
    model = make(architecture=architecture, input=source, output_head=head, position=kind, classes=3)
    out = model(*inputs(model))
    assert out.shape == size and out.isfinite().all()
    out.sin().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


UNUSUAL = [
    {"norm": "none"}, {"residual": False}, {"norm": "none", "residual": False}, {"window": 1},
    {"norm": "rms", "norm_order": "pre", "activation": "swiglu", "kv_heads": 1, "bias": False},
    {"heads": 3, "head_dim": 5, "value_dim": 2, "position": "alibi"},
    {"heads": 1, "dim": 1, "ff_dim": 1, "position": "none", "layers": 1},
    {"experts": 3, "experts_per_token": 1}, {"qk_norm": True, "kv_heads": 1, "position": "rope"},
    {"embed_norm": True, "token_types": 3, "head_layer": True, "logit_bias": True, "logit_scale": 0.3},
    *({"attention_score": score, "attention": "reference"} for score in ("multiplicative", "additive", "concat")),
]  # fmt: skip


@pytest.mark.parametrize("changes", UNUSUAL, ids=str)
def test_unusual_models_learn(changes: dict) -> None:
    """A few steps on one batch lower its loss."""
    model, given = make(**changes), tokens(4, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert math.isfinite(losses[-1]) and losses[-1] < losses[0]


def test_token_types_are_added() -> None:
    model = make(architecture="encoder", output_head="none", token_types=2)
    given = tokens(2, 5)
    assert torch.equal(model(given), model(given, types=torch.zeros_like(given)))
    assert not torch.allclose(model(given), model(given, types=torch.ones_like(given)))


def test_rows_do_not_know_each_other() -> None:
    model = make(experts=3).double().eval()
    given = tokens(3, 5)
    torch.testing.assert_close(model(given)[1:2], model(given[1:2]), atol=1e-12, rtol=1e-12)


# Beginnings


@pytest.mark.parametrize("init", ["xavier", "normal"])
def test_the_same_seed_gives_the_same_model(init: str) -> None:
    one, same, other = (make(seed, architecture="encoder-decoder", init=init).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["encoder.blocks.0.attention.qkv.weight"], other["encoder.blocks.0.attention.qkv.weight"])


@pytest.mark.parametrize("changes", [{}, {"norm_order": "pre"}, {"init": "normal", "embed_scale": False}])
def test_a_new_language_model_knows_nothing(changes: dict) -> None:
    """Cross-entropy near log(vocab_size), that of guessing evenly."""
    model = make(dim=32, vocab_size=503, **changes).eval()
    given, target = torch.randint(503, (8, 32)), torch.randint(503, (8, 32))
    loss = F.cross_entropy(model(given).flatten(0, 1), target.flatten()).item()
    assert math.log(503) - 0.1 < loss < math.log(503) + 1


def test_initial_spreads_are_those_of_the_papers() -> None:
    """GPT-2: 0.02, residual outputs by 1 / sqrt(2 layers); xavier: variance 2 / (in + out)."""
    spread = {
        name: p.std().item() for name, p in make(dim=128, ff_dim=256, init="normal").named_parameters() if p.dim() > 1
    }
    assert spread["decoder.blocks.1.attention.qkv.weight"] == pytest.approx(0.02, rel=0.05)
    for name in ("attention.out", "feedforward.down"):
        assert spread[f"decoder.blocks.0.{name}.weight"] == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    model = make(dim=128, ff_dim=256)
    assert model.decoder.blocks[0].feedforward.up.weight.std().item() == pytest.approx(math.sqrt(2 / 384), rel=0.05)
    assert model.embedding.tokens.weight.std().item() == pytest.approx(128**-0.5, rel=0.05)
    zeros = [p for name, p in model.named_parameters() if name.endswith("bias")]
    assert zeros and all((p == 0).all() for p in zeros)


# The same model by other means


@pytest.mark.parametrize(
    "changes", [{"position": "alibi"}, *slow({"position": "t5", "architecture": "encoder-decoder"})], ids=str
)
def test_compiles_without_graph_breaks(changes: dict) -> None:
    model = make(**changes).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    given = inputs(model)
    torch.testing.assert_close(compiled(*given), model(*given))
    is_real = torch.ones_like(given[0], dtype=torch.bool)
    is_real[0, :2] = False
    padded = (*given, is_real)
    torch.testing.assert_close(compiled(*padded), model(*padded))
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["decoder", "encoder-decoder"])
def test_one_compiled_graph_serves_every_length(architecture: str) -> None:
    """Compiled for the first length, once more with the length left open, then never again."""
    torch._dynamo.reset()
    model, counter = make(architecture=architecture, position="alibi").eval(), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in range(4, 12):
        compiled(*inputs(model, length=length))
    assert counter.frame_count == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["fused", "reference"])
def test_checkpointing_gives_the_same_gradients(kind: str, path: str) -> None:
    model = make(architecture="encoder-decoder", position=kind, attention=path, dropout=0.2, experts=2).double()
    given, slopes = inputs(model), []
    for on in (False, True):
        model.encoder.checkpoint = model.decoder.checkpoint = on
        model.zero_grad()
        torch.manual_seed(5)  # the same dropout
        model(*given).sin().sum().backward()
        slopes.append([p.grad.clone() for p in model.parameters()])
    for own, other in zip(*slopes, strict=True):
        torch.testing.assert_close(own, other)


def test_copies_and_saved_weights_compute_the_same() -> None:
    model, given = make(experts=2, position="t5").train(), tokens()
    model(given).sum().backward()
    model.eval()
    other = make(9, experts=2, position="t5").eval()
    other.load_state_dict(model.state_dict())
    for twin in (copy.deepcopy(model), other):
        assert torch.equal(twin(given), model(given))
    twin = copy.deepcopy(model)
    assert twin.output_head.project.weight is twin.embedding.tokens.weight is not model.embedding.tokens.weight


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_made_on_the_meta_device_can_be_filled(kind: str) -> None:
    """As large checkpoints are loaded: nothing but the saved weights is needed."""
    model, given = make(position=kind).eval(), tokens()
    with torch.device("meta"):
        hollow = build(model.config).eval()
    hollow.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(hollow(given), model(given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind: str, dtype: torch.dtype) -> None:
    """Fused and traced, with a row that is all padding; near what float32 gives."""
    model = make(position=kind, experts=2).eval()
    given, is_real = tokens(3, 5), torch.tensor([[True] * 5, [False, True, True, True, True], [False] * 5])
    exact = model(given, is_real)[is_real]
    half = copy.deepcopy(model).to(dtype)
    plain = half(given, is_real)
    with trace(half):
        traced = half(given, is_real)
    assert plain.dtype == traced.dtype == dtype and plain.isfinite().all() and traced.isfinite().all()
    assert (plain[is_real].float() - exact).abs().mean() < 0.1 * exact.abs().mean()
    assert (traced[is_real].float() - exact).abs().mean() < 0.1 * exact.abs().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_trains(kind: str) -> None:
    model = make(position=kind, architecture="encoder-decoder", experts=2)
    for checkpoint in (False, True):
        model.encoder.checkpoint = model.decoder.checkpoint = checkpoint
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(*inputs(model)).flatten(0, 1).float(), tokens(14))
        loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# Hard input


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "length"), [(0, 4), (2, 0), (0, 0)])
def test_nothing_in_nothing_out(kind: str, batch: int, length: int) -> None:
    """An empty batch or empty rows are no error; there is just nothing to say about them."""
    nothing, is_real = tokens(batch, length), torch.ones(batch, length, dtype=torch.bool)
    model = make(position=kind, experts=2)
    assert model(nothing).shape == model(nothing, is_real).shape == (batch, length, VOCAB)
    both = make(position=kind, architecture="encoder-decoder")
    assert both(nothing, tokens(batch, 3)).shape == (batch, 3, VOCAB)
    assert both(nothing, tokens(batch, 3)).isfinite().all()  # an empty memory: cross-attention adds its bias
    state = model.start()
    assert model.step(nothing, state).shape == (batch, length, VOCAB)
    assert model.step(tokens(batch, 2), state).isfinite().all()


def test_nothing_cannot_be_pooled() -> None:
    for pooling in ("cls", "mean"):
        with pytest.raises(UserError, match="no tokens"):
            make(architecture="encoder", output_head="pooled", pooling=pooling)(tokens(2, 0))


def test_input_of_a_wrong_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"\(5,\)"):
        make()(tokens(5))
    with pytest.raises(UserError, match="float32"):
        make()(torch.randn(2, 5))
    with pytest.raises(UserError, match=r"\(2, 3, 6, 7\): pass \[batch, 3, 6, 6\]"):
        make(architecture="encoder", input="patches", output_head="none")(torch.randn(2, 3, 6, 7))
    with pytest.raises(UserError, match=r"\(2, 5, 8\): pass \[batch, regions, 7\]"):
        make(architecture="encoder", input="features", output_head="none")(torch.randn(2, 5, 8))
    with pytest.raises(UserError, match=r"is_real has dtype torch\.int64"):
        make()(tokens(), torch.ones(2, 5).long())
    with pytest.raises(UserError, match="too small for 5 queries"):
        make()(tokens(), mask=from_tensor(torch.ones(3, 3).bool()))


def test_non_contiguous_input() -> None:
    model, given = make().eval(), tokens(5, 2)
    torch.testing.assert_close(model(given.T), model(given.T.contiguous()))
    seer = make(architecture="encoder", input="patches", output_head="none").eval()
    image = torch.randn(2, 6, 6, 3).permute(0, 3, 1, 2)
    torch.testing.assert_close(seer(image), seer(image.contiguous()))


def test_a_long_sequence_with_a_small_window() -> None:
    """4096 tokens: the last logits depend on the last tokens alone."""
    model = make(layers=1, position="rope", window=8).eval()
    given = tokens(1, 4096)
    other = given.clone()
    other[:, :4000] = tokens(1, 4000)
    with torch.no_grad():
        torch.testing.assert_close(model(given)[:, -80:], model(other)[:, -80:], atol=1e-5, rtol=1e-5)


def test_all_that_is_learned_is_saved() -> None:
    """Nothing that is needed lives outside the parameters."""
    for kind in KINDS:
        model = make(position=kind, architecture="encoder-decoder", experts=2)
        assert not list(model.buffers())
        assert {name for name, _ in model.named_parameters(remove_duplicate=False)} == set(model.state_dict())
