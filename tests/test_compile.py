"""Compiled blocks give the numbers of plain ones, whatever batch they were compiled for."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from regard.data.batch import PairBatch
from regard.models.config import ModelConfig
from regard.models.transformer import build
from regard.nn.block import Stack, run_block
from regard.nn.config import StackConfig
from regard.nn.mask import Positions
from regard.training.objective import translation
from variants import slow


@pytest.mark.parametrize("position", ["t5", *slow("sinusoidal", "rope")])
def test_a_batch_with_padding_after_one_without(position):
    """Same shapes, other masks: code compiled for the one must not serve the other."""
    torch._dynamo.reset()  # past 8 graphs of one function, dynamo would no longer compile it
    sizes = {"vocab_size": 30, "dim": 16, "layers": 1, "heads": 2, "ff_dim": 32, "dropout": 0.0, "embed_dropout": 0.0}
    model = build(ModelConfig(**sizes, position=position)).train()
    source, target, expected = (torch.randint(4, 30, (3, length)) for length in (7, 6, 6))
    is_real = torch.arange(7) < torch.tensor([7, 4, 2])[:, None]
    batches = [PairBatch(source, some, target, expected) for some in (None, is_real, None, is_real)]

    def learned(batch: PairBatch) -> tuple[torch.Tensor, ...]:
        loss, _ = translation(model, batch)
        return loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    plain = [learned(batch) for batch in batches]
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        stack.compute = torch.compile(run_block, backend="aot_eager", fullgraph=True)  # not translated to C++
    for batch, wanted in zip(batches, plain, strict=True):
        for ours, theirs in zip(learned(batch), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.equal(plain[0][0], plain[1][0])


@pytest.mark.parametrize("mixer", ["window(64)", *slow("linear", "performer", "gated-linear")])
def test_mixers_are_compiled_as_a_whole(mixer):
    torch._dynamo.reset()
    shape = {"dim": 16, "heads": 2, "ff_dim": 16, "layers": 1, "dropout": 0.0, "embed_dropout": 0.0, "bias": False}
    stack = Stack(StackConfig(**shape, mixer=mixer), causal=True).train()
    length = 600 if "window" in mixer else 150  # several blocks or chunks
    backend = "aot_eager" if "window" in mixer else "inductor"
    x, results = torch.randn(1, length, 16), []
    for stack.compute in (None, torch.compile(run_block, backend=backend, fullgraph=True)):
        out = stack(x, Positions.of(length, torch.device("cpu")))
        results.append([out, *torch.autograd.grad(out.square().mean(), list(stack.parameters()))])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixer", ["linear", "performer", "gated-linear"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_texts_are_compiled_once_in_linear_attention(mixer, is_causal):
    """Its shapes do not depend on the texts of a batch."""
    torch._dynamo.reset()
    shape = {"dim": 16, "heads": 2, "ff_dim": 16, "layers": 1, "dropout": 0.0, "embed_dropout": 0.0, "position": "none"}
    stack, graphs = Stack(StackConfig(**shape, mixer=mixer), causal=is_causal).train(), []

    def count(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    for number, lengths in enumerate(((30, 20, 100), (1, 149), (64, 64, 22))):
        x, document = torch.randn(1, 150, 16), torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions, results = Positions.of(150, x.device, document=document[None]), []
        compiled = torch.compile(run_block, backend=aot_autograd(fw_compiler=count)) if number == 0 else stack.compute
        for stack.compute in (None, compiled):
            out = stack(x, positions)
            results.append([out, *torch.autograd.grad(out.sin().mean(), list(stack.parameters()))])
        for plain, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2  # forward and backward


@pytest.mark.parametrize("mixer", ["linear", *slow("performer", "gated-linear")])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_linear_attention_is_compiled_for_several_lengths(mixer, backend):
    torch._dynamo.reset()
    shape = {"dim": 16, "heads": 2, "ff_dim": 16, "layers": 1, "dropout": 0.0, "embed_dropout": 0.0, "position": "none"}
    stack = Stack(StackConfig(**shape, mixer=mixer), causal=True).train()
    run = torch.compile(run_block, backend=backend, fullgraph=True)
    for length in (100, 130, 300):
        x, results = torch.randn(1, length, 16, requires_grad=True), []
        for stack.compute in (None, run):
            out = stack(x, Positions.of(length, x.device))
            results.append([out, *torch.autograd.grad(out.sin().mean(), [x, *stack.parameters()])])
        for plain, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
