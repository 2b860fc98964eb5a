"""Feed-forward layers against their formulas; experts against a naive loop and Mixtral."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.nn.block import Block
from regard.nn.config import StackConfig
from regard.nn.feedforward import Experts, FeedForward


def config(**changes: object) -> StackConfig:
    return StackConfig(**{"dim": 6, "heads": 2, "ff_dim": 10, **changes})


def double(module: nn.Module) -> nn.Module:
    module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def phi(x: Tensor) -> Tensor:
    """The normal distribution, by its definition."""
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x: Tensor) -> Tensor:
    """Hendrycks & Gimpel 2016: the approximation that GPT-2 uses."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: x * phi(x),
    "gelu-tanh": tanh_gelu,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "swiglu": lambda x: x[..., :10] / (1 + torch.exp(-x[..., :10])) * x[..., 10:],
    "geglu": lambda x: tanh_gelu(x[..., :10]) * x[..., 10:],
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", FORMULAS)
def test_feedforward_is_its_formula(activation: str, bias: bool) -> None:
    """W₂ act(W₁ x + b₁) + b₂ for every token alone."""
    layer = double(FeedForward(config(activation=activation, bias=bias)))
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    first = x @ layer.up.weight.T + (layer.up.bias if bias else 0)
    expected = FORMULAS[activation](first) @ layer.down.weight.T + (layer.down.bias if bias else 0)
    ours = layer(x)
    torch.testing.assert_close(ours, expected)
    inputs = [x, *layer.parameters()]
    for own, other in zip(*(torch.autograd.grad(y.sin().sum(), inputs) for y in (ours, expected)), strict=True):
        torch.testing.assert_close(own, other)


def test_gates_are_those_of_transformers() -> None:
    """SwiGLU is Llama's MLP, GEGLU that of T5 1.1 (`gated-gelu`)."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

    x = torch.randn(2, 3, 6, dtype=torch.float64)
    ours = double(FeedForward(config(activation="swiglu", bias=False)))
    llama = LlamaMLP(transformers.LlamaConfig(hidden_size=6, intermediate_size=10, num_attention_heads=2)).double()
    gate, value = ours.up.weight.chunk(2)
    llama.load_state_dict({"gate_proj.weight": gate, "up_proj.weight": value, "down_proj.weight": ours.down.weight})
    torch.testing.assert_close(ours(x), llama(x))

    ours = double(FeedForward(config(activation="geglu", bias=False)))
    t5 = T5DenseGatedActDense(transformers.T5Config(d_model=6, d_ff=10, feed_forward_proj="gated-gelu")).double().eval()
    gate, value = ours.up.weight.chunk(2)
    t5.load_state_dict({"wi_0.weight": gate, "wi_1.weight": value, "wo.weight": ours.down.weight})
    torch.testing.assert_close(ours(x), t5(x))


# Experts


def by_loop(layer: Experts, x: Tensor) -> Tensor:
    """Every token asks its best experts, one after the other."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        chance = torch.softmax(layer.router.weight @ token, dim=0)
        best = sorted(range(layer.count), key=lambda index: -chance[index].item())[: layer.top]
        total = sum(chance[index] for index in best)
        rows.append(sum(chance[index] / total * layer.experts[index](token) for index in best))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(("count", "top"), [(1, 1), (3, 1), (4, 2), (5, 5)])
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_experts_are_a_loop_over_tokens(count: int, top: int, activation: str) -> None:
    layer = double(Experts(config(experts=count, experts_per_token=top, activation=activation)))
    x = torch.randn(2, 7, 6, dtype=torch.float64, requires_grad=True)
    ours, theirs = layer(x), by_loop(layer, x)
    torch.testing.assert_close(ours, theirs)
    inputs = [x, *layer.parameters()]
    found = (torch.autograd.grad(y.sin().sum(), inputs, allow_unused=True) for y in (ours, theirs))
    for own, other in zip(*found, strict=True):
        if own is not None and other is not None:
            torch.testing.assert_close(own, other)


def test_all_experts_are_the_dense_mixture() -> None:
    layer = double(Experts(config(experts=4, experts_per_token=4)))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    chance = torch.softmax(x @ layer.router.weight.T, dim=-1)
    dense = torch.stack([expert(x) for expert in layer.experts], dim=-1)
    torch.testing.assert_close(layer(x), (dense * chance[..., None, :]).sum(dim=-1))


def test_alike_experts_are_one_feedforward() -> None:
    layer = double(Experts(config(experts=3)))
    for expert in layer.experts:
        expert.load_state_dict(layer.experts[0].state_dict())
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.experts[0](x))


def test_experts_are_those_of_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    size = transformers.MixtralConfig(
        hidden_size=6, intermediate_size=10, num_local_experts=4, num_experts_per_tok=2, num_attention_heads=2
    )
    theirs = MixtralSparseMoeBlock(size).eval()
    ours = Experts(config(experts=4, experts_per_token=2, activation="swiglu", bias=False))
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        theirs.experts.gate_up_proj.copy_(torch.stack([expert.up.weight for expert in ours.experts]))
        theirs.experts.down_proj.copy_(torch.stack([expert.down.weight for expert in ours.experts]))
    x = torch.randn(2, 9, 6)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-4, rtol=1e-4)


def test_balance_is_fedus_equation_4() -> None:
    """count · Σ share · mean probability, top-1; 1 where all is even, `count` where one expert takes everything."""
    layer = Experts(config(experts=4, experts_per_token=1))
    x = torch.randn(2, 50, 6)
    layer(x)
    chance = (x.flatten(0, 1) @ layer.router.weight.T).softmax(dim=-1)
    chosen = chance.argmax(dim=-1)
    expected = 4 * sum((chosen == e).float().mean() * chance[:, e].mean() for e in range(4))
    torch.testing.assert_close(layer.balance, expected)

    nn.init.zeros_(layer.router.weight)
    layer(x)
    assert layer.balance is not None and layer.balance.item() == pytest.approx(1.0)
    nn.init.zeros_(layer.router.weight)
    layer.router.weight.data[2] = 1000.0
    layer(x.abs())
    assert layer.balance.item() == pytest.approx(4.0)


def test_balance_trains_the_router() -> None:
    layer = Experts(config(experts=4))
    layer(torch.randn(2, 9, 6))
    assert layer.balance is not None
    layer.balance.backward()
    assert layer.router.weight.grad is not None and layer.router.weight.grad.abs().sum() > 0


def test_a_layer_can_be_copied_after_use() -> None:
    """The balance belongs to a graph, which cannot be copied."""
    layer = Experts(config(experts=3))
    x = torch.randn(2, 4, 6)
    out = layer(x)
    twin = copy.deepcopy(layer)
    assert layer.balance is not None and twin.balance is None
    torch.testing.assert_close(twin(x), out)


def test_no_token_no_crash() -> None:
    for layer in (Experts(config(experts=3)), FeedForward(config())):
        assert layer(torch.randn(2, 0, 6)).shape == (2, 0, 6)


@pytest.mark.parametrize("architecture", ["decoder", "encoder", "encoder-decoder"])
def test_every_residual_output_starts_smaller(architecture: str) -> None:
    """GPT-2: what is added to the residual stream has spread 0.02 / sqrt(2 · depth), each expert's output too."""
    size = {"dim": 96, "heads": 2, "ff_dim": 128, "layers": 3, "decoder_layers": 3, "vocab_size": 11, "experts": 4}
    model = build(ModelConfig(architecture=architecture, init="normal", **size))
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    ends = [attention.out for block in blocks for attention in (block.attention, block.cross) if attention is not None]
    ends += [expert.down for block in blocks for expert in block.feedforward.experts]
    assert len(ends) == len(blocks) * 5 + (3 if architecture == "encoder-decoder" else 0)
    starts = [
        module for block in blocks for module in block.modules() if isinstance(module, nn.Linear) and module not in ends
    ]
    for layers, spread in ((ends, 0.02 * (2 * len(blocks)) ** -0.5), (starts, 0.02)):
        for layer in layers:
            # the spread of n numbers is known to 1 / sqrt(2n): five times that is not chance
            assert layer.weight.std().item() == pytest.approx(spread, rel=5 * (2 * layer.weight.numel()) ** -0.5)
            assert layer.bias is None or (layer.bias == 0).all()
